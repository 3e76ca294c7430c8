"""The exercise checks of chapter 3: when the model no longer fits."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from shared import models
from shared.checks.machinery import Wrong, exercise, expect_close, refuse_stub, run_script

# --- Lesson 3.1: where memory goes -----------------------------------------------------------------------------------


@exercise("3.1a", "what is not trained costs its weights, and no more.")
def exercise_3_1a(fine_tuning_bytes: Callable[[int, int, str, int], float]) -> None:
    """fine_tuning_bytes(frozen, trainable, strategy, gpus) -> bytes of state a rank keeps, in mixed precision."""
    state = {"DDP": (16, 0), "ZeRO-1": (4, 12), "ZeRO-2": (2, 14), "FSDP": (0, 16)}
    for frozen, trainable in ((0, 1_024_000), (6_400_000, 0), (6_400_000, 1_024_000)):
        for gpus in (1, 8, 1024):
            for strategy, (whole, shared_out) in state.items():
                call = f"fine_tuning_bytes({frozen}, {trainable}, {strategy!r}, {gpus})"
                of_frozen = 2 * frozen / (gpus if strategy == "FSDP" else 1)
                expected = of_frozen + trainable * (whole + shared_out / gpus)
                seen = fine_tuning_bytes(frozen, trainable, strategy, gpus)
                parts = [f"{whole} bytes that every rank keeps"] if whole else []
                parts += [f"{shared_out}/{gpus}, this rank's share"] if shared_out else []
                hint = f"A trainable parameter: {' and '.join(parts)}."
                if seen == of_frozen + trainable * (whole + shared_out // gpus):
                    hint += f" `//` cuts {shared_out}/{gpus} down to {shared_out // gpus}: use `/`."
                if frozen:
                    hint = "A frozen parameter has a weight of 2 bytes: no gradient, no master copy, no moments."
                    if strategy == "FSDP" and gpus > 1:
                        hint = "FSDP shards every weight, a frozen one too."
                    elif gpus > 1:
                        hint = f"{strategy} shards no weights, so every rank keeps the frozen ones whole."
                expect_close(seen, expected, call, hint=hint)


@exercise("3.1b", "two measurements, and no run that dies in the night.")
def exercise_3_1b(largest_batch: Callable[[Callable[[int], int], int], int]) -> None:
    """largest_batch(needed, limit) -> the largest batch with needed(batch) <= limit, in three calls of needed."""
    for fixed, sequence, limit in (
        (16_000, 2_000, 60_000),
        (16_000, 2_000, 61_999),
        (1_000, 7_000, 50_000),
        (0, 3_000, 10_000),
        (16_000, 2_000, 18_000),
        (16_000, 2_000, 17_999),
        (90_000, 5_000, 40_000),
    ):
        calls = []

        def needed(batch: int, fixed: int = fixed, sequence: int = sequence, calls: list = calls) -> int:
            if batch < 1 or batch != int(batch):
                raise Wrong(f"you measure a batch of {batch}: a step needs at least one sequence, and whole ones")
            calls.append(batch)
            if len(calls) > 3:
                raise Wrong(f"you measure the batches {calls}: each is a run, and three are the most. It is a line")
            return fixed + sequence * int(batch)

        what = f"with {fixed:,} bytes of state and {sequence:,} a sequence, in {limit:,} bytes,"
        expected = max(0, (limit - fixed) // sequence)
        seen = largest_batch(needed, limit)
        if isinstance(seen, bool) or not isinstance(seen, int | float) or seen != int(seen):
            raise Wrong(f"{what} you say {seen!r}: return a whole number of sequences")
        if seen != expected:
            hint = "Where not even one sequence fits, it is 0."
            if expected and seen * sequence + fixed > limit:
                hint = f"That needs {seen * sequence + fixed:,.0f}. "
                hint += "Round down." if seen == expected + 1 else "Something is there before the first sequence."
            elif seen == expected - 1:
                hint = "One more fits: needed(1) has the first sequence in it already."
            elif expected:
                hint = "More would fit. needed(1) holds the state too, which a second sequence does not need again."
            raise Wrong(f"{what} {expected} fit; you say {seen}. {hint}")


def exercise_3_1c(
    saved_by_stage: Callable[[torch.nn.Module, torch.Tensor], dict[str, float]], *, strict: bool = False
) -> bool:
    """saved_by_stage(model, images) -> {child: bytes an image that autograd saves in it}; a right answer is shown."""
    right = children_save(saved_by_stage, strict=strict)
    if right:
        saved = bytes_saved_by_child(models.resnet18(), torch.randn(2, 1, 32, 32))
        shares = (f"{name} {size / sum(saved.values()):.0%}" for name, size in saved.items())
        print("[OK] Exercise 3.1c: of an image of 32x32:", ", ".join(shares))
    return right


@exercise("3.1c", "each storage once, where it is first saved.")
def children_save(saved_by_stage: Callable[[torch.nn.Module, torch.Tensor], dict[str, float]]) -> None:
    """saved_by_stage(model, images) -> {child: bytes an image that autograd saves in it, parameters apart}."""
    for size, pixels in ((2, 8), (3, 16)):
        model = models.resnet18()
        children = [name for name, _ in model.named_children()]
        images = torch.randn(size, 1, pixels, pixels)
        seen = saved_by_stage(model, images)
        if not isinstance(seen, dict) or set(children) != set(seen):
            keys = list(seen) if isinstance(seen, dict) else type(seen).__name__
            raise Wrong(f"return a dict with all the children's names, {', '.join(children)}; yours is {keys}")
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            raise Wrong("there are hooks left on the model: call remove() on every handle")
        expected = bytes_saved_by_child(model, images)
        if not any(seen.values()):
            raise Wrong("nothing was saved at all: run the model with gradients enabled, inside the `with` block")
        for name in children:
            hint = "Is each storage counted once, for the child that saves it first?"
            total, right = sum(seen.values()), sum(expected.values())
            if math.isclose(total, size * right, rel_tol=0.01):
                hint = f"Divide by the {size} images."
            elif math.isclose(seen["fc"], right, rel_tol=0.01):
                hint = "Take what a child adds, not all that there is by then."
            elif total > right + 1e6:
                hint = "Parameters, 45 MB of them, are not activations: leave their storages out."
            what = f"{name} on images of {pixels}x{pixels}, in bytes an image,"
            expect_close(seen[name], expected[name], what, 0.01, hint)


def bytes_saved_by_child(model: torch.nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Bytes an image of the storages that autograd saves, by the child of `model` that saves them first."""
    apart = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    current, owners, sizes = [""], {}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        owners.setdefault(storage._cdata, current[0])
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    def enter(name: str) -> Callable:
        return lambda *_: current.__setitem__(0, name)

    handles = [child.register_forward_pre_hook(enter(name)) for name, child in model.named_children()]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(images)  # kept: what it holds is not freed, so no storage takes another's place
    for handle in handles:
        handle.remove()
    del output
    saved = dict.fromkeys((name for name, _ in model.named_children()), 0.0)
    for storage in set(owners) - apart:
        saved[owners[storage]] += sizes[storage] / len(images)
    return saved


