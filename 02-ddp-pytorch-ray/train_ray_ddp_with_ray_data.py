"""Train an image classifier data-parallel on Ray Train, fed by Ray Data.

Two workers here:     python train_ray_ddp_with_ray_data.py --num-workers 2
In this process:      python train_ray_ddp_with_ray_data.py --num-workers 0      (Ray's local mode)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_ddp_with_ray_data.py --num-workers 16 \\
                          --storage-path s3://BUCKET/runs
Your own data:        python train_ray_ddp_with_ray_data.py --data-uri s3://BUCKET/images --image-size 64

A built-in data set is written once to Parquet under --storage-path, and streamed from there through CPU tasks. Every
sample is seen once per epoch, but Ray decides which worker gets it, and when. So losses differ from run to run, and an
interrupted epoch starts again.
"""

import argparse
from argparse import Namespace

import numpy as np
import ray.data
import ray.train
import torch
from ray.train.torch import prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

import ray_images
import shared
from shared import checkpoint, distributed, paths, sampling, tasks
from shared.on_ray import cluster, options, storage, workers
from shared.running import script
from shared.running.options import positive_int
from shared.running.progress import Progress, check_metrics_file, write_metrics
from shared.running.runs import options_of

TASKS = (tasks.ImageTask,)


def main() -> None:
    # No BatchNorm: a worker's last batch may be a single sample, which has no variance.
    parser = options.ray_parser(__doc__, TASKS, models=("resnet18", "resnet8", "mlp"))
    add = parser.add_argument
    add("--data-uri", dest="dataset", type=paths.path_or_uri, default=argparse.SUPPRESS, metavar="URI",
        help="in place of --dataset: a path or URI with train/ and val/ in it, each of them Parquet files with the "
        "columns image and label, or pictures in a folder for each label")  # fmt: skip
    add("--image-size", type=positive_int, metavar="PIXELS",
        help="resize pictures of --data-uri to this height and width (default: all have the same)")  # fmt: skip
    add("--augment", action="store_true",
        help="rotate, shift, scale and blur training images at random, on the CPUs of Ray Data's tasks")  # fmt: skip
    args = parser.parse_args()
    driver = distributed.Worker(distributed.rank_from_environment(), label="driver")  # rank 0, except under torchrun

    # [1] Before a worker starts, check everything that can be wrong.
    with distributed.fail_together():
        sampling.check_divisible(args.batch_size, workers.num_processes(args.num_workers))
        if args.num_workers == 0 and workers.num_processes(0) > 1:
            raise ValueError("Ray Data has no local mode under torchrun: start this script with plain python")
        if args.save_every_steps:
            raise ValueError("--save-every-steps: with Ray Data an epoch that was cut short starts again")
        splits = ray_images.find(args.dataset, args.data_dir, args.image_size)
        own = [splits["train"], splits["val"]] if isinstance(splits, dict) else None  # what --data-uri holds
        known_by = {"classes": own and own[0].classes, "samples": own and [images.num_samples for images in own]}
        run = storage.RayRun.named(
            args.storage_path, args.run_name, options_of(args, "image_size", "augment") | known_by,
            local_mode=args.num_workers == 0, may_differ=["augment"],
        )  # fmt: skip
        run.open_or_resume(args.resume, driver)
        check_metrics_file(args.metrics_out)
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(args.num_workers, args.use_gpu, spare_cpus=1, packages=(shared, ray_images))

    # [2] Plan the input. Nothing is read yet: each epoch streams through the plan, in tasks next to the workers.
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.use_datasource_v2 = False  # Ray's newer Parquet reader starts helper processes for each pass
    with distributed.fail_together():
        splits = ray_images.store(splits, f"{run.storage_path}/datasets/{args.dataset}")
        seed = args.seed + len(run.metrics)  # a resumed run does not repeat its first orders
        blocks = max(8, 4 * args.num_workers)  # several for each worker, because Ray deals blocks
        streams = {name: ray_images.read(images, seed, blocks) for name, images in splits.items()}
        if args.augment:
            streams["train"] = streams["train"].map_batches(augment)
    images = splits["train"]
    driver.log(f"{images.num_samples} images of {images.image_shape}, labels {ray_images.summarize(images.classes)}")

    # [3] Ray Train starts the workers, makes their process group, and replaces those that die.
    config = {"args": args, "run": run, "images": images}
    trainer = workers.build_trainer(
        train, config, args, run, use_gpu, datasets=streams, dataset_config=ray_images.EverySample()
    )
    metrics = workers.fit(trainer, run, driver)
    if driver.rank == 0:
        write_metrics(args.metrics_out, metrics)
        driver.log(f"done: {run.folder if args.num_workers else 'local mode stores no checkpoints'}")


