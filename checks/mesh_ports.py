"""Ports of a small GPT to a mesh of four ranks, right ones and faulty ones, for exercise 6.4a and its lesson.

A port is what somebody made of a model that trains in one process: a mesh, and three functions. `run` opens ports on
four ranks and calls a function with each of them.
"""

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shared import ranks

NUM_RANKS = 4
LAYERS, HEADS, DIM, CONTEXT, VOCABULARY = 2, 4, 32, 8, 64
SHAPES = ((2, 2), (1, 4), (4, 1))  # data x tensor
FAULTS = ("samples", "weights", "heads", "scale", "sum")
NAMES = (  # as in our GPT, in GPT-2 and in Llama
    ("tokens", "positions", "blocks", "norm", "head", "norm1", "qkv", "out", "norm2", "up", "down"),
    ("wte", "wpe", "h", "ln_f", "lm_head", "ln_1", "c_attn", "c_proj", "ln_2", "c_fc", "c_proj2"),
    ("embed", "places", "layers", "last", "output", "before1", "wqkv", "wo", "before2", "w1", "w2"),
)


@dataclass(frozen=True)
class Case:
    """Which port to make: its fault, its mesh of `data` x `tensor` ranks, and whether it has sequence parallelism.

    fault: "none", one of FAULTS, or "float32": the gradients are averaged over `data` in float32.
    seed: draws all the rest: weights, samples, names, and the place of each rank in the mesh.

    Raises ValueError for a fault that such a mesh cannot have.
    """

    fault: str = "none"
    data: int = 2
    tensor: int = 2
    sequence: bool = True
    seed: int = 7

    def __post_init__(self) -> None:
        if (self.data, self.tensor) not in SHAPES:
            raise ValueError(f"data={self.data}, tensor={self.tensor}: possible are 2 and 2, 1 and 4, 4 and 1")
        if self.fault not in ("none", "float32", *FAULTS):
            raise ValueError(f"unknown fault {self.fault!r}; possible are none, float32, {', '.join(FAULTS)}")
        if self.tensor == 1 and self.fault in ("heads", "sum"):
            raise ValueError(f"a port with tensor=1 can't have the fault {self.fault!r}")
        if self.fault == "sum" and not self.sequence:
            raise ValueError("a port without sequence parallelism can't have the fault 'sum'")

    def __str__(self) -> str:
        mesh = f"data={self.data}, tensor={self.tensor}, sequence={self.sequence}"
        return f"Case({self.fault!r}, {mesh}, seed={self.seed})"


@dataclass(frozen=True)
class Reference:
    """What one process computes for the whole batch: the mean loss, and weights and gradients by name."""

    loss: float
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Port:
    """A model on a mesh, on this rank.

    mesh: a DeviceMesh with the dimensions `data` and `tensor`.

    build(): returns a new model. Its parameters are DTensors.

    sample_ids(): returns the numbers of the samples that this rank reads, in this order.

    backward(model): computes the gradients from these samples. Returns this rank's share of the mean loss: the sum of
    its samples' losses, divided by the number of samples in the whole batch. Call it once for each model.
    """

    mesh: DeviceMesh
    build: Callable[[], nn.Module]
    sample_ids: Callable[[], list[int]]
    backward: Callable[[nn.Module], float]


