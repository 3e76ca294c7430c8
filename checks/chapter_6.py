"""The exercise checks of chapter 6: beyond data parallelism."""

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checks.machinery import Wrong, exercise, on_ranks
from shared import measure, models


def try_embedding(build: Callable, table: torch.Tensor, tokens: torch.Tensor, upstream: torch.Tensor) -> dict:
    """Report what a sliced embedding returns, its gradients, and what it sends forward and in all."""
    module = build(table.clone())
    with measure.Traffic() as traffic:
        found = module(tokens)
        forward = sum(traffic.sent.values())
        (found * upstream).sum().backward()
    return {
        "found": found.detach(),
        "parameters": [(value.detach(), value.grad) for value in module.parameters()],
        "forward": forward,
        "backward": sum(traffic.sent.values()) - forward,
    }


@exercise("6.1a", "each rank keeps its rows, and the embeddings and gradients are those of the whole table.")
def exercise_6_1a(answer: Callable) -> None:
    """A module SlicedEmbedding(weight), weight (vocabulary, width) -> forward(tokens) -> embeddings."""
    torch.manual_seed(7)
    for num_ranks, vocabulary in ((2, 8), (3, 10)):
        table = torch.randn(vocabulary, 4, dtype=torch.float64)
        tokens = torch.randint(vocabulary, (2, 12))
        tokens[0, :vocabulary] = torch.arange(vocabulary)  # each token, those at the borders of slices too
        upstream = torch.randn(2, 12, 4, dtype=torch.float64)
        whole = table.clone().requires_grad_()
        expected = F.embedding(tokens, whole)
        (expected * upstream).sum().backward()
        where = f"with {vocabulary} tokens on {num_ranks} ranks,"
        reports = on_ranks(try_embedding, num_ranks, answer, table, tokens, upstream)
        for rank, (report, rows) in enumerate(zip(reports, table.chunk(num_ranks), strict=True)):
            values = [value for value, _ in report["parameters"]]
            if [value.shape for value in values] != [rows.shape]:
                shapes = ", ".join(str(tuple(value.shape)) for value in values) or "no parameter"
                raise Wrong(f"{where} rank {rank} has {shapes}; its slice is one nn.Parameter {tuple(rows.shape)}")
            if report["found"].shape != expected.shape:
                raise Wrong(f"{where} rank {rank} returns the shape {tuple(report['found'].shape)}")
            wrong = (report["found"] - expected).abs().amax(dim=2) > 1e-9
            if wrong.any():
                token = int(tokens[wrong][0])
                owner = next(
                    number for number, part in enumerate(torch.arange(vocabulary).chunk(num_ranks)) if token in part
                )
                raise Wrong(
                    f"{where} rank {rank} returns a wrong embedding for token {token}, which rank {owner} has. "
                    "What does each rank contribute for a token that it does not have?"
                )
        for rank, report in enumerate(reports):
            (_, gradient), slice_ = report["parameters"][0], whole.grad.chunk(num_ranks)[rank]
            if gradient is None:
                raise Wrong(f"{where} rank {rank} has no gradient: how does it get through the all-reduce?")
            if torch.allclose(gradient, num_ranks * slice_, atol=1e-9):
                hint = "Every rank computes the same loss. Who adds up its gradients?"
                raise Wrong(f"{where} the gradient of rank {rank} is {num_ranks} times the right one. {hint}")
            if not torch.allclose(gradient, slice_, atol=1e-9):
                raise Wrong(f"{where} the gradient of rank {rank} is wrong. Which tokens does it have rows for?")
            embeddings = expected.nbytes * 2 * (num_ranks - 1) / num_ranks
            for name, limit in (("forward", embeddings), ("backward", 0)):
                if report[name] > limit + 1:
                    hint = f"expected at most {limit:.0f}: what has to be added up, and by whom?"
                    raise Wrong(f"{where} rank {rank} sends {report[name]:.0f} bytes {name}, {hint}")


