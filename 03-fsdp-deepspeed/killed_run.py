"""Run a script that loses a rank, and return what its ranks printed: the helpers of lesson 3.3.

As a script: train as train_ray_fsdp2.py does, and kill worker 1 just before it uploads its slices of step 6, once.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

STEP = 6  # worker 1 dies before it uploads anything of this step's checkpoint


def torchrun(log: Path, script: str, *words: str) -> list[str]:
    """Run `torchrun --nproc-per-node 2 SCRIPT WORDS`, in which a rank is killed, and return the ranks' own lines.

    log: the file for everything that is printed. Raises AssertionError with its end unless a rank died by SIGKILL.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *words]
    printed = _run(command, log)
    killed = re.search(r"rank *: (\d+) .*\n *exitcode *: -9\b", printed)
    assert killed, printed[-3000:]
    return [*_own_lines(printed), f"[torchrun] rank {killed[1]} was killed by signal 9 (SIGKILL)"]


def train_on_ray(folder: Path, name: str, *options: str) -> list[str]:
    """Run this file as a script, with its log and checkpoints in `folder`, and return the lines that it logs itself.

    Raises AssertionError with the log's end if the run failed.
    """
    for old in folder.glob(f"{name}*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    places = ["--storage-path", str(folder), "--run-name", name, "--metrics-out", str(folder / f"{name}.jsonl")]
    printed = _run([__file__, *options, *places], folder / f"{name}.log")
    assert "[driver] done" in printed, printed[-3000:]
    return _own_lines(printed)


def metrics_of_both_attempts(folder: Path, name: str) -> tuple[dict, dict]:
    """Return the metrics of a run's only epoch: those of the killed attempt, and those that the run ended with."""
    attempts = [json.loads((folder / f"{name}.{end}").read_text()) for end in ("first-attempt.json", "jsonl")]
    measured = ("samples_per_second", "tokens_per_second", "peak_memory_bytes")
    return tuple({key: value for key, value in line.items() if key not in measured} for line in attempts)


def _run(words: list[str], log: Path) -> str:
    with open(log, "w") as file:
        subprocess.run([sys.executable, *words], stdout=file, stderr=file, timeout=600)
    return log.read_text()


def _own_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(("[rank ", "[driver]"))]


def main() -> None:
    """Run the training script, with `train` replaced by one in which worker 1 dies."""
    import train_ray_fsdp2

    from shared.running import script

    train_fsdp2 = train_ray_fsdp2.train

    def train(args: Namespace, run: object, worker: object) -> list[dict]:
        """Train on one worker. If no worker was killed before, worker 1 dies in the upload of step STEP."""
        import ray.train

        really_report = ray.train.report
        rank_0_uploaded = Path(f"{run.folder}.rank-0-uploaded")

        def upload(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            """Copy rank 0's files into the storage as Ray does. On rank 1, wait for that, and die."""
            if worker.rank == 1:
                while not rank_0_uploaded.exists():
                    time.sleep(0.01)
                worker.log(f"killed before it uploads its slices of step {STEP}")
                os.kill(os.getpid(), signal.SIGKILL)
            stored = Path(run.folder, name)
            shutil.copytree(checkpoint.path, stored)
            rank_0_uploaded.touch()
            return ray.train.Checkpoint(str(stored))

        def report(metrics: dict, checkpoint_dir_name: str, **more: object) -> None:
            if f"-{STEP:08d}-" in checkpoint_dir_name and not rank_0_uploaded.exists():
                more["checkpoint_upload_fn"] = upload
                if worker.rank == 0:
                    Path(f"{run.folder}.first-attempt.json").write_text(json.dumps(metrics))
            really_report(metrics, checkpoint_dir_name=checkpoint_dir_name, **more)

        ray.train.report = report
        return train_fsdp2(args, run, worker)

    train_ray_fsdp2.train = train
    script.run_main(train_ray_fsdp2.main)


if __name__ == "__main__":
    main()
