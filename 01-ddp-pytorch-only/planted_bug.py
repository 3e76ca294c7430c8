"""Run train_ddp.py with a planted bug: no rank averages its gradients. Lesson 1.4 shows what its losses look like.

DDP calls a communication hook for each full bucket of gradients and stores what the hook returns. This hook returns
the rank's own gradients, so DDP sends nothing. The options are those of train_ddp.py.
"""

import torch
import torch.distributed as dist
import train_ddp
from torch.nn.parallel import DistributedDataParallel

from shared.running import script


def keep_own_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket's gradients as they are, as a finished future."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def without_averaging(model: torch.nn.Module, **options) -> DistributedDataParallel:
    """Wrap the model in a DDP whose ranks keep their own gradients."""
    ddp_model = DistributedDataParallel(model, **options)
    ddp_model.register_comm_hook(None, keep_own_gradients)
    return ddp_model


if __name__ == "__main__":
    train_ddp.DistributedDataParallel = without_averaging
    script.run_main(train_ddp.main)