@dataclass
class WithoutOne:
    """Calls `function`, but not in the call number `left_out`."""

    function: Callable[[torch.Tensor], torch.Tensor]
    left_out: int | None = None
    calls: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls - 1 == self.left_out else self.function(x)


@exercise("6.1b", "you find each missing sum, and blame nobody whose model is right.")
def exercise_6_1b(answer: tuple[Callable, Callable, Callable, Callable]) -> None:
    """A function find_missing_sum(results) -> what is missing; a function run(copy, add) -> results; copy; add."""
    find_missing_sum, run, copy, add = answer
    complete = run(copy, add)
    find_missing_sum(complete)  # a stub raises here
    num_blocks = len({name.split(".")[1] for name in complete[0][1] if name.startswith("blocks.")})
    draw = random.Random(repr(complete[0][0]))  # by the loss: with a different SEED, other sums are missing
    places = [2 * draw.randrange(num_blocks), 2 * draw.randrange(num_blocks) + 1, 2 * num_blocks - 1, 0]
    cases = {"none": (None, None), "forward": (None, draw.randrange(2 * num_blocks))}
    cases |= {f"backward, block {place // 2}, {('attention', 'mlp')[place % 2]}": (place, None) for place in places}
    for expected, (backward, forward) in draw.sample(list(cases.items()), len(cases)):
        results = run(WithoutOne(copy, backward), WithoutOne(add, forward))
        said = find_missing_sum(results)
        if said != expected:
            hints = {
                "none": "All losses and gradients are those of one process, except for rounding.",
                "forward": "What is wrong in this case alone, and right in all others?",
            }
            hint = hints.get(
                expected, "Which gradients are right? They are computed before the backward pass gets there."
            )
            raise Wrong(f"the answer was {expected!r}, and you say {said!r}. {hint}")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a module's parameters by name, each of them whole. Collective."""
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in module.named_parameters()
    }


def try_plan(module: torch.nn.Module, plan: Callable, x: torch.Tensor, upstream: torch.Tensor) -> dict:
    """Report this rank's tokens of the result, the gradients, and the collectives that a plan needs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = parallelize_module(module, mesh, plan())
    calls: list[str] = []
    mesh.get_group().register_pre_hook(1, lambda call: calls.append(call.name.name))
    own, own_upstream = (part.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone() for part in (x, upstream))
    own.requires_grad_()
    found = module(own)
    forward = len(calls)
    report = {"type": type(found).__name__, "found": local(found.detach())}
    if report["found"].shape == own_upstream.shape:
        (local(found) * own_upstream).sum().backward()
        report |= {"forward": calls[:forward], "backward": calls[forward:], "gradients": gathered(module)}
        report["gradients"]["x"] = own.grad
    return report


@exercise("6.2a", "the plan computes what one process computes, with two collectives forward and two backward.")
def exercise_6_2a(answer: tuple[Callable, type]) -> None:
    """A function plan() -> dict for parallelize_module, and the module that it is for."""
    plan, layer = answer
    if not isinstance(plan(), dict):
        raise Wrong("plan() returns no dict {name of a module: style}")
    torch.manual_seed(7)
    module = layer(8, 12).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x, upstream = torch.randn(2, 2, 6, 8, dtype=torch.float64).unbind()
    whole = x.clone().requires_grad_()
    expected = module(whole)
    (expected * upstream).sum().backward()
    gradients = gathered(module)
    module.zero_grad()
    reports = on_ranks(try_plan, 2, module, plan, x, upstream)
    for rank, report in enumerate(reports):
        tokens = expected.chunk(2, 1)[rank]
        if report["found"].shape != tokens.shape:
            raise Wrong(
                f"rank {rank} returns the shape {tuple(report['found'].shape)}; its tokens are {tuple(tokens.shape)}"
            )
        if report["type"] == "DTensor":
            raise Wrong("the result is a DTensor; an ordinary tensor with the rank's tokens was asked for")
        if not torch.allclose(report["found"], tokens, atol=1e-9):
            raise Wrong(f"rank {rank} returns wrong numbers for its tokens. Which rows and columns belong together?")
        if not torch.allclose(report["gradients"]["x"], whole.grad.chunk(2, 1)[rank], atol=1e-9):
            raise Wrong(f"the result is right, and the gradient of x on rank {rank} is wrong")
        for name, gradient in gradients.items():
            if not torch.allclose(report["gradients"][name], gradient, atol=1e-9):
                if "norm" in name:
                    hint = "It comes from this rank's tokens only. Which style tells the norm so?"
                else:
                    hint = "Is this layer cut at all? The plan must name every linear layer."
                raise Wrong(f"the results are right, and the gradient of {name} on rank {rank} is wrong. {hint}")
    forward, backward = reports[0]["forward"], reports[0]["backward"]
    if len(forward) + len(backward) > 4:
        counted = f"{len(forward)} collectives forward and {len(backward)} backward"
        hint = "Which tensor is gathered more than once, and which gradient is added up more than once?"
        if "ALLREDUCE" in backward:
            hint = (
                "The backward pass has all-reduces, but a rank needs only its tokens. Which styles say that x is cut?"
            )
        raise Wrong(f"all numbers are right, with {counted}. 4 in all are enough. {hint}")


def try_mlp(module: torch.nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> tuple:
    """Report the result of an MLP that is cut by columns, then rows, and its gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = parallelize_module(module, mesh, {"gate_up": ColwiseParallel(), "down": RowwiseParallel()})
    found = local(module(x))
    if found.shape == upstream.shape:
        (found * upstream).sum().backward()
        return found.detach(), gathered(module)
    return found.detach(), {}


