"""Measure how fast this machine is, so that times of different machines can be compared.

Measures the seconds of `import torch` in a new process (files, Python) and of 10 optimizer steps of bare_loop.py
(arithmetic) with one thread, the shortest of three each. `make bench` adds them to its tables.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS, BATCH_SIZE, REPEATS = 10, 64, 3


def calibrate() -> dict[str, float]:
    """Measure the two times, in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    imports = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
        imports.append(time.perf_counter() - started)
    command = [sys.executable, HERE / "bare_loop.py", str(REPEATS), str(STEPS), str(BATCH_SIZE)]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    fastest = max(json.loads(printed))  # samples per second
    return {"import_torch_s": round(min(imports), 2), "training_s": round(STEPS * BATCH_SIZE / fastest, 2)}


def describe(seconds: dict[str, float]) -> str:
    """Describe the two times in one line for a report."""
    imports, training = seconds["import_torch_s"], seconds["training_s"]
    return f"calibration: import torch {imports} s, {STEPS} steps of training {training} s"


if __name__ == "__main__":
    print(describe(calibrate()))
