"""What docs/communication.md says of input and device, on this CPU."""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset, Sampler

from shared import datasets, distributed, models


class ProcessIds(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


class CountingSampler(Sampler):
    drawn = 0

    def __iter__(self):
        for index in range(100):
            self.drawn += 1
            yield index


TWO_WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


def test_persistent_workers_make_all_epochs_in_the_same_processes():
    for keep, expected in ((False, 6), (True, 2)):
        loader = DataLoader(ProcessIds(), batch_size=2, persistent_workers=keep, **TWO_WORKERS)
        assert len({pid for epoch in range(3) for batch in loader for pid in batch.tolist()}) == expected


def test_a_loader_orders_prefetch_factor_batches_per_worker_ahead():
    for factor in (2, 4):
        sampler = CountingSampler()
        batches = iter(DataLoader(ProcessIds(), sampler=sampler, prefetch_factor=factor, **TWO_WORKERS))
        next(batches)
        assert sampler.drawn == 1 + 2 * factor
        del batches  # its workers end with it


def gradients(images, labels, autocast: bool, scale: float = 1.0) -> torch.Tensor:
    distributed.seed_everything(7)
    network = models.MLP(64, 768, dropout=0)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        logits = network(images)
    (1e-3 * scale * F.cross_entropy(logits.float(), labels)).backward()  # as small as late in a training
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()]) / scale


def test_a_scaled_loss_keeps_small_gradients_from_becoming_zero():
    images, labels = datasets.digits().train[:64]
    exact = gradients(images, labels, autocast=False)

    def lost(scale):
        half = gradients(images, labels, autocast=True, scale=scale)
        return ((half == 0) & (exact != 0)).sum() / (exact != 0).sum()

    assert lost(1) > 0.02 and lost(2**16) < 0.05


def test_grad_scaler_skips_a_step_that_overflows_and_halves_its_scale():
    images, labels = datasets.digits().train[:64]
    distributed.seed_everything(7)
    network: nn.Module = models.MLP(64, 768, dropout=0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler, history = torch.amp.GradScaler("cpu", init_scale=2.0**24), set()
    for _ in range(8):
        before, scale = network.layers[1].weight.clone(), scaler.get_scale()
        with torch.autocast("cpu", torch.float16):
            logits = network(images)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(logits.float(), labels)).backward()
        finite = all(parameter.grad.isfinite().all() for parameter in network.parameters())
        scaler.step(optimizer)
        scaler.update()
        history.add((finite, not torch.equal(before, network.layers[1].weight), scaler.get_scale() / scale))
    assert history == {(False, False, 0.5), (True, True, 1.0)}


def test_fused_attention_is_the_flash_kernel_and_equals_attention_written_out():
    q, k, v = torch.randn(3, 2, 4, 128, 32)
    scores = (q @ k.mT / math.sqrt(32)).masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -math.inf)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # fails if it cannot
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)) == SDPBackend.FLASH_ATTENTION
    assert (fused - scores.softmax(-1) @ v).abs().max() < 1e-5


def test_the_numbers_for_64_nodes_of_8_gpus():
    nodes, gpus = 64, 8
    world = nodes * gpus
    flat, levels = 2 * (world - 1) / world, 2 * (nodes - 1) / nodes
    assert (round(flat, 2), round(levels, 2)) == (2.00, 1.97)
    assert round(flat / (levels / gpus), 1) == 8.1  # with one card per GPU each sends an eighth
    assert (2 * (world - 1), 2 * (gpus - 1) + 2 * (nodes - 1)) == (1022, 140)
