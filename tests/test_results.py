"""Pages and lessons show what the benchmarks' results and programs hold. (The programs run in tests/all.)"""

import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from notebook_rules import ROOT

from shared import measure

BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks/results"


@pytest.fixture
def program(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports a program of `benchmarks`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_first_screen_says_what_was_measured():
    """README.md: five runs within 1e-13, and the table of memory, by the formula and counted."""
    readme = (ROOT / "README.md").read_text()
    series = json.loads((RESULTS / "same-curve.json").read_text())["step_losses"]
    furthest = max(max(losses) - min(losses) for losses in zip(*series.values(), strict=True))
    assert len(series) == 5 and furthest < 1e-13 and "the losses agree to within 1e-13" in readme
    (path,) = RESULTS.glob("sharded-*.json")
    lesson = json.loads(path.read_text())["lesson"]  # the table of lesson 3.5
    counted = {name: float(seen) for name, seen in re.findall(r"\| \*\*(.+?)\*\* \| ([\d.]+)", lesson)}
    assert f"results/{path.stem}.md" in readme
    row = r"^\| ([A-Z][\w, -]+) \| .+? \| ([\d.]+) \| ([\d.]+) \| \*\*([\d.]+)\*\* \|$"
    rows = re.findall(row, readme, flags=re.MULTILINE)
    assert [names for names, *_ in rows] == ["DDP", "ZeRO-1, ZeRO-2", "ZeRO-3", "FSDP2"]
    for names, *shown in rows:
        for name in names.split(", "):
            on_1024, on_2 = (measure.predicted_state_bytes(name.lower(), "fp32", 1, ranks) for ranks in (1024, 2))
            for text, value in zip(shown, (on_1024, on_2, counted[name]), strict=True):
                assert float(text) == round(value, len(text.partition(".")[2])), (name, text, value)


@pytest.mark.parametrize("name", ["ddp", "ray", "sharded", "network"])
def test_the_committed_tables_are_made_of_the_committed_numbers(name, program):
    paths = list(RESULTS.glob(f"{name}-*.json"))
    assert paths
    for path in paths:
        result, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()
        figure = [f"{path.stem}.svg"] if path.with_suffix(".svg").exists() else []
        assert page == program(f"bench_{name}").report(result, *figure)
        assert name != "sharded" or "below 30 s: reached." in page  # an epoch of `nano`
        if name == "network":
            assert {run["mbit"] for run in result["ways"]} == {10_000, 1000, 100}, "docs/communication.md shows these"


def test_the_page_of_the_gpu_paths_is_made_of_its_numbers(program, monkeypatch):
    paths = list(RESULTS.glob("gpu-*.json"))
    assert paths
    monkeypatch.syspath_prepend(ROOT / "03-fsdp-deepspeed")
    gpu_paths = program("gpu_paths")
    for path in paths:
        result = json.loads(path.read_text())
        assert path.with_suffix(".md").read_text() == gpu_paths.report(result)
        compared = {name: outcome for name, outcome in result["paths"].items() if outcome.get("like")}
        assert len(compared) > 30 and all(each["verdict"] in ("ok", "other losses") for each in compared.values())
        wrong = {name for name, each in compared.items() if each["difference"] > each["within"]}
        assert wrong == {name for name, each in compared.items() if each["verdict"] != "ok"}
        assert wrong == {"124m: zero-0, bf16"}, "a note on the page says why"
        assert "124m: zero-0, bf16" in " ".join(result["notes"])
        peaks = {kind: max(peak.values()) for kind, peak in result["optimizer"].items()}
        shown = "had peaks of {foreach:.1f} bytes per parameter with `foreach`, {fused:.1f} with `fused` and {loop:.1f}"
        lesson = (ROOT / "03-fsdp-deepspeed/01_where_memory_goes.ipynb").read_text()
        assert shown.format(loop=peaks["for-loop"], **peaks) in lesson
        scripts = {trial.script for trial in gpu_paths.trials() if result["paths"].get(trial.name, {}).get("losses")}
        assert {Path(script).name for script in scripts if "/" in script} == {
            path.name for folder in ("01-*", "02-*", "03-*") for path in ROOT.glob(f"{folder}/train_*.py")
        }, "README.md says that all scripts were run"


def test_the_committed_results_can_be_compared(program):
    check = program("check_regression")
    for kind in ("ddp", "ray", "sharded"):
        for path in RESULTS.glob(f"{kind}-*.json"):
            assert len(check.ratios(check.read_result(path))) >= 5
            assert not check.compare_files(path, path)


def test_the_regression_alarm_on_made_up_noise(program):
    """docs/regression-alarm.md: no false alarm of 80, and all 80 slowdowns of 20 % found. (Its tables: tests/all.)"""
    noisy = program("alarm_on_noise")
    alarms = {
        (detector, factor): [noisy.count_alarms(detector, kind, factor, jobs=20) for kind in noisy.KINDS]
        for detector in ("one run each, means", "check_regression.py", "8 pairs, but all old runs first")
        for factor in (1.0, 1.2)
    }
    assert alarms["check_regression.py", 1.0] == [0] * 4 and alarms["check_regression.py", 1.2] == [20] * 4
    assert sum(alarms["one run each, means", 1.0]) > 3 and sum(alarms["one run each, means", 1.2]) < 77
    assert alarms["8 pairs, but all old runs first", 1.0][1] > 0


def test_lesson_4_4_says_what_its_recording_holds():
    recorded = json.loads((ROOT / "checks/data/recorded_hooks.json").read_text())["runs"]
    ms = {(run["mbit"], run["hook"]): statistics.median(map(max, *run["step_ms"])) for run in recorded}
    sent = {run["hook"]: run["sent"][0] for run in recorded if run["mbit"] == 10_000}

    def adds(hook: str, mbit: int = 10_000) -> float:
        return ms[mbit, hook] - ms[mbit, "float32"] + 8e-3 * (sent["float32"] - sent[hook]) / mbit

    def pays_below(hook: str, mbit: int = 10_000) -> float:
        return 8e-3 * (sent["float32"] - sent[hook]) / adds(hook, mbit)

    lesson = (ROOT / "04-ray-in-production/04_communication.ipynb").read_text()
    svd, power, half = "SVD 4", "PowerSGD 4", "fp16 PowerSGD 4"
    for words in (
        f"the hook added {adds(svd):.0f} ms on our test machine, and the lines crossed at {pays_below(svd):.0f} Mbit/s",
        f"took {ms[10_000, svd]:.0f} ms per step on our test machine at 10,000",
        f"PowerSGD 4 adds about {adds(power):.0f} ms and the SVD {adds(svd):.0f}",
        f"breaks even at {pays_below(power) / 1000:.1f} Gbit/s",
        f"PowerSGD 4 was {ms[10_000, power] - ms[1000, power]:.0f} ms *faster* at 1,000 Mbit/s than at 10,000",
        f"this hook added {adds(half):.0f} ms on our test machine, and PowerSGD 4 added {adds(power):.0f}",
        f"{pays_below(half):,.0f} instead of {pays_below(power):,.0f} Mbit/s",
    ):
        assert words in lesson, words
    assert pays_below(power, 1000) > 10_000 and pays_below(power) > 10 * pays_below(svd)
