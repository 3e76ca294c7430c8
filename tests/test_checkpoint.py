"""shared.checkpoint: a crash, a damaged file or a hostile one never costs more than one checkpoint."""

import copy
import os
import pickle
import random
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.api import CheckpointException

from shared import checkpoint, models, sharded
from shared.distributed import UsageError, Worker, seed_everything

STATE = {
    "weights": {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(5)},
    "progress": {"step": 3, "losses": [1.5, 2.5]},
}


def same(one, other) -> bool:
    """Equal plain data, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def save_step(folder, step: int):
    """A small readable checkpoint of that step."""
    return checkpoint.save_atomically({**STATE, "step": step}, checkpoint.path_for_step(folder, step))


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- writing ---------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save_atomically(STATE, tmp_path / "a.pt")
    assert same(checkpoint.load(path), {"format": checkpoint.FORMAT, **STATE})
    assert names(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("where", ["while writing", "while flushing", "before the renaming"])
def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = checkpoint.save_atomically(STATE, tmp_path / "a.pt")

    def half_a_save(state, file):
        file.write(b"half a checkpoint")
        raise OSError("No space left on device")

    def crash(*args):
        raise OSError("crash")

    owner, name, fake = {
        "while writing": (torch, "save", half_a_save),
        "while flushing": (os, "fsync", crash),
        "before the renaming": (os, "replace", crash),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fake)
        with pytest.raises(OSError):
            checkpoint.save_atomically({"weights": "new"}, path)
    assert same(checkpoint.load(path)["weights"], STATE["weights"])
    assert checkpoint.list_newest_first(tmp_path) == []  # what the crash left does not look like a checkpoint
    checkpoint.save_atomically({"weights": "new"}, path)  # and is not in the way of the next one
    assert checkpoint.load(path)["weights"] == "new"
    assert names(tmp_path) == ["a.pt"]


def test_a_partial_file_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    save_step(tmp_path, 20)
    assert len(names(tmp_path)) == 1
    assert checkpoint.first_readable(checkpoint.list_newest_first(tmp_path)) == (None, None, [])


# --- damaged and foreign files ---------------------------------------------------------------------------------------


def test_a_file_truncated_anywhere_is_recognized(tmp_path):
    good = save_step(tmp_path, 1).read_bytes()
    path = tmp_path / "cut.pt"
    for length in (*range(0, len(good), 13), *range(len(good) - 30, len(good))):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError):
            checkpoint.load(path)


def test_a_flipped_bit_is_recognized_or_without_effect(tmp_path):
    """Bits that carry nothing (padding, time stamps) may flip; whatever loads must be what was saved."""
    path = save_step(tmp_path, 1)
    good, expected = path.read_bytes(), checkpoint.load(path)
    refused = 0
    for index in range(0, len(good), 3):
        damaged = bytearray(good)
        damaged[index] ^= 1 << (index // 3 % 8)
        path.write_bytes(damaged)
        try:
            loaded = checkpoint.load(path)
        except ValueError:
            refused += 1
        else:
            assert same(loaded, expected), f"byte {index}"
    assert refused > 200


def test_flipped_bits_that_torch_load_does_not_notice_are_recognized(tmp_path):
    path = save_step(tmp_path, 1)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        tensor_entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
    tensor_bytes = good.index(STATE["weights"]["w"].numpy().tobytes())
    directory = good.index(b"PK\1\2", tensor_bytes)
    attributes = good.index(tensor_entry.filename.encode(), directory) - 8
    # A bit of a weight, and the bit that makes the tensor's entry a folder.
    for index, bit in ((tensor_bytes + 7, 1), (attributes, 16)):
        damaged = bytearray(good)
        damaged[index] ^= bit
        path.write_bytes(damaged)
        torch.load(path, weights_only=True)  # raises nothing
        with pytest.raises(ValueError, match=r"damaged: .*/data/0"):
            checkpoint.load(path)


class Attack:
    """Unpickling it touches the file `victim`."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def write_foreign_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "not a checkpoint")