# --- Lesson 3.2: FSDP2 -----------------------------------------------------------------------------------------------


@exercise("3.2a", "whole rows, as many as rank 0 has until none are left.")
def exercise_3_2a(slice_bytes: Callable[[tuple[int, ...], torch.dtype, int, int], int]) -> None:
    """slice_bytes(shape, dtype, world_size, rank) -> bytes of this rank's slice of a parameter of that shape."""
    for shape, dtype, world_size in (
        ((384, 128), torch.float32, 2), ((5, 8), torch.float32, 4), ((10,), torch.float64, 4),
        ((50257, 768), torch.bfloat16, 8),
    ):  # fmt: skip
        row = math.prod(shape[1:]) * dtype.itemsize
        expected = [row * len(rows) for rows in torch.empty(shape[0]).chunk(world_size)]
        expected += [0] * (world_size - len(expected))
        try:
            seen = [slice_bytes(shape, dtype, world_size, rank) for rank in range(world_size)]
        except IndexError:
            raise Wrong(
                f"{shape} has {len(shape)} dimension(s): a bias or a norm has one, and rows of 1 number"
            ) from None
        if not all(isinstance(each, int | float) for each in seen):
            raise Wrong(f"return a number of bytes, not {seen[0]!r}")
        if seen == expected:
            continue
        hint, size = "", sum(expected)
        if min(seen) < 0:
            hint = "A rank past the last row has 0 rows, not fewer."
        elif all(math.isclose(each, size / world_size) for each in seen):
            hint = "A row is never cut in two."
        elif seen == [expected[0]] * world_size:
            hint = "That is the padded storage: the last ranks have fewer rows, or none."
        elif sum(seen) == size:
            hint = "Rows are not evened out: each rank takes as many as rank 0, until none are left."
        elif sum(seen) * dtype.itemsize == size or sum(seen) * dtype.itemsize == 4 * size:
            hint = f"A number of {dtype} takes {dtype.itemsize} bytes."
        where = f"{shape} of {dtype} on {world_size} ranks"
        raise Wrong(f"{where}: the slices have {expected} bytes, you say {seen}. {hint}")


