"""Train on replicas that may die, freeze and return: for lesson 4.7.

`Server` starts `python replicas.py`, a process that imports torch and torchft once and forks every replica.
A replica calls a function of a program, as FUNCTION(manager, model, optimizer, run). What it notes is in its own file,
one JSON line per attempt at a step. Nothing of a run is left behind: each process is ended, or killed after LIMIT_S.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from shared import datasets

STEPS, BATCH = 20, 60
AT_STEP, ALONE = 6, 4  # an accident's step; the steps that the survivors then take before the lost replica returns
HEARTBEAT_S = float(os.getenv("HEARTBEAT_S", "3"))  # a replica that has been silent for so long counts as lost
TIMEOUT_S = float(os.getenv("TIMEOUT_S", "6"))  # of a collective, and of a load from a peer
LIMIT_S = float(os.getenv("LIMIT_S", "150"))  # of a run: it only catches a hang
MISSING = """\
Lesson 4.7 needs the package torchft, which not every learner installs: it exists for Linux on x86-64 alone.
Run `make torchft` in the workshop's folder, restart this kernel, and run this cell again."""


class PackageMissing(Exception):
    """An optional package is missing. Jupyter shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check() -> None:
    """Raise PackageMissing where torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise PackageMissing(MISSING)
    print("[OK]   torchft, the optional package of this lesson")


# --- The task: digits, a small network in float64, Adam. --------------------------------------------------------------


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, with the same first weights in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def global_batch(step: int) -> torch.Tensor:
    """Return the indices of the samples that step `step` learns from: BATCH of 1,280, in a fixed random order."""
    order = torch.randperm(1280, generator=torch.Generator().manual_seed(1))
    return order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]


@functools.cache
def digits() -> Dataset:
    """Return the images to learn from."""
    return datasets.digits().train


def samples(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 1, 8, 8) in float64, and labels (N,)."""
    images, labels = digits()[indices]
    return images.double(), labels


def digest(model: nn.Module) -> str:
    """Return a name for the exact bits of a model's weights."""
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]


# --- A replica: it notes what it does, and has its accident where that is planned. ------------------------------------


class Run:
    """What a replica knows of the run: its own name, where its notes go, and the accident that is planned."""

    def __init__(self, folder: Path, name: str, names: str, life: int, accident: dict | None) -> None:
        self.folder, self.name, self.names, self.life, self.accident = folder, name, names, life, accident
        self.index, self.bytes, self.loads, self.alone, self.returns = names.index(name), 0, [], 0, life > 0
        self.notes = folder / f"{name}{life}.jsonl"
        self.notes.touch()

    def note(self, step: int, committed: bool, model: nn.Module, participants: int = 0, **values: object) -> None:
        """Write a line about an attempt at a step, after it was committed or given up."""
        self.alone = self.alone + 1 if 0 < participants < len(self.names) else 0
        line = {"replica": self.name, "pid": os.getpid(), "step": step, "committed": committed}
        line |= {"participants": participants, **values, "bits": digest(model), "bytes": self.bytes}
        with self.notes.open("a") as file:
            file.write(json.dumps(line | {"loads": self.loads, "time": time.time()}) + "\n")

    def at(self, place: str, step: int) -> None:
        """Called by a replica before its quorum, its all-reduce and its commit: an accident may be planned there."""
        plan = self.accident
        if plan and (self.name, step, place, self.returns) == (plan["replica"], plan["step"], plan["place"], False):
            self.returns = True
            os.kill(os.getpid(), plan["signal"])
        if plan and place == "quorum":
            if self.returns:
                (self.folder / "asks").touch()
            if self.alone >= ALONE:  # a real step takes longer, and a process needs a while to start
                self.wait_for("asks")
                time.sleep(0.25)

    def wait_for_step(self, step: int, name: str) -> None:
        """Wait until the first process of a replica has noted a step."""
        while len(read_notes(self.folder / f"{name}0.jsonl")) <= step:
            time.sleep(0.01)

    def wait_for(self, name: str) -> None:
        """Wait for a file in the run's folder."""
        while not (self.folder / name).exists():
            time.sleep(0.01)


