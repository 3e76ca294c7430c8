"""shared.cli: the contract that all training scripts share."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared import checkpoint, cli
from shared.distributed import UsageError, Worker


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    """Every test starts as under plain `python train.py`: no variable of torchrun is set."""
    for name in (
        "RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def parse(*words: str):
    return cli.training_parser("A manual.").parse_args(words)


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_contract():
    assert vars(parse()) == {
        "epochs": 5, "max_steps": None, "batch_size": 64, "lr": 1e-3, "lr_step_size": 2, "seed": 0, "model": "resnet18",
        "dataset": "digits", "data_dir": "data", "precision": "fp32", "storage_path": "runs", "run_name": None,
        "resume": False, "metrics_out": None,
    }  # fmt: skip


def test_every_option_is_read():
    words = (
        "--epochs 2 --max-steps 7 --batch-size 32 --lr 0.5 --lr-step-size 30 --seed 9 --model mlp --dataset mnist "
        "--data-dir d --precision fp64 --storage-path s --run-name r --resume --metrics-out m"
    )
    assert vars(parse(*words.split())) == {
        "epochs": 2, "max_steps": 7, "batch_size": 32, "lr": 0.5, "lr_step_size": 30, "seed": 9, "model": "mlp",
        "dataset": "mnist", "data_dir": "d", "precision": "fp64", "storage_path": "s", "run_name": "r", "resume": True,
        "metrics_out": "m",
    }  # fmt: skip


@pytest.mark.parametrize(("option", "values"), [
    ("--epochs", ["0", "-1", "1.5", "many", ""]),
    ("--max-steps", ["0", "-3", "x"]),
    ("--batch-size", ["0", "-64", "64.0"]),
    ("--lr-step-size", ["0", "1.5"]),
    ("--lr", ["0", "-0.1", "nan", "inf", "1e-3x"]),
    ("--seed", ["1.5", "x", "-1", str(2**64)]),
    ("--model", ["vgg", ""]),
    ("--dataset", ["cifar"]),
    ("--precision", ["fp16", "64"]),
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


def test_positive_numbers():
    assert [cli.positive_int(text) for text in ("1", "64")] == [1, 64]
    assert [cli.positive_float(text) for text in ("1e-3", "2")] == [0.001, 2.0]
    with pytest.raises(cli.argparse.ArgumentTypeError, match="0 is not above 0"):
        cli.positive_int("0")
    with pytest.raises(cli.argparse.ArgumentTypeError, match="nan is not a number above 0"):
        cli.positive_float("nan")


@pytest.mark.parametrize(("rank", "prints"), [(None, True), ("0", True), ("1", False)])
def test_the_manual_is_printed_by_one_rank(rank, prints, monkeypatch, capsys):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    manual = capsys.readouterr().out
    assert ("A manual." in manual and "--metrics-out" in manual) if prints else manual == ""


def test_bf16_is_refused_only_on_a_gpu_without_it(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    cli.check_precision("bf16", torch.device("cpu"))
    cli.check_precision("fp32", gpu)
    with pytest.raises(ValueError, match="Tesla T4 has no bf16 units; use --precision fp32"):
        cli.check_precision("bf16", gpu)


def test_fp16_is_refused_on_a_cpu():
    cli.check_precision("fp16", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        cli.check_precision("fp16", torch.device("cpu"))


# --- claiming a run --------------------------------------------------------------------------------------------------


@pytest.fixture
def args(tmp_path):
    return parse(
        "--storage-path",
        str(tmp_path / "runs"),
        "--run-name",
        "mine",
        "--metrics-out",
        str(tmp_path / "out" / "m.jsonl"),
    )


@pytest.fixture
def folder(args):
    return cli.run_folder(args)


def save_step(folder: Path, step: int, **options) -> Path:
    """A checkpoint of the run in `folder`, as a script with the default options and these would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = cli.new_progress(parse(*(f"--{name.replace('_', '-')}={value}" for name, value in options.items())))
    return checkpoint.save_atomically({"progress": {**progress, "step": step}}, checkpoint.path_for_step(folder, step))


def claim(args, folder, restarted=False):
    return cli.claim_run(args, folder, Worker(restarted=restarted))


def test_a_run_has_its_folder_under_the_storage_path(args, folder, tmp_path):
    assert folder == tmp_path / "runs" / "mine"


