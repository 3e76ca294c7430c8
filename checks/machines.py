"""Machines of a Ray cluster: groups of processes on this computer, each with its own home, token and packages."""

import atexit
import contextlib
import logging
import os
import re
import shlex
import shutil
import site
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from shared.on_ray import cluster
from shared.rendezvous import free_port

# Python runs this file before a program. It makes the workshop's package `shared` look as if nobody had installed it:
# only the copy that Ray unpacks for a job is found. In workers it moves the clock of a machine whose clock is wrong.
SITECUSTOMIZE = """
import os, sys, time
from importlib.machinery import PathFinder

class OnlyFromTheJob:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "shared":
            spec = PathFinder.find_spec(name, [folder for folder in sys.path if "runtime_resources" in folder])
            if spec is None:
                raise ModuleNotFoundError("No module named 'shared'", name=name)
            return spec

sys.meta_path.insert(0, OnlyFromTheJob)
wrong_by_s = float(os.environ.get("CLOCK_IS_WRONG_BY_S", 0))
if wrong_by_s and any(word.endswith("default_worker.py") for word in sys.orig_argv):
    right = time.time
    time.time = lambda: right() + wrong_by_s
"""
START_S = 300  # others may be using these cores
NO_ROOM = "worker group startup timed out"  # Ray Train's words after a minute without room for the workers
# What Ray itself prints while a job runs.
OF_RAY = (
    r"\d{4}-\d\d-\d\d .* INFO |\[.*core_worker|\(raylet\)|\t\(\d\)|Running entrypoint|Requesting resources|"
    r"Attempting to start|Started training worker group|- \(ip="
)


@dataclass(frozen=True)
class Ended:
    """How a job ended: whether it succeeded, and the lines that its processes printed, without those of Ray."""

    succeeded: bool
    lines: list[str]


