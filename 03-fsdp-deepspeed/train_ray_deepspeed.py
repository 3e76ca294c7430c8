"""Train a GPT with DeepSpeed ZeRO on Ray Train: stages 1, 2, 3 shard optimizer state, gradients and weights.

Two workers here:     python train_ray_deepspeed.py --num-workers 2 --zero-stage 3
In this process:      python train_ray_deepspeed.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_deepspeed.py --num-workers 16 --precision bf16 \\
                          --preset 7b --ds-config my_config.json --storage-path s3://BUCKET/runs

Every stage computes what DDP computes: with the same --seed and --batch-size, any number of workers has the same
losses, up to rounding. A worker that dies is replaced, and the run continues from its newest checkpoint. --resume
continues it with any number of workers. The buckets in ds_config.json are small, for the preset nano. For a larger
preset give a --ds-config without bucket sizes, and DeepSpeed uses its own.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import ds_settings
import torch
from ray.train.torch import prepare_data_loader
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import shared
import zero
from shared import distributed, measure, models, paths, sampling, tasks
from shared.on_ray import cluster, options, storage, workers
from shared.running import script
from shared.running.progress import Progress, check_metrics_file, write_metrics
from shared.running.runs import options_of

TASKS = (tasks.TextTask,)


def main() -> None:
    parser = options.ray_parser(__doc__, TASKS, precisions={
        "fp32": "everything in float32",
        "bf16": "weights, gradients and activations, with a float32 copy of the weights in the optimizer",
        "fp16": "as bf16, with loss scaling; on GPUs",
    })  # fmt: skip
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=0,
        help="1: shard the optimizer state, 2: gradients too, 3: weights too (default: %(default)s)")  # fmt: skip
    parser.add_argument("--ds-config", metavar="FILE", type=paths.local_path,
        default=str(ds_settings.OWN_FILE),
        help="DeepSpeed's settings (default: ds_config.json next to this file)")  # fmt: skip
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in the host's memory")
    yielding = ("batch_size", "lr", "precision", "zero_stage")  # --ds-config decides those that are not given
    parser.set_defaults(**{name: ds_settings.Default(parser.get_default(name)) for name in yielding})
    args = parser.parse_args()
    driver = distributed.Worker(distributed.rank_from_environment(), label="driver")  # rank 0, except under torchrun

    # [1] Before a worker starts, check everything that can be wrong.
    with distributed.fail_together():
        args, settings = ds_settings.read_settings(args, workers.num_processes(args.num_workers), driver)
        options_of_run = options_of(args) | {"zero_stage": settings["zero_optimization"]["stage"]}
        run = storage.RayRun.named(
            args.storage_path, args.run_name, options_of_run, local_mode=args.num_workers == 0
        )  # fmt: skip
        run.open_or_resume(args.resume, driver)
        check_metrics_file(args.metrics_out)
        tasks.TextTask.load(args)
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(args.num_workers, args.use_gpu, packages=(shared, zero))

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    trainer = workers.build_trainer(train, {"args": args, "run": run, "settings": settings}, args, run, use_gpu)
    metrics = workers.fit(trainer, run, driver)
    if driver.rank == 0:
        write_metrics(args.metrics_out, metrics)
        driver.log(f"done: {run.folder if args.num_workers else 'local mode stores no checkpoints'}")


def train(args: Namespace, run: storage.RayRun, settings: dict, worker: distributed.Worker) -> list[dict]:
    """Train on one worker, and return the metrics."""
    with distributed.fail_together():
        local_batch_size = sampling.local_batch_size(args.batch_size, worker.world_size)
        tasks.check_precision(args.precision, worker.device)
        run.check_folder()
        if args.offload and worker.device.type == "cpu":
            raise ValueError("--offload moves state from GPUs to the host's memory, and there are no GPUs")
    task = tasks.build(TASKS, args, worker, patience_s=run.patience_s)

    # [3] Start, or continue an interrupted run. The engine holds the model, its optimizer and its scheduler.
    distributed.join_alone(worker.device)  # in local mode
    progress = Progress(
        worker, len(task.splits.train), run.options, batch_size=args.batch_size, epochs=args.epochs,
        data=task.checksum(), max_steps=args.max_steps, stop_every=[args.save_every_steps], quiet=args.quiet,
    )  # fmt: skip
    with run.fetch_on_all_ranks(worker) as (folder, state):
        # Convert it for a different number of ranks. In stage 0 nothing is sharded, and all ranks read the same file.
        sharded = settings["zero_optimization"]["stage"] > 0
        universal = sharded and state is not None and state["world_size"] != worker.world_size
        if universal:
            settings = settings | {"checkpoint": {**settings.get("checkpoint", {}), "load_universal": True}}
        if state is not None:
            progress.load_state_dict(state["progress"])
        engine = build_engine(task, settings, schedule(progress), worker)
        if state is not None:
            with zero.universal_format(folder, worker) if universal else nullcontext(folder) as folder:
                zero.restore_zero(folder, engine, universal)
            if worker.rank == 0:
                worker.log(f"continuing after step {progress.step}")

    train_loader = sampling.rank_loader(task.splits.train, local_batch_size, worker, shuffle_seed=args.seed)
    val_loader = sampling.rank_loader(task.splits.val, local_batch_size, worker)
    # Ray keeps our DistributedSampler. Without ours, it would add one that pads, and none on a single worker.
    train_loader, val_loader = prepare_data_loader(train_loader), prepare_data_loader(val_loader)
    num_val_batches = len(sampling.global_batch_counts(len(task.splits.val), args.batch_size))

    # [4] Train, validate and save, epoch by epoch.
    while not progress.finished:
        speed_and_memory = train_epoch(engine, train_loader, task, worker, progress)
        if progress.interrupted:  # by --save-every-steps
            save(run, worker, engine, progress, {"epoch": 0})
            continue
        metrics = progress.finish_epoch({
            # Every forward pass gathers weights from all ranks, so every rank must make the same number.
            **evaluate(engine, sampling.even_batches(val_loader, num_val_batches), task),
            **speed_and_memory,
            "world_size": worker.world_size,
        })  # fmt: skip
        save(run, worker, engine, progress, metrics)
        if worker.rank == 0:
            worker.log(progress.describe(metrics))
    return progress.metrics


def schedule(progress: Progress) -> Callable[[int], float]:
    """Return a function of the step: the learning rate's factor, halved every --lr-step-size epochs."""
    steps_per_epoch = len(sampling.global_batch_counts(progress.num_samples, progress.batch_size))
    # A run resumed with a different --batch-size has taken more or fewer steps to the same position.
    ahead = progress.epoch * steps_per_epoch + progress.position // progress.batch_size - progress.step
    return lambda step: 0.5 ** ((step + ahead) // (progress.options["lr_step_size"] * steps_per_epoch))


def build_engine(task: tasks.TextTask, settings: dict, factor: Callable, worker: distributed.Worker) -> nn.Module:
    """Return a DeepSpeedEngine around a GPT. In stage 3 the GPT is sharded while it is built.

    So no rank ever holds all of its weights.
    """
    os.environ["DS_ACCELERATOR"] = worker.device.type  # workers may have inherited the driver's
    import deepspeed  # after the back end is chosen

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would have to be compiled, and is for CPUs only
    deepspeed.init_distributed(dist_init_required=False)  # joins the existing process group
    cut_up = settings["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=cut_up):
        model = models.GPT(task.gpt_config, task.args.activation_checkpointing)
    models.init_weights(model, task.args.seed, gathered=lambda parameter: deepspeed.zero.GatheredParameters(
        parameter, modifier_rank=0, enabled=cut_up
    ))  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=settings,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),
    )
    zero.undo_first_step(engine)
    return engine


