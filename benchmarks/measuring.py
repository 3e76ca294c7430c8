"""Shared code of the benchmarks: describe the machine, compare two sides, and word a report's verdict."""

import os
import platform
from pathlib import Path
from statistics import median

import torch
from calibrate import calibrate, describe

from shared.doctor import cpu_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread per process, on both sides of every ratio
BATCH_SIZE = 64  # train_ddp.py's default, over all ranks


def machine(quick: bool = False) -> dict:
    """Describe the machine: device, CPUs, GPUs, versions and, unless `quick`, how fast it is."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu, gpus = cpu_name(), torch.cuda.device_count()
    device = f"{torch.cuda.get_device_name(0)}, {gpus} GPU{'s'[: gpus > 1]}" if gpus else f"{cpu}, {cpus} CPUs"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    facts = {"device": device, "cpu": cpu, "cpus": cpus, "gpus": gpus, "threads_per_process": 1, **versions}
    return facts if quick else {**facts, "calibration": calibrate()}


def calibration_line(result: dict) -> str:
    """Return a report's line about the speed of the machine, or "" if that was not measured."""
    return f"\nThis machine's {describe(result['calibration'])}.\n" if "calibration" in result else ""


def compare(baseline: list[float], measured: list[float]) -> dict:
    """Compare the samples per second of two sides: the ratio of their medians, and the range over single pairs."""
    pairs = [rate / baseline_rate for baseline_rate, rate in zip(baseline, measured, strict=True)]
    ratio = median(measured) / median(baseline)
    return {"baseline": baseline, "measured": measured, "ratio": ratio, "lowest": min(pairs), "highest": max(pairs)}


def reached(goal: bool) -> str:
    """Return a report's verdict on a goal."""
    return "reached" if goal else "MISSED"
