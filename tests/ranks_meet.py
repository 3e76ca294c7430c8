"""What shared.distributed promises, on ranks of two pretended nodes; started by test_distributed.py under torchrun.

torchrun --nproc-per-node 4 ranks_meet.py FOLDER
"""

import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shared import distributed
from shared.errors import UsageError

folder = Path(sys.argv[1])
worker = distributed.join()
rank, size = worker.rank, worker.world_size

assert distributed.from_rank_zero(rank) == 0
assert distributed.gather_objects({"rank": rank}) == [{"rank": other} for other in range(size)]
values = torch.full((2,), float(rank))
assert distributed.global_sum(values).tolist() == [6.0, 6.0] and values.tolist() == [rank, rank]

# Buffers that differ by rank become those of rank 0; weights stay.
model = torch.nn.BatchNorm1d(3)
model.running_mean.fill_(rank)
model.weight.data.fill_(rank)
distributed.broadcast_buffers(model)
assert model.running_mean.tolist() == [0.0] * 3 and model.weight.tolist() == [rank] * 3

# An error on one rank is everybody's, with its rank said; an error of another kind is not caught.
for wrong in ({2}, {0, 1, 2, 3}):
    try:
        with distributed.fail_together():
            if rank in wrong:
                raise OSError("disk full")
    except UsageError as error:
        assert str(error) == ("rank 2: disk full" if wrong == {2} else "disk full"), error
    else:
        raise AssertionError("no error on this rank")

# A rank may take longer than the group's timeout, in which a collective would raise on the others.
dist.set_timeout(timedelta(seconds=10))
with distributed.fail_together(), distributed.local_first(replace(worker, local_rank=rank % 2)):
    time.sleep(15 if rank == 2 else 0)
dist.set_timeout(timedelta(seconds=600))
assert distributed.global_max(rank) == size - 1

distributed.check_same("text", "not raised")
try:
    distributed.check_same(rank // 3, "texts differ")
except UsageError as error:
    assert str(error) == "texts differ"
else:
    raise AssertionError("no error on this rank")

# Ranks 0 and 2 are the first of their nodes: both have written before the other two look, and rank 0 before rank 2.
node = replace(worker, local_rank=rank % 2)
with distributed.local_first(node):
    if node.local_rank == 0:
        (folder / f"node-{rank // 2}").touch()
    found = sorted(path.name for path in folder.iterdir())
    assert found == (["node-0"] if rank == 0 else ["node-0", "node-1"]), found

# Four ranks draw alike after the same seed, and differ after their own.
distributed.seed_everything(7)
assert len({tuple(draw) for draw in distributed.gather_objects(torch.rand(2).tolist())}) == 1
distributed.seed_everything(7 + rank)
assert len({tuple(draw) for draw in distributed.gather_objects(torch.rand(2).tolist())}) == size

dist.barrier()
distributed.leave()
