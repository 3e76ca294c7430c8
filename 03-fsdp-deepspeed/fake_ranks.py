"""Play any rank of any number of ranks in one process, to look at how a model is sharded."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def as_rank(rank: int, world_size: int) -> DeviceMesh:
    """Make this process rank `rank` of `world_size`, and return a device mesh with all ranks in a row.

    The process group is fake: its collectives return at once and move no data. So all shapes are right, and gathered
    values are not. It belongs to torch's own tests and may change without notice. Use it to look, never to train.
    """
    leave()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # DTensor caches what it has computed for a mesh. With a name per rank, no rank gets another one's results.
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=(f"rank_{rank}",))


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
