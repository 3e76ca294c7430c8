"""Train an image classifier data-parallel on Ray Train, fed by Ray Data.

Two workers here:     python train_ray_ddp_with_ray_data.py --num-workers 2
In this process:      python train_ray_ddp_with_ray_data.py --num-workers 0      (Ray's local mode)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_ddp_with_ray_data.py --num-workers 16 \\
                          --storage-path s3://BUCKET/runs
Data of your own:     python train_ray_ddp_with_ray_data.py --data-uri s3://BUCKET/images --image-size 64

A built-in data set is written to Parquet under --storage-path once, and streamed from there through CPU tasks. Every
sample is seen once an epoch, but which worker gets it, and when, is Ray's to say: so losses differ from run to run, and
an epoch that was cut short begins again.
"""

import argparse
import time
from argparse import Namespace

import numpy as np
import ray.data
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

from shared import checkpoint, cli, cluster, data, distributed, models, ray_images, ray_storage, runs


def main() -> None:
    # No BatchNorm: whichever rows a worker gets, its last batch may be of one sample, which has no variance.
    parser = cli.ray_parser(__doc__, models=("resnet18", "resnet8", "mlp"))
    parser.add_argument("--data-uri", dest="dataset", type=cli.path_or_uri, default=argparse.SUPPRESS, metavar="URI",
        help="in place of --dataset: a path or URI with train/ and val/ in it, each of them Parquet files with the "
        "columns image and label, or pictures in a folder for each label")  # fmt: skip
    parser.add_argument("--image-size", type=cli.positive_int, metavar="PIXELS",
        help="bring pictures of --data-uri to this height and width (default: all have the same)")  # fmt: skip
    parser.add_argument("--augment", action="store_true",
        help="turn, shift, scale and blur each training image at random, on the CPUs of Ray Data's tasks")  # fmt: skip
    args = parser.parse_args()
    driver = cluster.Driver(distributed.rank_from_environment())  # rank 0, but for local mode under torchrun

    # [1] Whatever can be wrong is found before a worker starts.
    with distributed.fail_together():
        data.local_batch_size(args.batch_size, cluster.world_size(args))
        if args.num_workers == 0 and cluster.world_size(args) > 1:
            raise ValueError("Ray Data has no local mode under torchrun: start this script with plain python")
        built_in = args.dataset in data.IMAGE_DATASETS
        if args.save_every_steps:
            raise ValueError("--save-every-steps: with Ray Data an epoch that was cut short begins again")
        if built_in and args.image_size:
            raise ValueError("--image-size is for the pictures of --data-uri")
        splits = data.load(args.dataset, args.data_dir) if built_in else ray_images.look(args.dataset, args.image_size)
        args.classes = None if built_in else splits["train"].classes  # a run that is resumed must have the same
        run, earlier = ray_storage.claim(args, driver)
    cli.stop_on_signals(driver, run, clean_up=cluster.stop_at_once)
    cluster.start(args, spare_cpus=1)

    # [2] The input: nothing is read yet, this is a plan. Each epoch streams through it, in tasks beside the workers.
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.use_datasource_v2 = False  # Ray's newer Parquet reader starts helper processes for each pass
    storage_path, name = run.place
    with distributed.fail_together():
        if built_in:
            splits = ray_images.write(splits, f"{storage_path}/datasets/{args.dataset}")
        datasets = {name: read(images, args, first_epoch=len(earlier)) for name, images in splits.items()}
        if args.augment:
            datasets["train"] = datasets["train"].map_batches(augment)
    facts = splits["train"]
    args.image_shape, args.num_classes = facts.image_shape, len(facts.classes)
    args.num_samples, args.has_ids = facts.num_samples, facts.has_ids
    if not built_in:
        driver.log(f"{facts.num_samples} images of {facts.image_shape}, labels {ray_images.some(facts.classes)}")

    # [3] Ray Train starts the workers, makes their process group, and replaces those that die.
    trainer = TorchTrainer(
        cluster.on_workers(train),
        train_loop_config=vars(args),
        datasets=datasets,
        dataset_config=EverySample(),
        torch_config=TorchConfig(timeout_s=600),  # a collective that a worker never reaches; Ray's default is 1,800
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=bool(args.use_gpu)),
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
    with distributed.fail_together():
        cli.check_precision(args.precision, worker.device)
        ray_storage.check_folder(args)
        local_batch_size = data.local_batch_size(args.batch_size, worker.world_size)
    train_shard, val_shard = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("val")

    # [4] The same weights on every rank; after that each rank draws its own random numbers (dropout).
    distributed.seed_everything(args.seed)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model = models.build(args.model, args.image_shape, args.num_classes).to(worker.device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    distributed.seed_everything(args.seed + worker.rank)

    # [5] Go on where a run was interrupted: rank 0 has read the file, the others get it from there.
    progress = runs.new_progress(args)
    _, state = ray_storage.newest_state(args, worker)
    if resumed := state is not None:
        with distributed.fail_together():
            progress = checkpoint.restore(state, model, optimizer, scheduler, worker)
        # The stream cannot be entered in its middle: an epoch that was cut short begins again, with its steps taken.
        progress |= runs.new_epoch()
        if worker.rank == 0:
            worker.log(f"going on after step {progress['step']}")
    del state  # it is as large as model and optimizer

    # [6] From here on backward() averages the gradients of all ranks.
    ddp_model = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    if isinstance(ddp_model, DistributedDataParallel):  # one worker's model is not wrapped
        distributed.settle_buckets(ddp_model, torch.empty(0, *args.image_shape, device=worker.device, dtype=dtype))
    if not resumed:
        save(worker, model, optimizer, scheduler, progress, {"epoch": 0})

    # [7] Train, validate and save, epoch by epoch.
    while progress["epoch"] < args.epochs and (args.max_steps is None or progress["step"] < args.max_steps):
        ended, seen_once = train_epoch(ddp_model, train_shard, local_batch_size, optimizer, worker, args, progress)
        # An epoch is over when the stream is: with a filter in it, nobody knows beforehand how long it is.
        metrics = runs.finish_epoch(progress, progress["position"] if ended else args.num_samples, {
            **evaluate(model, val_shard, local_batch_size, args.image_shape, worker),
            "world_size": worker.world_size,
        })  # fmt: skip
        metrics["samples_seen"] = seen_once
        if progress["position"] == 0:
            scheduler.step()
        save(worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(runs.describe(metrics, args.epochs))
    return progress["metrics"]


class EverySample(ray.train.DataConfig):
    """Deals all rows: Ray's own DataConfig drops up to N - 1 of them, so that all N workers get equally many."""

    def configure(self, datasets: dict, world_size: int, worker_handles, worker_node_ids, **kwargs) -> list[dict]:
        shards = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            streams = dataset.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
            for shard, stream in zip(shards, streams, strict=True):
                shard[name] = stream
        return shards


def read(images: ray_images.ImageSet, args: Namespace, first_epoch: int) -> ray.data.Dataset:
    """A stream of these images, in another order each epoch, normalised on the way."""
    shuffle = ray.data.FileShuffleConfig(seed=args.seed + first_epoch)  # each pass mixes its number in
    options = {"shuffle": shuffle, "include_paths": True, "partition_filter": ray_images.Visible()}
    if images.pictures:
        rows = ray.data.read_binary_files(images.path, **options)
    else:
        # Several for each worker: blocks are what is dealt. How large they are of one's own files Ray knows best.
        blocks = max(8, 4 * args.num_workers) if args.dataset in data.IMAGE_DATASETS else None
        columns = ["image", "label", *(["id"] if images.has_ids else [])]
        rows = ray.data.read_parquet(images.path, columns=columns, override_num_blocks=blocks, **options)
    # Pictures may be many times as large when they are pixels: a few at a time, in place of a block.
    few = None if args.dataset in data.IMAGE_DATASETS else 64
    return rows.map_batches(images, batch_size=few).map_batches(normalize)


def normalize(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Pixels in [0, 1] to [-1, 1], as `shared.data` has them. Runs in Ray Data's tasks."""
    return {**batch, "image": (batch["image"] - np.float32(0.5)) / np.float32(0.5)}


def augment(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each image turned, shifted, scaled and blurred, by random numbers of its own. Runs in Ray Data's tasks."""
    torch.seed()  # each process begins with the same one
    change = v2.Compose([v2.RandomAffine(15, translate=(0.1, 0.1), scale=(0.8, 1.2), fill=-1), v2.GaussianBlur(3)])
    return {**batch, "image": torch.stack([change(torch.tensor(image)) for image in batch["image"]]).numpy()}


def train_epoch(
    ddp_model: nn.Module, shard: ray.data.DataIterator, local_batch_size: int, optimizer: torch.optim.Optimizer,
    worker: distributed.Worker, args: Namespace, progress: dict,
) -> tuple[bool, int]:  # fmt: skip
    """Train one epoch, or to --max-steps; returns whether it ended, and how many samples were seen just once."""
    ddp_model.train()
    dtype = next(ddp_model.parameters()).dtype
    # Our proof, by ids. A data set of one's own has none: its samples are counted.
    seen = torch.zeros(args.num_samples * args.has_ids, device=worker.device)
    ended = False
    nothing = {name: torch.empty(0, dtype=torch.long, device=worker.device) for name in ("id", "image", "label")}
    losses, counts = [], []
    started = time.perf_counter()
    batches = ray_images.Stream(shard.iter_torch_batches(
        batch_size=local_batch_size, device=worker.device,
        local_shuffle_buffer_size=8 * local_batch_size, local_shuffle_seed=args.seed + progress["epoch"],
    ))  # fmt: skip
    while args.max_steps is None or progress["step"] + len(losses) < args.max_steps:
        # Ranks have different numbers of rows: all go on, some with empty batches, until the last one has none left.
        batch = next(batches, nothing)
        # A second, tiny all-reduce a step, which a GPU waits for: the price of using every row.
        count = int(distributed.global_sum(torch.tensor(len(batch["label"]), device=worker.device)))
        if count == 0:
            ended = True
            break
        images = batch["image"].to(dtype).view(len(batch["label"]), *args.image_shape)
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(images)
        # This rank's share of the mean over the global batch. DDP divides by the world size, so we multiply by it.
        loss = F.cross_entropy(logits.to(dtype), batch["label"], reduction="sum") / count
        optimizer.zero_grad()
        (loss * worker.world_size).backward()
        optimizer.step()
        losses.append(loss.detach())
        counts.append(count)
        if args.has_ids:
            seen[batch["id"]] += 1
    with distributed.fail_together():
        batches.check()  # no image was beyond reading
    step_losses = distributed.global_sum(torch.stack(losses)).tolist()  # one all-reduce here, not one a step
    runs.record_steps(progress, step_losses, counts, time.perf_counter() - started)
    return ended, int((distributed.global_sum(seen) == 1).sum()) if args.has_ids else sum(counts)


@torch.no_grad()
def evaluate(
    model: nn.Module, shard: ray.data.DataIterator, batch_size: int, image_shape: tuple, worker: distributed.Worker
) -> dict:
    """Loss and accuracy over the whole data set: sums are added over all ranks, then divided, once."""
    model.eval()
    dtype = next(model.parameters()).dtype
    totals = torch.zeros(3, dtype=torch.float64, device=worker.device)  # loss, correct, samples
    batches = ray_images.Stream(shard.iter_torch_batches(batch_size=batch_size, device=worker.device))
    for batch in batches:
        labels = batch["label"]
        logits = model(batch["image"].to(dtype).view(len(labels), *image_shape))
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        totals += torch.stack([loss.double(), correct.double(), torch.tensor(len(labels)).to(totals)])
    with distributed.fail_together():
        batches.check()
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(worker: distributed.Worker, model, optimizer, scheduler, progress: dict, metrics: dict) -> None:
    """Report the metrics with the whole state: rank 0 writes it, Ray stores it and keeps the two newest."""
    state = checkpoint.training_state(model, optimizer, scheduler, progress)
    ray_storage.report(state, metrics, worker)


if __name__ == "__main__":
    cli.run(main)
