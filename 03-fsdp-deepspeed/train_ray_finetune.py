"""Fine-tune a pretrained model with FSDP2 on Ray Train: a Hugging Face folder in, a Hugging Face folder out.

The workshop's own:   python train_ray_finetune.py --num-workers 2 --lora-rank 8 --export tuned
Your own:             python train_ray_finetune.py --num-workers 2 --base FOLDER --data-file ROWS.jsonl --export mine
In this process:      python train_ray_finetune.py --num-workers 0      (Ray's local mode: set a breakpoint anywhere)
On a cluster's node:  RAY_ADDRESS=HOST:6379 python train_ray_finetune.py --num-workers 16 --precision bf16 \\
                          --base /mnt/BASE --data-file /mnt/ROWS.jsonl --storage-path /mnt/runs --export /mnt/tuned

It is train_ray_fsdp2.py with pretrained weights, and with a loss that is the mean over the tokens of the answers. With
the same --seed and --batch-size, the losses are the same for any number of workers, up to rounding, unless dropout
draws random numbers. With two or more workers no process ever holds the whole model. A worker that dies is replaced,
and the run continues from its newest checkpoint. --resume continues it with any number of workers.

New against train_ray_fsdp2.py: [1] checks base and rows. [3] reads the base's weights, each rank its slices, and warms
up the learning rate. [4] restores random numbers too, for dropout. `train_epoch` takes a batch in parts, divides by its
answer tokens, and clips. [5] validates inside an epoch too, and shows answers. [6] exports.
"""

from argparse import Namespace
from collections.abc import Iterable

import torch
from ray.train.torch import prepare_data_loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import pairs
import pretrained
import shared
import tiny_base
from shared import checkpoint, distributed, measure, paths, sampling, sharded, tasks
from shared.on_ray import cluster, options, storage, workers
from shared.running import script
from shared.running.options import positive_float, positive_int
from shared.running.progress import check_metrics_file, write_metrics
from shared.running.runs import options_of

TASKS = (pairs.PairTask,)
MAY_DIFFER = ("accumulate", "max_grad_norm", "warmup_steps", "lora_dropout")  # options that a resumed run may change


def main() -> None:
    parser = options.ray_parser(__doc__, TASKS, precisions={
        "fp32": "everything in float32",
        "bf16": "gathered weights and activations, while slices, reductions and moments stay float32",
        "fp64": "to compare runs",
    })  # fmt: skip
    parser.add_argument("--accumulate", type=positive_int, default=1, metavar="N",
        help="compute a batch in N passes, each with a part of its rows: less memory for activations")  # fmt: skip
    parser.add_argument("--max-grad-norm", type=positive_float, default=float("inf"), metavar="NORM",
        help="scale larger gradients down to this norm (default: no limit)")  # fmt: skip
    parser.add_argument("--warmup-steps", type=positive_int, default=1, metavar="N",
        help="raise the learning rate over the first N steps (default: 1, no warm-up)")  # fmt: skip
    parser.add_argument("--eval-every-steps", type=positive_int, metavar="N",
        help="also validate inside an epoch, every N optimizer steps (default: only at its end)")  # fmt: skip
    parser.add_argument("--export", type=paths.local_path, metavar="FOLDER",
        help="write the result as a Hugging Face folder, with LoRA as an adapter; every node must see it")  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="export the base with the adapters added to its weights")
    args = parser.parse_args()
    driver = distributed.Worker(distributed.rank_from_environment(), label="driver")  # rank 0, except under torchrun

    # [1] Before a worker starts, check everything that can be wrong.
    with distributed.fail_together():
        local_batch_size = sampling.local_batch_size(args.batch_size, workers.num_processes(args.num_workers))
        if local_batch_size % args.accumulate:
            raise ValueError(f"--accumulate {args.accumulate} does not divide the {local_batch_size} rows of a rank")
        pretrained.check_export(args)
        run = storage.RayRun.named(
            args.storage_path, args.run_name, options_of(args, *MAY_DIFFER) | pairs.check(args, driver),
            local_mode=args.num_workers == 0, may_differ=MAY_DIFFER,
        )  # fmt: skip
        run.open_or_resume(args.resume, driver)
        check_metrics_file(args.metrics_out)
    script.stop_on_signals(driver, run.resume_hint, clean_up=cluster.stop_at_once)
    use_gpu = cluster.start(args.num_workers, args.use_gpu, packages=(shared, pairs, pretrained, tiny_base))

    # [2] Ray Train starts the workers, makes their process group, and replaces those that die.
    trainer = workers.build_trainer(train, {"args": args, "run": run}, args, run, use_gpu)
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
        pretrained.check_same_base(args, run, worker)
    if args.export:
        pretrained.check_export_is_shared(args, worker)
    task = tasks.build(TASKS, args, worker, patience_s=run.patience_s)

    # [3] No rank ever holds the whole model. It is built without memory, then sharded, then each rank reads its slices.
    distributed.join_alone(worker.device)  # in local mode
    with distributed.fail_together():
        model = task.build_model()
    if worker.rank == 0 and args.lora_rank and (frozen := pretrained.without_adapters(model)):
        worker.log(f"note: no adapters for {', '.join(frozen)}: not linear layers, so they stay frozen")
    shard(model, args, worker)
    model.to_empty(device=worker.device)
    pretrained.fill(model, args.base, args.seed)
    optimizer = task.build_optimizer(model)  # before any forward pass, which may leave weights gathered
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size, gamma=0.5)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warmup_steps, total_iters=args.warmup_steps - 1)
    distributed.seed_everything(args.seed + worker.rank)  # every rank draws its own dropout

    # [4] Continue an interrupted run: every rank reads its slices, even if other ranks wrote them.
    progress = pairs.FinetuneProgress(
        worker, len(task.splits.train), run.options, batch_size=args.batch_size, epochs=args.epochs,
        max_steps=args.max_steps, stop_every=[args.save_every_steps, args.eval_every_steps], quiet=args.quiet,
    )  # fmt: skip
    with run.fetch_on_all_ranks(worker) as (folder, state):
        if state is not None:
            sharded.restore_sharded(folder, model, optimizer)
            scheduler.load_state_dict(state["scheduler"])
            warmup.load_state_dict(state["warmup"])
            progress.load_state_dict(state["progress"])
            if worker.rank < len(state["random"]):
                checkpoint.set_random_state(state["random"][worker.rank])
            if worker.rank == 0:
                worker.log(f"continuing after step {progress.step}")

    train_loader = sampling.rank_loader(task.splits.train, local_batch_size, worker, shuffle_seed=args.seed)
    val_loader = sampling.rank_loader(task.splits.val, local_batch_size, worker)
    # Ray keeps our DistributedSampler and moves the batches. Its own would pad, and one worker would get none.
    train_loader, val_loader = prepare_data_loader(train_loader), prepare_data_loader(val_loader)
    num_val_batches = len(sampling.global_batch_counts(len(task.splits.val), args.batch_size))

    # [5] Train, validate and save, epoch by epoch.
    while not progress.finished:
        train_epoch(model, train_loader, optimizer, warmup, task, worker, progress)
        if progress.interrupted and not progress.due(args.eval_every_steps):
            save(run, worker, model, optimizer, scheduler, warmup, progress, {"epoch": 0})
            continue
        # Every forward pass gathers weights from all ranks, so each rank must make equally many.
        measured = evaluate(model, sampling.even_batches(val_loader, num_val_batches), task)
        answers = pairs.sample_answers(model, task)
        if worker.rank == 0:
            worker.log(f"after step {progress.step}: {answers}")
        if progress.interrupted:
            progress.add_evaluation(measured)
            if progress.due(args.save_every_steps):
                save(run, worker, model, optimizer, scheduler, warmup, progress, {"epoch": 0})
            continue
        metrics = progress.finish_epoch({
            **measured,
            **progress.epoch_metrics(),
            "state_bytes_per_rank": distributed.global_max(measure.state_bytes(model, optimizer)),
            "world_size": worker.world_size,
        })  # fmt: skip
        if progress.epoch_complete:
            scheduler.step()
        save(run, worker, model, optimizer, scheduler, warmup, progress, metrics)
        if worker.rank == 0:
            worker.log(progress.describe(metrics))

    # [6] Write what others can load.
    if args.export:
        pretrained.export(model, args, run, worker, task.ends)
    return progress.metrics


