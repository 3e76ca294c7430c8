"""Call the learner's ring all-reduce and note the size of each message, for exercise 1.2b.

torchrun ring_all_reduce.py FOLDER FILE CHUNKS

FILE defines ring_all_reduce(chunks, rank, exchange). CHUNKS is JSON: each rank's list of chunks. Each rank writes to
FOLDER/RANK.json the chunks that the function returns, and how many numbers it sent in each message.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shared import distributed

folder, path, chunks_of_ranks = sys.argv[1:]
worker = distributed.join(timeout_s=20)
sent = []


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor to the right neighbor, and return the one that the left neighbor sends."""
    if len(sent) > 20:
        raise RuntimeError("exchange() was called more than 20 times")
    sent.append(tensor.numel())
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor.contiguous(), (worker.rank + 1) % worker.world_size)
    dist.recv(received, (worker.rank - 1) % worker.world_size)
    sending.wait()
    return received


chunks = [torch.tensor(chunk) for chunk in json.loads(chunks_of_ranks)[worker.rank]]
answer = runpy.run_path(path)["ring_all_reduce"](chunks, worker.rank, exchange)
is_list = isinstance(answer, (list, tuple)) and all(isinstance(chunk, torch.Tensor) for chunk in answer)
report = {"chunks": [chunk.tolist() for chunk in answer] if is_list else repr(answer), "sent": sent}
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
