"""Train on Ray with metrics of each rank, and ask Ray what it knows of the run: the example of docs/watching.md.

    python reporting_run.py FOLDER

starts a Ray of its own on this machine, with a dashboard, and trains two ranks for 60 steps. Rank 1 reads slowly. While
they wait after step 40, the program asks Ray for nodes, actors, the run and its logs, and after step 60 how much the
metrics have grown. It prints all answers, and writes them to FOLDER/answers.json. If Prometheus is installed, it starts
one and asks that too. FOLDER also gets each rank's lines, as event files for TensorBoard too, and a dashboard for
Grafana. All processes have ended when it returns.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import ray
import ray.train
import torch
import torch.nn.functional as F
from breakable_run import Fit
from prometheus_client.parser import text_string_to_metric_families
from ray.cluster_utils import Cluster
from ray.job_submission import JobSubmissionClient
from ray.train.torch import TorchTrainer, prepare_model
from ray.util import state
from ray.util.metrics import Counter, Gauge, Histogram
from tensorboardX import SummaryWriter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shared import datasets, models
from shared.on_ray import cluster
from shared.rendezvous import free_port

SLOW_RANK, SLOW_S, BATCH_SIZE = 1, 0.05, 128
ASK_AFTER, STEPS = 40, 60
SAMPLES, WORK, WAIT = (f"ray_training_{name}_total" for name in ("samples", "work_seconds", "wait_seconds"))
QUESTIONS = {
    "samples per second, all ranks": "sum(rate(ray_training_samples_total[5m]))",
    "share of the time at work": "sum by (rank) (rate(ray_training_work_seconds_total[5m])) / sum by (rank) "
    "(rate(ray_training_work_seconds_total[5m]) + rate(ray_training_wait_seconds_total[5m]))",
    "the rank that works most": "topk(1, sum by (rank) (rate(ray_training_work_seconds_total[5m])))",
    "half of the steps take less than": "histogram_quantile(0.5, "
    "sum by (le) (rate(ray_training_step_seconds_bucket[5m])))",
    "memory, MB": "sum by (rank) (ray_training_memory_bytes) / 1e6",
    "the node's CPUs in use, %": "sum by (instance) (ray_node_cpu_utilization)",
}
GRAFANA = Path(__file__).parent / "program/deployment/grafana/training.json"


# --- on each rank ----------------------------------------------------------------------------------------------------


def hand_over(clock, bucket):
    """Note when this rank has computed the last of its gradients (lesson 4.3)."""
    clock["handed_over"] = time.perf_counter()  # each bucket overwrites it: the last one's time remains
    return allreduce_hook(None, bucket)  # averages as DDP does without a hook


def timed_step(ddp_model, optimizer, read_batch, clock):
    """Take a step, and return the seconds of its parts (lesson 4.3)."""
    start = clock.get("ended", time.perf_counter())  # the end of the step before, if there was one
    images, labels = read_batch()
    read = time.perf_counter()
    loss = F.cross_entropy(ddp_model(images), labels)
    loss.backward()
    averaged = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    end = clock["ended"] = time.perf_counter()
    waiting = averaged - clock["handed_over"]
    return {"reading": read - start, "computing": end - read - waiting, "waiting": waiting, "loss": loss.item()}


def make_reporter(rank: int, folder: Path) -> Callable[[int, int, dict], None]:
    """Return report(step, samples, parts), which adds to Ray's metrics, logs, and writes a line to steps-RANK.jsonl."""
    of_rank, tags = {"tag_keys": ("rank",)}, {"rank": str(rank)}  # a tag with few values: never the step
    samples_seen = Counter("training_samples", "samples that this rank has trained on", **of_rank)
    work = Counter("training_work_seconds", "reading and computing", **of_rank)
    wait = Counter("training_wait_seconds", "waiting for the others and the network", **of_rank)
    steps = Histogram("training_step_seconds", "a step", boundaries=[0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], **of_rank)
    memory = Gauge("training_memory_bytes", "memory of the process", **of_rank)
    process, log = psutil.Process(), logging.getLogger("training")
    sent_before = psutil.net_io_counters().bytes_sent  # by this machine, all interfaces

    def report(step: int, samples: int, parts: dict) -> None:
        nonlocal sent_before
        own_work, sent = parts["reading"] + parts["computing"], psutil.net_io_counters().bytes_sent
        work.inc(own_work, tags)
        wait.inc(parts["waiting"], tags)
        steps.observe(own_work + parts["waiting"], tags)
        memory.set(process.memory_info().rss, tags)
        samples_seen.inc(samples, tags)
        if step % 10 == 0:
            log.info("step %d: worked %.3f s, waited %.3f s", step, own_work, parts["waiting"])
        about = {"rank": rank, "step": step, "time": time.time(), "pid": process.pid, "sent": sent - sent_before}
        sent_before = sent
        with open(folder / f"steps-{rank}.jsonl", "a") as file:
            file.write(json.dumps({**about, "samples": samples, **parts}) + "\n")

    return report


