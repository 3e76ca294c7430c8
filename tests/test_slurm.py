"""The files for Slurm: each option by the parser that reads it, and what they do with stand-ins for Slurm's commands.

(Both run on two hosts in tests/all/test_slurm_jobs.py.)
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import slurm
from runs import ROOT
from slurm import FILES, SCONTROL, job, with_stand_ins
from torch.distributed.run import get_args_parser

from shared import distributed, tasks
from shared.errors import UsageError
from shared.on_ray import options as ray_options
from shared.running import options

PAGE = ROOT / "docs/slurm.md"
TASKS = (tasks.ImageTask, tasks.TextTask)
# Of the manual of Slurm 22.05: the options that the files use, and what they may be.
SBATCH = {
    "job-name": r"\w+", "nodes": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+", "gpus-per-node": r"\d+",
    "time": r"\d\d:\d\d:\d\d", "signal": r"B:[A-Z0-9]+@\d+", "open-mode": r"append|truncate",
    "mem": r"\d+", "requeue": None, "exclusive": None,
}  # fmt: skip
SRUN = {"export": "ALL", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+", "kill-on-bad-exit": r"[01]"}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def directives(file: Path) -> list[str]:
    """The options in the lines #SBATCH. Slurm reads them up to the first line that is a command."""
    before = re.split(r"^(?!#|\s*$)", file.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^#SBATCH (\S+)$", before, re.MULTILINE)
    assert len(found) == file.read_text().count("#SBATCH")
    return found


def values(words: list[str], known: dict[str, str | None]) -> dict[str, str]:
    """The values of options --NAME=VALUE and --NAME, each of which is known and has a value that it may have."""
    found = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and name in known and name not in found, word
        assert re.fullmatch(known[name], value) if known[name] else "=" not in word, word
        found[name] = value
    return found


@pytest.fixture
def started(tmp_path) -> Callable[..., list[str]]:
    """Runs a file with an srun that only notes its words and Ray's mode, and returns the words."""
    note = f"""
        printf '%s\\n' "$@" > {tmp_path}/words
        echo "${{RAY_AUTH_MODE:-unset}}" > {tmp_path}/mode
        if [[ -v mark ]]; then touch "$mark"; fi
    """

    def run(file: Path, *words: str, **variables: str) -> list[str]:
        path = with_stand_ins(tmp_path, srun=note, scontrol=SCONTROL)
        environment = job(file, tmp_path, PATH=path, NODES="node-1 node-2", **variables)
        done = subprocess.run(["bash", file, *words], env=environment, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        return (tmp_path / "words").read_text().splitlines()

    return run


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """What a parser makes of words, none of them shortened."""
    parser.allow_abbrev = False
    return parser.parse_args(words)


@each_file
def test_the_files_are_well(file):
    # SC1091: it does not follow `source .venv/bin/activate`, which `make lab` has made.
    # SC2016: what is in single quotes after `bash -c` is for that bash.
    found = subprocess.run(["shellcheck", "--exclude=SC1091,SC2016", file], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@each_file
def test_slurm_knows_what_it_is_asked_for(file):
    asked = values(directives(file), SBATCH)
    assert asked["ntasks-per-node"] == "1"  # one launcher per node
    assert "requeue" in asked and asked["signal"] == "B:USR1@180" and asked["open-mode"] == "append"
    assert (asked.get("exclusive"), asked.get("mem")) == (("", "0") if file.stem == "ray" else (None, None))


def test_torchrun_and_the_script_know_their_options(started):
    words = started(FILES[0], "--epochs", "20", SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK="8")
    launcher = words.index("torchrun")
    assert values(words[:launcher], SRUN) == {
        "export": "ALL", "ntasks-per-node": "1", "cpus-per-task": "8", "kill-on-bad-exit": "1",
    }  # fmt: skip
    args = parsed(get_args_parser(), words[launcher + 1 :])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("2", "4", "8421")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "node-1:28421")
    assert (ROOT / args.training_script).name == "train_ddp.py" and (ROOT / args.training_script).is_file()
    script = parsed(options.training_parser("", TASKS), args.training_script_args)
    assert (script.run_name, script.epochs, script.resume) == ("train_ddp-8421", 20, False)


def test_ray_and_the_script_know_their_options(started):
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    # Of nodes with eight GPUs each, which --exclusive adds, four were asked for.
    gpus = {"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": "8"}
    words = started(FILES[1], "--epochs", "20", SLURM_CPUS_PER_TASK="8", **gpus)
    launcher, command = words.index("ray"), words.index("--")
    assert values(words[:launcher], SRUN) == {
        "export": "ALL", "ntasks-per-node": "1", "cpus-per-task": "8", "kill-on-bad-exit": "1",
    }  # fmt: skip
    assert words[launcher + 1] == "symmetric-run"
    context = symmetric_run.make_context("symmetric-run", words[launcher + 2 : command])
    assert (context.params["address"], context.params["min_nodes"]) == ("node-1:6379", 2)
    nodes = start.make_context("start", list(context.params["ray_args_and_entrypoint"]))  # raises for what it lacks
    assert (nodes.params["num_cpus"], nodes.params["num_gpus"]) == (8, 4)
    assert words[command + 1 : command + 5] == ["env", "RAY_ADDRESS=node-1:6379", "bash", "-c"]
    place = command + 7  # after bash's command and name
    assert (ROOT / words[place]).name == "train_ray_ddp.py" and (ROOT / words[place]).is_file()
    script = parsed(ray_options.elastic_parser("", TASKS), words[place + 1 :])
    assert (script.num_workers, script.run_name, script.epochs) == (8, "train_ray_ddp-8421", 20)


@pytest.mark.parametrize(("gpus", "num_gpus", "num_workers"), [
    ({}, "0", "2"), ({"SLURM_GPUS_PER_NODE": "0"}, "0", "2"), ({"SLURM_GPUS_ON_NODE": "4"}, "4", "8"),
])  # fmt: skip
def test_ray_gets_the_gpus_asked_for(gpus, num_gpus, num_workers, started):
    words = started(FILES[1], **gpus)
    assert words[words.index("--num-gpus") + 1] == num_gpus
    assert words[words.index("--num-workers") + 1] == num_workers


def test_ray_uses_a_token_if_there_is_one(started, tmp_path):
    started(FILES[1])
    assert (tmp_path / "mode").read_text() == "unset\n"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").touch()
    started(FILES[1])
    assert (tmp_path / "mode").read_text() == "token\n"


@pytest.mark.parametrize(("python", "starts", "code"), [("true", True, 0), ("false", True, 1), ("true", False, 1)])
def test_a_job_with_ray_fails_unless_its_script_ends_well(python, starts, code, tmp_path):
    """As `ray symmetric-run` may, this srun hides that Ray has not started; an old mark does not help."""
    command = 'while [[ $1 != -- ]]; do shift; done; shift; PATH=$STORAGE:$PATH; "$@" || true'
    path = with_stand_ins(tmp_path, srun=command if starts else "true", python=python, scontrol=SCONTROL)
    mark = tmp_path / "train_ray_ddp-8421.ended-well"
    mark.touch()
    environment = job(FILES[1], tmp_path, PATH=path, NODES="node-1 node-2")
    done = subprocess.run(["bash", FILES[1]], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == code and ("rm: cannot remove" in done.stderr) == bool(code), done.stderr
    assert not mark.exists()


@each_file
@pytest.mark.parametrize(("restarts", "refuses", "requeued"), [("19", "", True), ("20", "", False), ("0", "1", False)])
def test_a_job_that_is_not_requeued_runs_to_its_end(file, restarts, refuses, requeued, tmp_path):
    srun = 'kill -USR1 $PPID; sleep 0.3; echo trained; if [[ -v mark ]]; then touch "$mark"; fi'
    scontrol = "if [[ $1 == requeue && -n $REFUSES ]]; then exit 1; fi\n" + SCONTROL
    path = with_stand_ins(tmp_path, srun=srun, scontrol=scontrol)
    settings = {"SLURM_RESTART_COUNT": restarts, "REFUSES": refuses, "NODES": "node-1 node-2", "PATH": path}
    storage = tmp_path / "storage"
    storage.mkdir()
    environment = job(file, storage, **settings)
    done = subprocess.run(["bash", file], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    assert ("The job is not requeued." in done.stdout) != requeued
    assert (storage / "scontrol").exists() == requeued


@each_file
def test_a_job_continues_if_it_has_saved_something(file, started, tmp_path):
    assert "--resume" not in started(file)
    run = tmp_path / f"{values(directives(file), SBATCH)['job-name']}-8421"
    (run / "checkpoint-best").mkdir(parents=True)  # a copy that a user keeps
    assert "--resume" not in started(file)
    (run / "checkpoint-00000020").mkdir()
    assert "--resume" in started(file, SLURM_RESTART_COUNT="1")
    assert "--resume" not in started(file, SLURM_JOB_NAME="lr[0.1] *")  # whose name is no pattern
    (tmp_path / "lr[0.1] *-8421/checkpoint-00000020").mkdir(parents=True)
    assert "--resume" in started(file, SLURM_JOB_NAME="lr[0.1] *")


@each_file
def test_a_job_that_asks_for_no_cpus_gets_one_per_node(file, started, monkeypatch):
    monkeypatch.setattr(slurm, "JOB", {name: value for name, value in slurm.JOB.items() if "CPUS" not in name})
    assert "--cpus-per-task=1" in started(file)


def test_the_files_differ_where_the_page_says():
    torchrun, ray = (file.read_text().partition("\n# [5]")[0].splitlines() for file in FILES)
    assert set(torchrun) - set(ray) == {
        "#SBATCH --job-name=train_ddp", "port=$((20000 + SLURM_JOB_ID % 9000))",
        "# [3] All nodes meet on the job's first node. Each job has its own port, because two jobs may share a node.",
    }  # fmt: skip
    assert set(ray) - set(torchrun) == {
        "#SBATCH --job-name=train_ray_ddp", "#SBATCH --exclusive", "#SBATCH --mem=0", "address=$first_node:6379",
        "# [3] All nodes meet on the job's first node, which becomes the head of the Ray cluster.",
    }  # fmt: skip


def test_the_page_shows_the_files_and_the_message(monkeypatch):
    page = PAGE.read_text()
    shown = re.findall(r"^```shell\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown == [FILES[0].read_text(), "# [5]" + FILES[1].read_text().partition("# [5]")[2]]
    explained = [name for name in re.findall(r"^\| `--([\w-]+)", page, re.MULTILINE) if name in SBATCH]
    assert explained == list(values(directives(FILES[0]), SBATCH))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UsageError) as caught:
        distributed.join()
    assert f"\ntrain_ddp.py: error: {caught.value}\n" in page


@pytest.mark.parametrize("running", [False, True])
def test_ray_refuses_a_node_with_a_ray_and_its_exit_code_hides_one_that_does_not_start(running, monkeypatch):
    from click.testing import CliRunner
    from ray._raylet import Config
    from ray.scripts import symmetric_run

    commands = []

    def run(words: list[str], **_: object) -> None:
        commands.append(words[:2])
        if words[1] == "start":
            raise subprocess.CalledProcessError(1, words)

    stand_in = SimpleNamespace(run=run, CalledProcessError=subprocess.CalledProcessError)
    monkeypatch.setattr(symmetric_run, "subprocess", stand_in)  # no Ray of this machine is started or stopped
    monkeypatch.setattr(symmetric_run, "check_ray_already_started", lambda: running)
    words = ["--address", "127.0.0.1:6379", "--", "true"]
    monkeypatch.setattr(sys, "argv", ["ray", "symmetric-run", *words])
    done = CliRunner().invoke(symmetric_run.symmetric_run, words)
    if running:
        assert (done.exit_code, commands) == (1, []) and "Ray is already started on this node." in done.output
    else:
        assert (done.exit_code, commands) == (0, [["ray", "start"], ["ray", "stop"]])
        assert "Failed to start Ray" in done.output
    assert (symmetric_run.CLUSTER_WAIT_TIMEOUT, Config.py_gcs_connect_timeout_s()) == (30, 30)
