"""shared.running.options: the contract that all training scripts share."""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from shared import distributed, tasks
from shared.errors import RunFailed, UsageError
from shared.on_ray import options as ray_options
from shared.running import options, script

pytestmark = pytest.mark.usefixtures("plain_python")


def parse(*words: str):
    return options.training_parser("A manual.", [tasks.ImageTask, tasks.TextTask]).parse_args(words)


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_contract():
    assert vars(parse()) == {
        "epochs": 5, "max_steps": None, "save_every_steps": None, "batch_size": 64, "lr": 1e-3, "lr_step_size": 2,
        "seed": 0, "model": "resnet18", "dataset": "digits",
        "data_dir": os.path.abspath("data"), "precision": "fp32", "storage_path": "runs",
        "run_name": None, "resume": False, "metrics_out": None, "quiet": False,
        "preset": None, "text_file": None, "activation_checkpointing": False,
    }  # fmt: skip


def as_under_torchrun(monkeypatch, **values: str) -> None:
    everything = dict.fromkeys(distributed.FROM_TORCHRUN, "0") | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    for name, value in (everything | values).items():
        monkeypatch.setenv(name, value)


def test_every_option_is_read():
    words = (
        "--epochs 2 --max-steps 7 --save-every-steps 3 --batch-size 32 --lr 0.5 --lr-step-size 30 --seed 9 "
        "--model mlp --dataset mnist --data-dir d --precision fp64 --storage-path s --run-name r --resume "
        "--metrics-out m --quiet"
    )
    assert vars(parse(*words.split())) == {
        "epochs": 2, "max_steps": 7, "save_every_steps": 3, "batch_size": 32, "lr": 0.5, "lr_step_size": 30,
        "seed": 9, "model": "mlp", "dataset": "mnist", "data_dir": os.path.abspath("d"),
        "precision": "fp64", "storage_path": "s",
        "run_name": "r", "resume": True, "metrics_out": os.path.abspath("m"), "quiet": True,
        "preset": None, "text_file": None, "activation_checkpointing": False,
    }  # fmt: skip


