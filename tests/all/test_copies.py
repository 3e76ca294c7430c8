"""The scripts, copied out as their pages say, train on data of one's own without the workshop."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from markdown_pages import blocks, copied_out, needs, run_in, section
from notebook_rules import ROOT


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory) -> Path:
    """An interpreter with all packages that are installed here, but for those of the workshop."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is added as it is: the .pth files in it, which lead to this folder, are not read.
    (packages / "all.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin/python"
    assert subprocess.run([python, "-c", "import shared"], cwd=folder, capture_output=True).returncode == 1
    return python


def with_own_data(script: Path) -> None:
    """Change a copied script as chapter 1's page says: its diff, and its task."""
    parts = {language: content for _, language, content in blocks(section("01-ddp-pytorch-only/README.md"))}
    text = script.read_text()
    diff = parts["diff"].replace("+import numpy as np\n import torch\n", "")
    for old, new in re.findall(r"^-(.*)\n\+(.*)$", diff, re.MULTILINE):
        assert text.count(old) == 1, old
        text = text.replace(old, f"\n{parts['python']}\n\n{new}")
    script.write_text(text.replace("\nimport torch\n", "\nimport numpy as np\nimport torch\n", 1))


@pytest.mark.parametrize(("name", "launch", "options"), [
    ("01-ddp-pytorch-only/train_ddp.py", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []),
    ("02-ddp-pytorch-ray/train_ray_ddp.py", [], ["--num-workers", "0"]),
])  # fmt: skip
def test_a_copy_trains_on_data_of_ones_own(name, launch, options, clean_python, tmp_path):
    copied_out(str(Path(name).parent / "README.md"), tmp_path)
    job = tmp_path / "job"
    script = job / Path(name).name
    kept = needs(ROOT / name) | {"__init__"}
    for path in (job / "shared").glob("*"):
        if path.stem not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with_own_data(script)
    (job / "data").mkdir()
    labels = np.arange(240) % 3
    images = np.random.default_rng(0).normal(size=(240, 3, 6, 5)) + labels[:, None, None, None]
    np.savez(job / "data/mine.npz", images=images, labels=labels)
    options = [*options, "--model", "mlp", "--epochs", "4", "--batch-size", "50", "--metrics-out", "metrics.jsonl"]
    run_in(job, tmp_path, clean_python, *launch, script.name, *options)
    lines = [ast.literal_eval(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples_seen"] for line in lines] == [192] * 4 and lines[0]["world_size"] == (2 if launch else 1)
    assert lines[-1]["val_accuracy"] > 0.6  # of three classes
