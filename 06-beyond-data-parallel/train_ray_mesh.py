"""Train a GPT on a mesh of Ray Train's workers: tensor parallelism within a group of T workers, FSDP2 across groups.

Two workers here:     python train_ray_mesh.py --num-workers 2 --tensor-parallel 2
In this process:      python train_ray_mesh.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_mesh.py --num-workers 16 --tensor-parallel 8 \\
                          --precision bf16 --preset 7b --storage-path s3://BUCKET/runs

It computes what train_ray_fsdp2.py computes: with the same --seed and --batch-size, any mesh gives the same losses, up
to rounding. A worker that dies is replaced, and the run continues from its newest checkpoint. --resume continues it on
any mesh, and so does train_ray_fsdp2.py.
"""

import argparse
import math
import warnings
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace

import torch
from ray.train.torch import prepare_data_loader
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

from shared import distributed, measure, models, sampling, sharded, tasks
from shared.on_ray import cluster, options, storage, workers
from shared.running import script
from shared.running.options import checked, positive_int
from shared.running.progress import Progress, check_metrics_file, write_metrics
from shared.running.runs import options_of

TASKS = (tasks.TextTask,)


def main() -> None:
    parser = options.ray_parser(__doc__, TASKS, precisions={
        "fp32": "everything in float32",
        "bf16": "gathered weights, activations and their sums; slices, sums of gradients and moments stay float32",
        "fp64": "to compare runs",
    })  # fmt: skip
    only_fsdp2 = checked(str, "fsdp2".__eq__, "fsdp2; for DDP use train_ray_ddp.py --dataset text")
    parser.add_argument("--strategy", type=only_fsdp2, default="fsdp2", help=argparse.SUPPRESS)
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True,
        help="free a block's gathered weights between its forward and its backward pass (default: yes)")  # fmt: skip
    parser.add_argument("--offload", action="store_true",
        help="keep weights, gradients and moments in the host's memory; a block visits the GPU to compute")  # fmt: skip
    parser.add_argument("--tensor-parallel", type=positive_int, default=1, metavar="T",
        help="how many workers share each matrix: T consecutive ranks, best on one node (default: 1)")  # fmt: skip
    args = parser.parse_args()
    driver = distributed.Worker(distributed.rank_from_environment(), label="driver")  # rank 0, except under torchrun
    run = storage.RayRun.named(args.storage_path, args.run_name, options_of(args), local_mode=args.num_workers == 0)

    # [1] Before a worker starts, check everything that can be wrong.
    with distributed.fail_together():
        num_groups = data_size(args, workers.num_processes(args.num_workers))
        sampling.check_divisible(args.batch_size, num_groups, readers="tensor groups")
        run.open_or_resume(args.resume, driver)
        check_metrics_file(args.metrics_out)
        tasks.TextTask.load(args)
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(args.num_workers, args.use_gpu)

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    trainer = workers.build_trainer(train, {"args": args, "run": run}, args, run, use_gpu)
    metrics = workers.fit(trainer, run, driver)
    if driver.rank == 0:
        write_metrics(args.metrics_out, metrics)
        driver.log(f"done: {run.folder if args.num_workers else 'local mode stores no checkpoints'}")


def data_size(args: Namespace, world_size: int) -> int:
    """Return the number of tensor groups: the size of the mesh's data dimension.

    Raises ValueError if T does not divide the workers, or anything of the model that T workers share.
    """
    size, gpt = args.tensor_parallel, models.GPT_PRESETS[args.preset]
    counts = {"workers": world_size, "heads": gpt.num_heads, "width": gpt.dim, "vocabulary": gpt.vocab_size,
        "context": gpt.context}  # fmt: skip
    if not_divided := [f"{what} ({count})" for what, count in counts.items() if count % size]:
        most = math.gcd(*counts.values())
        sizes = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        raise ValueError(f"--tensor-parallel {size} does not divide {', '.join(not_divided)}; possible here: {sizes}")
    return world_size // size