def train_epoch(
    engine: nn.Module, loader: DataLoader, task: tasks.TextTask, worker: distributed.Worker, progress: Progress
) -> dict:
    """Train until the epoch ends, or until --save-every-steps or --max-steps interrupts it.

    Returns the speed, and the largest byte counts of all ranks.
    """
    engine.train()
    accumulation = engine.gradient_accumulation_steps()
    memory = measure.PeakMemory(worker.device)
    counts = progress.start_steps()  # the samples of each step, over all ranks
    for global_count, batch in sampling.deal_batches(loader, progress.epoch, progress.position, counts):
        step_loss = 0.0
        for parts in zip(*(tensor.tensor_split(accumulation) for tensor in batch), strict=True):
            inputs, targets = task.to_device(parts)
            watched = progress.in_last_step and engine.is_gradient_accumulation_boundary()
            if watched:  # only the last backward pass, because measuring is slow on a CPU
                memory.start(*zero.state_tensors(engine))
            # This rank's share of the mean over the global batch. DeepSpeed divides by the world size and by the
            # number of accumulation steps, so we multiply by both.
            loss = task.loss(engine(inputs), targets) / global_count
            engine.backward(loss * worker.world_size * accumulation)
            step_loss += loss.detach()
            if watched:
                state_bytes = measure.storage_bytes(zero.state_tensors(engine))
            engine.step()  # updates the weights after the last of the accumulation steps
        progress.add_step(step_loss, global_count)
    progress.finish_steps()  # one all-reduce for all losses, not one per step
    return {
        "tokens_per_second": progress.position * task.gpt_config.context / progress.seconds,
        "state_bytes_per_rank": distributed.global_max(state_bytes),
        "peak_memory_bytes": distributed.global_max(memory.stop()),
    }


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable, task: tasks.Task) -> dict:
    """Return loss and accuracy over the whole data set: sum over all ranks, then divide once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=task.device)  # loss, correct answers, samples
    for batch in batches:
        inputs, targets = task.to_device(batch)
        totals += task.metric_sums(model(inputs), targets)
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(run: storage.RayRun, worker: distributed.Worker, engine: nn.Module, progress: Progress, metrics: dict) -> None:
    """Report the metrics and the whole state. Every rank writes its slices, and Ray stores one checkpoint."""
    # Nothing here draws random numbers. If your model has dropout, add checkpoint.random_state(), as in chapter 1.
    state = {"progress": progress.state_dict(), "world_size": worker.world_size}
    run.report(state, metrics, worker, write=lambda folder: zero.save_zero(folder, engine))


if __name__ == "__main__":
    script.run_main(main)
