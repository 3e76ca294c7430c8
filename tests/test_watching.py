"""Lesson 4.3: its dashboard for Grafana, its questions to Prometheus, its two ways to read a metric, event files."""

import ast
import http.server
import json
import re
import shutil
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import ray
import yaml
from notebook_rules import ROOT, Notebook, definitions
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from shared.rendezvous import free_port

LESSON = Notebook(ROOT / "04-ray-in-production/03_watching.ipynb")
CELLS = {cell.raw["id"]: cell for cell in LESSON.cells}
DASHBOARD = ROOT / "04-ray-in-production/program/deployment/grafana/training.json"
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed")


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def panel_questions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def lesson_questions() -> list[str]:
    (assigned,) = (node for node in CELLS["promql"].python.body if isinstance(node, ast.Assign))
    return list(ast.literal_eval(assigned.value).values())


def alerts() -> dict:
    (text,) = re.findall(r"```yaml\n(.*?)```", CELLS["promql-saw"].source, flags=re.DOTALL)
    return yaml.safe_load(text)


def alert_questions() -> list[str]:
    return [rule["expr"] for group in alerts()["groups"] for rule in group["rules"]]


def metrics_told() -> set[str]:
    """The names under which Ray exports what the lesson's `teller` makes."""
    names = set()
    endings = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_count", "_sum"]}
    for node in ast.walk(CELLS["tell"].python):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in endings:
            names |= {f"ray_{node.args[0].value}{ending}" for ending in endings[ast.unparse(node.func)]}
    return names


def metrics_of_ray() -> set[str]:
    """The names in the dashboards that Ray itself brings."""
    folder = Path(ray.__file__).parent / "dashboard/modules/metrics/dashboards"
    return set(re.findall(r"\bray_(?:node|train)_\w+", "".join(path.read_text() for path in folder.glob("*.py"))))


# --- Grafana's file, and PromQL --------------------------------------------------------------------------------------


def test_every_metric_that_is_asked_for_is_exported():
    known = metrics_told() | metrics_of_ray()
    assert len(metrics_told()) == 7
    for question in panel_questions() + lesson_questions() + alert_questions():
        names = set(re.findall(r"\bray_\w+", question))
        assert names and names <= known, (question, names - known)
    in_panels = set(re.findall(r"\bray_training_\w+", " ".join(panel_questions())))
    assert in_panels == metrics_told() - {"ray_training_step_seconds_sum", "ray_training_step_seconds_count"}


def test_no_question_uses_the_sum_of_a_histogram_which_ray_only_estimates():
    assert "_sum" not in " ".join(panel_questions() + lesson_questions() + alert_questions())


def test_the_dashboard_is_one_that_grafana_can_import():
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    assert len({panel["id"] for panel in panels()}) == len(panels()) >= 10
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard["panels"])))
    assert used == variables
    for panel in panels():
        if panel["type"] != "row":
            assert panel["type"] == "timeseries" and panel["targets"] and panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) and all(target["legendFormat"] for target in panel["targets"])


def test_no_two_panels_of_the_dashboard_overlap():
    taken = set()
    for panel in panels():
        place = panel["gridPos"]
        boxes = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not boxes & taken and place["x"] + place["w"] <= 24
        taken |= boxes


def check_rules(rules: dict, folder: Path) -> subprocess.CompletedProcess:
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    return subprocess.run(
        ["promtool", "check", "rules", str(folder / "rules.yml")], capture_output=True, text=True, check=False
    )


def recorded(questions: list[str]) -> dict:
    filled = [question.replace("$SessionName", ".*").replace("$window", "1m") for question in questions]
    rules = [{"record": f"question:{number}", "expr": question} for number, question in enumerate(filled)]
    return {"groups": [{"name": "questions", "rules": rules}]}


@needs_promtool
def test_promtool_accepts_every_question_and_alert(tmp_path):
    questions = panel_questions() + lesson_questions()
    assert len(questions) >= 16
    for rules in (recorded(questions), alerts()):
        checked = check_rules(rules, tmp_path)
        assert checked.returncode == 0, checked.stderr
    assert check_rules(recorded(["sum by rank (ray_training_samples_total)"]), tmp_path).returncode != 0


