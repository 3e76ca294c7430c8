"""docs/watching.md with Prometheus: it takes every question, and reads what the nodes serve."""

import shutil
import subprocess
import time
import urllib.error
from pathlib import Path

import pytest
import yaml
from watching import alerts, list_of_nodes, page_questions, panel_questions, reporting_run

needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed")


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
    questions = panel_questions() + page_questions()
    assert len(questions) >= 16
    for rules in (recorded(questions), alerts()):
        checked = check_rules(rules, tmp_path)
        assert checked.returncode == 0, checked.stderr
    assert check_rules(recorded(["sum by rank (ray_training_samples_total)"]), tmp_path).returncode != 0


@needs_prometheus
def test_with_prometheus_a_reading_is_the_same(tmp_path):
    with list_of_nodes(tmp_path) as discovery:
        process, address = reporting_run.start_prometheus(
            shutil.which("prometheus"), discovery, tmp_path / "prometheus"
        )
        try:
            deadline = time.monotonic() + 60
            while reporting_run.asked(address, "ray_training_samples_total") != {"0": 64.0, "1": 128.0}:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            assert reporting_run.asked(address, "ray_training_nothing") == {}
            for question in page_questions():
                reporting_run.ask(address, question)  # raises HTTPError for one that Prometheus refuses
            with pytest.raises(urllib.error.HTTPError):
                reporting_run.ask(address, "sum by rank (ray_training_samples_total)")
        finally:
            process.terminate()
            process.wait(timeout=30)