FOREIGN = {
    "an empty file": lambda path: path.write_bytes(b""),
    "a text": lambda path: path.write_text("epoch,loss\n1,0.5\n"),
    "zeros, as a full disk leaves them": lambda path: path.write_bytes(bytes(5000)),
    "a plain pickle": lambda path: path.write_bytes(pickle.dumps({"format": checkpoint.FORMAT})),
    "another zip": write_foreign_zip,
    "torch's old format": lambda path: torch.save(
        {"format": checkpoint.FORMAT}, path, _use_new_zipfile_serialization=False
    ),
    "a state dict of another program": lambda path: torch.save(models.MLP(4, 4).state_dict(), path),
    "a tensor": lambda path: torch.save(torch.ones(3), path),
    "a later format": lambda path: torch.save({"format": "distributed-training-workshop checkpoint 2"}, path),
    "a whole model": lambda path: torch.save({"format": checkpoint.FORMAT, "model": models.MLP(4, 4)}, path),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_recognized(tmp_path, what):
    path = checkpoint.path_for_step(tmp_path, 7)
    FOREIGN[what](path)
    with pytest.raises(ValueError) as caught:
        checkpoint.load(path)
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pickled", [pickle.dump, torch.save])
def test_a_hostile_pickle_is_not_executed(tmp_path, pickled):
    victim, path = tmp_path / "victim", tmp_path / "hostile.pt"
    with open(path, "wb") as file:
        pickled({"format": checkpoint.FORMAT, "model": Attack(victim)}, file)
    with pytest.raises(ValueError):
        checkpoint.load(path)
    assert not victim.exists()
    with open(path, "rb") as file:  # the proof that it would have worked
        if pickled is torch.save:
            torch.load(file, weights_only=False)
        else:
            pickle.load(file)
    assert victim.exists()


# --- the newest readable one -----------------------------------------------------------------------------------------


def test_checkpoints_are_listed_by_their_step_and_nothing_else_is(tmp_path):
    for step in (5, 100, 20, 12345678):
        save_step(tmp_path, step)
    for other in ("checkpoint-1.pt", "checkpoint-00000300.pt.bak", "xcheckpoint-00000300.pt", "notes.txt"):
        (tmp_path / other).write_text("something else")
    steps = [int(path.stem.removeprefix("checkpoint-")) for path in checkpoint.list_newest_first(tmp_path)]
    assert steps == [12345678, 100, 20, 5]
    assert checkpoint.list_newest_first(tmp_path / "no such folder") == []


def test_the_newest_readable_one_is_loaded_and_the_skipped_are_named(tmp_path):
    for step in (10, 20, 30, 40):
        save_step(tmp_path, step)
    cut, flipped = checkpoint.path_for_step(tmp_path, 40), checkpoint.path_for_step(tmp_path, 30)
    cut.write_bytes(cut.read_bytes()[:-100])
    flipped.write_bytes(flipped.read_bytes().replace(b"step", b"stop", 1))
    path, state, skipped = checkpoint.first_readable(checkpoint.list_newest_first(tmp_path))
    assert (path, state["step"]) == (checkpoint.path_for_step(tmp_path, 20), 20)
    assert [what.split()[0] for what in skipped] == [cut.name, flipped.name]
    assert "truncated" in skipped[0] and "damaged" in skipped[1]


def test_without_a_readable_one_there_is_none(tmp_path):
    assert checkpoint.first_readable(checkpoint.list_newest_first(tmp_path / "none")) == (None, None, [])
    checkpoint.path_for_step(tmp_path, 1).write_bytes(b"")
    path, state, skipped = checkpoint.first_readable(checkpoint.list_newest_first(tmp_path))
    assert path is None and state is None and len(skipped) == 1


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [30, 20]), (3, [30, 20, 10]), (9, [30, 20, 10, 5])])
def test_the_newest_are_kept(tmp_path, keep, left):
    for step in (5, 10, 20):
        save_step(tmp_path, step)
    checkpoint.keep_newest(save_step(tmp_path, 30), keep)
    assert checkpoint.list_newest_first(tmp_path) == [checkpoint.path_for_step(tmp_path, step) for step in left]


def test_unreadable_newer_ones_do_not_push_out_readable_ones(tmp_path):
    """A resumed run skipped 40 and 50 and has just written 30: the readable 30 and 20 must both stay."""
    for step in (10, 20):
        save_step(tmp_path, step)
    for step in (40, 50):
        checkpoint.path_for_step(tmp_path, step).write_bytes(b"cut off")
    checkpoint.keep_newest(save_step(tmp_path, 30))
    left = [int(path.stem[-8:]) for path in checkpoint.list_newest_first(tmp_path)]
    assert left == [50, 40, 30, 20]


# --- the state of a run ----------------------------------------------------------------------------------------------


def draw() -> list:
    """Some numbers of each generator, an odd count of normal ones: those are made in pairs, and one stays behind."""
    return [
        random.random(), random.gauss(0, 1), random.sample(range(100), 5),
        np.random.rand(), np.random.randn(), np.random.permutation(10).tolist(),
        torch.rand(3).tolist(), torch.randn(1).tolist(), torch.randperm(10).tolist(),
    ]  # fmt: skip


def test_the_generators_go_on_where_they_were_saved(tmp_path):
    seed_everything(5)
    draw()
    path = checkpoint.save_atomically({"random": checkpoint.random_state()}, tmp_path / "a.pt")
    expected = draw()
    assert draw() != expected
    seed_everything(6)
    checkpoint.set_random_state(checkpoint.load(path)["random"])
    assert draw() == expected


def new_run(seed: int = 0, hidden_dim: int = 16, dropout: float = 0.5):
    """Model, optimizer and scheduler; the schedule halves the learning rate every two steps."""
    seed_everything(seed)
    model = models.MLP(input_dim=8, hidden_dim=hidden_dim, num_classes=3, dropout=dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(model, optimizer, scheduler, num_steps: int) -> list[float]:
    """The losses of some steps on random data, drawn from the same generators as the dropout."""
    losses = []
    for _ in range(num_steps):
        loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 3, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_run_on_cpus_asks_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("would make a context on GPU 0"))
    state = checkpoint.random_state()
    assert state["cuda"] is None
    checkpoint.set_random_state(state)


