"""shared.on_ray.cluster: joining and starting Ray, training on it, and leaving it."""

import argparse
import json
import os
import signal
import subprocess
import time
from datetime import datetime

import psutil
import pytest
import ray
from ray._private import services
from ray._private.utils import validate_socket_filepath
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, RayActorError
from runs import ROOT, refused_here

from shared import paths
from shared.distributed import Worker
from shared.errors import RunFailed, UsageError
from shared.on_ray import cluster, workers
from shared.on_ray.storage import RayRun
from shared.rendezvous import free_port


def test_the_world_is_the_workers_or_torchruns(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert workers.num_processes(3) == 3
    assert workers.num_processes(0) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert workers.num_processes(0) == 2


def test_resources_in_words():
    assert cluster.in_words({"CPU": 1.0}) == "1 CPU and no GPU"
    assert cluster.in_words({"CPU": 8.0, "GPU": 1.0}) == "8 CPUs and 1 GPU"
    assert cluster.in_words({"GPU": 2.0}) == "0 CPUs and 2 GPUs"
    assert cluster.enough({"CPU": 2.0}, {"CPU": 2, "GPU": 0})
    assert not cluster.enough({"CPU": 2.0}, {"CPU": 2, "GPU": 1})


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RAY_DATA_LOG_LEVEL": "DEBUG"})
    own, joined = cluster.quiet_settings(own=True), cluster.quiet_settings(own=False)
    assert own["RAY_DATA_LOG_LEVEL"] == joined["RAY_DATA_LOG_LEVEL"] == "DEBUG"
    assert own["RAY_TRAIN_ENABLE_PRINT_PATCH"] == os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"
    assert own.keys() - joined.keys() == {
        "RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
    }  # fmt: skip
    elastic = cluster.quiet_settings(own=False, elastic=True)
    assert elastic.keys() - joined.keys() == {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"}


@pytest.mark.parametrize(("variables", "address"), [
    ({}, "local"),
    ({"ANYSCALE_CLI_TOKEN": "a laptop has one too"}, "local"),
    ({"ANYSCALE_CLUSTER_ID": "ses_1"}, "auto"),
    ({"RAY_ADDRESS": "auto", "ANYSCALE_CLUSTER_ID": "ses_1"}, "auto"),
    ({"RAY_ADDRESS": "local", "ANYSCALE_CLUSTER_ID": "ses_1"}, "local"),
])  # fmt: skip
@pytest.mark.parametrize(("num_workers", "spare_cpus", "num_cpus"), [
    (1, 0, None), (2, 0, None), (2, 1, 3), (4, 1, 5), (64, 0, 4),
])  # fmt: skip
def test_where_ray_is_looked_for(variables, address, num_workers, spare_cpus, num_cpus, monkeypatch):
    def init(where: str, **options) -> None:
        assert where == address
        assert options.get("num_cpus") == (num_cpus if address == "local" else None)
        assert ("runtime_env" in options) == (address != "local")
        raise ConnectionError("seen enough")

    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(cluster, "get_num_cpus", lambda **options: 2)  # a pod's part of a host of 64
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=f"cannot join Ray at {address}: seen enough"):
        cluster.start(num_workers, spare_cpus=spare_cpus)
    assert os.environ.get("RAY_ADDRESS") == variables.get("RAY_ADDRESS")


def test_the_driver_has_no_rank_in_its_lines(capsys):
    Worker(label="driver").log("hello")
    assert capsys.readouterr().out == "[driver] hello\n"


def test_only_processes_of_its_own_ray_are_ended(monkeypatch):
    """A kernel has other children too: a shell, a server, a Ray that somebody else has started."""
    monkeypatch.setattr(cluster, "OWN_RAY_ENV", {"RAY_ADDRESS": "10.0.0.1:6379"})
    # What is below one of Ray's belongs to it too, though its environment does not tell.
    scripts = {"10.0.0.1:6379": "env -u RAY_ADDRESS sleep 600 & wait", "10.0.0.1:6380": "exec sleep 600"}
    scripts[""] = scripts["10.0.0.1:6380"]
    children = [
        subprocess.Popen(["sh", "-c", script], env={**os.environ, "RAY_ADDRESS": address})
        for address, script in scripts.items()
    ]
    try:
        while not all("sleep" in name for name in (sleeper(each).name() for each in children)):
            time.sleep(0.01)
        below = sleeper(children[0])
        assert below.pid != children[0].pid
        cluster.stop_at_once()
        assert children[0].wait(600) == -9
        assert not psutil.wait_procs([below], timeout=600)[1]
        assert [each.poll() for each in children[1:]] == [None, None]
    finally:
        for each in children:
            each.kill()


def sleeper(child: subprocess.Popen) -> psutil.Process:
    """The last one of a child and of those below it."""
    return [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)][-1]


