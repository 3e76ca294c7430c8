"""Build the workshop's models: torchvision's ResNets for small images, a plain MLP, and a GPT of any size."""

import math
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def resnet18(in_channels: int = 1, num_classes: int = 10, norm: str = "group") -> nn.Module:
    """Return torchvision's ResNet-18 for small images, (batch, in_channels, H, W) -> (batch, num_classes).

    The first layer is 3x3 with stride 1, and there is no max-pooling, as for CIFAR in He et al. (2015,
    arXiv:1512.03385, section 4.2). After the ImageNet stem an 8x8 digit would be a single pixel.

    norm: "group" is GroupNorm with 32 groups, where a sample's output does not depend on its batch. With "batch",
    BatchNorm, it does, so no data-parallel run equals a run on one process. Raises ValueError for any other value.
    """
    from torchvision.models import resnet18 as torchvision_resnet18  # slower to import than all the rest

    # A partial can be pickled, which Ray needs; a lambda cannot.
    layers = {"group": partial(nn.GroupNorm, 32), "batch": nn.BatchNorm2d}
    if norm not in layers:
        raise ValueError(f"unknown norm {norm!r}; use one of {', '.join(layers)}")
    return for_small_images(torchvision_resnet18(num_classes=num_classes, norm_layer=layers[norm]), in_channels)


def for_small_images(resnet: nn.Module, in_channels: int) -> nn.Module:
    """Give a torchvision ResNet a first layer of 3x3 with stride 1, remove its max-pooling, and return it."""
    resnet.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    resnet.maxpool = nn.Identity()
    return resnet


def resnet8(in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """Return a smaller `resnet18` with GroupNorm, (batch, in_channels, H, W) -> (batch, num_classes).

    It makes proofs fast. It has the first three stages with one block each, as deep as He et al.'s smallest network for
    CIFAR, and 1.2 M parameters instead of 11.2 M. Their gradients still fill two of DDP's buckets, so the order of the
    buckets still matters.
    """
    from torchvision.models.resnet import BasicBlock, ResNet

    resnet = ResNet(BasicBlock, [1, 1, 1, 1], num_classes, norm_layer=partial(nn.GroupNorm, 32))
    model = for_small_images(resnet, in_channels)
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, num_classes)
    return model


class MLP(nn.Module):
    """Three linear layers with dropout: (batch, ...) with `input_dim` values per sample -> (batch, num_classes)."""

    def __init__(self, input_dim: int = 784, hidden_dim: int = 512, num_classes: int = 10, dropout: float = 0.2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_dim, hidden_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


IMAGE_MODELS = {  # each takes (channels, height, width) and the number of classes
    "resnet18": lambda shape, num_classes: resnet18(shape[0], num_classes),
    "resnet18-batchnorm": lambda shape, num_classes: resnet18(shape[0], num_classes, norm="batch"),
    "resnet8": lambda shape, num_classes: resnet8(shape[0], num_classes),
    "mlp": lambda shape, num_classes: MLP(math.prod(shape), num_classes=num_classes),
}


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the image model called `name` for images of shape (channels, height, width).

    Raises ValueError if IMAGE_MODELS has no such name.
    """
    if name not in IMAGE_MODELS:
        raise ValueError(f"unknown model {name!r}; use one of {', '.join(IMAGE_MODELS)}")
    return IMAGE_MODELS[name](image_shape, num_classes)


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT: layers, attention heads, width, context length in tokens, and vocabulary size."""

    num_layers: int
    num_heads: int
    dim: int
    context: int
    vocab_size: int = 256  # bytes


# From 124m on, widths and depths are those of GPT-2 and GPT-3. The vocabulary of 256 bytes makes ours a bit smaller.
GPT_PRESETS = {
    "nano": GPTConfig(num_layers=5, num_heads=4, dim=128, context=64),  # 1 M parameters: for CPUs
    "micro": GPTConfig(num_layers=8, num_heads=8, dim=256, context=128),  # 6 M
    "124m": GPTConfig(num_layers=12, num_heads=12, dim=768, context=1024),
    "350m": GPTConfig(num_layers=24, num_heads=16, dim=1024, context=1024),
    "1b": GPTConfig(num_layers=24, num_heads=16, dim=2048, context=2048),
    "7b": GPTConfig(num_layers=32, num_heads=32, dim=4096, context=2048),
    "13b": GPTConfig(num_layers=40, num_heads=40, dim=5120, context=2048),
}


class Block(nn.Module):
    """One layer of a GPT: causal self-attention, then an MLP. It maps (batch, tokens, dim) to the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.norm1 = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)  # rows by head, so a slice can hold heads
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.norm2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, tokens, dim of a head)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes: int64 tokens (batch, T <= context) -> logits (batch, T, vocab_size).

    It has GPT-2's layers (Radford et al. 2019) without biases and without dropout, so training draws no random numbers.
    Call `init_weights` to set its parameters. torch's own initialization would draw different numbers for layers of
    which a rank holds only a slice.
    """

    def __init__(self, config: GPTConfig, activation_checkpointing: bool = False):
        super().__init__()
        self.config, self.activation_checkpointing = config, activation_checkpointing
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            # A checkpointed block keeps only its input and is computed again in the backward pass.
            x = checkpoint(block, x, use_reentrant=False) if self.activation_checkpointing else block(x)
        return self.head(self.norm(x))


def initial_value(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the float32 start value of a GPT's parameter, which depends only on name, shape and seed.

    It is normal with standard deviation 0.02, as in GPT-2. A norm's weight is 1, and its bias 0. So each parameter can
    be made independently, and N ranks that each keep a slice start from the same weights as one process.
    """
    if "norm" in name:
        return torch.full(shape, float(name.endswith("weight")))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.empty(shape).normal_(std=0.02, generator=generator)


@torch.no_grad()
def init_weights(
    model: GPT, seed: int, gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext
) -> None:
    """Set every parameter to its `initial_value`, with the rows of `qkv` by head.

    For a DTensor each rank sets its own slice, without communication.
    gathered: a context manager that gathers a whole parameter, such as DeepSpeed's `GatheredParameters`.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes half a second to import

    for name, parameter in model.named_parameters():
        with gathered(parameter):
            value = initial_value(name, parameter.shape, seed)
            if name.endswith("qkv.weight"):  # drawn as the queries of all heads, then the keys, then the values
                value = value.unflatten(0, (3, model.config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
            value = value.to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
