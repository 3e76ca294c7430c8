"""The checks of lesson 4.5: the stub and plausible wrong answers are rejected with a message that helps."""

import math
import os
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks


def on_one(node, worker):
    return int(min(node.get(name, 0) // amount for name, amount in worker.items()))


def workers_on(nodes, worker):
    return sum(on_one(node, worker) for node in nodes)


def room(nodes, worker):
    workers = workers_on(nodes, worker)
    return workers, sum(node.get("CPU", 0) for node in nodes) - workers * worker.get("CPU", 0)


def added_up(nodes, worker):
    total = {name: sum(node.get(name, 0) for node in nodes) for node in nodes for name in node}
    workers = on_one(total, worker)
    return workers, total["CPU"] - workers * worker.get("CPU", 0)


def by_cpus_alone(nodes, worker):
    return room(nodes, {"CPU": worker.get("CPU", 1)})


def with_brackets(nodes, worker):
    return sum(min(node[name] // worker[name] for name in worker) for node in nodes), 12


def test_4_5a_accepts(capsys):
    assert_accepts(checks.exercise_4_5a, room, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("a worker lies on one node", added_up),
    ("one GPU on each of two nodes", by_cpus_alone),
    ("`.get` says 0", with_brackets),
    ("The workers are right; they hold 4 CPUs", lambda nodes, worker: (workers_on(nodes, worker), 16)),
    ("should be (workers, cpus_left)", workers_on),
])  # fmt: skip
def test_4_5a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_5a, answer, because, capsys)


def nodes_for(workers, worker, node, minimum, maximum):
    if not on_one(node, worker) or workers > maximum * on_one(node, worker):
        raise ValueError("they never start")
    return max(minimum, math.ceil(workers / on_one(node, worker)))


def divides_by_zero(workers, worker, node, minimum, maximum):
    needed = math.ceil(workers / on_one(node, worker))
    if needed > maximum:
        raise ValueError("too many")
    return max(minimum, needed)


def waits_for_ever(workers, worker, node, minimum, maximum):
    return max(minimum, math.ceil(workers / max(1, on_one(node, worker))))


def without_minimum(workers, worker, node, minimum, maximum):
    return nodes_for(workers, worker, node, 0, maximum)


def rounded_down(workers, worker, node, minimum, maximum):
    return max(minimum, workers // on_one(node, worker))


def too_strict(workers, worker, node, minimum, maximum):
    if workers >= maximum * on_one(node, worker):
        raise ValueError("full")
    return nodes_for(workers, worker, node, minimum, maximum)


def test_4_5b_accepts(capsys):
    assert_accepts(checks.exercise_4_5b, nodes_for, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("raise a ValueError that says so", divides_by_zero),
    ("this waits for ever", waits_for_ever),
    ("never fewer than 3", without_minimum),
    ("2 of these workers go on one node, so 5 need 3", rounded_down),
    ("the workers do fit", too_strict),
])  # fmt: skip
def test_4_5b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_5b, answer, because, capsys)


def survives(path, mounts):
    inside = any(Path(os.path.normpath(path)).is_relative_to(mount) for mount in mounts)
    return inside or path.startswith(("s3://", "gs://"))


def test_4_5c_accepts(capsys):
    assert_accepts(checks.exercise_4_5c, survives, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("a bucket belongs to no node", lambda path, mounts: path.startswith(tuple(mounts))),
    ("it begins with the letters", lambda path, mounts: path.startswith((*mounts, "s3:", "gs:"))),
    ("it is /mnt/private", lambda path, mounts: "3:" in path or "gs:" in path or any(
        Path(path).is_relative_to(mount) for mount in mounts)),
    ("of the node's own disk", lambda path, mounts: "://" in path or survives(path, mounts)),
    ("it is the node's own disk", lambda path, mounts: path.startswith("/") or survives(path, mounts)),
    ("yours says None", lambda path, mounts: survives(path, mounts) or None),
])  # fmt: skip
def test_4_5c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_4_5c, answer, because, capsys)