def train(config: dict) -> None:
    """Train for STEPS steps, each of them as soon as the driver allows it."""
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    folder, (images, labels) = Path(config["folder"]), datasets.load("digits").train.tensors
    rows = torch.arange(rank, BATCH_SIZE, world_size)

    def read_batch() -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLOW_S * (rank == SLOW_RANK))
        return images[rows], labels[rows]

    model, clock, report = prepare_model(models.MLP(64, 384)), {}, make_reporter(rank, folder)
    model.register_comm_hook(clock, hand_over)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        while int((folder / "until").read_text() or 0) < step:  # empty for a moment while it is written
            time.sleep(0.02)
            clock["ended"] = time.perf_counter()  # a step does not contain what the driver asks before it
        report(step, len(rows), timed_step(model, optimizer, read_batch, clock))


# --- what Ray serves -------------------------------------------------------------------------------------------------


def samples_served(discovery: Path) -> Iterator:
    """Yield every sample of the metrics of every node in Ray's list for Prometheus."""
    for target in json.loads(discovery.read_text())[0]["targets"]:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as page:
            for family in text_string_to_metric_families(page.read().decode()):
                yield from family.samples


def served(discovery: Path, name: str) -> dict[str, float]:
    """Return the value of a metric for each rank, as the nodes serve it."""
    return dict(sorted((one.labels["rank"], one.value) for one in samples_served(discovery) if one.name == name))


def start_prometheus(program: str, discovery: Path, folder: Path) -> tuple[subprocess.Popen, str]:
    """Start a Prometheus that scrapes the nodes in Ray's list every second. Return its process and address."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    source = {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)], "refresh_interval": "1s"}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [source]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML, too
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, f"http://127.0.0.1:{port}"


def ask(prometheus: str, question: str) -> list[dict]:
    """Return Prometheus's answer to a question in PromQL."""
    query = urllib.parse.urlencode({"query": question})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def asked(prometheus: str, name: str) -> dict[str, float]:
    """Return the value of a metric for each rank by Prometheus, or nothing while that is still starting."""
    try:
        found = ask(prometheus, f"sum by (rank) ({name})")
    except urllib.error.URLError:
        return {}
    return dict(sorted((one["metric"]["rank"], float(one["value"][1])) for one in found))


# --- the driver ------------------------------------------------------------------------------------------------------


