"""Train a GPT with FSDP2 on Ray Train: every worker keeps a slice of the weights, the gradients and Adam's moments.

Two workers here:     python train_ray_fsdp2.py --num-workers 2
In this process:      python train_ray_fsdp2.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_fsdp2.py --num-workers 16 --precision bf16 \\
                          --preset 7b --storage-path s3://BUCKET/runs

It computes what DDP computes: with one --seed and --batch-size, every number of workers has the same losses, up to
rounding. A worker that dies is replaced, and the run goes on from its newest checkpoint. With --resume it does so with
any number of workers.
"""

import argparse
import time
import zlib
from argparse import Namespace

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared import checkpoint, cli, cluster, data, distributed, measure, models, ray_storage, runs


def main() -> None:
    parser = cli.gpt_parser(__doc__, {
        "fp32": "everything in float32",
        "bf16": "gathered weights and activations, while slices, reductions and moments stay float32",
        "fp64": "to compare runs",
    })  # fmt: skip
    parser.add_argument("--strategy", choices=("fsdp2", "ddp"), default="fsdp2",
        help="ddp: every worker keeps everything, to compare (default: %(default)s)")  # fmt: skip
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True,
        help="free a block's gathered weights between its forward and its backward pass (default: yes)")  # fmt: skip
    parser.add_argument("--offload", action="store_true",
        help="keep weights, gradients and moments in the host's memory; a block visits the GPU to compute")  # fmt: skip
    args = parser.parse_args()
    if args.strategy == "ddp" and (args.precision == "bf16" or args.offload or not args.reshard_after_forward):
        parser.error("--strategy ddp is there to compare: without --precision bf16, --offload, --no-reshard...")
    driver = cluster.Driver(distributed.rank_from_environment())  # rank 0, but for local mode under torchrun

    # [1] Whatever can be wrong is found before a worker starts.
    with distributed.fail_together():
        data.local_batch_size(args.batch_size, cluster.world_size(args))
        run, earlier = ray_storage.claim(args, driver)
        data.text(models.GPT_PRESETS[args.preset].context, args.text_file)
    cli.stop_on_signals(driver, run, clean_up=cluster.stop_at_once)
    cluster.start(args)

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    storage_path, name = run.place
    trainer = TorchTrainer(
        cluster.on_workers(train),
        train_loop_config=vars(args),
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
    config = models.GPT_PRESETS[args.preset]
    with distributed.fail_together():
        cli.check_precision(args.precision, worker.device)
        ray_storage.check_folder(args)
        splits = data.text(config.context, args.text_file)
        local_batch_size = data.local_batch_size(args.batch_size, worker.world_size)
        if args.offload and worker.device.type == "cpu":
            raise ValueError("--offload moves state from GPUs to the host's memory, and there are no GPUs")
    windows = zlib.crc32(splits.train.tensors[0].numpy().tobytes())
    distributed.check_same(windows, "the nodes' texts differ: give --text-file a file that is the same on all of them")

    # [3] No rank ever holds the whole model: it is laid out without memory and cut up, then each slice gets its values.
    distributed.join_alone(worker.device)  # in local mode
    with torch.device("meta"):
        model = models.GPT(config, args.activation_checkpointing)
    model.to(torch.float64 if args.precision == "fp64" else torch.float32)
    if args.strategy == "fsdp2":
        shard(model, args, worker)
    model.to_empty(device="cpu" if args.offload else worker.device)
    models.init_weights(model, args.seed)  # parameters only: buffers (of BatchNorm, say) would have to be filled too
    if args.strategy == "ddp":  # to compare
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)

    # [4] Go on where a run was interrupted: every rank reads its slices, also those that other ranks have written.
    progress = runs.new_progress(args)
    with ray_storage.newest_checkpoint(args, worker) as (saved, state):
        if state is not None:
            checkpoint.restore_sharded(saved, model, optimizer)
            scheduler.load_state_dict(state["scheduler"])
            progress = state["progress"]
            if worker.rank == 0:
                worker.log(f"going on after step {progress['step']}")

    # Ray's own sampler would pad, and one worker would get none: it leaves ours as it is, and moves the batches.
    train_loader = prepare_data_loader(data.rank_loader(splits.train, local_batch_size, worker, shuffle_seed=args.seed))
    val_loader = prepare_data_loader(data.rank_loader(splits.val, local_batch_size, worker))

    # [5] Train, validate and save, epoch by epoch.
    while progress["epoch"] < args.epochs and (args.max_steps is None or progress["step"] < args.max_steps):
        measured = train_epoch(model, train_loader, optimizer, worker, args, progress)
        if progress["position"] < len(splits.train) and progress["step"] != args.max_steps:  # by --save-every-steps
            save(worker, model, optimizer, scheduler, progress, {"epoch": 0})
            continue
        metrics = runs.finish_epoch(progress, len(splits.train), {
            **evaluate(model, val_loader, worker, args.batch_size),
            **measured,
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress["position"] == 0:
            scheduler.step()
        save(worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(runs.describe(metrics, args.epochs))
    return progress["metrics"]


def shard(model: models.GPT, args: Namespace, worker: distributed.Worker) -> None:
    """Cut every parameter into one slice a rank. A block is gathered whole while it computes, the rest once a pass."""
    options = {
        "mesh": init_device_mesh(worker.device.type, (worker.world_size,)),
        "reshard_after_forward": args.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if args.offload else OffloadPolicy(),
    }
    if args.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, worker: distributed.Worker,
    args: Namespace, progress: dict,
) -> dict:  # fmt: skip
    """Train from `progress` to the end of the epoch, or to where --save-every-steps or --max-steps ends it before.

    Returns speed and memory.
    """
    model.train()
    counts, batches = data.epoch_batches(loader, args, progress)
    losses = []
    memory = measure.PeakMemory(worker.device)
    started = time.perf_counter()
    for count, (tokens, targets) in zip(counts, batches, strict=True):
        optimizer.zero_grad()
        if len(losses) == len(counts) - 1:  # the last step only: on a CPU, watching takes time
            memory.start(model, optimizer)
        tokens, targets = (batch.to(worker.device, non_blocking=True) for batch in (tokens, targets))
        # This rank's share of the mean over the global batch. FSDP divides by the world size, so we multiply by it.
        loss = sum_of_losses(model(tokens), targets) / (count * tokens.shape[1])
        (loss * worker.world_size).backward()
        optimizer.step()
        losses.append(loss.detach())
    step_losses = distributed.global_sum(torch.stack(losses)).tolist()  # one all-reduce here, not one a step
    runs.record_steps(progress, step_losses, counts, time.perf_counter() - started)
    return {
        "tokens_per_second": progress["position"] * tokens.shape[1] / progress["seconds"],
        "state_bytes_per_rank": distributed.global_max(measure.state_bytes(model, optimizer)),
        "peak_memory_bytes": distributed.global_max(memory.stop()),
    }


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, worker: distributed.Worker, batch_size: int) -> dict:
    """Loss and accuracy over the whole data set: sums are added over all ranks, then divided, once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=worker.device)  # loss, correct, tokens
    num_batches = len(data.global_batch_counts(len(loader.dataset), batch_size))
    for tokens, targets in data.even_batches(loader, num_batches):  # every forward pass gathers weights from all ranks
        tokens, targets = tokens.to(worker.device), targets.to(worker.device)
        logits = model(tokens)
        totals[0] += sum_of_losses(logits, targets)
        totals[1] += (logits.argmax(dim=2) == targets).sum()
        totals[2] += targets.numel()
    loss, correct, num_tokens = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / num_tokens, "val_accuracy": correct / num_tokens}


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each of a batch's tokens, (batch, T, vocab_size) and (batch, T), added up; never in bf16."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def save(worker: distributed.Worker, model, optimizer, scheduler, progress: dict, metrics: dict) -> None:
    """Report the metrics with the whole state: every rank writes its slices, Ray stores them as one checkpoint."""
    # No random state: nothing here draws numbers. With dropout add checkpoint.random_state(), as in chapter 1.
    state = {"scheduler": scheduler.state_dict(), "progress": progress}
    ray_storage.report(state, metrics, worker, write=lambda folder: checkpoint.save_sharded(folder, model, optimizer))


if __name__ == "__main__":
    cli.run(main)
