"""Train an image classifier or a GPT data-parallel on Ray Train.

Two workers here:     python train_ray_ddp.py --num-workers 2
In this process:      python train_ray_ddp.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_ddp.py --num-workers 16 --storage-path s3://BUCKET/runs
Where nodes come and go:  ... --num-workers 4:6 --batch-size 240 --save-every-steps 100

It computes what train_ddp.py computes: with the same --seed and --batch-size, any number of workers computes the
same losses, up to rounding. train_ddp.py lists the exceptions. A worker that dies is replaced, and the run continues
from its newest checkpoint. With --num-workers MIN:MAX it continues even on fewer nodes, and later on more.
"""

from argparse import Namespace
from collections.abc import Iterable

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared import checkpoint, distributed, sampling, tasks
from shared.on_ray import cluster, options, storage, workers
from shared.running import script
from shared.running.progress import Progress, check_metrics_file, write_metrics
from shared.running.runs import options_of

TASKS = (tasks.ImageTask, tasks.TextTask)


def main() -> None:
    args = options.elastic_parser(__doc__, TASKS).parse_args()
    driver = distributed.Worker(distributed.rank_from_environment(), label="driver")  # rank 0, except under torchrun
    run = storage.RayRun.named(args.storage_path, args.run_name, options_of(args), local_mode=args.num_workers == 0)

    # [1] Before a worker starts, check everything that can be wrong.
    with distributed.fail_together():
        sampling.check_divisible(args.batch_size, workers.num_processes(args.num_workers), args.max_workers)
        run.open_or_resume(args.resume, driver)
        check_metrics_file(args.metrics_out)
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    elastic = args.max_workers > args.num_workers  # as many workers as there is room for, while nodes come and go
    use_gpu = cluster.start(args.num_workers, args.use_gpu, elastic=elastic)

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    trainer = TorchTrainer(
        workers.on_workers(train),
        train_loop_config={"args": args, "run": run},
        torch_config=workers.NodeTorchConfig(timeout_s=600),  # for each collective; Ray's default is 1,800
        scaling_config=ray.train.ScalingConfig(
            num_workers=(args.num_workers, args.max_workers) if elastic else args.num_workers,
            use_gpu=use_gpu,
            elastic_resize_monitor_interval_s=20,  # how often Ray looks for new nodes
        ),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),
            callbacks=[storage.MetricsFile(args.metrics_out, run.metrics)],
        ),
    )
    metrics = workers.fit(trainer, run, driver)
    if driver.rank == 0:
        write_metrics(args.metrics_out, metrics)
        driver.log(f"done: {run.folder if args.num_workers else 'local mode stores no checkpoints'}")


def train(args: Namespace, run: storage.RayRun, worker: distributed.Worker) -> list[dict]:
    """Train on one worker, and return the metrics."""
    with distributed.fail_together():
        local_batch_size = sampling.local_batch_size(args.batch_size, worker.world_size)
        tasks.check_precision(args.precision, worker.device)
        run.check_folder()
    task = tasks.build(TASKS, args, worker, args.max_workers, run.patience_s)

    # [3] Start from the same weights on every rank. After that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    model = task.build_model().to(worker.device, task.dtype)
    optimizer = task.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [4] Continue an interrupted run: rank 0 has read the file, and the others get its content from rank 0.
    progress = Progress(
        worker, len(task.splits.train), run.options, batch_size=args.batch_size, epochs=args.epochs,
        data=task.checksum(), max_steps=args.max_steps, stop_every=[args.save_every_steps], quiet=args.quiet,
    )  # fmt: skip
    _, state = run.load_on_all_ranks(worker)
    resumed = state is not None
    if resumed:
        with distributed.fail_together():
            progress.load_state_dict(checkpoint.restore(state, model, optimizer, scheduler, worker))
        if worker.rank == 0:
            worker.log(f"continuing after step {progress.step}")
    del state  # it is as large as model and optimizer

    # [5] From here on backward() averages the gradients of all ranks.
    ddp_model = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    if isinstance(ddp_model, DistributedDataParallel):  # a single worker's model is not wrapped
        # Regroup the buckets now, so that a resumed run is equal bit for bit. Your own loop can do without this.
        inputs, targets = task.to_device(sampling.empty_batch(task.splits.train))
        distributed.warm_up_ddp_buckets(ddp_model, lambda: task.loss(ddp_model(inputs), targets))
    train_loader = sampling.rank_loader(task.splits.train, local_batch_size, worker, shuffle_seed=args.seed)
    val_loader = sampling.rank_loader(task.splits.val, local_batch_size, worker)
    # Ray keeps our DistributedSampler. Without ours, it would add one that pads, and none on a single worker.
    train_loader, val_loader = prepare_data_loader(train_loader), prepare_data_loader(val_loader)
    if not resumed:  # a run that is killed in its first epoch restarts from the same weights
        save(run, worker, model, optimizer, scheduler, progress, {"epoch": 0})

    # [6] Train, validate and save, epoch by epoch.
    while not progress.finished:
        train_epoch(ddp_model, train_loader, optimizer, task, worker, progress)
        if progress.interrupted:  # by --save-every-steps
            save(run, worker, model, optimizer, scheduler, progress, {"epoch": 0})
            continue
        distributed.broadcast_buffers(model)  # BatchNorm's statistics differ by rank: validate with the saved ones
        metrics = progress.finish_epoch({
            **evaluate(model, val_loader, task),
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress.epoch_complete:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(progress.describe(metrics))
    return progress.metrics


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


def save(run: storage.RayRun, worker, model, optimizer, scheduler, progress: Progress, metrics: dict) -> None:
    """Report the metrics and the whole state. Rank 0 writes it, and Ray stores it and keeps the two newest."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress.state_dict())
    run.report(state, metrics, worker)


if __name__ == "__main__":
    script.run_main(main)
