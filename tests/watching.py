"""What tests read of lesson 4.3: its cells, its questions to Prometheus, its alerts, and the dashboard's."""

import ast
import contextlib
import http.server
import json
import re
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml
from notebook_rules import ROOT, Notebook, definitions
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.rendezvous import free_port

LESSON = Notebook(ROOT / "04-ray-in-production/03_watching.ipynb")
CELLS = {cell.raw["id"]: cell for cell in LESSON.cells}
DASHBOARD = ROOT / "04-ray-in-production/program/deployment/grafana/training.json"


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


@contextlib.contextmanager
def lesson_with_metrics(folder: Path) -> Iterator[dict[str, object]]:
    """The lesson's functions, with a node that serves `some_metrics`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    Metrics.page = some_metrics()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    discovery = folder / "discovery.json"
    discovery.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{server.server_port}"]}]))
    ray_folder = folder / "ray"
    ray_folder.mkdir()
    names = {
        "json": json, "Path": Path, "subprocess": subprocess, "urllib": urllib, "free_port": free_port,
        "text_string_to_metric_families": text_string_to_metric_families, "discovery": discovery,
        "ray_folder": type("Folder", (), {"name": str(ray_folder)}), "prometheus": None, "page": None,
    }  # fmt: skip
    for cell in ("scrape", "prometheus", "ask"):
        wanted = list(definitions(CELLS[cell].python).values())
        exec(compile(ast.Module(wanted, []), cell, "exec"), names)
    yield names
    server.shutdown()
    server.server_close()