def train(args: Namespace, run: storage.RayRun, worker: distributed.Worker) -> list[dict]:
    """Train on one worker, and return the metrics."""
    with distributed.fail_together():
        num_groups = data_size(args, worker.world_size)
        local_batch_size = sampling.local_batch_size(args.batch_size, num_groups)
        tasks.check_precision(args.precision, worker.device)
        run.check_folder()
        if args.offload and worker.device.type == "cpu":
            raise ValueError("--offload moves state from GPUs to the host's memory, and there are no GPUs")
    task = tasks.build(TASKS, args, worker, patience_s=run.patience_s)

    # [3] No rank ever holds the whole model. It is built without memory, then sharded, then each slice gets its values.
    distributed.join_alone(worker.device)  # in local mode
    mesh = init_device_mesh(worker.device.type, (num_groups, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = models.GPT(task.gpt_config, args.activation_checkpointing).to(task.dtype)
    share_matrices(model, mesh["tensor"])
    shard(model, args, mesh["data"])
    model.to_empty(device="cpu" if args.offload else worker.device)
    models.init_weights(model, args.seed)  # it sets parameters; buffers, as BatchNorm has, would need values too
    optimizer = task.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)

    # [4] Continue an interrupted run: every rank reads its slices, even if other ranks wrote them.
    progress = Progress(
        worker, len(task.splits.train), run.options, batch_size=args.batch_size, epochs=args.epochs,
        data=task.checksum(), max_steps=args.max_steps, stop_every=[args.save_every_steps], quiet=args.quiet,
    )  # fmt: skip
    with run.fetch_on_all_ranks(worker) as (folder, state):
        if state is not None:
            sharded.restore_sharded(folder, model, optimizer)
            scheduler.load_state_dict(state["scheduler"])
            progress.load_state_dict(state["progress"])
            if worker.rank == 0:
                worker.log(f"continuing after step {progress.step}")

    # All workers of a tensor group read the same samples: a group takes the part of one rank.
    group = replace(worker, rank=mesh.get_local_rank("data"), world_size=num_groups)
    train_loader = sampling.rank_loader(task.splits.train, local_batch_size, group, shuffle_seed=args.seed)
    val_loader = sampling.rank_loader(task.splits.val, local_batch_size, group)
    # Ray keeps our DistributedSampler. Without ours, it would add one that pads, and none on a single worker.
    train_loader, val_loader = prepare_data_loader(train_loader), prepare_data_loader(val_loader)
    num_val_batches = len(sampling.global_batch_counts(len(task.splits.val), args.batch_size))

    # [5] Train, validate and save, epoch by epoch.
    while not progress.finished:
        speed_and_memory = train_epoch(model, train_loader, optimizer, task, mesh, progress)
        if progress.interrupted:  # by --save-every-steps
            save(run, worker, model, optimizer, scheduler, progress, {"epoch": 0})
            continue
        metrics = progress.finish_epoch({
            # Every forward pass gathers weights from all ranks, so every rank must make the same number.
            **evaluate(model, sampling.even_batches(val_loader, num_val_batches), task),
            **speed_and_memory,
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress.epoch_complete:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, progress, metrics)
        if worker.rank == 0:
            worker.log(progress.describe(metrics))
    return progress.metrics


def share_matrices(model: models.GPT, mesh: DeviceMesh) -> None:
    """Cut every matrix among the workers of a tensor group. They compute with their slices and exchange activations.

    Between the matrices each worker has a part of the tokens (sequence parallelism), and all the norms.
    """
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "blocks.*.norm*": SequenceParallel(),
        "blocks.*.qkv": ColwiseParallel(input_layouts=Shard(1)),  # a slice of its rows is whole heads
        "blocks.*.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)  # on `meta` there are no values to send
    # FSDP2 warns that `head` returns a view. Nothing changes the logits in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def shard(model: models.GPT, args: Namespace, mesh: DeviceMesh) -> None:
    """Shard every slice again, one part per tensor group, block by block.

    A block is gathered while it computes, and the other parameters once per pass.
    """
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.precision == "bf16" else {}
    policies = {
        "mesh": mesh,
        "reshard_after_forward": args.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(**bf16),
        "offload_policy": CPUOffloadPolicy() if args.offload else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, task: tasks.Task, mesh: DeviceMesh,
    progress: Progress,
) -> dict:  # fmt: skip
    """Train until the epoch ends, or until --save-every-steps or --max-steps interrupts it.

    Returns the speed, and the largest byte counts of all ranks.
    """
    model.train()
    memory = measure.PeakMemory(task.device)
    counts = progress.start_steps()  # the samples of each step, over all ranks
    for global_count, batch in sampling.deal_batches(loader, progress.epoch, progress.position, counts):
        inputs, targets = task.to_device(batch)
        optimizer.zero_grad()
        if progress.in_last_step:  # only there, because measuring is slow on a CPU
            memory.start(model, optimizer)
        # This group's share of the mean over the global batch. FSDP divides by the number of groups, so we multiply.
        loss = task.loss(model(inputs), targets) / global_count
        (loss * mesh["data"].size()).backward()
        optimizer.step()
        progress.add_step(loss / mesh["tensor"].size(), global_count)  # all workers of the group have this loss
    progress.finish_steps()  # one all-reduce for all losses, not one per step
    return {
        "tokens_per_second": progress.position * task.gpt_config.context / progress.seconds,
        "state_bytes_per_rank": distributed.global_max(measure.state_bytes(model, optimizer)),
        "peak_memory_bytes": distributed.global_max(memory.stop()),
    }


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable, task: tasks.Task) -> dict:
    """Return loss and accuracy over the whole data set: sum over all ranks, then divide once.

    A sample is counted T times, once per worker of its tensor group, in all three sums.
    """
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=task.device)  # loss, correct answers, samples
    for batch in batches:
        inputs, targets = task.to_device(batch)
        totals += task.metric_sums(model(inputs), targets)
    loss, correct, samples = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / samples, "val_accuracy": correct / samples}


def save(run: storage.RayRun, worker, model, optimizer, scheduler, progress: Progress, metrics: dict) -> None:
    """Report the metrics and the whole state. Every rank writes its slices, and Ray stores one checkpoint."""
    # Nothing here draws random numbers. If your model has dropout, add checkpoint.random_state(), as in chapter 1.
    state = {"scheduler": scheduler.state_dict(), "progress": progress.state_dict()}
    run.report(state, metrics, worker, write=lambda folder: sharded.save_sharded(folder, model, optimizer))


if __name__ == "__main__":
    script.run_main(main)
