"""Lesson 4.3: its dashboard for Grafana, its questions to Prometheus, its two ways to read a metric, event files."""

import ast
import json
import re
import struct
from pathlib import Path

import pytest
import ray
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from watching import CELLS, DASHBOARD, alert_questions, lesson_questions, lesson_with_metrics, panel_questions, panels


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


# --- the way to read a metric without Prometheus (with it: tests/all/test_prometheus.py) -----------------------------


@pytest.fixture
def lesson(tmp_path):
    with lesson_with_metrics(tmp_path) as names:
        yield names


def test_without_prometheus_a_reading_is_what_the_nodes_serve(lesson):
    assert lesson["reading"]("ray_training_samples_total") == {"0": 64.0, "1": 128.0}
    assert lesson["reading"]("ray_training_memory_bytes") == {"0": 1e9, "1": 1e9}
    assert lesson["reading"]("ray_training_nothing") == {}


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
