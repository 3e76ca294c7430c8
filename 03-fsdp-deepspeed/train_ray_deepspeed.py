"""Train a GPT with DeepSpeed ZeRO on Ray Train: optimizer state, gradients and weights cut up in stages 1, 2 and 3.

Two workers here:     python train_ray_deepspeed.py --num-workers 2 --zero-stage 3
In this process:      python train_ray_deepspeed.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_deepspeed.py --num-workers 16 --precision bf16 \\
                          --preset 7b --ds-config my_config.json --storage-path s3://BUCKET/runs

Every stage computes what DDP computes: with one --seed and --batch-size, every number of workers has the same losses,
up to rounding. A worker that dies is replaced, and the run goes on from its newest checkpoint. With --resume it does so
with any number of workers. The buckets in ds_config.json are as small as the preset nano: for a larger one give a
--ds-config without them, and DeepSpeed's own hold.
"""

import json
import os
import time
import zlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from shared import checkpoint, cli, cluster, data, distributed, measure, models, ray_storage, runs


def main() -> None:
    parser = cli.gpt_parser(__doc__, {
        "fp32": "everything in float32",
        "bf16": "weights, gradients and activations, with a float32 copy of the weights in the optimizer",
        "fp16": "as bf16, with loss scaling; on GPUs",
    })  # fmt: skip
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3),
        help="1: optimizer state is cut up, 2: gradients too, 3: weights too (default: as in --ds-config)")  # fmt: skip
    parser.add_argument("--ds-config", metavar="FILE", default=str(Path(__file__).with_name("ds_config.json")),
        help="DeepSpeed's settings (default: ds_config.json beside this file)")  # fmt: skip
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in the host's memory")
    args = parser.parse_args()
    driver = cluster.Driver(distributed.rank_from_environment())  # rank 0, but for local mode under torchrun

    # [1] Whatever can be wrong is found before a worker starts.
    with distributed.fail_together():
        data.local_batch_size(args.batch_size, cluster.world_size(args))
        args.settings = read_settings(args, cluster.world_size(args))
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

    # [3] Go on where a run was interrupted, or begin: the engine is the model, its optimizer and its scheduler in one.
    progress = runs.new_progress(args)
    distributed.join_alone(worker.device)  # in local mode
    os.environ.setdefault("DS_ACCELERATOR", worker.device.type)
    with ray_storage.newest_checkpoint(args, worker) as (saved, state):
        # Another number of ranks: in stage 0 nothing is cut up, and every rank reads the same file.
        moved = state is not None and args.zero_stage > 0 and state["world_size"] != worker.world_size
        if moved:
            checkpoint.make_universal(saved, worker)
            args.settings["checkpoint"] = {"load_universal": True}
        if state is not None:  # the schedule is the run's own
            progress = state["progress"]
            args.lr_step_size = progress["options"]["lr_step_size"]
        engine = build_engine(config, schedule(args, progress, len(splits.train)), args, worker)
        if state is not None:
            checkpoint.restore_zero(saved, engine, universal=moved)
            if worker.rank == 0:
                worker.log(f"going on after step {progress['step']}")

    # Ray's own sampler would pad, and one worker would get none: it leaves ours as it is, and moves the batches.
    train_loader = prepare_data_loader(data.rank_loader(splits.train, local_batch_size, worker, shuffle_seed=args.seed))
    val_loader = prepare_data_loader(data.rank_loader(splits.val, local_batch_size, worker))

    # [4] Train, validate and save, epoch by epoch.
    while progress["epoch"] < args.epochs and (args.max_steps is None or progress["step"] < args.max_steps):
        measured = train_epoch(engine, train_loader, worker, args, progress)
        if progress["position"] < len(splits.train) and progress["step"] != args.max_steps:  # by --save-every-steps
            save(worker, engine, progress, {"epoch": 0})
            continue
        metrics = runs.finish_epoch(progress, len(splits.train), {
            **evaluate(engine, val_loader, worker, args.batch_size),
            **measured,
            "world_size": worker.world_size,
        })  # fmt: skip
        save(worker, engine, progress, metrics)
        if worker.rank == 0:
            worker.log(runs.describe(metrics, args.epochs))
    return progress["metrics"]