def shard(model: nn.Module, args: Namespace, worker: distributed.Worker) -> None:
    """Shard every parameter, one slice per rank, block by block.

    A block is gathered while it computes, and the other parameters once per pass.
    """
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.precision == "bf16" else {}
    policies = {
        "mesh": init_device_mesh(worker.device.type, (worker.world_size,)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(**bf16),
    }
    for block in pretrained.blocks(model):
        fully_shard(block, **policies)
    fully_shard(pretrained.decoder(model), **policies)  # not its PeftModel, which `generate` does not go through


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, warmup: LRScheduler, task: tasks.Task,
    worker: distributed.Worker, progress: pairs.FinetuneProgress,
) -> None:  # fmt: skip
    """Train until the epoch ends, or until --save-every-steps, --eval-every-steps or --max-steps interrupts it."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counts = progress.start_steps()  # the samples of each step, over all ranks
    for global_count, batch in sampling.deal_batches(loader, progress.epoch, progress.position, counts):
        # Answers differ in length, and so do the ranks' numbers of tokens: divide by all of them, over all passes.
        answer_tokens = distributed.global_sum(task.count_answer_tokens(batch))
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=worker.device)
        for inputs, targets in task.split(batch, task.args.accumulate):
            loss = task.loss(model(input_ids=inputs, use_cache=False).logits, targets) / answer_tokens
            (loss * worker.world_size).backward()  # FSDP divides by the world size
            step_loss = step_loss + loss.detach()
        norm = clip_grad_norm_(parameters, task.args.max_grad_norm).full_tensor()
        optimizer.step()
        warmup.step()
        progress.add_step(step_loss, global_count)
        progress.add_numbers(norm, answer_tokens)
    progress.finish_steps()  # one all-reduce for all losses, not one per step


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable, task: pairs.PairTask) -> dict:
    """Return loss and accuracy over the whole data set: sum over all ranks, then divide once."""
    model.eval()
    totals = torch.zeros(5, dtype=torch.float64, device=task.device)
    for batch in batches:
        for inputs, targets in task.split(batch, task.args.accumulate):
            totals += task.metric_sums(model(input_ids=inputs, use_cache=False).logits, targets)
    loss, correct, tokens, exact, rows = distributed.global_sum(totals).tolist()
    return {"val_loss": loss / tokens, "val_accuracy": correct / tokens, "val_exact_match": exact / rows}


def save(run: storage.RayRun, worker, model, optimizer, scheduler, warmup, progress, metrics: dict) -> None:
    """Report the metrics and the state that training changes. Every rank writes its slices of it.

    Frozen weights are in the base, and the run's options hold the base's checksums.
    """
    state = {
        "scheduler": scheduler.state_dict(),
        "warmup": warmup.state_dict(),
        "random": distributed.gather_objects(checkpoint.random_state()),  # for dropout
        "progress": progress.state_dict(),
    }
    run.report(state, metrics, worker, write=lambda folder: sharded.save_sharded(folder, model, optimizer))


if __name__ == "__main__":
    script.run_main(main)
