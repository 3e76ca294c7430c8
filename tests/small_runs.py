"""Six small runs: what the workshop computes, on record, and compared from commit to commit.

    python tests/small_runs.py --record     write small_runs.json: the losses on this machine, with its CPU and Python
    python tests/small_runs.py OLD NEW      do two commits compute the same, bit for bit, on 1 and 2 ranks?

The runs, all in float64: DDP in one process and on 2 and 4 ranks under torchrun, Ray Train in local mode and with 2
workers, FSDP2 on 2 ranks. OLD and NEW are names of commits, or folders that hold a checkout. For commits
without resnet8 add `--model resnet18`. Exit code 1 where a number differs, 2 where a run fails or cannot be started.
`make test` holds each commit to the record within 1e-9 (test_small_runs.py).
"""

import argparse
import contextlib
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from shared.doctor import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
DDP, RAY = "01-ddp-pytorch-only/train_ddp.py", "02-ddp-pytorch-ray/train_ray_ddp.py"
FSDP2 = "03-fsdp-deepspeed/train_ray_fsdp2.py"
# Of `write_inputs`: 176 images in batches of 52 leave a tail of 20.
UNEVEN = ("--dataset", "mnist", "--batch-size", "52", "--epochs", "2", "--seed", "7", "--precision", "fp64")
MODEL = "resnet8"
UNEVEN += ("--model", MODEL)
SQUARES = ("--max-steps", "6", "--batch-size", "8", "--epochs", "1", "--seed", "7", "--precision", "fp64")
RUNS = {  # name: (script, ranks under torchrun (0: plain python), options)
    "one process": (DDP, 0, UNEVEN),
    "torchrun, 2 ranks": (DDP, 2, UNEVEN),
    "torchrun, 4 ranks": (DDP, 4, UNEVEN),
    "Ray Train, local mode": (RAY, 0, (*UNEVEN, "--num-workers", "0")),
    "Ray Train, 2 workers": (RAY, 0, (*UNEVEN, "--num-workers", "2", "--no-use-gpu")),
    "FSDP2, 2 ranks": (FSDP2, 2, (*SQUARES, "--num-workers", "0", "--no-use-gpu")),
}
NOT_COMPARED = ("samples_per_second", "tokens_per_second", "peak_memory_bytes")
LIMIT_S = 1800  # for one run


def write_inputs(folder: Path) -> Path:
    """Write what the runs read into `folder`, the same on every machine; returns `folder`.

    192 of scikit-learn's digits as MNIST's training file (176 remain for training) and 32 as its test file, 8x8 each;
    and squares.txt, because the default text, Python's standard library, differs by version.
    """
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images * 15.9).byte(), torch.from_numpy(digits.target).byte()
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, 192)), ("t10k", slice(192, 224))):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(images[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx_bytes(labels[part]))
    (folder / "squares.txt").write_text(" ".join(str(number * number) for number in range(8000)))
    return folder


def idx_bytes(values: torch.Tensor) -> bytes:
    """A uint8 tensor in MNIST's file format: two zero bytes, type 8, the number of dimensions, each size, the data."""
    header = struct.pack(">BBBB", 0, 0, 8, values.dim()) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + bytes(values.flatten().tolist())


def input_options(name: str, inputs: Path) -> tuple[str, ...]:
    """Where a run finds what it reads."""
    text = RUNS[name][0] == FSDP2
    return ("--text-file", str(inputs / "squares.txt")) if text else ("--data-dir", str(inputs))


def step_losses(metrics: list[dict]) -> list[float]:
    """The losses of all steps in a metrics file."""
    return [loss for line in metrics for loss in line["step_losses"]]


def run(name: str, checkout: Path, inputs: Path, model: str = MODEL) -> list[dict]:
    """Run one of RUNS by the files of `checkout`; its metrics. Raises CalledProcessError where it fails.

    model: what the runs on images train.
    """
    script, ranks, options = RUNS[name]
    options = [model if word == MODEL else word for word in options]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        metrics = Path(folder, "metrics.jsonl")
        files = ["--storage-path", folder, "--metrics-out", str(metrics), *input_options(name, inputs)]
        command = [sys.executable, *torchrun, str(checkout / script), *options, *files]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        subprocess.run(command, env=environment, cwd=folder, check=True, timeout=LIMIT_S, **pipes)
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def record(inputs: Path) -> None:
    """Write small_runs.json."""
    losses = {name: step_losses(run(name, ROOT, inputs)) for name in RUNS}
    about = {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__}
    RECORD.write_text(json.dumps({**about, "step_losses": losses}, indent=1) + "\n")
    print(f"written: {RECORD.name}, on {about}")


@contextlib.contextmanager
def checkout_of(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, deleted afterwards; a folder that is given is left alone."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def first_difference(old: list[dict], new: list[dict]) -> str | None:
    """Where the metrics of two runs differ, apart from speeds; None where they are equal bit for bit."""
    for a, b in zip(old, new, strict=False):
        for key in sorted((a.keys() | b.keys()) - set(NOT_COMPARED)):
            if a.get(key) != b.get(key):
                return f"epoch {a['epoch']}, {key}: {a.get(key)} and {b.get(key)}"
    return None if len(old) == len(new) else f"{len(old)} and {len(new)} epochs"


def compare(old: str, new: str, inputs: Path, model: str) -> int:
    """Run both commits and print each verdict; the number of runs that differ."""
    different = 0
    with checkout_of(old) as old_files, checkout_of(new) as new_files:
        for name, (_, ranks, _) in RUNS.items():
            if ranks > 2:  # gloo does not fix the order of addition there
                continue
            results = [run(name, files, inputs, model) for files in (old_files, new_files)]
            difference = first_difference(*results)
            different += difference is not None
            print(f"{name:22} {difference or f'equal bit for bit: {len(step_losses(results[0]))} losses'}", flush=True)
    return different


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="OLD and NEW: names of commits, or folders")
    parser.add_argument("--record", action="store_true", help="write small_runs.json")
    parser.add_argument("--model", default=MODEL, help="what the image runs train (%(default)s)")
    args = parser.parse_args()
    if len(args.commits) != (0 if args.record else 2) or (args.record and args.model != MODEL):
        parser.error("give --record, or two commits: OLD NEW")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        inputs = write_inputs(Path(folder))
        try:
            if args.record:
                record(inputs)
                return 0
            return int(compare(*args.commits, inputs, args.model) > 0)
        except (subprocess.SubprocessError, FileNotFoundError) as error:  # a run or git failed, or git is missing
            print(getattr(error, "stdout", None) or "", file=sys.stderr)
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
