"""What the benchmarks share: where they run, how two sides are compared, how a report words its verdict."""

import os
import platform
from pathlib import Path
from statistics import median

import torch
from calibrate import calibration, in_words

from shared.doctor import cpu_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread per process, on both sides of every ratio
BATCH_SIZE = 64  # train_ddp.py's default, over all ranks


def machine(quick: bool = False) -> dict:
    """Where this is measured: device, CPUs, GPUs, versions and, unless `quick`, how fast the machine is."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu, gpus = cpu_name(), torch.cuda.device_count()
    device = f"{torch.cuda.get_device_name(0)}, {gpus} GPUs" if gpus else f"{cpu}, {cpus} CPUs"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    known = {"device": device, "cpu": cpu, "cpus": cpus, "gpus": gpus, "threads_per_process": 1, **versions}
    return known if quick else {**known, "calibration": calibration()}


def calibrated(result: dict) -> str:
    """The line of a report that says how fast the machine is; empty if that was not measured."""
    return f"\nThis machine's {in_words(result['calibration'])}.\n" if "calibration" in result else ""


def compare(baseline: list[float], measured: list[float]) -> dict:
    """Samples per second of both sides, the ratio of their medians, and the lowest and highest of single pairs."""
    pairs = [ours / theirs for theirs, ours in zip(baseline, measured, strict=True)]
    ratio = median(measured) / median(baseline)
    return {"baseline": baseline, "measured": measured, "ratio": ratio, "lowest": min(pairs), "highest": max(pairs)}


def reached(goal: bool) -> str:
    """The verdict on a goal, as a report prints it."""
    return "reached" if goal else "MISSED"