@pytest.mark.parametrize(("option", "values"), [
    ("--epochs", ["0", "-1", "1.5", "many", ""]),
    ("--max-steps", ["0", "-3", "x"]),
    ("--save-every-steps", ["0", "-3", "x"]),
    ("--batch-size", ["0", "-64", "64.0"]),
    ("--lr-step-size", ["0", "1.5"]),
    ("--lr", ["0", "-0.1", "nan", "inf", "1e-3x"]),
    ("--seed", ["1.5", "x", "-1", str(2**64)]),
    ("--model", ["vgg", ""]),
    ("--dataset", ["cifar"]),
    ("--precision", ["fp16", "64"]),
    ("--run-name", ["team/first", "/tmp/first", "..", ""]),
])  # fmt: skip
def test_a_wrong_value_is_a_usage_error_that_names_the_option(option, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse(f"{option}={value}")
        message = str(caught.value)
        assert option in message and "--help" in message and "\n" not in message


@pytest.mark.parametrize(("words", "named"), [
    (["--gpus", "2"], "--gpus"), (["--epochs"], "--epochs"), (["extra"], "extra"), (["--resume=yes"], "--resume"),
])  # fmt: skip
def test_options_that_do_not_exist_are_usage_errors(words, named):
    with pytest.raises(UsageError, match=named):
        parse(*words)


def test_numbers_of_workers():
    assert [ray_options.num_workers(text) for text in ("0", "16")] == [0, 16]
    assert [ray_options.elastic_workers(text) for text in ("0", "2", "1:2", "3:3")] == [(0, 0), (2, 2), (1, 2), (3, 3)]
    for text in ("-1", "1:2", "two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number of workers, 0 or more"):
            ray_options.num_workers(text)
    for text in ("0:2", "2:1", "-1:2", "1:0", "1:", ":2", "1:2:3", "1-2", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not .* MIN:MAX with 1 <= MIN <= MAX"):
            ray_options.elastic_workers(text)
    args = ray_options.elastic_parser("", [tasks.ImageTask]).parse_args(["--num-workers", "4:6"])
    assert (args.num_workers, args.max_workers) == (4, 6)


@pytest.mark.parametrize("number", ["2", "1"])
def test_under_torchrun_ray_starts_no_processes_of_its_own(number, monkeypatch):
    as_under_torchrun(monkeypatch)
    for parser in (ray_options.ray_parser, ray_options.elastic_parser):
        with pytest.raises(UsageError, match="Ray starts the processes itself: start with plain python, or give"):
            parser("", [tasks.ImageTask]).parse_args(["--num-workers", number])
        assert parser("", [tasks.ImageTask]).parse_args(["--num-workers", "0"]).num_workers == 0


def test_positive_numbers():
    assert [options.positive_int(text) for text in ("1", "64")] == [1, 64]
    assert [options.positive_float(text) for text in ("1e-3", "2")] == [0.001, 2.0]
    with pytest.raises(argparse.ArgumentTypeError, match="'0' is not a whole number above 0"):
        options.positive_int("0")
    with pytest.raises(argparse.ArgumentTypeError, match="'nan' is not a number above 0"):
        options.positive_float("nan")
    with pytest.raises(argparse.ArgumentTypeError, match="'1e39' is not a number above 0, between 1e-37 and 1e37"):
        options.positive_float("1e39")


def test_options_are_frozen():
    args = parse("--seed", "3")
    with pytest.raises(AttributeError, match="seed cannot be set"):
        args.seed = 4
    assert args.seed == 3


@pytest.mark.parametrize(("words", "model", "preset"), [
    ("", "resnet18", None), ("--model mlp", "mlp", None), ("--dataset text", "gpt", "nano"),
    ("--dataset text --model gpt --preset micro", "gpt", "micro"), ("--dataset mnist", "resnet18", None),
])  # fmt: skip
def test_a_data_set_has_its_models(words, model, preset):
    args = parse(*words.split())
    assert (args.model, args.preset) == (model, preset)


@pytest.mark.parametrize(("words", "message"), [
    ("--dataset text --model mlp", "--model mlp does not train on --dataset text; use gpt"),
    ("--model gpt", "--model gpt does not train on --dataset digits; use resnet18, resnet18-batchnorm, resnet8, mlp"),
    ("--preset nano", "--preset goes with --dataset text"), ("--text-file t", "--text-file goes with --dataset text"),
    ("--activation-checkpointing", "--activation-checkpointing goes with --dataset text"),
])  # fmt: skip
def test_options_of_the_other_task_are_refused(words, message):
    with pytest.raises(UsageError) as caught:
        parse(*words.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(("task", "dataset"), [(tasks.ImageTask, "text"), (tasks.TextTask, "digits")])
def test_a_script_refuses_the_data_of_a_task_that_it_does_not_serve(task, dataset):
    with pytest.raises(UsageError, match=f"--dataset: invalid choice: '{dataset}'"):
        options.training_parser("", [task]).parse_args(["--dataset", dataset])


@pytest.mark.parametrize(("rank", "prints"), [(None, True), ("0", True), ("1", False)])
def test_the_manual_is_printed_by_one_rank(rank, prints, monkeypatch, capsys):
    if rank is not None:
        as_under_torchrun(monkeypatch, RANK=rank)
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    manual = capsys.readouterr().out
    assert ("A manual." in manual and "--metrics-out" in manual) if prints else manual == ""


def test_bf16_is_refused_only_on_a_gpu_without_it(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    tasks.check_precision("bf16", torch.device("cpu"))
    tasks.check_precision("fp32", gpu)
    with pytest.raises(ValueError, match="Tesla T4 has no bf16 units; use --precision fp32"):
        tasks.check_precision("bf16", gpu)


def test_fp16_is_refused_on_a_cpu():
    tasks.check_precision("fp16", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        tasks.check_precision("fp16", torch.device("cpu"))


# --- the end of a script --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "waits"), [(None, False), ("0", False), ("1", True)])
def test_a_usage_error_is_one_line_of_one_rank_and_exit_code_2(rank, waits, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(script.time, "sleep", waited.append)
    if rank is not None:
        as_under_torchrun(monkeypatch, RANK=rank, LOCAL_RANK=rank)

    def main():
        raise UsageError("global batch 130 is not divisible")

    with pytest.raises(SystemExit) as caught:
        script.run_main(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("" if waits else "train.py: error: global batch 130 is not divisible\n")
    assert bool(waited) == waits  # so that rank 0 has spoken before torchrun ends all


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_node_whose_ranks_cannot_join_says_so_itself(local_rank, monkeypatch, capsys):
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    as_under_torchrun(monkeypatch, RANK="8", LOCAL_RANK=local_rank)

    def main():
        raise UsageError("8 processes on a node with 7 GPUs")

    with pytest.raises(SystemExit):
        script.run_main(main)
    assert ("7 GPUs" in capsys.readouterr().err) == (local_rank == "0")


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    for error in (RuntimeError("of a collective"), ValueError("a bug")):

        def main(error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            script.run_main(main)
        assert caught.value is error


def test_a_run_that_failed_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def main():
        raise RunFailed("the worker of rank 1 died")

    with pytest.raises(SystemExit) as caught:
        script.run_main(main)
    assert (caught.value.code, capsys.readouterr().err) == (1, "train.py: failed: the worker of rank 1 died\n")


# Each case is a process of its own, forked from one that has imported torch: (how the storage lists what is saved, what
# clean_up does, what the script does after the signal, what is printed).
STOPPED = [
    ("return []", "pass", "time.sleep(600)", "nothing was saved yet"),
    ("raise OSError('no credentials')", "pass", "time.sleep(600)",
     "cannot see what is saved in runs/mine (no credentials); continue with: python train.py --run-name mine --resume"),
    ("time.sleep(600)", "pass", "time.sleep(600)",
     "runs/mine does not answer; continue with: python train.py --run-name mine --resume"),
    ("return []", "1 / 0", "time.sleep(600)", "nothing was saved yet"),
    ("return []", "time.sleep(600)", "time.sleep(600)", "nothing was saved yet"),
    # What breaks meanwhile in the main thread is not said.
    ("time.sleep(1); return []", "pass", "raise ValueError('Ray was ended')", "nothing was saved yet"),
    ("time.sleep(1); return []", "pass", "raise UsageError('cannot join Ray')", "nothing was saved yet"),
    # Nobody listens: standard output is a pipe whose other end is closed.
    ("return []", "pass", "time.sleep(600)", None),
]  # fmt: skip
STOP = """
import json, os, signal, sys, time
from shared.running import runs, script
from shared.distributed import Worker
from shared.errors import UsageError

def case(number, saved, clean_up, then, said):
    os.dup2(os.open(f"{number}.out", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    if said is None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        os.dup2(write_end, 1)
    names = dict(UsageError=UsageError, time=time)
    exec(f"def saved(run): {saved}\\ndef clean_up(): {clean_up}\\ndef then(): {then}", names)
    runs.Run.list_newest_first = names["saved"]
    script.stop_on_signals(Worker(), runs.Run("runs/mine").resume_hint, names["clean_up"])
    os.kill(os.getpid(), signal.SIGINT)
    script.run_main(names["then"])

children = []
sys.argv = ["train.py", *sys.argv[1:]]
for number, words in enumerate(json.loads(sys.argv.pop())):
    if (child := os.fork()) == 0:
        case(number, *words)
        os._exit(99)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def test_a_signal_ends_a_run_whatever_fails(tmp_path):
    command = [sys.executable, "-c", STOP, json.dumps(STOPPED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert json.loads(done.stdout) == [130] * len(STOPPED), done.stderr
    for number, (*_, said) in enumerate(STOPPED):
        lines = (tmp_path / f"{number}.out").read_text().splitlines()
        assert lines == ([] if said is None else [f"[rank 0/1] stopped by SIGINT: {said}"])


SIGNALED = """
import os, signal, sys, time
from shared.running import runs, script
from shared.distributed import Worker

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        if (child := os.fork()) == 0:
            signal.signal(number, handler)
            script.stop_on_signals(Worker(), runs.Run("runs/mine").resume_hint)
            os.kill(os.getpid(), number)
            time.sleep(1 if (number, handler) == (signal.SIGHUP, signal.SIG_IGN) else 600)
            os._exit(0)
        print(number.name, handler.name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_every_signal_that_ends_a_process_ends_a_run_with_its_hint_except_a_closed_terminal_under_nohup():
    done = subprocess.run([sys.executable, "-c", SIGNALED], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    said = [
        f"[rank 0/1] stopped by {name}: nothing was saved yet" for name in ("SIGHUP", *2 * ["SIGINT"], *2 * ["SIGTERM"])
    ]
    assert [line for line in lines if line.startswith("[")] == said, done.stdout + done.stderr
    assert [line for line in lines if not line.startswith("[")] == [
        "SIGHUP SIG_DFL 129", "SIGHUP SIG_IGN 0", "SIGINT SIG_DFL 130", "SIGINT SIG_IGN 130", "SIGTERM SIG_DFL 143",
        "SIGTERM SIG_IGN 143",
    ]  # fmt: skip


LOADS_WITH_WORKERS = """
import sys
from torch.utils.data import DataLoader
from shared.running import runs, script
from shared.distributed import Worker

script.stop_on_signals(Worker(), runs.Run("runs/mine").resume_hint)
for _ in range(2):  # a loader's workers end with each epoch
    print(sum(len(batch) for batch in DataLoader(range(10), batch_size=4, num_workers=1)))
"""


def test_only_a_stop_stops_and_not_the_end_of_a_loaders_worker():
    command = [sys.executable, "-c", LOADS_WITH_WORKERS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "10\n10\n"), result.stderr


# --- what an environment may hold ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("environment", "words"), [
    ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK is set without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT:"),
    ({"RANK": "0"}, "RANK is set without LOCAL_RANK"),
    ({"RANK": "first"}, "RANK=first is not a whole number: start with torchrun, or unset RANK"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set without RANK: start with torchrun, or unset WORLD_SIZE"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a whole number"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, r"this is one of 4 processes \(SLURM_STEP_NUM_TASKS\) .*one torchrun per node"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, r"this is one of 2 processes \(OMPI_COMM_WORLD_SIZE\)"),
    ({"PMI_SIZE": "2"}, r"this is one of 2 processes \(PMI_SIZE\)"),
])  # fmt: skip
def test_an_environment_of_half_a_group_is_refused(environment, words, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        distributed.join()
    assert distributed.rank_from_environment() == 0  # it speaks for itself


@pytest.mark.parametrize(("name", "value"), [("RANK", "16"), ("LOCAL_RANK", "8"), ("MASTER_PORT", "ssh")])
def test_a_rank_outside_of_its_group_is_refused(name, value, monkeypatch):
    as_under_torchrun(monkeypatch, **{name: value})
    with pytest.raises(UsageError, match=f"{name}={value} is "):
        distributed.join()


@pytest.mark.parametrize("environment", [
    {}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, {"SLURM_STEP_NUM_TASKS": "1"},
    {"PMI_SIZE": "1"}, {"MASTER_ADDR": "gpu-1"},
])  # fmt: skip
def test_a_single_process_is_one_everywhere(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed.join().world_size == 1


@pytest.mark.parametrize("name", ["a/b", "a#1", "why?", "50%", ".hidden", "..", ""])
def test_what_is_no_name_of_a_run(name):
    with pytest.raises(UsageError, match="is not the name of a run"):
        parse("--run-name", name)


@pytest.mark.parametrize("option", ["--metrics-out", "--data-dir", "--text-file"])
def test_paths_of_this_machine_are_no_uris_and_know_the_home(option, monkeypatch):
    monkeypatch.setenv("HOME", "/the/home")
    parser = options.training_parser("", [tasks.TextTask])
    with pytest.raises(UsageError, match="'s3://bucket/it' is a URI, but must be a path on this machine"):
        parser.parse_args([option, "s3://bucket/it"])
    assert vars(parser.parse_args([option, "~/it"]))[option[2:].replace("-", "_")] == "/the/home/it"
    assert parser.parse_args(["--storage-path", "~/runs"]).storage_path == "/the/home/runs"


def test_ray_is_given_no_name_that_it_cannot_send():
    with pytest.raises(UsageError, match="'räy' has letters that Ray Train cannot send"):
        ray_options.ray_parser("", [tasks.ImageTask]).parse_args(["--run-name", "räy"])
    assert parse("--run-name", "räy").run_name == "räy"


@pytest.mark.parametrize("level", ["DETAIL", "detail"])
def test_a_level_of_debugging_with_which_ddp_crashes_is_refused(level, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    for has_gpus in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpus=has_gpus: has_gpus)
        with nullcontext() if has_gpus else pytest.raises(SystemExit):
            script.run_main(lambda: None)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(
        "error: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on CPUs in torch 2.15: use INFO"
    )


def test_a_script_without_an_output_ends_in_one_line():
    code = "from shared.errors import UsageError; from shared.running import script; script.run_main(MAIN)"
    code = code.replace("MAIN", "lambda: (_ for _ in ()).throw(UsageError('a mistake'))")
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "{code}" >&-'], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "-c: error: a mistake\n")


def test_a_killed_script_has_written_its_lines():
    """Those that Ray forwards from the workers are printed without a flush."""
    code = "import os; from shared.running import script; script.run_main(lambda: (print('a line'), os._exit(0)))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "a line\n", done.stderr