def replica(run: Run, program: Path, function: str, lighthouse: str) -> None:
    """Train, in a process of its own."""
    import torchft
    from torch.distributed import TCPStore

    class CountingGloo(torchft.ProcessGroupGloo):
        def allreduce(self, tensors, options):
            run.bytes += sum(tensor.nbytes for tensor in tensors)
            return super().allreduce(tensors, options)

    model, optimizer = build()

    def load(state):
        run.loads.append(manager.current_step())
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    manager = torchft.Manager(
        pg=CountingGloo(timeout=timeout), min_replica_size=1, use_async_quorum=False, init_sync=False,
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        timeout=timeout, quorum_timeout=timedelta(seconds=LIMIT_S), rank=0, world_size=1, hostname="localhost",
        store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, replica_id=run.name,
    )  # fmt: skip
    (run.folder / f"{run.name}{run.life}.ready").touch()
    run.wait_for("go")  # otherwise the first replica would train alone until the second one is there
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program))[function](manager, model, optimizer, run)
    (run.folder / f"{run.name}{run.life}.done").touch()
    run.wait_for("end")


# --- The server: it forks the processes of a run, and ends them. ------------------------------------------------------


class Processes:
    """The forked processes of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids, self.parent = folder, {}, os.getppid()

    def fork(self, name: str, function, *arguments: object) -> None:
        """Fork a process that calls a function, writes to NAME.log, and leaves by os._exit."""
        self.pids[name] = os.fork()
        if self.pids[name]:
            return
        log = os.open(self.folder / f"{name}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # a normal exit would wait for torchft's threads

    def wait_until(self, true: Callable[[], bool], may_die: str = "") -> bool:
        """Wait until something is true. Returns False if a process other than `may_die` ends first, or for a hang."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            for name, pid in list(self.pids.items()):
                if pid == os.waitpid(pid, os.WNOHANG)[0]:
                    del self.pids[name]
                    if name != may_die:
                        return False
            if os.getppid() != self.parent or time.monotonic() > deadline:  # then nobody waits for this run any more
                return False
            time.sleep(0.02)
        return True

    def wait_for(self, *files: str, may_die: str = "") -> bool:
        """Wait until all files are in the run's folder."""
        return self.wait_until(lambda: all((self.folder / file).exists() for file in files), may_die)

    def kill(self) -> None:
        """Kill what is left."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = {}


def watch_over_replicas(folder: Path) -> None:
    """Be the lighthouse: the process that all replicas tell that they are there."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=50, heartbeat_timeout_ms=int(1000 * HEARTBEAT_S),
        join_timeout_ms=60_000,  # without it, a quorum soon leaves out a replica that is alive but late
    )  # fmt: skip
    (folder / "address.part").write_text(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    (folder / "address.part").rename(folder / "address")
    time.sleep(2 * LIMIT_S)


def serve_run(folder: Path, program: Path, function: str, names: str, accident: dict | None) -> None:
    """Let the replicas of a run train; restart or wake the one that has the accident, and nobody else."""
    processes = Processes(folder)

    def start(name: str, life: int) -> None:
        run = Run(folder, name, names, life, accident)
        processes.fork(f"{name}{life}", replica, run, program, function, (folder / "address").read_text())

    try:
        processes.fork("lighthouse", watch_over_replicas, folder)
        if not processes.wait_for("address"):
            return
        for name in names:
            start(name, 0)
        if not processes.wait_for(*(f"{name}0.ready" for name in names)):
            return
        (folder / "go").touch()
        done = {name: f"{name}0.done" for name in names}
        if accident:
            lost, survivor = accident["replica"] + "0", next(name for name in names if name != accident["replica"])
            notes = folder / f"{survivor}0.jsonl"
            if not processes.wait_until(lambda: steps_alone(notes, names) >= ALONE, may_die=lost):
                return
            if accident["signal"] == signal.SIGSTOP:
                os.kill(processes.pids[lost], signal.SIGCONT)
            else:
                start(accident["replica"], 1)
                done[accident["replica"]] = accident["replica"] + "1.done"
        if processes.wait_for(*done.values(), may_die=accident["replica"] + "0" if accident else ""):
            (folder / "end").touch()
    finally:
        processes.kill()


def steps_alone(notes: Path, names: str) -> int:
    """Return how many steps a survivor has committed without the lost replica."""
    return sum(line["committed"] and line["participants"] < len(names) for line in read_notes(notes))


def read_notes(path: Path) -> list[dict]:
    """Return a replica's lines so far, without one that is being written."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def serve() -> None:
    """Serve the runs that standard input asks for, a JSON object per line; answer each by a line."""
    import torchft.local_sgd  # noqa: F401  what every replica needs

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        serve_run(Path(order.pop("folder")), Path(order.pop("program")), **order)
        print("done", flush=True)


# --- In the notebook. -------------------------------------------------------------------------------------------------


class Server:
    """The process that forks replicas: started with the first run, ended by `close`."""

    def __init__(self) -> None:
        self.process = None

    def run(
        self, folder: Path, program: Path, function: str = "train", *, lost: str = "", how: str = "kill",
        place: str = "quorum", at_step: int = AT_STEP, names: str = "ab", may_fail: bool = False,
    ) -> list[dict]:  # fmt: skip
        """Train on the replicas `names`, and return their notes in the order of their times.

        lost: the replica that is killed (how="kill") or frozen (how="freeze") before its quorum, its all-reduce or its
        commit (place) in step `at_step`. Raises RuntimeError if a replica fails or hangs, unless it may_fail.
        """
        if re.search(r"^ *raise NotImplementedError", program.read_text(), re.MULTILINE):
            raise NotImplementedError  # an exercise that nobody has begun
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
        accident = {"replica": lost, "step": at_step, "place": place, "signal": signals[how]} if lost else None
        order = {"folder": str(folder.resolve()), "program": str(program.resolve()), "function": function}
        self.ask(order | {"names": names, "accident": accident})
        if not may_fail and not (folder / "end").exists():
            raise RuntimeError(f"the run hangs or has failed. {'; '.join(errors(folder)) or 'No replica raised.'}")
        lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_notes(path)]
        return sorted(lines, key=lambda line: line["time"])

    def ask(self, order: dict) -> None:
        """Send an order to the server, and wait until it is done."""
        if self.process is None or self.process.poll() is not None:
            settings = {
                "RUST_LOG": "error",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
            }
            self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, bufsize=1, env={**os.environ, **settings},
            )  # fmt: skip
            self.answer("ready")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.answer("done")

    def answer(self, expected: str) -> None:
        """Wait for the server's answer."""
        if self.process.stdout.readline().strip() != expected:
            raise RuntimeError(f"the server of the replicas has ended: {self.process.stderr.read()[-500:]}")

    def close(self) -> None:
        """End the server."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(30)
            self.process.stdout.close(), self.process.stderr.close()
            self.process = None


def attempts(lines: list[dict]) -> dict[tuple[int, int], dict[str, dict]]:
    """Return the lines of each attempt by (step, number of the try at it), and in it by the name of the replica."""
    found, tries = {}, Counter()
    for line in lines:
        key = line["replica"], line["pid"], line["step"]
        found.setdefault((line["step"], tries[key]), {})[line["replica"]] = line
        tries[key] += 1
    return dict(sorted(found.items()))


def draw_shares(runs: Mapping[str, list[dict]]) -> None:
    """Draw for each run how many samples each replica learned from in each attempt at a step."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    from shared import plots

    _, panels = plt.subplots(len(runs), 1, figsize=(10, 1.9 * len(runs)), layout="constrained", squeeze=False)
    for axes, (title, lines) in zip(panels[:, 0], runs.items(), strict=True):
        tried, names = attempts(lines), sorted({line["replica"] for line in lines})
        first = {name: next(line["pid"] for line in lines if line["replica"] == name) for name in names}
        for place, shares in enumerate(tried.values()):
            below = 0
            for name, line in sorted(shares.items()):
                color = plots.COLORS[names.index(name)]
                style = {"color": color} if line["committed"] else {"facecolor": "white", "edgecolor": color, "ls": ":"}
                hatch = "////" if line["pid"] != first[name] else ""
                axes.bar(place, len(line["samples"]), bottom=below, width=0.8, hatch=hatch, **style)
                if hatch:
                    axes.patches[-1].set_edgecolor("white")
                below += len(line["samples"])
        axes.set_title(title, loc="left", fontsize=11)
        axes.set(xticks=range(len(tried)), yticks=(0, BATCH // 2, BATCH), ylabel="samples", ylim=(0, BATCH * 1.02))
        axes.set_xticklabels([step for step, _ in tried])
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step (a step that appears twice was tried twice)")
    kinds = [Patch(color=plots.COLORS[number], label=f"replica {name}") for number, name in enumerate(names)]
    kinds.append(Patch(facecolor="gray", edgecolor="white", hatch="////", label="its second process"))
    kinds.append(Patch(facecolor="white", edgecolor="gray", ls=":", label="not committed"))
    panels[0, 0].figure.legend(handles=kinds, loc="outside upper right", ncols=4, frameon=False)
    plt.show()


def errors(folder: Path) -> list[str]:
    """Return for each replica that raised an error its name and the last line of its traceback."""
    found = []
    for path in sorted(folder.glob("[a-z][0-9].log")):
        text = path.read_text()
        if "Traceback" in text and not path.with_suffix(".done").exists():
            found.append(f"replica {path.stem[0]}: {text.strip().splitlines()[-1]}")
    return found


if __name__ == "__main__":
    serve()
