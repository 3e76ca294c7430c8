"""What lesson 4.7 says of torchft beyond its own runs: three replicas, other places to die, and the open port."""

import re
import threading
import time
import urllib.error
import urllib.request

import pytest
from answers import cell
from notebook_rules import ROOT

pytest.importorskip("torchft")
CHAPTER = ROOT / "04-ray-in-production"


@pytest.fixture(scope="module")
def replicas():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CHAPTER)
        import replicas
    return replicas


@pytest.fixture
def server(replicas):
    server = replicas.Server()
    yield server
    server.close()


@pytest.fixture
def program(tmp_path):
    """The lesson's own loop."""
    path = tmp_path / "train.py"
    path.write_text(cell(CHAPTER / "07_lose_a_replica.ipynb", "write-train").partition("\n")[2])
    return path


@pytest.mark.parametrize(("names", "lost", "how", "place", "given_up"), [
    ("abc", "a", "kill", "all-reduce", 1), ("abc", "c", "kill", "quorum", 0), ("ab", "b", "kill", "commit", 0),
    ("ab", "a", "freeze", "quorum", 0),
])  # fmt: skip
def test_the_survivors_go_on(server, replicas, program, tmp_path, names, lost, how, place, given_up):
    lines = server.run(tmp_path / "run", program, lost=lost, how=how, place=place, names=names)
    scope = {"STEPS": replicas.STEPS}
    exec(cell(CHAPTER / "07_lose_a_replica.ipynb", "one-process"), scope | vars(replicas) | IMPORTED, scope)
    exec(cell(CHAPTER / "07_lose_a_replica.ipynb", "show"), scope)
    exec(cell(CHAPTER / "07_lose_a_replica.ipynb", "prove").partition("\n\n\n")[0], scope)
    scope["prove"](lines, names.replace(lost, ""), given_up, lost)


def test_anybody_who_reaches_the_lighthouse_can_end_a_replica(server, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    run = threading.Thread(target=server.run, args=(tmp_path / "run", tmp_path / "slow.py"), kwargs={"may_fail": True})
    run.start()
    notes = tmp_path / "run/a0.jsonl"
    while run.is_alive() and not (notes.exists() and notes.read_text()):  # the run itself ends after LIMIT_S
        time.sleep(0.1)
    address = (tmp_path / "run/address").read_text()
    status = urllib.request.urlopen(f"{address}/status", timeout=30).read().decode()
    (replica,) = set(re.findall(r"/replica/(a:[^/\"]+)/kill", status))
    with pytest.raises(urllib.error.HTTPError):  # the replica has ended before it could answer
        urllib.request.urlopen(urllib.request.Request(f"{address}/replica/{replica}/kill", method="POST"), timeout=30)
    run.join()
    assert not (tmp_path / "run/end").exists() and len(notes.read_text().splitlines()) < 1000


IMPORTED = {"cross_entropy": __import__("torch").nn.functional.cross_entropy}
SLOW = """
import time


def train(manager, model, optimizer, run):
    for step in range(1000):
        manager.start_quorum()
        manager.should_commit()
        run.note(step, True, model)
        time.sleep(0.1)
"""
