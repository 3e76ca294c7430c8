"""docs/troubles.md: what one machine can cause is caused here, has the page's words, and is then mended."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import clusters
import pytest
from runs import LIMIT, ROOT, TORCHRUN

from shared.rendezvous import free_port

ROWS = [line for line in (ROOT / "docs/troubles.md").read_text().splitlines() if line.startswith("| ")]
SYMPTOMS = [words for row in ROWS for words in re.findall("`([^`]+)`", row)]


def quoted(words: str) -> str:
    """These words, which the page's table has too, as code: what it leaves open there is not among them."""
    assert any(words in symptom for symptom in SYMPTOMS), f"docs/troubles.md does not say {words}"
    return words


def without_ray(**variables: str) -> dict[str, str]:
    """The environment without what it says of a Ray, and with these variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def run(*command: object, ok: bool = True, cwd: Path | None = None, **variables: str) -> str:
    """Run a command to its end, which is to be a good one or not; what it has said."""
    done = subprocess.run(
        list(map(str, command)), env=without_ray(**variables), cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


@contextmanager
def running(output: Path, *command: object, **variables: str) -> Iterator[subprocess.Popen]:
    """A command that has no end of its own."""
    with open(output, "w") as file:
        words = list(map(str, command))
        process = subprocess.Popen(words, env=without_ray(**variables), cwd=output.parent, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()  # inside a call of Ray it would not take another signal for half a minute
        process.wait(LIMIT)


def wait_until(output: Path, process: subprocess.Popen, words: str) -> str:
    """What a command has said, as soon as these words are among it; it must still run."""
    deadline = time.monotonic() + LIMIT
    while words not in (said := output.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.2)
    return said


def script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("troubles")


@pytest.fixture(scope="module")
def cluster():
    with clusters.head() as variables:
        yield variables


@pytest.fixture(scope="module")
def nodes(cluster, folder) -> Iterator[bool]:
    """A node as it should be, `near`, and one with little shared memory that does not see the folder `project`, `far`.

    Whether it is so: that takes a mount table of its own.
    """
    project, mounts = folder / "project", clusters.can_mount()
    project.mkdir()
    before = f"mount -t tmpfs tmpfs {shlex.quote(str(project))}\nmount -t tmpfs -o size=32m tmpfs /dev/shm"
    store = f"--object-store-memory={100 * 2**20}"
    with (
        clusters.node(cluster, folder / "near.log", store, '--resources={"near": 1}'),
        clusters.node(cluster, folder / "far.log", store, '--resources={"far": 1}', before=before if mounts else ""),
    ):
        yield mounts


@pytest.fixture
def far(nodes):
    if not nodes:
        pytest.skip("no mount table of its own is allowed here")


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    return f"127.0.0.1:{free_port()}"


# --- a node or a driver that does not join ---------------------------------------------------------------------------


def test_a_node_with_another_token_does_not_join(cluster, nodes, folder):
    (folder / "token").write_text("0" * 64)
    said = run(*clusters.ray_start(cluster), ok=False, **{**cluster, "RAY_AUTH_TOKEN_PATH": str(folder / "token")})
    assert quoted("InvalidAuthToken: Authentication token is missing or incorrect") in said
    # With the head's token it joins: so have the nodes of this file.


def test_a_node_tries_for_minutes_where_nobody_listens(cluster, nodes, closed, tmp_path):
    command = clusters.ray_start({**cluster, "RAY_ADDRESS": closed})
    with running(tmp_path / "out", *command, **cluster) as process:
        wait_until(tmp_path / "out", process, f":{closed.split(':')[1]}{quoted(' within 5 seconds')}")
    assert quoted("Failed to connect to GCS at address") in (tmp_path / "out").read_text()
    # At the address that the head has printed it joins: so have the nodes of this file.


def stale(folder: Path, address: str) -> None:
    """The file by which Ray finds "the" cluster of a machine."""
    (folder / "ray").mkdir()
    (folder / "ray/ray_current_cluster").write_text(address)


def test_an_address_file_that_a_dead_cluster_has_left(closed, tmp_path):
    stale(tmp_path, closed)
    init = script(tmp_path / "init.py", "import ray\nray.init()\nprint('nodes:', len(ray.nodes()))\n")
    with running(tmp_path / "out", sys.executable, init, RAY_TMPDIR=str(tmp_path)) as process:
        said = wait_until(tmp_path / "out", process, "Failed to connect to GCS at address")
    assert quoted("Connecting to existing Ray cluster at address") in said and f":{closed.split(':')[1]}" in said
    # Another symptom: a folder for Ray's files whose path is too long for sockets in it.
    said = run(sys.executable, init, ok=False, RAY_ADDRESS="local", RAY_TMPDIR=str(tmp_path / ("a" * 60)))
    assert quoted("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes") in said
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        stale(Path(short), closed)
        assert "nodes: 1" in run(sys.executable, init, RAY_ADDRESS="local", RAY_TMPDIR=short)


def test_a_head_whose_port_for_clients_is_taken():
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # a short path: Ray makes sockets in it
    with folder as short, socket.create_server(("127.0.0.1", 0)) as other:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"]
        command += ["--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={100 * 2**20}"]
        command += [f"--port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
        command += [f"--ray-client-server-port={other.getsockname()[1]}"]
        said = run(*command, ok=False, RAY_TMPDIR=short, **clusters.AT_ONCE)
    assert quoted("Some Ray subprocesses exited unexpectedly") in said and quoted("Address already in use") in said
    assert quoted("ray_client_server") in said.partition("exited unexpectedly")[2].splitlines()[1]
    # With a port that is free it stays: so has the head of this file.


# --- a job that waits, or whose files are gone -----------------------------------------------------------------------

FIT = """
    import sys
    from pathlib import Path
    import ray.train
    from ray.train.torch import TorchTrainer

    def train(config):
        rank = ray.train.get_context().get_world_rank()
        Path(f"relative-{rank}.txt").write_text("written")
        Path(config["storage"], f"absolute-{rank}.txt").write_text("written")
        return str(Path.cwd())

    trainer = TorchTrainer(
        train,
        train_loop_config={"storage": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=int(sys.argv[2])),
        run_config=ray.train.RunConfig(storage_path=sys.argv[1], name="run"),
    )
    print("worker's folder:", trainer.fit().return_value)
