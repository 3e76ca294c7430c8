"""What chapter 1 says of causes, larger batches and bf16, and does not run itself; without processes."""

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
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


def test_the_first_loss_is_above_ln_10_because_of_the_size_of_the_scores():
    distributed.seed_everything(7)
    images, labels = datasets.load("digits").train.tensors
    with torch.no_grad():
        scores = models.resnet18()(images)
    assert F.cross_entropy(scores, labels).item() > math.log(10) + 0.05
    assert abs(F.cross_entropy(scores / 10, labels).item() - math.log(10)) < 0.01


def first_losses(
    name: str, steps: int, dtype: torch.dtype = torch.float32, lr: float = 1e-3, filled: int = 0, change: float = 0.0
) -> list[float]:
    """The losses of the first steps with Adam.

    filled: how many batches fill Adam's averages first, at a rate of 0. change: of each initial weight, relative to it.
    """
    images, labels = datasets.load("digits").train.tensors
    distributed.seed_everything(7)
    model, images = models.build(name, (1, 8, 8), 10).to(dtype), images.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + change * torch.randn_like(parameter))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=lr), []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    batches = order.split(64)
    for number, part in enumerate(batches[len(batches) - filled :] + batches[:steps]):
        optimizer.param_groups[0]["lr"] = 0.0 if number < filled else lr
        loss = F.cross_entropy(model(images[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[filled:]


def test_the_jump_of_the_first_steps_is_smaller_with_filled_averages_and_gone_at_a_tenth_of_the_rate():
    young, filled = (first_losses("resnet18", steps=2, filled=filled) for filled in (0, 4))
    small_steps = first_losses("resnet18", steps=4, lr=1e-4)  # with averages as young as those of `young`
    assert young[0] == filled[0] == small_steps[0]
    assert young[1] - 0.3 > filled[1] > filled[0] + 0.4
    assert max(small_steps) == small_steps[0]


def test_training_amplifies_a_tiny_difference_in_float64_too():
    one, other = (first_losses("resnet8", 12, torch.float64, change=change) for change in (0.0, 1e-7))
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert gaps[0] < 1e-6 and max(gaps[-3:]) > 100 * gaps[0]


def test_dividing_before_or_after_the_sum_is_the_same_for_two_ranks_and_not_for_three():
    ranks = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for num_ranks, equal in ((2, True), (3, False)):
        before, after = (ranks[:num_ranks] / num_ranks).sum(dim=0), ranks[:num_ranks].sum(dim=0) / num_ranks
        assert torch.equal(before, after) is equal
        assert torch.allclose(before, after, rtol=0, atol=1e-15)


def test_a_mean_over_no_samples_is_nan_and_its_gradient_is_zero():
    model = models.resnet8().double()
    loss = F.cross_entropy(model(torch.empty(0, 1, 8, 8, dtype=torch.float64)), torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.isnan() and all((parameter.grad == 0).all() for parameter in model.parameters())


def test_counts_sums_and_squares_of_two_ranks_give_the_batch_norm_of_the_whole_batch():
    x = torch.randn(9, 4, 6, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    parts = [part.transpose(0, 1).flatten(1) for part in (x[::2], x[1::2])]  # channels, values
    count, total, squares = (
        sum(numbers(part) for part in parts)
        for numbers in (lambda part: part.shape[1], lambda part: part.sum(1), lambda part: part.square().sum(1))
    )
    mean = total / count
    variance = squares / count - mean.square()
    scaled = (x - mean[:, None, None]) / torch.sqrt(variance[:, None, None] + 1e-5)
    assert torch.allclose(scaled, F.batch_norm(x, None, None, training=True), rtol=0, atol=1e-12)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sync_batch_norm_refuses_to_run_on_a_cpu(one_rank):
    layer = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="GPU"):
        torch.nn.parallel.DistributedDataParallel(layer)
    with pytest.raises(ValueError, match="GPU"):
        layer(torch.randn(2, 4, 6, 6))


@pytest.mark.parametrize("find_unused", [False, True])
def test_ddp_regroups_its_buckets_after_the_first_step_unless_it_looks_for_unused_parameters(one_rank, find_unused):
    ddp_model = torch.nn.parallel.DistributedDataParallel(
        models.resnet18(), bucket_cap_mb=5, find_unused_parameters=find_unused
    )
    buckets = []

    def count(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp_model.register_comm_hook(None, count)
    seen = []
    for _ in range(2):
        buckets.clear()
        ddp_model(torch.zeros(2, 1, 8, 8)).sum().backward()
        seen.append(len(buckets))
    assert (seen[0] == seen[1] > 1) if find_unused else (seen == [1, 6])


def test_ddp_refuses_to_wrap_a_model_without_a_process_group():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_a_model_without_the_wrapper_refuses_the_wrappers_names(one_rank):
    model = torch.nn.Linear(2, 2)
    state = torch.nn.parallel.DistributedDataParallel(model).state_dict()
    assert all(name.startswith("module.") for name in state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_gloo_pairs_collectives_of_one_size_by_their_order_alone():
    """Rank 0 averages a gradient first, and rank 1 has none: its sum of hits meets that gradient."""
    store, tensors = torch.distributed.HashStore(), [torch.tensor([0.5]), torch.tensor([20.0])]

    def sum_up(rank: int) -> None:
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=600))
        group.allreduce([tensors[rank]]).wait()

    with ThreadPoolExecutor() as pool:
        list(pool.map(sum_up, range(2)))
    assert [tensor.item() for tensor in tensors] == [20.5, 20.5]
