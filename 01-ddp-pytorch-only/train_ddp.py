"""Train an image classifier on one process, or data-parallel on many, with plain PyTorch.

One process:          python train_ddp.py
Two on this machine:  torchrun --standalone --nproc-per-node 2 train_ddp.py
Two nodes:            ./launch_multinode_ddp.sh HOST1 HOST2 --nproc-per-node 4 -- --epochs 5

GPUs are used where there are any (one process a GPU, nccl), else CPUs (gloo). With one --seed and --batch-size, every
number of processes computes the same losses, up to rounding; not so with --model mlp, whose dropout draws on every
rank, and with resnet18-batchnorm, whose statistics are each rank's own.
"""

import time
from argparse import Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared import checkpoint, cli, data, distributed, models, runs


def main() -> None:
    args = cli.training_parser(__doc__).parse_args()
    worker = distributed.join()
    run = runs.Run.of(args)

    # [1] Whatever can be wrong is found before the first step, and by all ranks together.
    state = None
    with distributed.fail_together():
        local_batch_size = data.local_batch_size(args.batch_size, worker.world_size)
        cli.check_precision(args.precision, worker.device)
        if worker.rank == 0:
            state = run.claim(args, worker)
    with distributed.fail_together(), distributed.local_first(worker):
        splits = data.load(args.dataset, args.data_dir)
    with distributed.fail_together():
        data.check_batch_norm(args.model, len(splits.train), args.batch_size, worker.world_size)
    cli.stop_on_signals(worker, run)

    # [2] The same weights on every rank; after that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model = models.build(args.model, splits.image_shape, splits.num_classes).to(worker.device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [3] Go on where a run was interrupted: rank 0 has read the file, the others get it from there.
    progress = runs.new_progress(args)
    state = distributed.from_rank_zero(state)
    if resumed := state is not None:
        with distributed.fail_together():
            progress = checkpoint.restore(state, model, optimizer, scheduler, worker)
    del state  # it is as large as model and optimizer

    # [4] From here on backward() averages the gradients of all ranks.
    ddp_model = model
    if dist.is_initialized():
        device_ids = [worker.device] if worker.device.type == "cuda" else None
        ddp_model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        distributed.settle_buckets(ddp_model, torch.empty(0, *splits.image_shape, device=worker.device, dtype=dtype))
    train_loader = data.rank_loader(splits.train, local_batch_size, worker, shuffle_seed=args.seed)
    val_loader = data.rank_loader(splits.val, local_batch_size, worker)
    if not resumed:
        save(run, worker, model, optimizer, scheduler, progress)

    # [5] Train, validate and save, epoch by epoch.
    while progress["epoch"] < args.epochs and (args.max_steps is None or progress["step"] < args.max_steps):
        train_epoch(ddp_model, train_loader, optimizer, worker, args, progress)
        if progress["position"] < len(splits.train) and progress["step"] != args.max_steps:  # by --save-every-steps
            save(run, worker, model, optimizer, scheduler, progress)
            continue
        distributed.broadcast_buffers(model)  # BatchNorm's statistics differ by rank; validate what is saved
        metrics = runs.finish_epoch(progress, len(splits.train), {
            **evaluate(model, val_loader, worker),
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress["position"] == 0:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, progress)
        if worker.rank == 0:
            runs.write_metrics(args.metrics_out, progress["metrics"])
            worker.log(runs.describe(metrics, args.epochs))
    if worker.rank == 0:
        runs.write_metrics(args.metrics_out, progress["metrics"])
        worker.log(f"done after {progress['step']} steps: {run.folder}")
    distributed.leave()


def train_epoch(
    ddp_model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, worker: distributed.Worker,
    args: Namespace, progress: dict,
) -> None:  # fmt: skip
    """Train from `progress` to the end of the epoch, or to where --save-every-steps or --max-steps ends it before."""
    ddp_model.train()
    counts, batches = data.epoch_batches(loader, args, progress)
    dtype = next(ddp_model.parameters()).dtype
    losses = []
    started = time.perf_counter()
    for count, (images, labels) in zip(counts, batches, strict=True):
        images = images.to(worker.device, dtype, non_blocking=True)
        labels = labels.to(worker.device, non_blocking=True)
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(images)
        # This rank's share of the mean over the global batch. DDP divides by the world size, so we multiply by it.
        loss = F.cross_entropy(logits.to(dtype), labels, reduction="sum") / count
        optimizer.zero_grad()
        (loss * worker.world_size).backward()
        optimizer.step()
        losses.append(loss.detach())
    step_losses = distributed.global_sum(torch.stack(losses)).tolist()  # one all-reduce here, not one a step
    runs.record_steps(progress, step_losses, counts, time.perf_counter() - started)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, worker: distributed.Worker) -> dict:
    """Loss and accuracy over the whole data set: sums are added over all ranks, then divided, once."""
    model.eval()
    dtype = next(model.parameters()).dtype
    totals = torch.zeros(3, dtype=torch.float64, device=worker.device)  # loss, correct, samples
    for images, labels in loader:
        images, labels = images.to(worker.device, dtype), labels.to(worker.device)
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        totals += torch.stack([loss.double(), correct.double(), torch.tensor(len(labels)).to(totals)])
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(run: runs.Run, worker: distributed.Worker, model, optimizer, scheduler, progress: dict) -> None:
    """Rank 0 writes the whole state and keeps the two newest; the others hand it their random generators."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress)
    run.save(state, worker)


if __name__ == "__main__":
    cli.run(main)