"""


def test_a_fit_that_asks_for_too_much_waits_and_where_its_files_are(cluster, nodes, tmp_path):
    fit, output = script(tmp_path / "fit.py", FIT), tmp_path / "out"
    variables = {**cluster, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}  # 60 by default
    with running(output, sys.executable, fit, tmp_path, 4, **variables) as process:
        wait_until(output, process, quoted("Attempting to start training worker group of size 4"))
        deadline = time.monotonic() + LIMIT
        while quoted("{'CPU': 1.0} * 4 (PACK): 1+ pending placement groups") not in run("ray", "status", **cluster):
            assert process.poll() is None and time.monotonic() < deadline
        quoted("The worker group startup timed out after 60.0 seconds waiting for 4 workers")
        wait_until(output, process, "The worker group startup timed out after 10.0 seconds waiting for 4 workers")
    said = run(sys.executable, fit, tmp_path, 2, cwd=tmp_path, **cluster)  # there are two CPUs

    (workers_folder,) = re.findall("worker's folder: (.*)", said)
    assert not list(tmp_path.glob("relative-*")) and len(list(tmp_path.glob("absolute-*"))) == 2
    assert Path(workers_folder).is_relative_to(cluster["RAY_TMPDIR"])  # goes with the cluster, or with its machine


def test_a_job_without_its_folder_and_with_it(cluster, nodes, tmp_path):
    script(tmp_path / "train.py", "print('trained')\nopen('relative.txt', 'w').close()\n")
    submit = (sys.executable, "-m", "ray.scripts.scripts", "job", "submit")
    said = run(*submit, "--", sys.executable, "train.py", ok=False, cwd=tmp_path, **cluster)
    assert quoted("python: can't open file").partition(": ")[2] in said
    assert "trained" in run(*submit, "--working-dir", tmp_path, "--", sys.executable, "train.py", **cluster)
    assert not (tmp_path / "relative.txt").exists() and list(Path(cluster["RAY_TMPDIR"]).rglob("relative.txt"))


PLACE = """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    ray.init(log_to_driver=False)
    for strategy, patience in ("PACK", 60), ("STRICT_SPREAD", 60), ("STRICT_PACK", 3):
        group = placement_group([{"CPU": 1}] * 2, strategy=strategy)
        ready = group.wait(patience)
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values()) if ready else ()
        print(strategy, "waits" if not ready else f"on {len(nodes)} nodes")
        ray.util.remove_placement_group(group)

    @ray.remote(num_cpus=0)
    def where():
        return ray.get_runtime_context().get_node_id()

    near = next(node["NodeID"] for node in ray.nodes() if "near" in node["Resources"])
    print("resource near:", ray.get(where.options(resources={"near": 0.1}).remote()) == near)