class Run:
    """A cluster of one node with a dashboard, and a training on it that continues when it is allowed to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": True, "dashboard_port": free_port(),
            "dashboard_agent_listen_port": None, "_system_config": {"metrics_report_interval_ms": 1000},
        })  # fmt: skip
        options = {"logging_config": ray.LoggingConfig(log_level="ERROR"), "log_to_driver": False}
        self.dashboard = f"http://{ray.init(self.nodes.address, **options).dashboard_url}"
        self.session = Path(self.nodes.head_node.get_session_dir_path())
        self.discovery = self.session / "prom_metrics_service_discovery.json"
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="reporting", storage_path=str(folder)),
        )
        self.allow(0)
        self.fit = Fit(trainer.fit)

    def lines(self) -> list[dict]:
        """Return the lines of both ranks so far."""
        texts = [path.read_text() for path in sorted(self.folder.glob("steps-*.jsonl"))]
        return [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]

    def allow(self, step: int) -> None:
        """Let the ranks continue, up to and including this step."""
        (self.folder / "until").write_text(str(step))

    def go_to(self, step: int) -> dict[str, float]:
        """Let the ranks train up to this step. Return the samples of each rank, once Ray serves them."""
        self.allow(step)
        self.fit.wait_until(lambda: sum(line["step"] == step for line in self.lines()) == 2)
        expected = {str(rank): 0.0 for rank in (0, 1)}
        for line in self.lines():
            expected[str(line["rank"])] += line["samples"]
        if step < STEPS:  # after the last step the workers end
            self.fit.wait_until(lambda: served(self.discovery, SAMPLES) == expected)
        return expected

    def ask_ray(self) -> dict[str, object]:
        """Return what the state API, the pages on jobs and training, and the logs say."""
        (node,) = state.list_nodes(address=self.dashboard)
        actors = state.list_actors(address=self.dashboard, filters=[("state", "=", "ALIVE")])
        client = JobSubmissionClient(self.dashboard)
        jobs = [{"type": job.type.value, "status": job.status.value} for job in client.list_jobs()]
        (run,) = client._do_request("GET", "/api/train/v2/runs/v1").json()["train_runs"]  # with the token, if any
        workers = run["attempts"][-1]["workers"]
        options = {"address": self.nodes.address, "node_id": node.node_id}
        found = state.list_logs(glob_filter="train/*app-worker*", **options)
        names = sorted(name for group in found.values() for name in group)
        texts = ["".join(state.get_log(filename=name, tail=1000, **options)) for name in names]
        logged = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
        return {
            "actors": {actor.pid: actor.class_name for actor in actors},
            "jobs": jobs,
            "run": {"name": run["name"], "status": run["status"], "attempts": len(run["attempts"])},
            "processes": {worker["world_rank"]: worker["pid"] for worker in workers},
            "logged": [[line["world_rank"], line["message"]] for line in logged if line["message"].startswith("step ")],
        }

    def stop(self) -> None:
        """End the cluster with every process in it."""
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        self.nodes.shutdown()
        psutil.wait_procs(started, timeout=5)
        cluster.kill(started)  # agents that would outlive it


def with_our_panels(rays: dict, ours: dict) -> dict:
    """Return Ray's dashboard for Grafana with our panels below its own."""
    below = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in rays["panels"])
    moved = [
        {**panel, "id": 1000 + number, "gridPos": {**panel["gridPos"], "y": panel["gridPos"]["y"] + below}}
        for number, panel in enumerate(ours["panels"])
    ]
    return {**rays, "panels": rays["panels"] + moved}


def write_for_tensorboard(lines: list[dict], folder: Path) -> None:
    """Write the steps of each rank as event files, in a folder for each rank."""
    for rank in sorted({line["rank"] for line in lines}):
        with SummaryWriter(str(folder / f"rank-{rank}")) as writer:
            for line in lines:
                for name in ("reading", "waiting", "loss"):
                    if line["rank"] == rank:
                        writer.add_scalar(f"training/{name}", line[name], line["step"], walltime=line["time"])


def prepare_environment(ray_folder: str) -> None:
    """Turn on what `cluster.quiet_settings` would turn off, and give Ray ports of its own."""
    os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "1"  # the dashboard's page on training
    os.environ["RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"] = "1"
    os.environ["RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING"] = "1"
    for name in ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT"):  # two Rays on one machine would share them
        os.environ[name] = str(free_port())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["RAY_TMPDIR"] = ray_folder
    cluster.quiet_settings(own=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for lines, answers, event files and the dashboard")
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as ray_folder:
        prepare_environment(ray_folder)
        run, prometheus = Run(folder), None
        try:
            if program := shutil.which("prometheus"):
                prometheus, address = start_prometheus(program, run.discovery, Path(ray_folder, "prometheus"))
            answers = {"samples": [run.go_to(ASK_AFTER)], "ray": run.ask_ray()}
            before = {name: served(run.discovery, name) for name in (WORK, WAIT)}
            answers["samples"].append(run.go_to(STEPS - 1))
            answers["grown"] = {
                name: {rank: value - before[name][rank] for rank, value in served(run.discovery, name).items()}
                for name in before
            }
            answers["exported"] = sorted({sample.name for sample in samples_served(run.discovery)})
            if prometheus:
                run.fit.wait_until(lambda: asked(address, SAMPLES) == answers["samples"][-1])
                answers["prometheus"] = {what: ask(address, question) for what, question in QUESTIONS.items()}
            rays = json.loads((run.session / "metrics/grafana/dashboards/train_grafana_dashboard.json").read_text())
            ours = json.loads(GRAFANA.read_text())
            (folder / "train_and_ours.json").write_text(json.dumps(with_our_panels(rays, ours), indent=2))
            run.go_to(STEPS)
            run.fit.result()
        finally:
            if prometheus:
                prometheus.terminate()
                prometheus.wait(timeout=30)
            run.stop()
    write_for_tensorboard(run.lines(), folder / "tensorboard")
    (folder / "answers.json").write_text(json.dumps(answers, indent=2))
    print(json.dumps(answers, indent=2))


if __name__ == "__main__":
    main()