def test_a_run_without_a_name_gets_a_new_one(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["some/where/train_ddp.py"])
    monkeypatch.chdir(tmp_path)
    folder = cli.run_folder(parse())
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("train_ddp-20") and folder.name.endswith(f"-{os.getpid()}")


def test_a_new_run_gets_its_folders_and_starts_from_nothing(args, folder, tmp_path, capsys):
    assert claim(args, folder) is None
    assert list(folder.iterdir()) == []
    assert (tmp_path / "out" / "m.jsonl").read_text() == ""
    assert capsys.readouterr().out == ""


def test_claiming_leaves_an_older_metrics_file_alone(args, folder):
    metrics = Path(args.metrics_out)
    metrics.parent.mkdir()
    metrics.write_text("what was there\n")
    claim(args, folder)
    assert metrics.read_text() == "what was there\n"


def test_a_run_that_exists_is_refused_before_anything_is_written(args, folder):
    path = save_step(folder, 20)
    with pytest.raises(ValueError) as caught:
        claim(args, folder)
    assert (
        str(caught.value)
        == f"{folder} holds a run already: add --resume to go on with it, or choose another --run-name"
    )
    assert list(folder.iterdir()) == [path]
    assert not Path(args.metrics_out).exists()


def test_even_an_unreadable_checkpoint_means_that_the_run_exists(args, folder):
    save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="holds a run already"):
        claim(args, folder)


@pytest.mark.parametrize("how", ["--resume", "restarted by torchrun"])
def test_a_run_goes_on_from_its_newest_readable_checkpoint(args, folder, how, capsys):
    for step in (20, 40, 60):
        path = save_step(folder, step)
    path.write_bytes(path.read_bytes()[:-50])
    args.resume = how == "--resume"
    assert claim(args, folder, restarted=not args.resume)["progress"]["step"] == 40
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0/1] skipped checkpoint-00000060.pt (truncated or no checkpoint at all)",
        f"[rank 0/1] resuming from {folder / 'checkpoint-00000040.pt'}",
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_with_nothing_readable_resume_is_an_error(args, folder, broken, capsys):
    args.resume = True
    if broken:
        save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=f"nothing to resume: no readable checkpoint in {folder}"):
        claim(args, folder)
    assert ("skipped checkpoint-00000020.pt" in capsys.readouterr().out) == broken


@pytest.mark.parametrize("resume", [False, True])
def test_a_restart_by_torchrun_before_the_first_checkpoint_begins_anew(args, folder, resume, capsys):
    args.resume = resume
    assert claim(args, folder, restarted=True) is None
    assert f"there is no checkpoint in {folder}: beginning anew" in capsys.readouterr().out


def test_a_restart_by_torchrun_never_writes_over_checkpoints_that_it_cannot_read(args, folder):
    save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="no readable checkpoint"):
        claim(args, folder, restarted=True)


def test_resume_needs_a_name(args, folder):
    args.resume, args.run_name = True, None
    with pytest.raises(ValueError, match="--resume needs the --run-name"):
        claim(args, folder)


def test_a_storage_path_that_is_a_url_is_refused(args):
    args.storage_path = "s3://bucket/runs"
    with pytest.raises(UsageError, match="--storage-path s3://bucket/runs"):
        cli.run_folder(args)


def test_a_storage_path_that_cannot_be_made_is_a_clear_error(args, folder):
    folder.parent.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=f"cannot write to --storage-path: .*: {folder}"):
        claim(args, folder)


def test_a_read_only_storage_path_is_a_clear_error(args, folder, monkeypatch):
    def refuse(path, *_):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ValueError, match=f"cannot write to --storage-path: Read-only file system: {folder}"):
        claim(args, folder)


@pytest.mark.parametrize("in_the_way", ["a folder", "a file for a folder"])
def test_a_metrics_file_that_cannot_be_written_is_a_clear_error(args, folder, in_the_way):
    metrics = Path(args.metrics_out)
    if in_the_way == "a folder":
        metrics.mkdir(parents=True)
    else:
        metrics.parent.write_text("a file")
    with pytest.raises(ValueError, match=f"cannot write to --metrics-out: .*: {metrics}"):
        claim(args, folder)