@exercise("6.2b", "the repaired layer is right on 1, 2 and 3 ranks.")
def exercise_6_2b(answer: type) -> None:
    """A module RepairedMLP(dim, hidden) with gate_up and down: rows(weight) -> weight, forward(x)."""
    torch.manual_seed(7)
    dim, hidden = 4, 6
    old = torch.randn(2 * hidden, dim, dtype=torch.float64)
    x, upstream = torch.randn(2, 2, 3, dim, dtype=torch.float64).unbind()
    module = answer(dim, hidden).double()
    rows = answer.rows(old.clone())
    if not torch.is_tensor(rows) or rows.shape != old.shape:
        raise Wrong(
            f"rows(weight) returns {tuple(getattr(rows, 'shape', ()))}; the new weight is {tuple(old.shape)}, too"
        )
    order = [next((i for i, row in enumerate(old) if torch.equal(row, each)), None) for each in rows]
    if sorted(order, key=str) != sorted(range(2 * hidden), key=str):
        raise Wrong("rows(weight) must return each row of the old weight once, in some order")
    with torch.no_grad():
        module.gate_up.weight.copy_(rows)
    down = module.down.weight.detach()
    gate, up = old.clone().requires_grad_(), down.clone().requires_grad_()
    parts = (x @ gate.T).chunk(2, dim=-1)
    expected = (F.silu(parts[0]) * parts[1]) @ up.T
    (expected * upstream).sum().backward()
    for num_ranks in (1, 2, 3):
        where = "in one process" if num_ranks == 1 else f"on {num_ranks} ranks"
        reports = [(module(x).detach(), {})] if num_ranks == 1 else on_ranks(try_mlp, num_ranks, module, x, upstream)
        for rank, (found, gradients) in enumerate(reports):
            if found.shape != expected.shape:
                raise Wrong(f"{where}, rank {rank} returns the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
            if not torch.allclose(found, expected, atol=1e-9):
                hint = "Do rows() and forward() agree on the order?"
                if num_ranks > 1:
                    slices = [", ".join(f"{'gate' if i < hidden else 'up'} {i % hidden}" for i in part)
                        for part in torch.tensor(order).chunk(num_ranks)]  # fmt: skip
                    hint = f"It is right on fewer. The slice of rank 0 holds {slices[0]}."
                raise Wrong(f"{where}, the result of rank {rank} is wrong. {hint}")
            if gradients and not torch.allclose(gradients["gate_up.weight"], gate.grad[order], atol=1e-9):
                raise Wrong(f"{where}, the result is right, and the gradient of gate_up is wrong")


def gpt_on_mesh(sizes: dict[str, int], norms: bool = True) -> tuple:
    """Return a small GPT and its mesh: HSDP over `copies` and `shards` (or FSDP2 over `data`), and tensor parallelism.

    norms: whether the plan names the norms. Otherwise their gradients know only the dimensions of FSDP2.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = small_gpt()
    if "tensor" in sizes:
        between = Shard(1) if norms else Replicate()
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "blocks.*.qkv": ColwiseParallel(input_layouts=between),
            "blocks.*.out": RowwiseParallel(output_layouts=between),
            "blocks.*.up": ColwiseParallel(input_layouts=between),
            "blocks.*.down": RowwiseParallel(output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        if norms:
            plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
            plan |= {"blocks.*.norm*": SequenceParallel(), "norm": SequenceParallel()}
        parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    over = tuple(name for name in sizes if name != "tensor")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh[over])
    return model, mesh


def small_gpt() -> models.GPT:
    """Return a GPT for four ranks in float64."""
    model = models.GPT(models.GPTConfig(num_layers=1, num_heads=4, dim=16, context=8)).double()
    models.init_weights(model, 7)
    return model


def small_text(num_windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and the targets of that many windows. The windows are all different."""
    text = torch.randint(256, (num_windows, 9), generator=torch.Generator().manual_seed(7))
    return text[:, :-1], text[:, 1:]


def mean_loss(model: models.GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean of the loss over all tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


NORM_CASES = {
    "HSDP on 2 x 2": ({"copies": 2, "shards": 2}, True),
    "FSDP2 x tensor on 2 x 2": ({"data": 2, "tensor": 2}, True),
    "FSDP2 x tensor on 2 x 2 without norms in the plan": ({"data": 2, "tensor": 2}, False),
}


def try_norms(answer: Callable) -> dict:
    """Report what gradient_norm says of each case, the norm from gathered gradients, and the numbers that it sent."""
    found = {}
    for name, (sizes, norms) in NORM_CASES.items():
        model, mesh = gpt_on_mesh(sizes, norms)
        mean_loss(model, *small_text(4)).backward()
        squares = [parameter.grad.full_tensor().square().sum() for parameter in model.parameters()]
        largest = [0]
        groups = {id(group): group for group in (dist.group.WORLD, *map(mesh.get_group, mesh.mesh_dim_names))}
        for group in groups.values():
            group.register_pre_hook(
                1,
                lambda call, largest=largest: largest.append(max([0, *(each.numel() for each in call.input_tensors)])),
            )
        said = answer(model)
        for group in groups.values():
            group.unregister_pre_hook(1)
        found[name] = (float(said), sum(squares).sqrt().item(), max(largest))
    return found


@exercise("6.3a", "the norm is right on every rank, whatever the layouts of the gradients.")
def exercise_6_3a(answer: Callable) -> None:
    """A function gradient_norm(model) -> the norm of all gradients, on every rank."""
    reports = on_ranks(try_norms, 4, answer)
    for name in NORM_CASES:
        for rank, report in enumerate(reports):
            said, expected, largest = report[name]
            if abs(said - reports[0][name][0]) > 1e-9:
                raise Wrong(
                    f"{name}: rank 0 says {reports[0][name][0]:.6f}, and rank {rank} {said:.6f}. Who sums what?"
                )
            if said > expected + 1e-9:
                hint = "Which squares are in your sum more than once?"
                raise Wrong(f"{name}: you say {said:.6f}, more than the right {expected:.6f}. {hint}")
            if said < expected - 1e-9:
                hint = "Which squares are not in your sum, or are divided by too much?"
                raise Wrong(f"{name}: you say {said:.6f}, less than the right {expected:.6f}. {hint}")
            if largest > 64:
                raise Wrong(f"{name}: right, but rank {rank} sends {largest} numbers at once. Add up the squares first")


THREE_CASES = (((2, 2, 1), 3), ((1, 2, 2), 7), ((2, 1, 2), 5))  # (copies, shards, tensor), windows; one rank has none


def try_three(answer: Callable, shape: tuple[int, int, int], num_windows: int) -> dict:
    """Report loss, gathered gradients and the windows that the model was given."""
    model, mesh = gpt_on_mesh(dict(zip(("copies", "shards", "tensor"), shape, strict=True)))
    tokens, targets = small_text(num_windows)
    read = []
    model.register_forward_pre_hook(lambda module, inputs: read.extend(inputs[0].tolist()))
    loss = answer(model, mesh, tokens.clone(), targets.clone())
    if any(parameter.grad is None for parameter in model.parameters()):
        return {"loss": loss, "gradients": None}
    rows = tokens.tolist()
    return {
        "loss": float(loss),
        "gradients": gathered(model),
        "read": [rows.index(row) if row in rows else -1 for row in read],
    }


def try_shapes(answer: Callable) -> dict:
    """Report `try_three` for all cases."""
    return {case: try_three(answer, *case) for case in THREE_CASES}


@exercise("6.3b", "loss and gradients are those of one process, and each window is read by one tensor group.")
def exercise_6_3b(answer: Callable) -> None:
    """A function step_on_three(model, mesh, tokens, targets) -> the mean loss over the batch, on every rank."""
    reports = on_ranks(try_shapes, 4, answer)
    for shape, num_windows in reports[0]:
        where = f"copies {shape[0]}, shards {shape[1]}, tensor {shape[2]}, {num_windows} windows:"
        model = small_gpt()
        expected = mean_loss(model, *small_text(num_windows))
        expected.backward()
        for rank, report in enumerate(each[shape, num_windows] for each in reports):
            if report["gradients"] is None:
                raise Wrong(f"{where} rank {rank} has parameters without a gradient. Call backward() on every rank")
            if not abs(report["loss"] - expected.item()) <= 1e-9:  # it may be nan
                ratio = report["loss"] / expected.item()
                raise Wrong(
                    f"{where} rank {rank} returns the loss {report['loss']:.6f}, {ratio:.4f} times the right one. "
                    "Whose losses are in the sum, how often, and by what are they divided?"
                )
        groups = [each[shape, num_windows]["read"] for each in reports]
        by_group = [groups[start : start + shape[2]] for start in range(0, 4, shape[2])]
        if any(read != group[0] for group in by_group for read in group):
            raise Wrong(f"{where} the ranks of a tensor group read different windows: {groups}")
        counts = [sum(window in group[0] for group in by_group) for window in range(num_windows)]
        if any(count != 1 for count in counts):
            number = next(number for number, count in enumerate(counts) if count != 1)
            raise Wrong(
                f"{where} {counts[number]} tensor groups read window {number}. By rank, the windows read are {groups}"
            )
        for rank, report in enumerate(each[shape, num_windows] for each in reports):
            for name, parameter in model.named_parameters():
                found = report["gradients"][name]
                if not torch.allclose(found, parameter.grad, rtol=0, atol=1e-9):
                    ratio = (found.norm() / parameter.grad.norm()).item()
                    raise Wrong(
                        f"{where} the loss is right, and the gradient of {name} on rank {rank} is not: its norm is "
                        f"{ratio:.3f} times the right one. FSDP2 averages over which ranks?"
                    )