def read_settings(args: Namespace, world_size: int) -> dict:
    """DeepSpeed's settings: those of --ds-config, with this run's batch, precision and stage. Raises ValueError."""
    try:
        return fill_in(json.loads(Path(args.ds_config).read_text()), args, world_size)
    except (ValueError, TypeError) as error:  # of the file's text, of its values
        raise ValueError(f"{args.ds_config}: {error}") from error


def fill_in(settings: dict, args: Namespace, world_size: int) -> dict:
    """`settings` with what the options decide. Raises ValueError where both do, and differ, or where one is no use."""
    if not isinstance(settings, dict):
        raise ValueError("it must hold an object of settings, as ds_config.json does")
    for part in ("zero_optimization", "optimizer", "fp16", "bf16"):
        if not isinstance(settings.setdefault(part, {}), dict):
            raise ValueError(f'{part} must hold settings, as in {{"name": 2}}')
    if automatic := [name for name in settings if '"auto"' in json.dumps(settings[name])]:
        raise ValueError(f'"auto" is Hugging Face\'s, and nothing fills it in here: {automatic[0]}')
    if "scheduler" in settings:
        raise ValueError('the learning rate is scheduled by this script; leave out "scheduler"')
    zero, optimizer = settings["zero_optimization"], settings["optimizer"]
    args.zero_stage = zero["stage"] = zero.get("stage", 0) if args.zero_stage is None else args.zero_stage
    if zero["stage"] not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0, 1, 2 and 3, not {zero['stage']!r}")
    local_batch_size = data.local_batch_size(args.batch_size, world_size)
    accumulation = settings.setdefault("gradient_accumulation_steps", 1)
    if not isinstance(accumulation, int) or accumulation < 1 or local_batch_size % accumulation:
        raise ValueError(
            f"the {local_batch_size} samples of a worker's batch are not divisible by {accumulation!r} "
            "gradient_accumulation_steps"
        )
    batches = (args.batch_size, local_batch_size // accumulation)
    for name, size in zip(("train_batch_size", "train_micro_batch_size_per_gpu"), batches, strict=True):
        if settings.setdefault(name, size) != size:
            raise ValueError(
                f"{name} is {settings[name]}; --batch-size {args.batch_size} on {world_size} workers with "
                f"{accumulation} accumulation steps makes it {size}. Leave it out, and it is filled in"
            )
    optimizer.setdefault("type", "AdamW")
    optimizer["params"] = {**optimizer.get("params", {}), "lr": args.lr}
    for name in ("bf16", "fp16"):
        settings[name]["enabled"] = args.precision == name
    if args.offload:
        zero.setdefault("offload_optimizer", {"device": "cpu", "pin_memory": True})
    return settings


def schedule(args: Namespace, progress: dict, num_samples: int) -> Callable[[int], float]:
    """The learning rate's factor after a number of optimizer steps: halved every `args.lr_step_size` epochs."""
    per_epoch = len(data.global_batch_counts(num_samples, args.batch_size))
    # Resumed with another --batch-size, a run has come as far as it is in more or in fewer steps.
    ahead = progress["epoch"] * per_epoch + progress["position"] // args.batch_size - progress["step"]
    return lambda step: 0.5 ** ((step + ahead) // (args.lr_step_size * per_epoch))


def build_engine(config: models.GPTConfig, factor: Callable, args: Namespace, worker: distributed.Worker) -> nn.Module:
    """A DeepSpeedEngine around a GPT. In stage 3 its weights are cut up while it is built: no rank ever holds all."""
    import deepspeed  # takes seconds; the driver needs none of it

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for CPUs only
    deepspeed.init_distributed(dist_init_required=False)  # joins the process group that is there
    with deepspeed.zero.Init(config_dict_or_path=args.settings, enabled=args.zero_stage == 3):
        model = models.GPT(config, args.activation_checkpointing)
    models.init_weights(model, args.seed, gathered=lambda parameter: deepspeed.zero.GatheredParameters(
        parameter, modifier_rank=0, enabled=args.zero_stage == 3
    ))  # fmt: skip
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=args.settings,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),
    )[0]


