"""shared.models: shapes, and what a normalization layer knows of the rest of the batch."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from shared import models


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("in_channels", "size", "num_classes"), [(1, 8, 10), (1, 28, 10), (3, 32, 7)])
def test_resnet18_gives_a_score_a_class_for_images_of_any_size(norm, in_channels, size, num_classes):
    model = models.resnet18(in_channels, num_classes, norm)
    assert model(torch.randn(2, in_channels, size, size)).shape == (2, num_classes)


def test_resnet18_does_not_shrink_a_small_image_before_its_first_block():
    model, seen = models.resnet18(), []
    model.layer1.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    model(torch.randn(2, 1, 8, 8))
    assert seen == [(2, 64, 8, 8)]


def test_resnet18_has_the_parameters_that_the_lessons_name():
    assert sum(p.numel() for p in models.resnet18().parameters()) == 11_172_810


def test_resnet8_is_small_and_its_gradients_still_fill_two_of_ddp_s_buckets():
    """In float32; in float64 they have twice the bytes. Counted in the second step, when DDP has its final buckets."""
    assert sum(p.numel() for p in models.resnet8().parameters()) == 1_226_442
    seen = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(models.resnet8())
        model.register_comm_hook(None, lambda _, bucket: seen.append(bucket.index()) or allreduce_hook(None, bucket))
        for _ in range(2):
            seen.clear()
            model(torch.randn(2, 1, 8, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert len(seen) == 2


def norm_depends_on_batch(norm: str) -> bool:
    """Whether a training-mode ResNet's output for one image changes with the other images of the batch."""
    torch.manual_seed(0)
    model = models.resnet18(norm=norm).double().train()
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    return not torch.allclose(model(images)[:2], model(images[:2]), rtol=1e-9, atol=1e-9)


def test_group_norm_treats_each_sample_by_itself_and_batch_norm_does_not():
    assert not norm_depends_on_batch("group")
    assert norm_depends_on_batch("batch")


@pytest.mark.parametrize("name", models.IMAGE_MODELS)
def test_build_makes_every_model_it_names_and_each_can_be_pickled(name):
    model = models.build(name, (3, 12, 8), 5)
    assert model(torch.randn(4, 3, 12, 8)).shape == (4, 5)
    assert str(pickle.loads(pickle.dumps(model))) == str(model)


def test_build_gives_the_norm_that_the_name_says():
    def kinds(name):
        return {type(module).__name__ for module in models.build(name, (1, 8, 8), 10).modules()}

    assert "GroupNorm" in kinds("resnet18") and "BatchNorm2d" not in kinds("resnet18")
    assert "BatchNorm2d" in kinds("resnet18-batchnorm") and "GroupNorm" not in kinds("resnet18-batchnorm")


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown model 'vgg'; use one of resnet18, resnet18-batchnorm, resnet8, mlp"):
        models.build("vgg", (1, 8, 8), 10)
    with pytest.raises(ValueError, match="unknown norm 'layer'; use one of group, batch"):
        models.resnet18(norm="layer")


def test_mlp_flattens_its_input_and_drops_only_in_training():
    torch.manual_seed(0)
    model, images = models.MLP(input_dim=64, hidden_dim=32, dropout=0.5), torch.randn(5, 1, 8, 8)
    assert model(images).shape == (5, 10)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert torch.equal(model(images), model(images.flatten(1)))


def test_a_slice_of_qkv_holds_whole_heads():
    """Half of its rows and half of `out`'s columns compute half of the heads, and the halves add up to the whole."""
    model = models.GPT(models.GPTConfig(num_layers=1, num_heads=4, dim=16, context=6)).double()
    models.init_weights(model, seed=0)
    block, x = model.blocks[0], torch.randn(2, 6, 16, dtype=torch.float64)
    block.down.weight.data.zero_()  # leaves the attention alone
    whole, qkv, out = block(x) - x, block.qkv.weight.data, block.out.weight.data
    assert whole.abs().max() > 1e-4
    parts = 0
    for rows, columns in zip(qkv.chunk(2), out.chunk(2, dim=1), strict=True):
        block.qkv.weight.data, block.out.weight.data = rows, columns
        parts = parts + block(x) - x
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)


def test_a_head_starts_with_the_values_that_it_had_when_qkv_was_ordered_by_kind():
    """That is why the runs recorded before are equal to those of today."""
    model = models.GPT(models.GPTConfig(num_layers=1, num_heads=4, dim=16, context=6))
    models.init_weights(model, seed=3)
    name, weight = "blocks.0.qkv.weight", model.blocks[0].qkv.weight
    by_kind = models.initial_value(name, weight.shape, seed=3).unflatten(0, (3, 4, 4))
    by_head = weight.detach().unflatten(0, (4, 3, 4))
    assert all(torch.equal(by_head[head, kind], by_kind[kind, head]) for head in range(4) for kind in range(3))


def floating_point_operations(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def test_activation_checkpointing_computes_all_of_a_block_again_except_its_last_matrix_product():
    """Backward needs the input of `down` and not its output, so PyTorch stops there."""
    config = models.GPT_PRESETS["nano"]
    tokens = torch.zeros(4, config.context, dtype=torch.int64)
    plain, frugal = (models.GPT(config, activation_checkpointing=wanted) for wanted in (False, True))
    without, with_it = (
        floating_point_operations(lambda model: model(tokens).sum().backward(), model) for model in (plain, frugal)
    )
    block = floating_point_operations(plain.blocks[0], torch.zeros(4, config.context, config.dim))
    down = 2 * tokens.numel() * 4 * config.dim**2
    assert with_it - without == config.num_layers * (block - down)
    assert 1.2 < with_it / without < 1.25