def train(args: Namespace, run: storage.RayRun, images: ray_images.ImageSet, worker: distributed.Worker) -> list[dict]:
    """Train on one worker, and return the metrics."""
    with distributed.fail_together():
        local_batch_size = sampling.local_batch_size(args.batch_size, worker.world_size)
        tasks.check_precision(args.precision, worker.device)
        run.check_folder()
    task = tasks.ImageTask(args, images, worker.device)
    train_shard, val_shard = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("val")

    # [4] Start from the same weights on every rank. After that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    model = task.build_model().to(worker.device, task.dtype)
    optimizer = task.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [5] Continue an interrupted run: rank 0 has read the file, and the others get its content from rank 0.
    progress = Progress(
        worker, images.num_samples, run.options, batch_size=args.batch_size, epochs=args.epochs,
        max_steps=args.max_steps, quiet=args.quiet,
    )  # fmt: skip
    _, state = run.load_on_all_ranks(worker)
    resumed = state is not None
    if resumed:
        with distributed.fail_together():
            restored = checkpoint.restore(state, model, optimizer, scheduler, worker)
        # A stream cannot resume in the middle. An interrupted epoch starts again, and its steps still count.
        progress.load_state_dict({**restored, "position": 0})
        progress.begin_epoch()
        if worker.rank == 0:
            worker.log(f"continuing after step {progress.step}")
    del state  # it is as large as model and optimizer

    # [6] From here on backward() averages the gradients of all ranks.
    ddp_model = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    if isinstance(ddp_model, DistributedDataParallel):  # a single worker's model is not wrapped
        # Regroup the buckets now, so that a resumed run is equal bit for bit. Your own loop can do without this.
        inputs, targets = task.to_device([torch.empty(0, *images.image_shape), torch.empty(0, dtype=torch.long)])
        distributed.warm_up_ddp_buckets(ddp_model, lambda: task.loss(ddp_model(inputs), targets))
    if not resumed:  # a run that is killed in its first epoch restarts from the same weights
        save(run, worker, model, optimizer, scheduler, progress, {"epoch": 0})

    # [7] Train, validate and save, epoch by epoch.
    while not progress.finished:
        seen_once = train_epoch(ddp_model, train_shard, local_batch_size, optimizer, task, worker, args, progress)
        metrics = progress.finish_epoch({
            **evaluate(model, val_shard, local_batch_size, task),
            "world_size": worker.world_size,
        })  # fmt: skip
        metrics["samples_seen"] = seen_once
        if progress.epoch_complete:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(progress.describe(metrics))
    return progress.metrics


def augment(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rotate, shift, scale and blur each image with its own random numbers. Ray Data's tasks run this."""
    torch.seed()  # each process starts with the same seed
    change = v2.Compose([v2.RandomAffine(15, translate=(0.1, 0.1), scale=(0.8, 1.2), fill=-1), v2.GaussianBlur(3)])
    return {**batch, "image": torch.stack([change(torch.tensor(image)) for image in batch["image"]]).numpy()}


def train_epoch(
    model: nn.Module, shard: ray.data.DataIterator, local_batch_size: int, optimizer: torch.optim.Optimizer,
    task: tasks.Task, worker: distributed.Worker, args: Namespace, progress: Progress,
) -> int:  # fmt: skip
    """Train until the epoch or --max-steps ends. Return how many samples were seen exactly once."""
    model.train()
    batches = ray_images.Stream(shard.iter_torch_batches(
        batch_size=local_batch_size, device=worker.device,
        local_shuffle_buffer_size=8 * local_batch_size, local_shuffle_seed=args.seed + progress.epoch,
    ), task.splits, worker.device)  # fmt: skip
    progress.start_steps()
    while args.max_steps is None or progress.step + len(progress.losses) < args.max_steps:
        # Ranks have different numbers of rows. All continue, some with empty batches, until no rank has any left.
        inputs, targets = task.to_device(next(batches, batches.empty))
        # A second, tiny all-reduce per step, for which a GPU waits. This is the price of using every row.
        global_count = int(distributed.global_sum(torch.tensor(len(targets), device=worker.device)))
        if global_count == 0:
            # The epoch ends with the stream. With a filter in it, nobody knows its length in advance.
            progress.num_samples = progress.position + sum(progress.counts)
            break
        optimizer.zero_grad()
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(inputs)
        # This rank's share of the mean over the global batch. DDP divides by the world size, so we multiply by it.
        loss = task.loss(logits, targets) / global_count
        (loss * worker.world_size).backward()
        optimizer.step()
        progress.add_step(loss, global_count)
    with distributed.fail_together():
        batches.check()  # every image could be read
    progress.finish_steps()  # one all-reduce for all losses, not one per step
    # Built-in data have ids, which prove it. Your own have none, so the samples are only counted.
    return progress.position if batches.seen is None else int((distributed.global_sum(batches.seen) == 1).sum())


@torch.no_grad()
def evaluate(model: nn.Module, shard: ray.data.DataIterator, batch_size: int, task: tasks.Task) -> dict:
    """Return loss and accuracy over the whole data set: sum over all ranks, then divide once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=task.device)  # loss, correct answers, samples
    batches = shard.iter_torch_batches(batch_size=batch_size, device=task.device)
    batches = ray_images.Stream(batches, task.splits, task.device)
    for batch in batches:
        inputs, targets = task.to_device(batch)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            logits = model(inputs)
        totals += task.metric_sums(logits, targets)
    with distributed.fail_together():
        batches.check()
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(run: storage.RayRun, worker, model, optimizer, scheduler, progress: Progress, metrics: dict) -> None:
    """Report the metrics and the whole state. Rank 0 writes it, and Ray stores it and keeps the two newest."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress.state_dict())
    run.report(state, metrics, worker)


if __name__ == "__main__":
    script.run_main(main)
