"""Predict what training a GPT needs on each GPU, by strategy and by part: the calculator of lesson 3.1.

It assumes mixed precision with AdamW: 16 bytes of state per parameter. The lesson derives each formula, and measures
those that one process can measure.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from torch import nn

from shared import plots
from shared.models import GPT, GPTConfig

# Bytes of state per parameter: (on every rank, divided among the ranks).
STATE = {"DDP": (16, 0), "ZeRO-1": (4, 12), "ZeRO-2": (2, 14), "FSDP": (0, 16)}
BUCKET = 500e6  # numbers in one of DeepSpeed's communication buffers, by default


def count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def activation_bytes(config: GPTConfig, sequences: int, checkpointing: bool, size: int) -> int:
    """Return the peak of the activations in bytes.

    sequences: how many are in the batch; each is as long as the context.
    size: bytes per number, 4 in float32 or 2 in bfloat16. The loss is always in float32.
    """
    dim, layers = config.dim, config.num_layers
    saved = layers * dim if checkpointing else 16 * layers * dim
    current_block = (15 + 5) * dim if checkpointing else 5 * dim
    output = 2 * dim * size + 3 * config.vocab_size * 4
    return sequences * config.context * (saved * size + max(current_block * size, output))


def largest_shard(model: nn.Module, gpus: int) -> int:
    """Return how many numbers the fullest rank holds when every parameter is split by rows, as FSDP2 splits it."""
    return sum(math.ceil(len(p) / gpus) * p[0].numel() for p in model.parameters())


def per_gpu(model: GPT, strategy: str, gpus: int, sequences: int = 1) -> dict[str, float]:
    """Return the bytes that one of `gpus` GPUs needs, by part.

    model: may be on the meta device, where it takes no memory.
    strategy: a key of STATE.
    sequences: how many each GPU gets; each is as long as the context.
    """
    config, numbers = model.config, count(model)
    on_every_rank, divided = STATE[strategy]
    shard = largest_shard(model, gpus) if strategy == "FSDP" else math.ceil(numbers / gpus)
    if strategy == "DDP":
        extra = 0
    elif strategy == "FSDP":
        block = count(model.blocks[0])
        outside_blocks = numbers - config.num_layers * block
        extra = (2 + 2) * (2 * block + outside_blocks)  # weights and gradients, if gradients are reduced in 2 bytes too
    else:
        extra = 2 * 2 * min(BUCKET, numbers)  # two buckets, as with `overlap_comm`, 2 bytes per number
    return {
        "whole": on_every_rank * numbers,
        "shard": divided * shard,
        "gathered, buckets": extra,
        "activations": activation_bytes(config, sequences, model.activation_checkpointing, size=2),
    }


def draw_fit(table: Mapping[str, Sequence[float]], columns: Sequence[str], limit: float, title: str) -> Axes:
    """Draw a table of gigabytes: a light cell fits within the limit, a dark one does not.

    table: the name of a model -> its bytes in each column.
    columns: the labels above the columns.
    limit: in bytes.
    """
    axes = plots.new_axes(title, size=(6, 3.3))
    grid = torch.tensor([list(row) for row in table.values()])
    axes.pcolormesh(grid > limit, cmap=ListedColormap(["#d6e6f5", "#8a3b00"]), edgecolors="white", linewidth=2)
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=10)
    axes.set_xticks([number + 0.5 for number in range(len(columns))], columns)
    axes.set_yticks([number + 0.5 for number in range(len(table))], list(table), fontsize=11)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for row, sizes in enumerate(table.values()):
        for column, size in enumerate(sizes):
            text = f"{size / 1e9:,.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"
            color = "white" if size > limit else "black"
            axes.text(column + 0.5, row + 0.5, text, color=color, ha="center", va="center", fontsize=11)
    return axes
