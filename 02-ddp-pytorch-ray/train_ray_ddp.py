"""Train an image classifier data-parallel on Ray Train.

Two workers here:     python train_ray_ddp.py --num-workers 2
In this process:      python train_ray_ddp.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_ddp.py --num-workers 16 --storage-path s3://BUCKET/runs
Where nodes come and go:  ... --num-workers 4:6 --batch-size 240 --save-every-steps 100

It computes what train_ddp.py computes: with one --seed and --batch-size, every number of workers has the same losses,
up to rounding (and with the same exceptions). A worker that dies is replaced, and the run goes on from its newest
checkpoint; with --num-workers MIN:MAX also on fewer nodes, and then on more.
"""

import time
from argparse import Namespace

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared import checkpoint, cli, cluster, data, distributed, models, ray_storage, runs


def main() -> None:
    args = cli.ray_parser(__doc__, workers=cli.elastic_workers).parse_args()
    args.num_workers, args.max_workers = args.num_workers  # the fewest and the most
    driver = cluster.Driver(distributed.rank_from_environment())  # rank 0, but for local mode under torchrun

    # [1] Whatever can be wrong is found before a worker starts.
    with distributed.fail_together():
        data.local_batch_size(args.batch_size, cluster.world_size(args), args.max_workers)
        run, earlier = ray_storage.claim(args, driver)
    cli.stop_on_signals(driver, run, clean_up=cluster.stop_at_once)
    cluster.start(args)

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    storage_path, name = run.place
    elastic = args.max_workers > args.num_workers  # when nodes come or go, as many workers as there is room for
    trainer = TorchTrainer(
        cluster.on_workers(train),
        train_loop_config=vars(args),
        torch_config=TorchConfig(timeout_s=600),  # a collective that a worker never reaches; Ray's default is 1,800
        scaling_config=ray.train.ScalingConfig(
            num_workers=(args.num_workers, args.max_workers) if elastic else args.num_workers,
            use_gpu=bool(args.use_gpu),
            elastic_resize_monitor_interval_s=20,  # as often as Ray looks for new nodes
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage_path,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),
            callbacks=[ray_storage.MetricsFile(args.metrics_out, earlier)],
        ),
    )
    metrics = cluster.fit(trainer, run, driver)
    if driver.rank == 0:
        runs.write_metrics(args.metrics_out, metrics)
        driver.log(f"done: {run.folder if args.num_workers else 'local mode stores no checkpoints'}")


def train(args: Namespace, worker: distributed.Worker) -> list[dict]:
    """What every worker runs; returns the metrics."""
    with distributed.fail_together(), distributed.local_first(worker):
        cli.check_precision(args.precision, worker.device)
        ray_storage.check_folder(args)
        splits = data.load(args.dataset, args.data_dir)
    with distributed.fail_together():
        local_batch_size = data.local_batch_size(args.batch_size, worker.world_size)
        data.check_batch_norm(args.model, len(splits.train), args.batch_size, max(worker.world_size, args.max_workers))

    # [3] The same weights on every rank; after that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model = models.build(args.model, splits.image_shape, splits.num_classes).to(worker.device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [4] Go on where a run was interrupted: rank 0 has read the file, the others get it from there.
    progress = runs.new_progress(args)
    _, state = ray_storage.newest_state(args, worker)
    if resumed := state is not None:
        with distributed.fail_together():
            progress = checkpoint.restore(state, model, optimizer, scheduler, worker)
        if worker.rank == 0:
            worker.log(f"going on after step {progress['step']}")
    del state  # it is as large as model and optimizer

    # [5] From here on backward() averages the gradients of all ranks.
    ddp_model = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    if isinstance(ddp_model, DistributedDataParallel):  # one worker's model is not wrapped
        distributed.settle_buckets(ddp_model, torch.empty(0, *splits.image_shape, device=worker.device, dtype=dtype))
    # Ray's own sampler would pad, and one worker would get none: it leaves ours as it is, and moves the batches.
    train_loader = prepare_data_loader(data.rank_loader(splits.train, local_batch_size, worker, shuffle_seed=args.seed))
    val_loader = prepare_data_loader(data.rank_loader(splits.val, local_batch_size, worker))
    if not resumed:
        save(worker, model, optimizer, scheduler, progress, {"epoch": 0})

    # [6] Train, validate and save, epoch by epoch.
    while progress["epoch"] < args.epochs and (args.max_steps is None or progress["step"] < args.max_steps):
        train_epoch(ddp_model, train_loader, optimizer, worker, args, progress)
        if progress["position"] < len(splits.train) and progress["step"] != args.max_steps:  # by --save-every-steps
            save(worker, model, optimizer, scheduler, progress, {"epoch": 0})
            continue
        distributed.broadcast_buffers(model)  # BatchNorm's statistics differ by rank; validate what is saved
        metrics = runs.finish_epoch(progress, len(splits.train), {
            **evaluate(model, val_loader, worker),
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress["position"] == 0:
            scheduler.step()
        save(worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(runs.describe(metrics, args.epochs))
    return progress["metrics"]


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


def save(worker: distributed.Worker, model, optimizer, scheduler, progress: dict, metrics: dict) -> None:
    """Report the metrics with the whole state: rank 0 writes it, Ray stores it and keeps the two newest."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress)
    ray_storage.report(state, metrics, worker)


if __name__ == "__main__":
    cli.run(main)