class Trainer:
    """What `fit` sees of a TorchTrainer: each outcome is raised or returned by one call."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)

    def fit(self) -> argparse.Namespace:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, ray.train.TrainingFailedError | RayActorError):
            raise outcome
        return argparse.Namespace(return_value=outcome)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Fit until the end; the metrics, and the outcomes that were not asked for."""
    released = []
    monkeypatch.setattr(workers, "remove_leftover_placement_groups", lambda: released.append(1))

    def run(*outcomes: object) -> tuple[list[dict], list, int]:
        trainer = Trainer(*outcomes)
        metrics = workers.fit(trainer, RayRun(str(tmp_path / "mine")), Worker(label="driver"))
        return metrics, trainer.outcomes, len(released)

    return run


DIED = ray.train.ControllerError(ActorDiedError())
METRICS = [{"epoch": 1}]


def test_a_fit_that_loses_a_process_is_tried_again(fit, capsys):
    assert fit(METRICS) == (METRICS, [], 0)
    assert fit(DIED, ActorDiedError(), DIED, METRICS) == (METRICS, [], 3)
    tries = capsys.readouterr().out.splitlines()
    assert [line[-9:] for line in tries] == [" (1 of 3)", " (2 of 3)", " (3 of 3)"]
    assert "died where Ray Train does not replace it (ActorDiedError)" in tries[0]


@pytest.mark.parametrize(("outcomes", "why"), [
    ([DIED] * 4, "a worker or Ray's controller died where Ray Train does not replace it (ActorDiedError)"),
    ([ray.train.WorkerGroupError("", {1: ActorDiedError()})], "the worker of rank 1 died, and max_failures allows"),
    ([ray.train.WorkerGroupError("", {3: ValueError("a bug"), 5: ActorDiedError()})],
     "the worker of rank 3 failed: a bug"),
    ([ray.train.ControllerError(OSError("no\nspace"))], "Ray Train failed: "),
])  # fmt: skip
def test_a_fit_that_failed_for_good_is_one_line(outcomes, why, fit, tmp_path):
    with pytest.raises(RunFailed) as caught:
        fit(*outcomes)
    message = str(caught.value)
    assert message.startswith(why) and "\n" not in message
    assert message.endswith("nothing was saved yet")


def test_a_users_mistake_is_returned_by_a_worker_and_raised_by_fit(fit, monkeypatch):
    def train(num_workers: int, worker: Worker) -> list[dict]:
        raise UsageError(f"{num_workers} are too many")

    monkeypatch.setattr(workers, "current_worker", Worker)
    returned = workers.on_workers(train)({"num_workers": 7})
    with pytest.raises(UsageError, match="7 are too many"):
        fit(returned)


def test_the_reason_is_the_exception_and_not_a_warning_behind_it():
    text = "\x1b[36mray::train()\x1b[0m\n  ...\nRuntimeError: Gloo connectFullMesh failed\n[W socket.cpp] no name\n"
    failed = ray.train.WorkerGroupError("", {0: ValueError(text)})
    assert workers.reason_of(failed) == "the worker of rank 0 failed: RuntimeError: Gloo connectFullMesh failed"


LONG = "/tmp/" + 60 * "a"  # as Slurm's folder of a job may be


