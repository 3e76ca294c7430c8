"""Train a GPT with DDP, FSDP2 or a ZeRO stage through one interface, and measure what each rank keeps, sends and saves.

`build` returns a run: a model and its optimizer, with the methods `backward`, `update`, `kept`, `save` and `close`.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero
from shared import datasets, distributed, measure, models, sharded
from shared.distributed import Worker

LEARNING_RATE = 1e-3
ZERO_SETTINGS = {
    # For a model as small as `nano`: with the default sizes, all of it fits into one bucket.
    "reduce_bucket_size": 100_000,
    "allgather_bucket_size": 100_000,
    "stage3_prefetch_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 100_000,  # free gathered weights early
    "stage3_max_reuse_distance": 0,
}


class TorchRun:
    """A GPT under DDP or FSDP2, with AdamW."""

    def __init__(self, strategy: str, config: models.GPTConfig, batch_size: int, seed: int, worker: Worker) -> None:
        self.config, self.batch_size = config, batch_size
        with torch.device("meta"):
            model = models.GPT(config)
        if strategy.startswith("FSDP2"):
            dtype = torch.bfloat16 if "bf16" in strategy else None
            options = {
                "mesh": init_device_mesh(worker.device.type, (worker.world_size,)),
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
                "reshard_after_forward": "kept" not in strategy,
            }
            for part in (*model.blocks, model):
                fully_shard(part, **options)
        model.to_empty(device=worker.device)
        models.init_weights(model, seed)
        self.bare = self.model = model
        if strategy == "DDP":
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> list[torch.Tensor]:
        """Return the state tensors that this rank keeps."""
        return measure.state_tensors(self.bare, self.optimizer)

    def save(self, folder: str) -> None:
        """Write this rank's slices into `folder`. Collective."""
        sharded.save_sharded(folder, self.bare, self.optimizer)

    def close(self) -> None:
        """Do nothing: nothing else refers to the model."""


class ZeroRun:
    """A GPT in a DeepSpeed engine, in the ZeRO stage that the strategy names, with AdamW."""

    def __init__(self, strategy: str, config: models.GPTConfig, batch_size: int, seed: int, worker: Worker) -> None:
        deepspeed = import_deepspeed(worker)
        self.config, self.batch_size = config, batch_size
        stage = int(strategy.removeprefix("ZeRO-")[0])
        settings = {
            "train_batch_size": batch_size,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
            "zero_optimization": {
                "stage": stage,
                "use_multi_rank_bucket_allreduce": "default" in strategy,
                **ZERO_SETTINGS,
            },
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        }
        with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
            model = models.GPT(config)
        models.init_weights(model, seed, gathered=lambda parameter: deepspeed.zero.GatheredParameters(
            parameter, modifier_rank=0, enabled=stage == 3
        ))  # fmt: skip
        parameters = model.parameters()
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()

    def kept(self) -> list[torch.Tensor]:
        """Return the state tensors that this rank keeps."""
        return zero.state_tensors(self.model)

    def save(self, folder: str) -> None:
        """Write this rank's slices into `folder`. Collective."""
        zero.save_zero(folder, self.model)

    def close(self) -> None:
        """Free the engine, which DeepSpeed would otherwise keep in memory."""
        self.model.destroy()


def import_deepspeed(worker: Worker):
    """Import DeepSpeed for this worker's kind of device, and let it join the process group."""
    os.environ.setdefault("DS_ACCELERATOR", worker.device.type)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would have to be compiled first
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def build(strategy: str, config: models.GPTConfig, batch_size: int, seed: int, worker: Worker) -> TorchRun | ZeroRun:
    """Return a new run: "DDP", "FSDP2", "FSDP2, kept", "FSDP2, bf16", "ZeRO-1" to "ZeRO-3", or "ZeRO-2, default"."""
    on_gpu = torch.cuda.memory_allocated(worker.device) if worker.device.type == "cuda" else 0
    run = (ZeroRun if strategy.startswith("ZeRO") else TorchRun)(strategy, config, batch_size, seed, worker)
    run.bytes_before = on_gpu  # what an earlier engine has not freed
    return run


def train(run: TorchRun | ZeroRun, num_steps: int, worker: Worker) -> dict:
    """Train on text for `num_steps` >= 4 steps, and return what was measured on this rank.

    The last two steps are not timed, because the tools slow them down: `measure.Traffic` watches one of them and
    `measure.PeakMemory` the other. In bytes: "state" after the backward pass, "peak", and "sent" in one step. Also
    "calls" by collective, "losses" over the global batch, and "tokens_per_second" of the fastest step over all ranks.
    """
    losses, seconds, seen = [], [], {}
    inputs, targets = datasets.text(run.config.context).train.tensors
    for step in range(num_steps):
        part = slice(step * run.batch_size + worker.rank, (step + 1) * run.batch_size, worker.world_size)
        traffic, memory = measure.Traffic(), measure.PeakMemory(worker.device)
        if step == num_steps - 1:
            memory.start(*run.kept())
        started = time.perf_counter()
        with traffic if step == num_steps - 2 else contextlib.nullcontext():
            logits = run.model(inputs[part].to(worker.device))
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets[part].to(worker.device).flatten())
            run.backward(loss)  # equal parts, so the mean over the ranks is the mean over the batch
            seen["state"] = measure.storage_bytes(run.kept())
            run.update()
        seconds.append(time.perf_counter() - started)
        losses.append(distributed.global_sum(loss).item() / worker.world_size)
        if step == num_steps - 2:
            seen |= {"calls": dict(traffic.calls), "sent": sum(traffic.sent.values())}
    rate = run.batch_size * run.config.context / min(seconds[1:-2])
    return {**seen, "losses": losses, "peak": memory.stop() - run.bytes_before, "tokens_per_second": rate}


def save(run: TorchRun | ZeroRun) -> dict:
    """Save the run three times. Return the bytes of all ranks' files ("saved") and the shortest time ("save_s").

    A library may use the first save to prepare later ones, and Python's garbage collector may interrupt one of them.
    """
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            run.save(folder)
            seconds.append(time.perf_counter() - started)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"save_s": min(seconds), "saved": sum(distributed.gather_objects(size))}


def float64_losses(script: str, num_ranks: int, batch_size: int, seed: int, folder: Path) -> list[float]:
    """Run four float64 steps of a training script on text, in Ray's local mode, and return their losses.

    num_ranks: with more than one, `torchrun` starts the script.
    folder: where the run writes. What an earlier run left there is deleted.
    """
    name = f"{Path(script).stem}-on-{num_ranks}"
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    options = f"--dataset text --max-steps 4 --batch-size {batch_size} --seed {seed} --run-name {name}".split()
    options += ["--num-workers", "0", "--no-use-gpu", "--precision", "fp64"]
    options += ["--storage-path", str(folder), "--metrics-out", str(folder / f"{name}.jsonl")]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), script, *options]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{name}.jsonl").read_text())["step_losses"]