@dataclass(frozen=True)
class Recipe:
    """How a port is made; see `draw`."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    num_samples: int
    strided: bool
    norms: str
    by_kind: bool
    reduce_dtype: torch.dtype | None
    deal_over: str
    scale_over: str
    copied_over: str
    copied_from: int
    left_out: tuple[int, ...]


def draw(case: Case) -> Recipe:
    """Draw what the case leaves open.

    names: of the model's parts. places: the ranks in the order of the mesh. strided: whether a reader takes every n-th
    sample, or neighbors. norms: "plan" if the plan names them, "hand" if their gradients are summed in `backward`, ""
    if that is not needed. by_kind: whether the rows of qkv are all queries, then keys, then values, in one process too.
    deal_over, scale_over: the dimension of the mesh (or the world) for samples and loss. copied_over: "", or the
    dimension (or the world) along which all ranks have the slices of one, `copied_from`. left_out: norms whose
    gradients are not summed.
    """
    fault = "none" if case.fault == "float32" else case.fault  # of one seed, the same port in float32 and without
    dice = random.Random(repr(replace(case, fault=fault)))
    size_of = {"data": case.data, "tensor": case.tensor, "world": NUM_RANKS}
    sum_needed = case.sequence and case.tensor > 1
    right = Recipe(
        names=dice.choice(NAMES),
        # In each group the ranks must ascend: a group sorts them, and the mesh then computes something else, silently.
        places=dice.choice(((0, 1, 2, 3), (0, 2, 1, 3))) if case.data == case.tensor else (0, 1, 2, 3),
        num_samples=dice.choice((4, 6, 8)),
        strided=dice.random() < 0.5,
        norms=dice.choice(("plan", "hand")) if sum_needed else "",
        by_kind=case.tensor == 1 and dice.random() < 0.5,  # one rank has all rows, so any order is right
        reduce_dtype=torch.float32 if case.fault == "float32" else None,
        deal_over="data",
        scale_over="data",
        copied_over="",
        copied_from=0,
        left_out=(),
    )
    if fault == "samples":
        # Ranks of a tensor group that read different numbers of samples would abort. If each group is a single rank,
        # dealing over the world is right.
        dims = ("tensor", "world") if case.tensor > 1 else ("tensor",)
        return replace(right, num_samples=dice.choice((4, 8)), deal_over=dice.choice(dims))
    if fault == "weights":
        dims = [name for name, size in size_of.items() if size > 1]
        return replace(right, copied_over=dice.choice(dims), copied_from=dice.randrange(NUM_RANKS))
    if fault == "heads":
        return replace(right, by_kind=True)
    if fault == "scale":
        return replace(right, scale_over=dice.choice([name for name, size in size_of.items() if size != case.data]))
    if fault == "sum":
        last = 2 * LAYERS
        return replace(right, norms="hand", left_out=dice.choice((tuple(range(last + 1)), (last,), (0, 1))))
    return right


class Block(nn.Module):
    """One layer of the GPT in shared/models.py, with the names and the order of qkv's rows that a recipe says."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, sizes = recipe, {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM), "up": (DIM, 4 * DIM)}
        for part, name in zip(("norm1", "qkv", "out", "norm2", "up", "down"), recipe.names[5:], strict=True):
            is_norm, size = part.startswith("norm"), sizes.get(part, (4 * DIM, DIM))
            self.add_module(name, nn.LayerNorm(DIM) if is_norm else nn.Linear(*size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm1, qkv, out, norm2, up, down = (getattr(self, name) for name in self.recipe.names[5:])
        rows, head_dim = qkv(norm1(x)), DIM // HEADS
        if self.recipe.by_kind:
            q, k, v = rows.unflatten(2, (3, -1, head_dim)).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = rows.unflatten(2, (-1, 3, head_dim)).permute(3, 0, 2, 1, 4)
        x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + down(F.gelu(up(norm2(x))))


class Decoder(nn.Module):
    """The GPT of shared/models.py, with the names that a recipe says: tokens (batch, T) -> logits (batch, T, V)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        tokens, positions, blocks, norm, head = recipe.names[:5]
        self.add_module(tokens, nn.Embedding(VOCABULARY, DIM))
        self.add_module(positions, nn.Embedding(CONTEXT, DIM))
        self.add_module(blocks, nn.ModuleList(Block(recipe) for _ in range(LAYERS)))
        self.add_module(norm, nn.LayerNorm(DIM))
        self.add_module(head, nn.Linear(DIM, VOCABULARY, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed, place, blocks, norm, head = (getattr(self, name) for name in self.recipe.names[:5])
        x = embed(tokens) + place(torch.arange(tokens.shape[1]))
        for block in blocks:
            x = block(x)
        return head(norm(x))

    def norms(self) -> list[nn.LayerNorm]:
        """Return all norms, from the input to the output."""
        return [module for module in self.modules() if isinstance(module, nn.LayerNorm)]


def model_and_batch(case: Case, recipe: Recipe) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Return the model of one process, and the tokens and targets of the whole batch, (samples, CONTEXT) each."""
    generator = torch.Generator().manual_seed(case.seed)
    model = Decoder(recipe).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
        for norm in model.norms():
            norm.weight += 1
    # As in a text of plain English, the upper half of the vocabulary does not occur.
    text = torch.randint(VOCABULARY // 2, (recipe.num_samples, CONTEXT + 1), generator=generator)
    return model, text[:, :-1], text[:, 1:]


def summed_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the samples' losses. A sample's loss is the mean over its tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / CONTEXT


def reference_of(case: Case) -> Reference:
    """Compute the reference of a port in this process, without `torch.distributed`."""
    model, tokens, targets = model_and_batch(case, draw(case))
    loss = summed_loss(model, tokens, targets) / len(tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    return Reference(loss.item(), {name: each.detach() for name, each in model.named_parameters()}, gradients)


def new_mesh(case: Case, recipe: Recipe) -> DeviceMesh:
    """Make the mesh of a port. Collective over the world."""
    places = torch.tensor(recipe.places).view(case.data, case.tensor)
    return DeviceMesh("cpu", places, mesh_dim_names=("data", "tensor"))


def plan_of(case: Case, recipe: Recipe) -> dict:
    """Return the plan of lesson 6.2 for a model with these names."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    tokens, positions, blocks, norm, head, norm1, qkv, out, norm2, up, down = recipe.names
    between = Shard(1) if case.sequence else Replicate()
    plan = {
        tokens: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        f"{blocks}.*.{qkv}": ColwiseParallel(input_layouts=between),
        f"{blocks}.*.{out}": RowwiseParallel(output_layouts=between),
        f"{blocks}.*.{up}": ColwiseParallel(input_layouts=between),
        f"{blocks}.*.{down}": RowwiseParallel(output_layouts=between),
        head: ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if case.sequence:
        plan[positions] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if recipe.norms == "plan":
        plan |= {name: SequenceParallel() for name in (norm, f"{blocks}.*.{norm1}", f"{blocks}.*.{norm2}")}
    return plan


def along(mesh: DeviceMesh, name: str) -> tuple[int, int, dist.ProcessGroup]:
    """Return this rank's position along a dimension of the mesh or in the world, the size, and the group."""
    if name == "world":
        return dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    return mesh.get_local_rank(name), mesh[name].size(), mesh.get_group(name)


def open_port(case: Case, mesh: DeviceMesh) -> Port:
    """Open a port on this rank. Every rank of the mesh must do so."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    recipe = draw(case)

    def build() -> nn.Module:
        model = model_and_batch(case, recipe)[0]
        parallelize_module(model, mesh["tensor"], plan_of(case, recipe), src_data_rank=None)
        precision = MixedPrecisionPolicy(reduce_dtype=recipe.reduce_dtype)
        for module in (*getattr(model, recipe.names[2]), model):
            fully_shard(module, mesh=mesh["data"], mp_policy=precision)
        if recipe.copied_over:
            _, size, group = along(mesh, recipe.copied_over)
            for parameter in model.parameters():
                dist.broadcast(parameter.to_local().detach(), group=group, group_src=recipe.copied_from % size)
        return model

    def sample_ids() -> list[int]:
        position, size, _ = along(mesh, recipe.deal_over)
        order = random.Random(case.seed).sample(range(recipe.num_samples), recipe.num_samples)
        if recipe.strided:
            return order[position::size]
        return order[position * recipe.num_samples // size : (position + 1) * recipe.num_samples // size]

    def backward(model: nn.Module) -> float:
        _, tokens, targets = model_and_batch(case, recipe)
        own = sample_ids()
        loss = summed_loss(model, tokens[own], targets[own]) / recipe.num_samples
        (loss * along(mesh, recipe.scale_over)[1]).backward()
        if recipe.norms == "hand":
            for number, norm in enumerate(model.norms()):
                if number not in recipe.left_out:
                    for parameter in norm.parameters():
                        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("tensor"))
        return loss.item()

    return Port(mesh, build, sample_ids, backward)


def open_all(function: Callable, cases: list[Case], references: list[Reference]) -> list:
    """Call `function(port, reference)` for each case, on this rank."""
    return [function(open_port(case, new_mesh(case, draw(case))), reference)
        for case, reference in zip(cases, references, strict=True)]  # fmt: skip


def run(function: Callable, *cases: Case) -> list[list]:
    """Call `function(port, reference)` on four ranks, and return for each case what it returned, in rank order.

    Raises RanksFailed as ranks.run does, for a hang after a minute or a little more.
    """
    references, limit_s = [reference_of(case) for case in cases], 60 + 5 * len(cases)
    results = ranks.run(open_all, NUM_RANKS, function, list(cases), references, limit_s=limit_s)
    return [list(of_case) for of_case in zip(*results, strict=True)]