SHARD_RESNET = """
import importlib.util, json, sys
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from shared import datasets, distributed, measure, models

class Gathers(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += "allgather" in str(function)
        return function(*args, **(kwargs or {}))

script, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("exercise", script)
exercise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exercise)
worker = distributed.join()
images, labels = datasets.digits().train[:8]
mine = slice(worker.rank, None, worker.world_size)
torch.manual_seed(0)
plain, model = models.resnet18().double(), models.resnet18().double()
model.load_state_dict(plain.state_dict())
exercise.shard(model)
sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
report = {"unsharded": [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]}
if not report["unsharded"]:
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    pieces = dict.fromkeys(units, 0)
    for name, size in sizes.items():  # a parameter belongs to the innermost module that was sharded
        pieces[max((unit for unit in units if not unit or name.startswith(unit + ".")), key=len)] += size
    report["largest"] = max(pieces.values()) / sum(sizes.values())
    optimizer = torch.optim.AdamW(model.parameters())
    with Gathers() as gathers:
        F.cross_entropy(model(images[mine].double()), labels[mine]).backward()
    report["gathers"] = gathers.number
    F.cross_entropy(plain(images.double()), labels).backward()
    pairs = zip(model.parameters(), plain.parameters())
    report["apart"] = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    optimizer.step()  # from here on there are moments
    report["state"] = measure.state_bytes(model, optimizer) / sum(sizes.values())
with open(f"{folder}/{worker.rank}.json", "w") as file:
    json.dump(report, file)
distributed.leave()
"""


