"""The files for Slurm, started as Slurm does it, with stand-ins for its commands."""

import os
import re
from pathlib import Path

from runs import ROOT

FILES = [ROOT / "docs/slurm/torchrun.sbatch", ROOT / "docs/slurm/ray.sbatch"]
# What Slurm sets in a job of two nodes with a CPU each, and its ID.
JOB = {"SLURM_JOB_ID": "8421", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_SUBMIT_DIR": str(ROOT)}


def with_stand_ins(folder: Path, **scripts: str) -> str:
    """A PATH on which these scripts stand in for Slurm's commands."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{text}")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


SCONTROL = """
if [[ $* == "show hostnames node-[1-2]" ]]; then
    printf '%s\\n' $NODES
else
    echo "$*" >> "$STORAGE/scontrol"
fi
"""


def job(file: Path, storage: Path, **variables: str) -> dict[str, str]:
    """The environment in which Slurm starts a file."""
    (name,) = re.findall(r"--job-name=(\w+)", file.read_text())
    foreign = ("SLURM", "RAY_ADDRESS", "RAY_AUTH")
    known = {each: value for each, value in os.environ.items() if not each.startswith(foreign)}
    folders = {"STORAGE": str(storage), "HOME": str(storage)}
    variables = {"SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "node-[1-2]", **folders, **variables}
    return known | JOB | variables