def train_epoch(
    engine: nn.Module, loader: DataLoader, worker: distributed.Worker, args: Namespace, progress: dict
) -> dict:
    """Train from `progress` to the end of the epoch, or to where --save-every-steps or --max-steps ends it before.

    Returns speed and memory.
    """
    engine.train()
    counts, batches = data.epoch_batches(loader, args, progress)
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    memory = measure.PeakMemory(worker.device)
    started = time.perf_counter()
    for count, batch in zip(counts, batches, strict=True):
        losses.append(0.0)
        for tokens, targets in zip(*(part.tensor_split(accumulation) for part in batch), strict=True):
            watched = len(losses) == len(counts) and engine.is_gradient_accumulation_boundary()
            if watched:  # the last backward pass of the last step: on a CPU, watching takes time
                memory.start(*measure.zero_state(engine))
            tokens, targets = (part.to(worker.device, non_blocking=True) for part in (tokens, targets))
            # This rank's share of the mean over the global batch. DeepSpeed divides by the world size and by the
            # number of accumulation steps, so we multiply by them.
            loss = sum_of_losses(engine(tokens), targets) / (count * tokens.shape[1])
            engine.backward(loss * worker.world_size * accumulation)
            losses[-1] += loss.detach()
            if watched:
                state_bytes = measure.storage_bytes(measure.zero_state(engine))
            engine.step()  # moves the weights after the last of the accumulation steps
    step_losses = distributed.global_sum(torch.stack(losses)).tolist()  # one all-reduce here, not one a step
    runs.record_steps(progress, step_losses, counts, time.perf_counter() - started)
    return {
        "tokens_per_second": progress["position"] * tokens.shape[1] / progress["seconds"],
        "state_bytes_per_rank": distributed.global_max(state_bytes),
        "peak_memory_bytes": distributed.global_max(memory.stop()),
    }


@torch.no_grad()
def evaluate(engine: nn.Module, loader: DataLoader, worker: distributed.Worker, batch_size: int) -> dict:
    """Loss and accuracy over the whole data set: sums are added over all ranks, then divided, once."""
    engine.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=worker.device)  # loss, correct, tokens
    num_batches = len(data.global_batch_counts(len(loader.dataset), batch_size))
    for tokens, targets in data.even_batches(loader, num_batches):  # every forward pass gathers weights from all ranks
        tokens, targets = tokens.to(worker.device), targets.to(worker.device)
        logits = engine(tokens)
        totals[0] += sum_of_losses(logits, targets)
        totals[1] += (logits.argmax(dim=2) == targets).sum()
        totals[2] += targets.numel()
    loss, correct, num_tokens = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / num_tokens, "val_accuracy": correct / num_tokens}


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each of a batch's tokens, (batch, T, vocab_size) and (batch, T), added up; in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def save(worker: distributed.Worker, engine: nn.Module, progress: dict, metrics: dict) -> None:
    """Report the metrics with the whole state: every rank writes its slices, Ray stores them as one checkpoint."""
    # No random state: nothing here draws numbers. With dropout add checkpoint.random_state(), as in chapter 1.
    state = {"progress": progress, "world_size": worker.world_size}
    ray_storage.report(state, metrics, worker, write=lambda folder: checkpoint.save_zero(folder, engine))


if __name__ == "__main__":
    cli.run(main)
