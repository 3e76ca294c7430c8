"""Scripts in environments in which a library beneath them, or the system, does something else than usual."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import LIMIT, ROOT

TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
SHORT = ["--dataset", "digits", "--model", "mlp", "--epochs", "1", "--max-steps", "2", "--storage-path"]
DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_ddp_on_gloo_crashes_at_the_level_detail(level, tmp_path):
    """Once it does not, the scripts, the doctor and lesson 1.4 need not warn of it any more."""
    (tmp_path / "ddp.py").write_text(DDP)
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": level, "CUDA_VISIBLE_DEVICES": ""}
    command = [*TORCHRUN, tmp_path / "ddp.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode != 0) == ("(SIGSEGV)" in done.stderr) == (level == "DETAIL"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may rename a machine, in a namespace of its own")
def test_torchrun_on_a_machine_whose_name_is_no_address(tmp_path):
    """With the address that the doctor names. Without it, the ranks would wait for minutes."""
    script = ROOT / "01-ddp-pytorch-only/train_ddp.py"
    words = ["unshare", "--uts", "sh", "-c", 'hostname a-name.invalid && exec "$@"', "sh", *TORCHRUN, script, *SHORT]
    environment = {**os.environ, "PET_LOCAL_ADDR": "localhost"}
    done = subprocess.run([*words, tmp_path], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "done after 2 steps" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_run_starts_rays_workers_in_the_same_environment(tmp_path):
    script = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
    command = ["uv", "run", "--offline", "python", script, "--num-workers", "1", *SHORT, tmp_path]
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
