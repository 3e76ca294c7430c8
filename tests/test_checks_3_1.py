"""The checks of lesson 3.1: the stub and plausible wrong answers are rejected with a message that helps."""

import math

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from torch.autograd.graph import saved_tensors_hooks

from shared import checks
from shared.checks import chapter_3

STATE = {"DDP": (16, 0), "ZeRO-1": (4, 12), "ZeRO-2": (2, 14), "FSDP": (0, 16)}


def fine_tuning_bytes(frozen, trainable, strategy, gpus, state=STATE, shards=("FSDP",), of_frozen=2, cut=False):
    whole, shared_out = state[strategy]
    weights = of_frozen * frozen / (gpus if strategy in shards else 1)
    return weights + trainable * (whole + (shared_out // gpus if cut else shared_out / gpus))


def test_3_1a_accepts(capsys):
    assert_accepts(checks.exercise_3_1a, fine_tuning_bytes, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("no gradient, no master copy", lambda *call: fine_tuning_bytes(*call, of_frozen=16)),
    ("FSDP shards every weight", lambda *call: fine_tuning_bytes(*call, shards=())),
    ("ZeRO-1 shards no weights", lambda *call: fine_tuning_bytes(*call, shards=("FSDP", "ZeRO-1", "ZeRO-2"))),
    ("is 0, expected 16,384,000. A trainable parameter: 16 bytes that every rank keeps.", lambda *call: 0),
    ("every rank keeps and 12/8", lambda *call: fine_tuning_bytes(*call, state={**STATE, "ZeRO-1": (2, 14)})),
    ("`//` cuts 12/8 down to 1", lambda *call: fine_tuning_bytes(*call, cut=True)),
    ("should be a number", lambda *call: None),
])  # fmt: skip
def test_3_1a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_1a, answer, because, capsys)


def largest_batch(needed, limit, least=0):
    one = needed(1)
    sequence = needed(2) - one
    return max(least, (limit - one + sequence) // sequence)


def searched(needed, limit):
    batch = 0
    while needed(batch + 1) <= limit:
        batch += 1
    return batch


def test_3_1b_accepts(capsys):
    assert_accepts(checks.exercise_3_1b, largest_batch, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("needed(1) holds the state too", lambda needed, limit: limit // needed(1)),
    ("there before the first sequence", lambda needed, limit: limit // (needed(2) - needed(1))),
    ("each is a run", searched),
    ("a batch of 0", lambda needed, limit: (limit - needed(0)) // (needed(1) - needed(0))),
    ("needed(1) has the first sequence in it", lambda needed, limit: largest_batch(needed, limit) - 1),
    ("Round down", lambda needed, limit: math.ceil((limit - needed(1)) / (needed(2) - needed(1))) + 1),
    ("it is 0", lambda needed, limit: largest_batch(needed, limit, least=-math.inf)),
    ("a whole number", lambda needed, limit: largest_batch(needed, limit) + 0.5),
    ("a whole number", lambda needed, limit: None),
])  # fmt: skip
def test_3_1b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_1b, answer, because, capsys)


def saved_by_stage(model, images, apart=True, once=True, per_image=True, differences=True, remove=True):
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()} if apart else set()
    sizes, so_far = {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata if once else len(sizes)] = storage.nbytes()
        return tensor

    def when_done(name):
        return lambda *_: so_far.update({name: sum(sizes.values())})

    handles = [child.register_forward_hook(when_done(name)) for name, child in model.named_children()]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    for handle in handles * remove:
        handle.remove()
    before = [0, *so_far.values()] if differences else [0] * len(so_far)
    count = len(images) if per_image else 1
    return {name: (now - then) / count for (name, now), then in zip(so_far.items(), before, strict=False)}


def without_the_first(saved):
    return dict([*saved.items()][1:])


def test_3_1c_accepts(capsys):
    assert_accepts(checks.exercise_3_1c, saved_by_stage, capsys)


def test_3_1c_shows_the_shares_of_the_stages(capsys):
    checks.exercise_3_1c(saved_by_stage)
    praise, shares = capsys.readouterr().out.splitlines()
    assert "[OK]" in praise and "layer1 " in shares and ", fc " in shares


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("not activations", lambda model, images: saved_by_stage(model, images, apart=False)),
    ("Is each storage counted once", lambda model, images: saved_by_stage(model, images, once=False)),
    ("Divide by the 2 images", lambda model, images: saved_by_stage(model, images, per_image=False)),
    ("what a child adds", lambda model, images: saved_by_stage(model, images, differences=False)),
    ("hooks left on the model", lambda model, images: saved_by_stage(model, images, remove=False)),
    ("with gradients enabled", lambda model, images: torch.no_grad()(saved_by_stage)(model, images)),
    ("all the children's names", lambda model, images: without_the_first(saved_by_stage(model, images))),
    ("all the children's names", lambda model, images: sum(saved_by_stage(model, images).values())),
])  # fmt: skip
def test_3_1c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_1c, answer, because, capsys)


def test_3_1c_counts_what_resnet_saves_of_an_image():
    """Stage by stage from the layers' shapes: group norm saves its input and statistics, ReLU its result."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.Flatten())
    model.append(torch.nn.Linear(256, 10))
    saved = chapter_3.bytes_saved_by_child(model, torch.randn(5, 1, 8, 8))
    assert saved == {"0": 4 * 64, "1": 4 * 4 * 64, "2": 0, "3": 0}  # the image; ReLU's result, which the last one takes
