"""Train an image classifier or a GPT on one process, or data-parallel on many, with plain PyTorch.

One process:          python train_ddp.py
Two on this machine:  torchrun --standalone --nproc-per-node 2 train_ddp.py
Two nodes:            ./launch_multinode_ddp.sh HOST1 HOST2 --nproc-per-node 4 -- --epochs 5
A GPT:                python train_ddp.py --dataset text

Of the modules that it imports, read sampling, progress and tasks first. restarts, lease and script handle failures.
The script uses GPUs if there are any, with nccl and one process per GPU. Otherwise it uses CPUs, with gloo. With the
same --seed and --batch-size, any number of processes computes the same losses, up to rounding. Two models are
exceptions: mlp draws different dropout masks on each rank, and resnet18-batchnorm has separate statistics on each.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared import checkpoint, distributed, sampling, tasks
from shared.running import options, script
from shared.running.progress import Progress, check_metrics_file, write_metrics
from shared.running.restarts import RestartableRun
from shared.running.runs import options_of

TASKS = (tasks.ImageTask, tasks.TextTask)


def main() -> None:
    args = options.training_parser(__doc__, TASKS).parse_args()
    worker = distributed.join()
    run = RestartableRun.find(args.storage_path, args.run_name, options_of(args))

    # [1] Before the first step, check everything that can be wrong, on all ranks together.
    state = None
    with distributed.fail_together():
        local_batch_size = sampling.local_batch_size(args.batch_size, worker.world_size)
        tasks.check_precision(args.precision, worker.device)
        if worker.rank == 0:  # the only writer; the others get the state in [3]
            state = run.open_or_resume(args.resume, worker)
            check_metrics_file(args.metrics_out)
    task = tasks.build(TASKS, args, worker)
    script.stop_on_signals(worker, run.resume_hint)

    # [2] Start from the same weights on every rank. After that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    model = task.build_model().to(worker.device, task.dtype)
    optimizer = task.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [3] Continue an interrupted run: rank 0 has read the file, and the others get its content from rank 0.
    progress = Progress(
        worker, len(task.splits.train), run.options, batch_size=args.batch_size, epochs=args.epochs,
        data=task.checksum(), max_steps=args.max_steps, stop_every=[args.save_every_steps], quiet=args.quiet,
    )  # fmt: skip
    state = distributed.from_rank_zero(state)
    resumed = state is not None
    if resumed:
        with distributed.fail_together():
            progress.load_state_dict(checkpoint.restore(state, model, optimizer, scheduler, worker))
    del state  # it is as large as model and optimizer

    # [4] From here on backward() averages the gradients of all ranks.
    ddp_model = model
    if dist.is_initialized():
        device_ids = [worker.device] if worker.device.type == "cuda" else None
        ddp_model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        # Regroup the buckets now, so that a resumed run is equal bit for bit. Your own loop can do without this.
        inputs, targets = task.to_device(sampling.empty_batch(task.splits.train))
        distributed.warm_up_ddp_buckets(ddp_model, lambda: task.loss(ddp_model(inputs), targets))
    train_loader = sampling.rank_loader(task.splits.train, local_batch_size, worker, shuffle_seed=args.seed)
    val_loader = sampling.rank_loader(task.splits.val, local_batch_size, worker)
    if not resumed:  # a run that is killed in its first epoch restarts from the same weights
        save(run, worker, model, optimizer, scheduler, progress)

    # [5] Train, validate and save, epoch by epoch.
    while not progress.finished:
        train_epoch(ddp_model, train_loader, optimizer, task, worker, progress)
        if progress.interrupted:  # by --save-every-steps
            save(run, worker, model, optimizer, scheduler, progress)
            continue
        distributed.broadcast_buffers(model)  # BatchNorm's statistics differ by rank: validate with the saved ones
        metrics = progress.finish_epoch({
            **evaluate(model, val_loader, task),
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress.epoch_complete:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, progress)
        if worker.rank == 0:
            write_metrics(args.metrics_out, progress.metrics)
            worker.log(progress.describe(metrics))
    if worker.rank == 0:
        write_metrics(args.metrics_out, progress.metrics)
        worker.log(f"done after {progress.step} steps: {run.folder}")
    distributed.leave()


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, task: tasks.Task,
    worker: distributed.Worker, progress: Progress,
) -> None:  # fmt: skip
    """Train until the epoch ends, or until --save-every-steps or --max-steps interrupts it."""
    model.train()
    counts = progress.start_steps()  # the samples of each step, over all ranks
    for global_count, batch in sampling.deal_batches(loader, progress.epoch, progress.position, counts):
        inputs, targets = task.to_device(batch)
        optimizer.zero_grad()
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            logits = model(inputs)
        # This rank's share of the mean over the global batch. DDP divides by the world size, so we multiply by it.
        loss = task.loss(logits, targets) / global_count
        (loss * worker.world_size).backward()
        optimizer.step()
        progress.add_step(loss, global_count)
    progress.finish_steps()  # one all-reduce for all losses, not one per step


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable, task: tasks.Task) -> dict:
    """Return loss and accuracy over the whole data set: sum over all ranks, then divide once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=task.device)  # loss, correct answers, samples
    for batch in batches:
        inputs, targets = task.to_device(batch)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            logits = model(inputs)
        totals += task.metric_sums(logits, targets)
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(run: RestartableRun, worker: distributed.Worker, model, optimizer, scheduler, progress: Progress) -> None:
    """Save the whole state: rank 0 writes it and keeps the two newest, the others send their generators."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress.state_dict())
    run.save(state, worker)


if __name__ == "__main__":
    script.run_main(main)