@exercise("3.2b", "half of the state on each rank, and never more than one block gathered.")
def exercise_3_2b(script: str | Path) -> None:
    """A file with shard(model), which shards a ResNet-18 in place, block by block."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        caller = Path(folder) / "call.py"
        caller.write_text(SHARD_RESNET)
        try:
            run_script(caller, 2, str(script), folder)
        except Wrong as error:
            hint = " Did you shard the model before its blocks?" if "Invariant" in str(error) else ""
            raise Wrong(f"{error}.{hint}") from None
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        unsharded = report["unsharded"]
        if unsharded:
            names = ", ".join([*unsharded[:3], "..."] if len(unsharded) > 3 else unsharded)
            raise Wrong(
                f"{len(unsharded)} parameters are not sharded ({names}): their gradients are not averaged over the "
                "ranks either. Call fully_shard on the whole model last"
            )
        if report["largest"] > 0.43:
            raise Wrong(
                f"{report['largest']:.0%} of the weights are gathered at once; with each of the eight blocks for "
                "itself it is 42%, the largest block. Shard the blocks first, then the model"
            )
        if report["gathers"] < 17:
            raise Wrong(
                f"{report['gathers']} all-gathers in a step; block by block there are 17: the eight blocks and the "
                "rest for the forward pass, and the blocks once more for the backward pass. A call for each block, "
                "which is to reshard"
            )
        if report["apart"] > 1e-9:
            raise Wrong(f"the gradients are off by {report['apart']:.1e} from those of one process")
        expect_close(report["state"], 32 / 2, f"rank {rank} keeps, in bytes a parameter in float64,", tolerance=0.02)


@exercise("3.2c", "every micro-batch gathers, and only the last one reduces.")
def exercise_3_2c(collectives: Callable[[int, int, bool, bool], tuple[int, int]]) -> None:
    """collectives(num_blocks, micro_batches, reshard_blocks, reshard_root) -> (all_gathers, reduce_scatters)."""
    for num_blocks, micro_batches, blocks, root in (
        (5, 1, True, False), (5, 1, False, False), (5, 1, True, True), (32, 4, True, False), (2, 3, False, True),
    ):  # fmt: skip
        once = num_blocks + 1 + num_blocks * blocks + root
        expected = (micro_batches * once, num_blocks + 1)
        call = f"collectives({num_blocks}, {micro_batches}, reshard_blocks={blocks}, reshard_root={root})"
        seen = collectives(num_blocks, micro_batches, blocks, root)
        if not isinstance(seen, tuple | list) or len(seen) != 2:
            raise Wrong(f"{call} should return two numbers, (all_gathers, reduce_scatters); yours is {seen!r}")
        if tuple(seen) == expected:
            continue
        hint = "Forward gathers every group; backward gathers again what was freed, blocks or root."
        if seen[0] == expected[0]:
            hint = "Each group's gradients are reduced once a step, with the last micro-batch."
        elif micro_batches > 1 and seen[0] == once:
            hint = "After a backward pass everything is freed: the next micro-batch gathers anew."
        raise Wrong(f"{call} is {expected}, you say {tuple(seen)}. {hint}")


# --- Lesson 3.4: DeepSpeed ZeRO --------------------------------------------------------------------------------------


@exercise("3.4a", "an update count, a gradient norm and a first loss told these runs apart.")
def exercise_3_4a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each run A to E of five_engines.txt its mistake."""
    expected = {"A": "step once", "B": "divided twice", "C": "none", "D": "not gathered", "E": "clipped by hand"}
    signs = {
        "none": "Then nothing in its logs would be wrong. Average the two ranks' losses, and compare each step with "
        "the first line",
        "step once": "Then the engine would have made fewer updates than there are steps. Has it?",
        "divided twice": "Then its gradients would be half as long in every step. Are they?",
        "not gathered": "Then it would start from different weights, and its first loss would be wrong already. Is it?",
        "clipped by hand": "Clipping by hand has no effect on gradients that the engine has taken away. Whose losses "
        "would the run then have: those of the first line?",
        "not split": "Then both ranks would train on the same windows, with the same losses. Do they?",
    }
    seen = diagnose()
    if not isinstance(seen, dict) or set(seen) != set(expected):
        raise Wrong(f"return a dict with the keys A, B, C, D and E; yours is {seen!r}")
    for run, mistake in seen.items():
        if mistake not in signs:
            raise Wrong(f"for run {run} you say {mistake!r}, which is not one of {', '.join(signs)}")
        if mistake != expected[run]:
            raise Wrong(f"for run {run} you say {mistake!r}. {signs[mistake]}")


