"""The models of the workshop: torchvision's ResNet-18 for small images, and a plain MLP."""

from functools import partial

import torch
from torch import nn


def resnet18(in_channels: int = 1, num_classes: int = 10, norm: str = "group") -> nn.Module:
    """torchvision's ResNet-18 with a stem for small images, (batch, in_channels, H, W) -> (batch, num_classes).

    The first layer is 3x3 with stride 1 and there is no max-pooling, as He et al. (2015, arXiv:1512.03385, section 4.2)
    do for CIFAR: an 8x8 digit would be a single pixel after the ImageNet stem.

    norm: "group" (GroupNorm with 32 groups: a sample's output does not depend on its batch) or "batch" (BatchNorm:
    it does, so no data-parallel run equals a run on one process). Raises ValueError for any other.
    """
    from torchvision.models import resnet18 as torchvision_resnet18  # takes longer to import than the rest together

    # A partial rather than a lambda: the model can be pickled, as Ray does.
    layers = {"group": partial(nn.GroupNorm, 32), "batch": nn.BatchNorm2d}
    if norm not in layers:
        raise ValueError(f"unknown norm {norm!r}; use one of {', '.join(layers)}")
    model = torchvision_resnet18(num_classes=num_classes, norm_layer=layers[norm])
    model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class MLP(nn.Module):
    """Three linear layers with dropout: (batch, ...) of `input_dim` values a sample -> (batch, num_classes)."""

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


IMAGE_MODELS = ("resnet18", "resnet18-batchnorm", "mlp")


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The image model called `name` for images of shape (channels, height, width).

    Raises ValueError for a name that is not in IMAGE_MODELS.
    """
    if name == "resnet18":
        return resnet18(image_shape[0], num_classes)
    if name == "resnet18-batchnorm":
        return resnet18(image_shape[0], num_classes, norm="batch")
    if name == "mlp":
        return MLP(image_shape[0] * image_shape[1] * image_shape[2], num_classes=num_classes)
    raise ValueError(f"unknown model {name!r}; use one of {', '.join(IMAGE_MODELS)}")
