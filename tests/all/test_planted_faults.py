"""scripts/verify_cluster.py finds what is wrong, and where: two nodes, one of them sick in several ways."""

import json
import re
import shlex
import signal
import sys
from importlib.metadata import version

import clusters
import pytest
from clusters import PROGRAM, call
from runs import below

VERIFY = PROGRAM / "scripts/verify_cluster.py"
WRONG_BY_S = 1000
NAME = r"[\d.]+ \([0-9a-f]{8}\)"  # address and node ID
# Python runs this before a program: of the sick node's processes the workers get another clock, Ray's own do not.
SITECUSTOMIZE = f"""
import sys, time
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    right = time.time
    time.time = lambda: right() + {WRONG_BY_S}
"""


@pytest.fixture(scope="module")
def cluster():
    with clusters.head() as variables:
        yield variables


@pytest.fixture
def sick(tmp_path) -> dict[str, str]:
    """What Python finds on the sick node alone: another version of a package, and another clock."""
    packages = tmp_path / "sick"
    (packages / "numpy-1.2.3.dist-info").mkdir(parents=True)
    (packages / "numpy-1.2.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.2.3\n")
    (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": str(packages)}


def items(said: str) -> dict[str, tuple[str, str]]:
    """Of each item: [OK] or [FAIL], and all that stands behind its name, the advice too."""
    found, name = {}, None
    for line in said.splitlines():
        if line.startswith(("[OK]", "[FAIL]")):
            verdict, rest = line.split(maxsplit=1)
            name, _, seen = rest.partition(": ")
            found[name] = (verdict, seen)
        elif name and line.startswith("    "):
            found[name] = (found[name][0], f"{found[name][1]} -> {line.strip()}")
    return found


def test_a_node_with_another_storage_another_package_and_another_clock(cluster, sick, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    mounts = clusters.can_mount()
    before = f"mount -t tmpfs tmpfs {shlex.quote(str(storage))}" if mounts else ""
    with clusters.node(cluster, tmp_path / "node.log", before=before, **sick):
        said = call(sys.executable, VERIFY, storage, "--patience", "300", code=1, **cluster)
    seen = items(said)
    healthy = ("nodes", "disks", "GPUs") if mounts else ("nodes", "disks", "GPUs", "storage")
    assert {name for name, (verdict, _) in seen.items() if verdict == "[OK]"} == set(healthy), said
    clocks, packages, training = (seen[name][1] for name in ("clocks", "packages", "training"))
    wrong_by, name = re.match(rf"at least ([\d.]+) s from this one on ({NAME}) ", clocks).groups()
    assert WRONG_BY_S - 10 < float(wrong_by) <= WRONG_BY_S
    assert clocks.endswith(f"{name} -> run an NTP client (chrony) on all nodes")  # and no other node is named
    assert packages.startswith(f"numpy 1.2.3 on {name}, but {version('numpy')} here -> ")
    assert packages.endswith("the same requirements.txt, on all nodes")
    assert training == "not tried -> first fix what failed above"
    assert f"{len(seen)} items, {len(seen) - len(healthy)} failed" in said
    if not mounts:
        pytest.skip("clocks and packages hold; no mount table of its own is allowed here: storage not tried")
    assert seen["storage"][1].startswith(f"{storage} is not one folder: {name}: ")
    assert seen["storage"][1].endswith("-> mount it on all nodes at this path")


def test_a_node_that_has_frozen(cluster, tmp_path):
    with clusters.node(cluster, tmp_path / "node.log") as process:
        (raylet,) = below(process, clusters.RAYLET)
        raylet.send_signal(signal.SIGSTOP)
        said = call(sys.executable, VERIFY, tmp_path, "--json", code=1, **cluster)
    found = {item["name"]: item for item in json.loads(said[said.index("[\n") :])}
    assert {name for name, item in found.items() if item["ok"]} == {"clocks", "packages", "disks", "storage", "GPUs"}
    assert re.fullmatch(rf"no worker answered in 60 s on {NAME}", found["nodes"]["seen"])
    assert found["nodes"]["fix"] == "check its raylet's log; stop it"
    assert found["training"]["seen"] == "not tried"