# Every rank trains four steps with each port under stage 3, and writes what it saw to FOLDER/rank-R.json.
WATCH_PORT = """
import importlib.util, json, logging, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
import torch.nn.functional as F
from shared import datasets, distributed, models

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
worker = distributed.join(timeout_s=60)
deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed(dist_init_required=False)
config = models.GPTConfig(num_layers=2, num_heads=2, dim=32, context=16)
windows = datasets.text(config.context).train

def settings():
    return {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100000},
    }

def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def train_plainly(max_norm):
    model = models.GPT(config)
    models.init_weights(model, seed=7)
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(4):
        tokens, targets = windows[8 * step : 8 * step + 8]
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": norm.item()})
    return steps

def watch(path):
    spec = importlib.util.spec_from_file_location("port", path)
    port = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(port)
    engine = port.build_engine(config, settings())
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        wrong = [
            name for name, value in named.items() if not torch.equal(value, models.initial_value(name, value.shape, 7))
        ]
    steps = []
    for step in range(4):
        batch = windows[8 * step + worker.rank : 8 * step + 8 : 2]
        parts = list(zip(*(half.tensor_split(2) for half in batch)))
        with torch.no_grad():
            own = sum(loss_of(engine(tokens), targets).item() for tokens, targets in parts) / 2
        loss = port.train_step(engine, parts, loss_of)
        norm = float(engine.get_global_grad_norm() or 0)
        steps.append({"loss": loss if loss is None else float(loss), "own": own, "norm": norm,
                      "updates": engine.global_steps})
    engine.destroy()
    return {"wrong": wrong, "parameters": len(named), "steps": steps}

folder, *paths = sys.argv[1:]
report = {"clipped": train_plainly(0.5), "unclipped": train_plainly(float("inf"))}
with open(f"{folder}/rank-{worker.rank}.json", "w") as file:
    json.dump([{**report, **watch(path)} for path in paths], file)
distributed.leave()
"""


def watch_ports(*scripts: str | Path) -> list[list[dict]]:
    """Let two ranks train with each port. Return for each port what each rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        watcher = Path(folder) / "watch.py"
        watcher.write_text(WATCH_PORT)
        run_script(watcher, 2, folder, *map(str, scripts))
        by_rank = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return [list(seen) for seen in zip(*by_rank, strict=True)]


def judge_port(seen: list[dict]) -> None:
    """Raise Wrong unless the port's weights, updates, gradient norms and losses are those of one process."""
    report = seen[0]
    if report["wrong"]:
        raise Wrong(
            f"{len(report['wrong'])} of {report['parameters']} parameters do not have their start values, among them "
            f"{report['wrong'][0]}. In stage 3 a parameter outside GatheredParameters is an empty tensor. Gather it to "
            "fill it, and say which rank's changes count (section 2)"
        )
    for number, (step, right) in enumerate(zip(report["steps"], report["clipped"], strict=True), start=1):
        if step["updates"] != number:
            raise Wrong(
                f"after step {number} the engine has made {step['updates']} updates. It counts the parts of a step by "
                "the calls of engine.step()"
            )
        if math.isclose(step["norm"], right["norm"] / 2, rel_tol=1e-3):
            raise Wrong(
                f"in step {number} the gradients' norm is {step['norm']:.3f}, half of the {right['norm']:.3f} of one "
                "process. Who divides by the number of parts?"
            )
        unclipped = report["unclipped"][number - 1]
        if math.isclose(step["norm"], right["norm"], rel_tol=1e-4):
            continue
        if math.isclose(step["norm"], unclipped["norm"], rel_tol=1e-4):
            raise Wrong(
                f"in step {number} the run is where one process is that never clips. After engine.backward(), what is "
                "in the parameters' .grad? Let the engine clip: it has a setting for it (section 6)"
            )
        raise Wrong(
            f"in step {number} the gradients' norm is {step['norm']:.3f}, and {right['norm']:.3f} on one process. Does "
            "each part's forward pass go through the engine?"
        )
    for rank, own in enumerate(seen):
        for number, (step, right) in enumerate(zip(own["steps"], report["clipped"], strict=True), start=1):
            hint = "It is the mean over all windows of the step, on all ranks."
            if step["loss"] is not None and math.isclose(step["loss"], step["own"], rel_tol=1e-5):
                hint = "That is the mean over this rank's own windows. " + hint
            expect_close(step["loss"], right["loss"], f"step {number}'s loss on rank {rank}", 1e-4, hint)


