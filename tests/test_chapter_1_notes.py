"""What the README of chapter 1 says of larger batches and of bf16, without processes."""

import torch
import torch.nn.functional as F

from shared import datasets, distributed, models


def train_mlp(batch_size: int, lr: float, epochs: int = 6) -> float:
    """The loss on the training images after some epochs with SGD."""
    images, labels = datasets.load("digits").train.tensors
    distributed.seed_everything(7)
    model = models.MLP(input_dim=64, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for part in torch.randperm(len(images)).split(batch_size):
            loss = F.cross_entropy(model(images[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(images), labels).item()


def test_eight_times_the_batch_wants_eight_times_the_learning_rate():
    small, same_lr, scaled = train_mlp(32, 0.02), train_mlp(256, 0.02), train_mlp(256, 0.16)
    assert same_lr > 1.5 * small
    assert abs(scaled - small) < abs(same_lr - small) / 2


def test_under_autocast_products_are_bfloat16_and_weights_stay_float32():
    distributed.seed_everything(7)
    model, (images, labels) = models.resnet18(), datasets.load("digits").train[:32]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    weight = model.fc.weight
    exact = F.cross_entropy(model(images), labels).item()
    assert logits.dtype == torch.bfloat16
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert 0 < abs(loss.item() / exact - 1) < 0.05