"""


def test_two_bundles_pack_where_they_can_and_strict_pack_waits(cluster, nodes, tmp_path):
    said = run(sys.executable, script(tmp_path / "place.py", PLACE), **cluster)  # two nodes with one CPU each
    for line in ("PACK on 2 nodes", "STRICT_SPREAD on 2 nodes", "STRICT_PACK waits", "resource near: True"):
        assert line in said.splitlines(), said


# --- what a worker does not have -------------------------------------------------------------------------------------


def test_a_module_that_only_the_driver_has_and_a_working_dir_that_is_too_large(cluster, far, folder):
    project = folder / "project"
    script(project / "helper.py", "ANSWER = 42\n")
    (project / "data.bin").write_bytes(os.urandom(30 * 2**20))
    main = script(project / "main.py", """
        import ray

        @ray.remote(resources={"far": 0.1}, num_cpus=0, max_retries=0)
        def answer():
            import helper
            return helper.ANSWER

        here = __file__.removesuffix("/main.py")
        for number, more in enumerate([
            {},
            {"working_dir": here},
            {"working_dir": here, "excludes": ["*.bin"]},
            {"py_modules": [f"{here}/helper.py"]},
        ]):
            try:
                ray.init(runtime_env=more)
                print(f"[{number}]", ray.get(answer.remote()))
            except Exception as error:
                print(f"[{number}]", *str(error).splitlines()[-1:])
            ray.shutdown()
    """)  # fmt: skip
    # The limit is 512 MiB. It is lowered here, so that nobody has to pack so much.
    said = run(sys.executable, main, cwd=project, **cluster, RAY_max_grpc_message_size=str(20 * 2**20))
    answers = dict(re.findall(r"^\[(\d)\] (.*)$", said, flags=re.MULTILINE))
    assert answers["0"] == quoted("ModuleNotFoundError: No module named 'helper'"), said
    assert f"Package size (30.00MiB){quoted(' exceeds the maximum size of ')}20.00MiB" in answers["1"]
    assert answers["2"] == answers["3"] == "42"


def test_shared_memory_that_is_too_small(cluster, far, folder):
    words = f"{quoted('The object store is using ')}{cluster['RAY_TMPDIR']}/ray"
    words += f"{quoted(' instead of /dev/shm because /dev/shm has only ')}33554432"
    assert words in (folder / "far.log").read_text()
    assert "instead of /dev/shm" not in (folder / "near.log").read_text()  # there is as much as it needs


# --- without Ray -----------------------------------------------------------------------------------------------------


def test_a_network_interface_that_is_not_there(tmp_path):
    meet = script(tmp_path / "meet.py", """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"sum: {total.item():.0f}\\n", end="", flush=True)
        dist.destroy_process_group()
    """)  # fmt: skip
    command = [*TORCHRUN, "--nproc-per-node", "2", meet]
    assert f"{quoted('Unable to find address for: ')}nosuch0" in run(*command, ok=False, GLOO_SOCKET_IFNAME="nosuch0")
    assert run(*command, GLOO_SOCKET_IFNAME="lo").count("sum: 2") == 2


def test_a_batch_that_does_not_fit_into_memory(tmp_path):
    said = run(sys.executable, script(tmp_path / "memory.py", """
        import resource
        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1)).double()
        samples = torch.randn(8192, 64, dtype=torch.float64)

        def step(parts):
            model.zero_grad()
            total = 0.0
            for part in samples.chunk(parts):
                loss = model(part).square().sum() / len(samples)
                loss.backward()
                total += loss.item()
            return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

        step(1024)  # whatever is made once
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 128 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            step(1)
        except RuntimeError as error:
            print(error)
        loss, gradient = step(128)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        whole_loss, whole_gradient = step(1)
        print("same:", abs(loss - whole_loss) < 1e-12, torch.allclose(gradient, whole_gradient, rtol=0, atol=1e-12))
    """))  # fmt: skip
    assert quoted("can't allocate memory: you tried to allocate 268435456 bytes") in said and "same: True True" in said