@exercise("3.4b", "on two ranks in stage 3 the port computes what one process in plain PyTorch does.")
def exercise_3_4b(script: str | Path) -> None:
    """A file with build_engine(config, settings) and train_step(engine, parts, loss_of)."""
    refuse_stub(script)
    (seen,) = watch_ports(script)
    judge_port(seen)


# --- Lesson 3.5: choosing --------------------------------------------------------------------------------------------


@exercise("3.5a", "the least that fits.")
def exercise_3_5a(choose: Callable[[float, int, float, float], str | None]) -> None:
    """choose(num_parameters, num_gpus, gpu_bytes, activation_bytes) -> the first of ddp, zero-2, fsdp2 that fits."""
    for parameters, gpus, memory, activations, expected in (
        (1e9, 8, 80e9, 20e9, "ddp"), (5e9, 8, 80e9, 20e9, "zero-2"), (13e9, 8, 80e9, 20e9, "fsdp2"),
        (13e9, 1, 80e9, 20e9, None), (13e9, 64, 80e9, 20e9, "zero-2"), (1e9, 8, 32e9, 17e9, "zero-2"),
        (1e9, 8, 32e9, 16e9, "ddp"),
    ):  # fmt: skip
        call = f"choose({parameters:.0e}, {gpus}, {memory:.0e}, {activations:.0e})"
        seen = choose(parameters, gpus, memory, activations)
        if seen == expected:
            continue
        order = ("ddp", "zero-2", "fsdp2", None)
        if seen not in order:
            raise Wrong(f'{call} is {seen!r}; it should be "ddp", "zero-2", "fsdp2" or None')
        hint = "State and activations together must fit."
        if order.index(seen) > order.index(expected):
            hint = "Take the first that fits, in the order ddp, zero-2, fsdp2; just fitting is enough."
        raise Wrong(f"{call} is {expected!r}, you say {seen!r}. {hint}")


@exercise("3.5b", "accumulation is free of traffic for DDP, and not for FSDP2.")
def exercise_3_5b(bytes_sent: Callable[[str, int, int, int], float]) -> None:
    """bytes_sent(strategy, num_parameters, num_gpus, accumulation) -> bytes that a rank sends for an optimizer step."""
    for strategy, parameters, gpus, accumulation in (
        ("ddp", 1_000_000, 2, 1), ("ddp", 1_000_000, 8, 4), ("fsdp2", 1_000_000, 2, 1), ("fsdp2", 1_000_000, 8, 4),
        ("ddp", 1_000_000, 1, 1),
    ):  # fmt: skip
        ring = 4 * parameters * (gpus - 1) / gpus
        expected = 2 * ring if strategy == "ddp" else 3 * ring * accumulation
        seen = bytes_sent(strategy, parameters, gpus, accumulation)
        hint = (
            "An all-reduce is two rounds" if strategy == "ddp" else "Two gathers and a reduce-scatter are three rounds"
        )
        hint += ", each of (N-1)/N of all gradients or weights, 4 bytes each."
        if accumulation > 1:
            hint = "no_sync: one all-reduce a step." if strategy == "ddp" else "It gathers and reduces each time."
        elif gpus == 1:
            hint = "One GPU has nobody to send to."
        elif seen == expected * gpus / (gpus - 1):
            hint = "A rank does not send its own part: (N-1)/N."
        call = f'bytes_sent("{strategy}", {parameters}, {gpus}, {accumulation})'
        expect_close(seen, expected, call, hint=hint)
