"""The checks of lesson 2.3: the stub and plausible wrong answers are rejected with a message that helps."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks

CHAPTER = Path(__file__).parents[1] / "02-ddp-pytorch-ray"


class Shift:
    """The right answer; wrong ones override one method."""

    def __init__(self, seed: int, largest: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.largest = largest

    def columns(self, num_images: int):
        return self.generator.integers(-self.largest, self.largest, size=num_images, endpoint=True)

    def image(self, batch: dict):
        moves = zip(batch["image"], self.columns(len(batch["image"])), strict=True)
        return np.stack([np.roll(image, columns, axis=1) for image, columns in moves])

    def __call__(self, batch: dict) -> dict:
        return {**batch, "image": self.image(batch)}


class InPlace(Shift):
    def __call__(self, batch):
        for number, columns in enumerate(self.columns(len(batch["image"]))):
            batch["image"][number] = np.roll(batch["image"][number], columns, axis=1)
        return batch


class DropsColumns(Shift):
    def __call__(self, batch):
        return {"image": self.image(batch)}


class OneForAll(Shift):
    def columns(self, num_images):
        return np.full(num_images, self.generator.integers(-self.largest, self.largest, endpoint=True))


class NeverTheLargest(Shift):
    def columns(self, num_images):
        return self.generator.integers(-self.largest, self.largest, size=num_images)


class SameEachTime(Shift):
    def columns(self, num_images):
        return np.random.default_rng(7).integers(-2, 3, size=num_images)


class NoSeed(Shift):
    def __init__(self, seed, largest):
        super().__init__(None, largest)


class UpAndDown(Shift):
    def image(self, batch):
        moves = zip(batch["image"], self.columns(len(batch["image"])), strict=True)
        return np.stack([np.roll(image, columns, axis=0) for image, columns in moves])


class WholeBatchUpAndDown(Shift):
    def image(self, batch):
        return np.roll(batch["image"], self.columns(1)[0] or 1, axis=1)


class NotRoundTheEdge(Shift):
    def image(self, batch):
        images = super().image(batch)
        images[:, :, 0] = images[:, :, -1] = 0
        return images


class Widens(Shift):
    def image(self, batch):
        return super().image(batch).astype(np.float64)


def test_2_3a_accepts(capsys):
    assert_accepts(checks.exercise_2_3a, Shift, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("writes into the batch", InPlace),
    ("columns id, image and label", DropsColumns),
    ("draw a number for each image", OneForAll),
    ("everything from -2 to 2", NeverTheLargest),
    ("just like the first", SameEachTime),
    ("give the generator that seed", NoSeed),
    ("axis=2 of the whole batch", WholeBatchUpAndDown),
    ("Sideways is axis=1 of one image", UpAndDown),
    ("what leaves it comes back in", NotRoundTheEdge),
    ("float64", Widens),
])  # fmt: skip
def test_2_3a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_3a, answer, because, capsys)


def plan_steps(rows: list[int], batch_size: int) -> list[list[int]]:
    steps, rows = [], list(rows)
    while any(rows):
        steps.append([min(left, batch_size) for left in rows])
        rows = [left - taken for left, taken in zip(rows, steps[-1], strict=True)]
    return steps


def until_the_first_is_done(rows, batch_size):
    return plan_steps(rows, batch_size)[: -(-min(rows) // batch_size)]


def without_the_idle(rows, batch_size):
    return [[taken for taken in step if taken] for step in plan_steps(rows, batch_size)]


def once_more(rows, batch_size):
    return [*plan_steps(rows, batch_size), [0] * len(rows)]


def by_rank(rows, batch_size):
    return [list(rank) for rank in zip(*plan_steps(rows, batch_size), strict=True)]


def dealt_again(rows, batch_size):
    return plan_steps([sum(rows) // len(rows)] * len(rows), batch_size)


def full_batches_for_all(rows, batch_size):
    return [[batch_size] * len(rows) for _ in plan_steps(rows, batch_size)]


def rounded_down(rows, batch_size):
    return plan_steps(rows, batch_size)[: max(rows) // batch_size]


def test_2_3b_accepts(capsys):
    assert_accepts(checks.exercise_2_3b, plan_steps, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("goes on with empty batches", until_the_first_is_done),
    ("Round the number of steps up", rounded_down),
    ("Step 2 is the first wrong one: the ranks have [6, 3] rows left", full_batches_for_all),
    ("all-reduce waits for all", without_the_idle),
    ("a step in which no rank has a row is one too many", once_more),
    ("Yours has a list for each rank", by_rank),
    ("with [10, 7] rows", dealt_again),
    ("a list of steps", lambda rows, batch_size: rows),
])  # fmt: skip
def test_2_3b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_3b, answer, because, capsys)


def class_named(name: str, source: str) -> str:
    """The syntax tree of the class `name` in Python source."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return ast.dump(found[0])


def test_the_lesson_shows_the_class_that_the_script_uses() -> None:
    cells = json.loads((CHAPTER / "03_ray_data.ipynb").read_text())["cells"]
    shown = next(source for cell in cells if "class EverySample" in (source := "".join(cell["source"])))
    script = (CHAPTER / "ray_images.py").read_text()
    assert class_named("EverySample", shown) == class_named("EverySample", script)