def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path):
    run = new_run()
    train(*run, num_steps=3)
    state = checkpoint.training_state(*run, progress={"step": 3})
    path = checkpoint.save_atomically(state, tmp_path / "a.pt")
    expected = train(*run, num_steps=5)

    resumed = new_run(seed=99)
    assert checkpoint.restore(checkpoint.load(path), *resumed, Worker()) == {"step": 3}
    assert train(*resumed, num_steps=5) == expected
    assert same(dict(resumed[0].state_dict()), dict(run[0].state_dict()))
    assert resumed[2].get_last_lr() == run[2].get_last_lr() == [0.01 / 2**4]


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "random"])
def test_each_part_of_the_state_is_needed(part):
    run = new_run()
    train(*run, num_steps=3)
    state = copy.deepcopy(checkpoint.training_state(*run, progress={}))
    expected = train(*run, num_steps=5)

    other = new_run(seed=99)
    train(*other, num_steps=2)
    of_another_run = checkpoint.training_state(*other, progress={})[part]
    checkpoint.restore({**state, part: of_another_run}, *other, Worker())
    assert train(*other, num_steps=5) != expected


def test_a_rank_that_the_saved_run_did_not_have_keeps_its_own_generators():
    run = new_run()
    state = checkpoint.training_state(*run, progress={})
    seed_everything(123)
    expected = draw()
    seed_everything(123)
    checkpoint.restore(state, *run, Worker(rank=1, world_size=2))
    assert draw() == expected


@pytest.mark.parametrize("other", [{"hidden_dim": 17}, {"hidden_dim": 8}])
def test_a_checkpoint_of_another_model_is_refused(other):
    state = checkpoint.training_state(*new_run(), progress={})
    with pytest.raises(ValueError, match="the checkpoint is of a different model"):
        checkpoint.restore(state, *new_run(**other), Worker())


def test_a_checkpoint_of_another_kind_of_model_is_refused():
    state = checkpoint.training_state(*new_run(), progress={})
    model = models.resnet18()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="the checkpoint is of a different model") as caught:
        checkpoint.restore(state, model, optimizer, scheduler, Worker())
    assert "\n" not in str(caught.value)


def test_a_sharded_checkpoint_of_another_model_is_told_from_one_that_cannot_be_read_just_now(tmp_path):
    model, optimizer, _ = run = new_run()
    train(*run, num_steps=1)
    sharded.save_sharded(tmp_path, model, optimizer)
    sharded.restore_sharded(tmp_path, model, optimizer)
    other = new_run(hidden_dim=17)
    with pytest.raises(UsageError, match="the checkpoint is of a different model: Size mismatch") as caught:
        sharded.restore_sharded(tmp_path, *other[:2])
    assert "\n" not in str(caught.value)
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        sharded.restore_sharded(tmp_path, model, optimizer)


def test_checksums_of_large_files_say_how_far_they_are(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(3 * 2**24))
    (tmp_path / "apart").write_bytes(b"not asked for")
    seconds = iter(range(0, 1000, 6))  # a block of 16 MiB every six
    monkeypatch.setattr(sharded.time, "monotonic", lambda: next(seconds))
    said = []
    found = sharded.file_checksums(tmp_path, ["a", "b", "gone"], said.append)
    assert list(found) == ["a", "b"] and found["a"] == found["b"] == [3 * 2**24, zlib.crc32(bytes(3 * 2**24))]
    assert said[-1] == f"checking {tmp_path}: 0.1 of 0.1 GB" and 2 <= len(said) <= 3


def test_a_writer_that_was_frozen_does_no_harm_to_the_one_that_has_taken_over(tmp_path, monkeypatch):
    """It wakes up in the middle of its write, when the other has written the checkpoint of the same step."""
    path, save = checkpoint.path_for_step(tmp_path, 20), torch.save

    def frozen(state: dict, file: BinaryIO) -> None:
        save(state, file)
        monkeypatch.setattr(torch, "save", save)
        checkpoint.save_atomically({"weights": torch.ones(10)}, path)
        assert torch.equal(checkpoint.load(path)["weights"], torch.ones(10))
        file.write(b"the rest")
        file.flush()
        assert torch.equal(checkpoint.load(path)["weights"], torch.ones(10))
        raise OSError("taken over")

    monkeypatch.setattr(torch, "save", frozen)
    with pytest.raises(OSError, match="taken over"):
        checkpoint.save_atomically({"weights": torch.zeros(10)}, path)
    assert torch.equal(checkpoint.load(path)["weights"], torch.ones(10)) and list(tmp_path.iterdir()) == [path]


def test_what_killed_saves_have_left_goes_with_a_later_save(tmp_path):
    left, newer = (tmp_path / f".checkpoint-{step:08}.pt.0abc.partial" for step in (20, 60))
    left.touch(), newer.touch()
    checkpoint.save_safely({}, checkpoint.path_for_step(tmp_path, 40))
    assert set(tmp_path.iterdir()) == {checkpoint.path_for_step(tmp_path, 40), newer}