@pytest.mark.parametrize(("variables", "words"), [
    ({"TMPDIR": LONG}, "TMPDIR=/tmp/aaaa.* is too long by .* bytes for Ray's sockets: set RAY_TMPDIR to a shorter"),
    ({"RAY_TMPDIR": LONG}, "RAY_TMPDIR=/tmp/aaaa.* is too long by"),
    ({"RAY_TMPDIR": LONG, "TMPDIR": "/tmp"}, "RAY_TMPDIR=/tmp/aaaa.* is too long by"),
    ({"TMPDIR": "/tmp/" + 20 * "ä"}, "TMPDIR=/tmp/ää.* is too long by"),  # bytes count, not characters
    ({"TMPDIR": "tmp"}, "TMPDIR=tmp is not an absolute path: set RAY_TMPDIR to"),
    ({"TMPDIR": ""}, "TMPDIR= is not an absolute path"),
    ({"RAY_TMPDIR": "~/tmp"}, "RAY_TMPDIR=~/tmp is not an absolute path"),
    ({"TMPDIR": __file__}, r"Ray cannot write to .*test_cluster\.py \(TMPDIR="),
    ({"TMPDIR": "/dev/null/below"}, r"Ray cannot write to /dev/null \(TMPDIR="),
    ({"RAY_TMPDIR": "/proc/none"}, "Ray cannot write|cannot join Ray at local"),  # root may write there, by os.access
])  # fmt: skip
def test_a_temporary_folder_in_which_ray_could_not_work_is_refused(variables, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_TMPDIR", "TMPDIR", "RAY_ADDRESS")}
    monkeypatch.setattr(os, "environ", kept | variables)
    with pytest.raises(UsageError, match=words) as caught:
        cluster.start(1)
    assert "\n" not in str(caught.value) and not ray.is_initialized()
    assert cluster.start(0, use_gpu=False) is False  # local mode needs no Ray


@pytest.mark.parametrize("variables", [
    {}, {"TMPDIR": LONG, "RAY_TMPDIR": "/tmp"}, {"TMPDIR": "/tmp/" + 30 * "a"}, {"TMPDIR": "/tmp/none/yet"},
])  # fmt: skip
def test_a_temporary_folder_in_which_ray_works(variables, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    assert paths.ray_temp_dir() == variables.get("RAY_TMPDIR", variables.get("TMPDIR", "/tmp"))


def test_the_longest_temporary_folder_is_the_longest_that_ray_takes(monkeypatch):
    name = f"ray/session_{datetime.today().strftime('%Y-%m-%d_%H-%M-%S_%f')}_{os.getpid()}/sockets/plasma_store"
    for length in range(20, 60):
        monkeypatch.setenv("RAY_TMPDIR", folder := "/tmp/" + length * "a")
        problems = []
        for check in (lambda: validate_socket_filepath(f"{folder}/{name}"), paths.ray_temp_dir):
            try:
                check()
            except (OSError, UsageError) as error:
                problems.append(error)
        assert len(problems) in (0, 2), length


def test_a_temporary_folder_that_a_different_user_owns(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(paths, "SOCKET_BYTES", 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "ray")  # root may write everywhere
    with pytest.raises(UsageError, match=r"Ray cannot write to .*/ray .*: set RAY_TMPDIR to a folder of your own"):
        paths.ray_temp_dir()


def test_a_cluster_of_several_nodes_is_refused_in_a_long_tmpdir_too(monkeypatch, tmp_path):
    (folder := tmp_path / (70 * "a")).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of pytest's process
    line = refused_here(ROOT / "04-ray-in-production/elastic.py")
    assert line.startswith(f"elastic.py: error: TMPDIR={folder} is too long") and not list(folder.iterdir())


@pytest.mark.parametrize(("address", "words"), [
    ("http://head:8265", "is Ray's dashboard, .* joins at head:6379"), ("head:8265", "is Ray's dashboard"),
    ("https://head:8265/", "joins at head:6379"), ("ray://head:10001", "is Ray Client's, .* joins at head:6379"),
    ("head:10001", "is Ray Client's"),
])  # fmt: skip
def test_an_address_that_is_not_for_a_driver_is_explained(address, words):
    with pytest.raises(UsageError, match=words):
        cluster.check_answers(address)


@pytest.mark.parametrize("blank", [" ", "\r", "\t "])
def test_blanks_around_an_address_are_ignored(blank, monkeypatch):
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}{blank}")
    with pytest.raises(UsageError, match=rf"no Ray answers at RAY_ADDRESS=127.0.0.1:{port} \(Connection refused\)"):
        cluster.start(1)


def test_a_cluster_that_has_ended_is_not_waited_for(monkeypatch, tmp_path):
    """A crash leaves its address behind, where `auto` looks for it."""
    port = free_port()
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UsageError, match=r"no Ray answers at RAY_ADDRESS=auto \(Connection refused\): unset it"):
        cluster.start(1)


@pytest.mark.parametrize("executable", ["/usr/bin/python3", "/it's a course/.venv/bin/python"])
def test_a_shell_that_starts_rays_workers_finds_their_python(executable, monkeypatch):
    sent = {}
    monkeypatch.setattr(cluster, "ray_init", lambda address, log_level, **options: sent.update(options))
    monkeypatch.setattr(cluster.sys, "executable", executable)
    cluster.start_own(1, 0, dashboard=False)
    python = sent.get("runtime_env", {}).get("py_executable", executable)
    assert subprocess.check_output(["sh", "-c", f"printf %s {python}"], text=True) == executable


def test_without_a_home_ray_gets_a_token_unless_it_has_one(monkeypatch):
    seen = []
    monkeypatch.setattr(cluster, "ray_init", lambda address, **_: seen.append(os.environ.get("RAY_AUTH_TOKEN")))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    cluster.start_own(1, 0, dashboard=False)
    monkeypatch.setenv("HOME", "/no/home")
    cluster.start_own(1, 0, dashboard=False)
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    cluster.start_own(1, 0, dashboard=False)
    assert (seen[0], len(seen[1]), seen[2], os.environ["RAY_AUTH_TOKEN"]) == (None, 64, "the user's", "the user's")


def test_the_address_of_a_store_goes_to_all_nodes_and_credentials_stay(monkeypatch):
    sent = {}
    monkeypatch.setattr(cluster, "check_answers", lambda address: None)
    monkeypatch.setattr(cluster, "ray_init", lambda address, log_level, **options: sent.update(options))
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "something")
    cluster.join("head:6379", {"QUIET": "1"}, ())
    expected = {"QUIET": "1", "RAY_ADDRESS": "head:6379", "AWS_ENDPOINT_URL": "something", "AWS_REGION": "something"}
    assert sent["runtime_env"]["env_vars"] == expected
    # A submitted job whose own environment names the store: Ray refuses to be told twice.
    job = {"runtime_env": {"env_vars": {"AWS_ENDPOINT_URL": "something"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    cluster.join("head:6379", {}, ())
    assert sent["runtime_env"]["env_vars"] == {"RAY_ADDRESS": "head:6379", "AWS_REGION": "something"}


# --- with a Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Join a cluster, and leave it at the test's end."""

    def join(address: str, num_workers: int, **options: object) -> bool:
        monkeypatch.setenv("RAY_ADDRESS", address)
        return cluster.start(num_workers, **options)

    yield join
    ray.shutdown()


def test_a_cluster_that_is_too_small(joined, monkeypatch, capsys):
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "dashboard_port": None}
    )
    try:
        assert joined(nodes.address, 2) is False
        assert f"[driver] joined the Ray cluster at {nodes.address}: 2 CPUs and no GPU" in capsys.readouterr().out
        ray.shutdown()

        monkeypatch.setattr(cluster, "AUTOSCALER_WAIT_S", 3)
        with pytest.raises(UsageError, match="16 workers need 16 CPUs and no GPU, and there are 2 CPUs and no GPU"):
            joined(nodes.address, 16)
        ray.shutdown()
        with pytest.raises(UsageError, match="2 workers need 3 CPUs and no GPU, and there are 2 CPUs and no GPU"):
            joined(nodes.address, 2, spare_cpus=1)  # Ray Data's tasks would wait for ever
        ray.shutdown()

        with pytest.raises(UsageError, match=r"2 CPUs and 2 GPUs, and there are 2 CPUs and no GPU: .*--no-use-gpu"):
            joined(nodes.address, 2, use_gpu=True)
        ray.shutdown()

        # No autoscaler runs here: this is what one reports once it has begun.
        begun = argparse.Namespace(pending_launches=["a node"], pending_nodes=[])
        monkeypatch.setattr(cluster, "get_cluster_status", lambda address: begun)
        joined(nodes.address, 16)
        assert "the cluster is starting nodes; waiting for 16 times 1 CPU" in capsys.readouterr().out
        ray.shutdown()

        nodes.add_node(num_cpus=2)
        joined(nodes.address, 4)
        assert "4 CPUs and no GPU" in capsys.readouterr().out
    finally:
        ray.shutdown()
        nodes.shutdown()