# --- the two ways to read a metric -----------------------------------------------------------------------------------


class Metrics(http.server.BaseHTTPRequestHandler):
    """Serves `page` under /metrics, as Ray's nodes do."""

    page = b""

    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_):
        pass


def some_metrics() -> bytes:
    registry = CollectorRegistry()
    samples = Counter("ray_training_samples", "samples", ["rank"], registry=registry)
    memory = Gauge("ray_training_memory_bytes", "memory", ["rank"], registry=registry)
    for rank in ("0", "1"):
        samples.labels(rank).inc(64 * (1 + int(rank)))
        memory.labels(rank).set(1e9)
    return generate_latest(registry)


@pytest.fixture
def lesson(tmp_path):
    """The lesson's functions, with a node that serves `some_metrics`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    Metrics.page = some_metrics()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    discovery = tmp_path / "discovery.json"
    discovery.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{server.server_port}"]}]))
    folder = tmp_path / "ray"
    folder.mkdir()
    names = {
        "json": json, "Path": Path, "subprocess": subprocess, "urllib": urllib, "free_port": free_port,
        "text_string_to_metric_families": text_string_to_metric_families, "discovery": discovery,
        "ray_folder": type("Folder", (), {"name": str(folder)}), "prometheus": None, "page": None,
    }  # fmt: skip
    for cell in ("scrape", "prometheus", "ask"):
        wanted = list(definitions(CELLS[cell].python).values())
        exec(compile(ast.Module(wanted, []), cell, "exec"), names)
    yield names
    server.shutdown()
    server.server_close()


def test_without_prometheus_a_reading_is_what_the_nodes_serve(lesson):
    assert lesson["reading"]("ray_training_samples_total") == {"0": 64.0, "1": 128.0}
    assert lesson["reading"]("ray_training_memory_bytes") == {"0": 1e9, "1": 1e9}
    assert lesson["reading"]("ray_training_nothing") == {}


@needs_prometheus
def test_with_prometheus_a_reading_is_the_same(lesson):
    process, lesson["page"] = lesson["start_prometheus"](shutil.which("prometheus"))
    lesson["prometheus"] = process
    try:
        deadline = time.monotonic() + 60
        while lesson["reading"]("ray_training_samples_total") != {"0": 64.0, "1": 128.0}:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        assert lesson["reading"]("ray_training_nothing") == {}
        for question in lesson_questions():
            lesson["ask"](question)  # raises HTTPError for one that Prometheus refuses
        with pytest.raises(urllib.error.HTTPError):
            lesson["ask"]("sum by rank (ray_training_samples_total)")
    finally:
        process.terminate()
        process.wait(timeout=30)


# --- event files -----------------------------------------------------------------------------------------------------


def scalars(path: Path) -> list[tuple]:
    """(name, step, value, time) of each scalar in a file of records: length, checksum, event, checksum."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        found += [(value.tag, event.step, value.simple_value, event.wall_time) for value in event.summary.value]
        content = content[16 + length :]
    return found


def test_the_event_files_hold_the_lines_of_each_rank(tmp_path, capsys):
    lines = [
        {"rank": rank, "step": step, "step_s": 0.5, "wait_s": 0.25 * rank, "loss": 1.0 / step, "time": 1e9 + step}
        for step in (1, 2, 4)
        for rank in (0, 1)
    ]

    def lines_of(name: str) -> list[dict]:
        return [line for line in lines if name == f"steps-{line['rank']}"]

    names = {"FOLDER": tmp_path, "lines": lines_of, "SummaryWriter": SummaryWriter}
    exec(compile(CELLS["tensorboard"].python, "tensorboard", "exec"), names)
    assert capsys.readouterr().out.startswith("rank-0: ")
    for rank in (0, 1):
        (path,) = (tmp_path / "tensorboard" / f"rank-{rank}").glob("events*")
        expected = [(f"training/{key}", line["step"], line[key], line["time"])
                    for line in lines_of(f"steps-{rank}") for key in ("step_s", "wait_s", "loss")]  # fmt: skip
        assert scalars(path) == expected