@pytest.mark.parametrize(("name", "saved"), [("model", "mlp"), ("dataset", "synthetic")])
def test_a_checkpoint_of_another_model_or_data_set_is_refused(args, folder, name, saved):
    path = save_step(folder, 20, **{name: saved})
    args.resume = True
    with pytest.raises(ValueError) as caught:
        claim(args, folder)
    assert str(caught.value) == f"{path} is of --{name} {saved}, and this run asks for --{name} {getattr(args, name)}"


@pytest.mark.parametrize("progress", [{"epoch": 1}, None, {"options": {"model": "gpt"}}])
def test_a_checkpoint_of_another_program_is_refused(args, folder, progress):
    """Lessons write checkpoints too, with a progress of their own."""
    folder.mkdir(parents=True)
    state = {} if progress is None else {"progress": progress}
    path = checkpoint.save_atomically(state, checkpoint.path_for_step(folder, 20))
    args.resume = True
    with pytest.raises(ValueError, match=str(path)):
        claim(args, folder)


def test_other_options_than_before_are_noted(args, folder, capsys):
    save_step(folder, 20, lr=0.5, batch_size=32)
    args.resume = True
    assert claim(args, folder)["progress"]["step"] == 20
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert "batch_size 32 -> 64" in note and "lr 0.5 -> 0.001" in note and "seed" not in note


def test_more_epochs_are_no_other_options(args, folder, capsys):
    save_step(folder, 20)
    args.resume, args.epochs = True, 50
    claim(args, folder)
    assert "note" not in capsys.readouterr().out


# --- progress and metrics --------------------------------------------------------------------------------------------


def test_a_whole_epoch_becomes_a_line_and_the_next_one_begins():
    progress = cli.new_progress(parse())
    cli.record_steps(progress, [3.0, 2.0], [4, 4])
    cli.record_steps(progress, [1.0], [2])
    line = cli.finish_epoch(progress, 10, {"val_loss": 0.5})
    assert line == {
        "epoch": 1, "train_loss": (3 * 4 + 2 * 4 + 1 * 2) / 10, "val_loss": 0.5,
        "step_losses": [3.0, 2.0, 1.0], "samples_seen": 10,
    }  # fmt: skip
    assert progress == {
        **cli.new_progress(parse()), "step": 3, "epoch": 1, "metrics": [line],
    }  # fmt: skip
    cli.record_steps(progress, [0.5], [10])
    assert cli.finish_epoch(progress, 10, {})["epoch"] == 2
    assert line["step_losses"] == [3.0, 2.0, 1.0]  # the second epoch did not write into the first one's line
    assert [line["epoch"] for line in progress["metrics"]] == [1, 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_training_that_diverges_ends_and_nothing_is_noted(loss):
    progress = cli.new_progress(parse())
    cli.record_steps(progress, [3.0], [4])
    before = {**progress}
    with pytest.raises(UsageError, match=f"the loss of step 3 is {loss}"):
        cli.record_steps(progress, [2.0, loss], [4, 4])
    assert progress == before


def test_an_epoch_cut_short_stays_the_current_one_and_its_line_is_replaced():
    progress = cli.new_progress(parse())
    cli.record_steps(progress, [3.0], [4])
    cut = cli.finish_epoch(progress, 10, {})
    assert (cut["samples_seen"], cut["train_loss"]) == (4, 3.0)
    assert (progress["epoch"], progress["position"], progress["step"]) == (0, 4, 1)

    cli.record_steps(progress, [2.0, 1.0], [4, 2])
    line = cli.finish_epoch(progress, 10, {})
    assert progress["metrics"] == [line]
    assert cut["step_losses"] == [3.0]  # a line that was handed out does not change any more
    assert (line["epoch"], line["samples_seen"], line["step_losses"]) == (1, 10, [3.0, 2.0, 1.0])
    assert line["train_loss"] == pytest.approx(2.2)
    assert (progress["epoch"], progress["position"], progress["step"]) == (1, 0, 3)


def test_as_many_losses_as_counts():
    with pytest.raises(ValueError):
        cli.record_steps(cli.new_progress(parse()), [1.0, 2.0], [4])


def test_metrics_are_one_json_line_an_epoch_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [{"epoch": 1, "train_loss": 0.1 + 0.2}, {"epoch": 2, "train_loss": 1e-17}]
    cli.write_metrics(path, lines)
    cli.write_metrics(str(path), lines)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines  # floats to the last bit
    cli.write_metrics(path, lines[:1])
    assert len(path.read_text().splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]
    cli.write_metrics(None, lines)


@pytest.mark.parametrize("where", ["write_text", "replace"])
def test_a_crash_while_writing_metrics_leaves_the_old_ones(tmp_path, monkeypatch, where):
    path = tmp_path / "m.jsonl"
    cli.write_metrics(path, [{"epoch": 1}])

    def crash(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(*{"write_text": (Path, "write_text"), "replace": (os, "replace")}[where], crash)
    with pytest.raises(OSError):
        cli.write_metrics(path, [{"epoch": 1}, {"epoch": 2}])
    assert path.read_text() == '{"epoch": 1}\n'


def test_an_epoch_in_words():
    line = {"epoch": 2, "train_loss": 0.12345, "val_loss": 0.5, "val_accuracy": 0.97654, "samples_per_second": 321.7}
    assert cli.describe(line, 5) == ("epoch 2/5  train_loss 0.1235  val_loss 0.5000  val_accuracy 0.977  322 samples/s")


# --- the end of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [
    [], ["--epochs", "3"], ["--run-name", "mine"], ["--run-name=mine"], ["--run-name", "mine", "--resume"],
    ["--storage-path", "my runs/it's $HOME", "--metrics-out", "a;b.jsonl"],
])  # fmt: skip
def test_the_resume_command_can_be_pasted_into_a_shell(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["my scripts/train.py", *words])
    command = shlex.split(cli.resume_command("mine"))
    assert command[:2] == ["python", "my scripts/train.py"]
    again = parse(*command[2:])
    assert again.resume and again.run_name == "mine"
    as_before = parse(*words)
    for name in ("epochs", "storage_path", "metrics_out"):
        assert getattr(again, name) == getattr(as_before, name)
    assert command.count("--resume") == 1
    assert sum(word.startswith("--run-name") for word in command) == 1