class Machines:
    """A head and machines that join it, each in a folder of its own. Call `stop`, or use it as a context manager."""

    def __init__(self, token: Path | None = None) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True)  # Ray needs a short path
        self.folder, self.token = Path(self.scratch.name), token
        self.port, self.dashboard, client_port = free_port(), free_port(), free_port()
        self.head_options = [f"--port={self.port}", f"--dashboard-port={self.dashboard}"]
        self.hidden_options = [f"--ray-client-server-port={client_port}"]  # each machine of your own has its default
        self.processes: dict[str, psutil.Popen] = {}
        atexit.register(self.stop)

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The address where a driver or a machine joins the cluster."""
        return f"127.0.0.1:{self.port}"

    def home(self, name: str) -> Path:
        """Return a machine's home folder."""
        return self.folder / name / "home"

    def start(self, name: str, clock_wrong_by_s: float = 0, package: tuple[str, str] | None = None) -> str:
        """Start a machine, or the one called "head", wait until it has joined, and return its `ray start` command.

        clock_wrong_by_s: what its clock shows too much. package: the name and version that pip has recorded there for
        one of its packages.
        """
        packages = self.folder / name / "site"
        self.home(name).mkdir(parents=True)
        packages.mkdir()
        (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
        if package:
            record = packages / f"{package[0]}-{package[1]}.dist-info"
            record.mkdir()
            (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package[0]}\nVersion: {package[1]}\n")
        if self.token:  # its owner has copied it there, to the place where Ray looks
            copy = self.home(name) / ".ray/auth_token"
            copy.parent.mkdir()
            copy.touch(mode=0o600)
            copy.write_text(self.token.read_text())
        head = name == "head"
        shown = ["ray", "start", *(["--head", *self.head_options] if head else [f"--address={self.address}"])]
        shown += [f"--num-cpus={0 if head else 1}", f"--labels=machine={name}"]
        hidden = ["--block", "--disable-usage-stats", f"--temp-dir={self.folder / name / 'ray'}"]
        hidden += [f"--dashboard-agent-listen-port={free_port()}", f"--object-store-memory={100 * 2**20}"]
        hidden += self.hidden_options if head else []
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        variables |= {"HOME": str(self.home(name)), "PYTHONPATH": str(packages), "MACHINE": name}
        variables |= {"PYTHONUSERBASE": site.getuserbase()}  # by default it is in the home folder
        variables |= {"CLOCK_IS_WRONG_BY_S": str(clock_wrong_by_s)} if clock_wrong_by_s else {}
        variables |= {"RAY_AUTH_MODE": "token" if self.token else "disabled"}
        variables |= {"DASHBOARD_METRIC_PORT": str(free_port()), "AUTOSCALER_METRIC_PORT": str(free_port())}
        self.run(name, [sys.executable, "-m", "ray.scripts.scripts", *shown[1:], *hidden], variables)
        return shlex.join(shown)

    def run(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        """Start a machine's process, and wait until Ray says that it runs."""
        log = self.folder / name / "log"
        with open(log, "w") as file:
            process = psutil.Popen(
                command, env=variables, cwd=self.home(name), stdout=file, stderr=file, start_new_session=True
            )
        self.processes[name] = process
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"machine {name} does not start: {log.read_text()}")
            time.sleep(0.1)

    def submit(self, command: str, working_dir: Path | None = None, py_modules: list[Path] | None = None) -> Ended:
        """Submit a job as `ray job submit` does, and wait for its end. Its `python` is this environment's."""
        for name in ("dashboard_sdk", "packaging", "modules.job.sdk"):
            for package in ("ray.dashboard.modules", "ray._private.runtime_env", "ray.dashboard"):
                logging.getLogger(f"{package}.{name}").setLevel(logging.ERROR)
        client = self.client()
        environment = {"env_vars": {**cluster.QUIET, "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}}
        environment |= {"working_dir": str(working_dir)} if working_dir else {}
        environment |= {"py_modules": list(map(str, py_modules))} if py_modules else {}
        command = re.sub(r"^python\b", shlex.quote(sys.executable), command)
        job = client.submit_job(entrypoint=command, runtime_env=environment)
        while not (status := client.get_job_status(job)).is_terminal():
            if NO_ROOM in client.get_job_logs(job):
                client.stop_job(job)  # it would try forever
            time.sleep(0.3)
        text = re.sub(r"\x1b\[[0-9;]*m", "", client.get_job_logs(job))
        lines = [re.sub(r"^\(\w+ pid=\d+[^)]*\) ", "", line) for line in text.splitlines()]
        return Ended(status == JobStatus.SUCCEEDED, [line for line in lines if line and not re.match(OF_RAY, line)])

    def client(self) -> JobSubmissionClient:
        """Return a client of this cluster, even if the environment names a different one, which Ray would prefer."""
        name, url = "RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{self.dashboard}"
        before = os.environ.get(name)
        os.environ[name] = url
        try:
            return JobSubmissionClient(url)
        finally:
            del os.environ[name]
            os.environ.update({name: before} if before is not None else {})

    def replace(self, name: str, by: str) -> str:
        """Lose the machine `name`, start the machine `by`, and return its `ray start` command.

        The new one comes from an image that is older than the others'.
        """
        self.lose(name)
        return self.start(by, package=("numpy", "2.1.3"))

    def lose(self, name: str) -> None:
        """Kill all processes of a machine at once, and delete its disk."""
        cluster.kill(family := self.family(self.processes.pop(name)))
        psutil.wait_procs(family, timeout=30)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    @staticmethod
    def family(process: psutil.Popen) -> list[psutil.Process]:
        """Return a machine's processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process, *process.children(recursive=True)]
        return []

    def stop(self) -> list[psutil.Process]:
        """Kill the processes of all machines, delete their disks, and return the processes."""
        processes = [each for process in self.processes.values() for each in self.family(process)]
        cluster.kill(processes)
        psutil.wait_procs(processes, timeout=30)
        self.processes.clear()
        self.scratch.cleanup()
        return processes
