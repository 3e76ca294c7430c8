"""What tests read of docs/watching.md and its program: the questions to Prometheus, the alerts, and the dashboard's."""

import contextlib
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import yaml
from notebook_rules import ROOT
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

CHAPTER_4 = ROOT / "04-ray-in-production"
PAGE = (ROOT / "docs/watching.md").read_text()
DASHBOARD = CHAPTER_4 / "program/deployment/grafana/training.json"
sys.path.append(str(CHAPTER_4))
import reporting_run  # noqa: E402


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def panel_questions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def page_questions() -> list[str]:
    """Those of the page's table, and those of the program."""
    rows = re.findall(r"^\| [^|]+ \| `(.*ray_\w+.*)` \|$", PAGE, flags=re.MULTILINE)
    return [*rows, *reporting_run.QUESTIONS.values()]


def alerts() -> dict:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
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
def list_of_nodes(folder: Path) -> Iterator[Path]:
    """A file as Ray writes it for Prometheus, with a node that serves `some_metrics`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    Metrics.page = some_metrics()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    discovery = folder / "discovery.json"
    discovery.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{server.server_port}"]}]))
    yield discovery
    server.shutdown()
    server.server_close()
