"""docs/watching.md and its program: the dashboard for Grafana, the questions to Prometheus, metrics, event files."""

import ast
import json
import re
import struct
from pathlib import Path

import ray
from notebook_rules import Notebook, definitions, fingerprint
from tensorboardX.proto.event_pb2 import Event
from watching import (
    CHAPTER_4,
    DASHBOARD,
    alert_questions,
    list_of_nodes,
    page_questions,
    panel_questions,
    panels,
    reporting_run,
)

PROGRAM = ast.parse(Path(reporting_run.__file__).read_text())


def metrics_reported() -> set[str]:
    """The names under which Ray exports what `make_reporter` makes."""
    names = set()
    endings = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_count", "_sum"]}
    for node in ast.walk(PROGRAM):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in endings:
            names |= {f"ray_{node.args[0].value}{ending}" for ending in endings[ast.unparse(node.func)]}
    return names


def metrics_of_ray() -> set[str]:
    """The names in the dashboards that Ray itself brings."""
    folder = Path(ray.__file__).parent / "dashboard/modules/metrics/dashboards"
    return set(re.findall(r"\bray_(?:node|train)_\w+", "".join(path.read_text() for path in folder.glob("*.py"))))


def test_the_program_takes_the_times_as_lesson_4_3_teaches_it():
    taught, here = {}, definitions(PROGRAM)
    for cell in Notebook(CHAPTER_4 / "03_watching.ipynb").code:
        taught |= definitions(cell.script)
    for name in ("hand_over", "timed_step"):
        assert fingerprint(taught[name]) == fingerprint(here[name]), name


# --- Grafana's file, and PromQL --------------------------------------------------------------------------------------


def test_every_metric_that_is_asked_for_is_exported():
    known = metrics_reported() | metrics_of_ray()
    assert len(metrics_reported()) == 7
    for question in panel_questions() + page_questions() + alert_questions():
        names = set(re.findall(r"\bray_\w+", question))
        assert names and names <= known, (question, names - known)
    in_panels = set(re.findall(r"\bray_training_\w+", " ".join(panel_questions())))
    assert in_panels == metrics_reported() - {"ray_training_step_seconds_sum", "ray_training_step_seconds_count"}


def test_no_question_uses_the_sum_of_a_histogram_which_ray_only_estimates():
    assert "_sum" not in " ".join(panel_questions() + page_questions() + alert_questions())


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


# --- what the nodes serve (with Prometheus: tests/all/test_prometheus.py) --------------------------------------------


def test_a_metric_is_read_by_rank_from_what_the_nodes_serve(tmp_path):
    with list_of_nodes(tmp_path) as discovery:
        assert reporting_run.served(discovery, "ray_training_samples_total") == {"0": 64.0, "1": 128.0}
        assert reporting_run.served(discovery, "ray_training_memory_bytes") == {"0": 1e9, "1": 1e9}
        assert reporting_run.served(discovery, "ray_training_nothing") == {}


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


def test_the_event_files_hold_the_lines_of_each_rank(tmp_path):
    lines = [
        {"rank": rank, "step": step, "reading": 0.5, "waiting": 0.25 * rank, "loss": 1.0 / step, "time": 1e9 + step}
        for step in (1, 2, 4)
        for rank in (0, 1)
    ]
    reporting_run.write_for_tensorboard(lines, tmp_path)
    for rank in (0, 1):
        (path,) = (tmp_path / f"rank-{rank}").glob("events*")
        expected = [(f"training/{key}", line["step"], line[key], line["time"])
                    for line in lines if line["rank"] == rank for key in ("reading", "waiting", "loss")]  # fmt: skip
        assert scalars(path) == expected