def test_the_resume_command_quotes_a_run_name_with_spaces(monkeypatch):
    command = shlex.split(cli.resume_command("my first run"))
    assert command == ["python", "train.py", "--run-name", "my first run", "--resume"]


def test_the_resume_command_starts_as_many_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cli.resume_command("mine") == ("torchrun --standalone --nproc-per-node 4 train.py --run-name mine --resume")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert cli.resume_command("mine") == "the same command on every node, with --run-name mine --resume"


def test_the_farewell_names_what_is_saved(tmp_path):
    assert cli.farewell(tmp_path) == "nothing was saved yet"
    path = save_step(tmp_path, 20)
    assert cli.farewell(tmp_path) == f"{path} is saved; go on with: {cli.resume_command(tmp_path.name)}"


@pytest.mark.parametrize(("rank", "waits"), [(None, False), ("0", False), ("1", True)])
def test_a_usage_error_is_one_line_of_one_rank_and_exit_code_2(rank, waits, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)

    def main():
        raise UsageError("global batch 130 is not divisible")

    with pytest.raises(SystemExit) as caught:
        cli.run(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("" if waits else "train.py: error: global batch 130 is not divisible\n")
    assert bool(waited) == waits  # so that rank 0 has spoken before torchrun ends all


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_node_whose_ranks_cannot_join_says_so_itself(local_rank, monkeypatch, capsys):
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)

    def main():
        raise UsageError("8 processes on a node with 7 GPUs")

    with pytest.raises(SystemExit):
        cli.run(main)
    assert ("7 GPUs" in capsys.readouterr().err) == (local_rank == "0")


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    for error in (RuntimeError("of a collective"), ValueError("a bug")):

        def main(error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            cli.run(main)
        assert caught.value is error


LOADS_WITH_WORKERS = """
import sys
from torch.utils.data import DataLoader
from shared import cli
from shared.distributed import Worker

cli.stop_on_signals(Worker(), lambda: "farewell")
for _ in range(2):  # a loader's workers end with each epoch
    print(sum(len(batch) for batch in DataLoader(range(10), batch_size=4, num_workers=1)))
"""


def test_only_a_stop_stops_and_not_the_end_of_a_loaders_worker():
    command = [sys.executable, "-c", LOADS_WITH_WORKERS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "10\n10\n"), result.stderr
