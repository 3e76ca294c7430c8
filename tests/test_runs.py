"""shared.running.runs, restarts and progress: opening a run, its progress and metrics, and how it continues."""

import json
import math
import os
import resource
import select
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import ROOT

from shared import checkpoint, tasks
from shared.distributed import Worker
from shared.errors import UsageError
from shared.running import lease, options, restarts, runs
from shared.running.progress import LINE_EVERY_S, Progress, check_metrics_file, write_metrics
from shared.running.restarts import RestartableRun

pytestmark = pytest.mark.usefixtures("plain_python")


def parse(*words: str):
    return options.training_parser("A manual.", [tasks.ImageTask]).parse_args(words)


def changed(args, **values):
    """The options of a different command line: they cannot be changed themselves."""
    return options.Options(**(vars(args) | values))


def new_progress(num_samples: int, seed: int = 0, **more: int | None) -> Progress:
    return Progress(Worker(), num_samples, {"seed": seed}, batch_size=4, epochs=5, **more)


def named(args) -> RestartableRun:
    """The run that the options ask for."""
    return RestartableRun.find(args.storage_path, args.run_name, runs.options_of(args))


# --- opening a run ----------------------------------------------------------------------------------------------------


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
    return named(args).folder


def save_step(folder: Path, step: int, **options) -> Path:
    """A checkpoint of the run in `folder`, as a script with the default options and these would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = runs.options_of(parse(*(f"--{name.replace('_', '-')}={value}" for name, value in options.items())))
    progress = {**new_progress(1280).state_dict(), "step": step, "options": saved}
    return checkpoint.save_atomically({"progress": progress}, checkpoint.path_for_step(folder, step))


def open_or_resume(args, folder, restarted=False):
    run = RestartableRun(folder, runs.options_of(args))
    run.restarted = restarted
    state = run.open_or_resume(args.resume, Worker())
    check_metrics_file(args.metrics_out)
    return state


def test_a_run_has_its_folder_under_the_storage_path(args, folder, tmp_path):
    assert folder == tmp_path / "runs" / "mine"


def test_a_run_without_a_name_gets_a_new_one(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["some/where/train_ddp.py"])
    monkeypatch.chdir(tmp_path)
    folder = named(parse()).folder
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("train_ddp-20") and folder.name.endswith(f"-{os.getpid()}")


def test_a_new_run_gets_its_folders_and_starts_from_nothing(args, folder, tmp_path, capsys):
    assert open_or_resume(args, folder) is None
    assert [path.name for path in folder.iterdir()] == [".writer.json"]
    assert (tmp_path / "out" / "m.jsonl").read_text() == ""
    assert capsys.readouterr().out == ""


def test_opening_a_run_leaves_an_older_metrics_file_alone(args, folder):
    metrics = Path(args.metrics_out)
    metrics.parent.mkdir()
    metrics.write_text("what was there\n")
    open_or_resume(args, folder)
    assert metrics.read_text() == "what was there\n"


def test_a_run_that_exists_is_refused_before_anything_is_written(args, folder):
    path = save_step(folder, 20)
    with pytest.raises(ValueError) as caught:
        open_or_resume(args, folder)
    assert (
        str(caught.value)
        == f"{folder} holds a run already: add --resume to continue it, or choose a different --run-name"
    )
    assert list(folder.iterdir()) == [path]
    assert not Path(args.metrics_out).exists()


def test_even_an_unreadable_checkpoint_means_that_the_run_exists(args, folder):
    save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="holds a run already"):
        open_or_resume(args, folder)


@pytest.mark.parametrize("how", ["--resume", "restarted by torchrun"])
def test_a_run_goes_on_from_its_newest_readable_checkpoint(args, folder, how, capsys):
    for step in (20, 40, 60):
        path = save_step(folder, step)
    path.write_bytes(path.read_bytes()[:-50])
    args = changed(args, resume=how == "--resume")
    assert open_or_resume(args, folder, restarted=not args.resume)["progress"]["step"] == 40
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0/1] skipped checkpoint-00000060.pt (truncated, or not a checkpoint)",
        f"[rank 0/1] resuming from {folder / 'checkpoint-00000040.pt'}",
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_with_nothing_readable_resume_is_an_error(args, folder, broken, capsys):
    args = changed(args, resume=True)
    if broken:
        save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=f"nothing to resume: no readable checkpoint in {folder}"):
        open_or_resume(args, folder)
    assert ("skipped checkpoint-00000020.pt" in capsys.readouterr().out) == broken


@pytest.mark.parametrize("resume", [False, True])
def test_a_restart_by_torchrun_before_the_first_checkpoint_begins_anew(args, folder, resume, capsys):
    args = changed(args, resume=resume)
    assert open_or_resume(args, folder, restarted=True) is None
    assert "restarted before anything was saved: starting from scratch" in capsys.readouterr().out


def test_a_restart_by_torchrun_on_a_host_that_has_no_checkpoint_is_refused(args, folder):
    run = RestartableRun(folder, runs.options_of(args))
    run.restarted, run.saved_step = True, 40
    wanted = f"the checkpoint after step 40 is not in {folder} on .*: give all nodes a --storage-path that they share"
    with pytest.raises(ValueError, match=wanted):
        run.open_or_resume(args.resume, Worker())
    save_step(folder, 20)  # of a time when rank 0 was on this host
    with pytest.raises(ValueError, match=wanted):
        run.open_or_resume(args.resume, Worker())
    save_step(folder, 60)  # written a moment before the others could note it
    assert run.open_or_resume(args.resume, Worker())["progress"]["step"] == 60


def test_a_job_finds_its_notes_again_and_another_job_does_not(args, folder, monkeypatch):
    """The processes that an agent starts again have the same parent, here this test's own."""
    args = changed(args, run_name=None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    restarts.write_note(folder, -1, "its-token")
    again = named(args)
    assert (again.folder, again.restarted, again.saved_step, again.token) == (folder, True, -1, "its-token")
    again.save({"progress": {"step": 20}}, Worker())
    assert named(args).saved_step == 20
    again.save({"progress": {"step": 40}}, Worker(rank=1))  # another node, which has no checkpoint of its own
    assert named(args).saved_step == 40 and len(runs.Run(folder).list_newest_first()) == 1


def test_a_process_finds_its_agent_even_through_a_wrapper(monkeypatch):
    """The agent is the first process above it that does not have the variable which agents give to their processes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    script = [sys.executable, "-c", "from shared.running import restarts; print(restarts.note_name())"]
    starts_it = "import os, subprocess, sys; os.environ['TORCHELASTIC_RUN_ID'] = 'none'; subprocess.run(sys.argv[1:])"

    def note_of(*command: str) -> str:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    direct = note_of(*script)
    assert f"-{os.getpid()}-" in direct
    assert note_of("sh", "-c", f"{shlex.join(script)}; true") == direct
    other = note_of("env", "--unset=TORCHELASTIC_RUN_ID", sys.executable, "-c", starts_it, *script)
    assert other.startswith(".torchrun-") and f"-{os.getpid()}-" not in other


def test_a_job_that_has_resumed_a_run_notes_its_step(args, folder, monkeypatch):
    """Lost before its next save, and started again on a host without the checkpoints, it must not begin anew."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    save_step(folder, 20)
    assert open_or_resume(changed(args, resume=True), folder)["progress"]["step"] == 20
    assert named(args).saved_step == 20


def test_a_job_that_trains_one_run_after_the_other_opens_each_by_its_name(args, folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    restarts.write_note(folder, 20, "its-token")
    other = named(changed(args, run_name="[other]"))
    assert (other.folder.name, other.restarted) == ("[other]", False)
    assert (named(args).folder, named(args).restarted) == (folder, True)


def test_nodes_with_different_options_are_refused(args, monkeypatch):
    monkeypatch.setattr("shared.distributed.gather_objects", lambda value: [value, value and value.replace("7", "8")])
    with pytest.raises(UsageError, match="the nodes were started with different options"):
        RestartableRun.find(args.storage_path, "mine", {"seed": 7})


def test_a_restart_by_torchrun_never_writes_over_checkpoints_that_it_cannot_read(args, folder):
    save_step(folder, 20).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="no readable checkpoint"):
        open_or_resume(args, folder, restarted=True)


def test_resume_needs_a_name():
    with pytest.raises(UsageError, match="--resume needs the --run-name"):
        parse("--resume")


def test_a_storage_path_that_is_a_url_is_refused(args):
    args = changed(args, storage_path="s3://bucket/runs")
    with pytest.raises(UsageError, match="--storage-path s3://bucket/runs"):
        named(args)


def test_a_storage_path_that_cannot_be_made_is_a_clear_error(args, folder):
    folder.parent.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=f"cannot write to --storage-path: .*: {folder}"):
        open_or_resume(args, folder)


def test_a_read_only_storage_path_is_a_clear_error(args, folder, monkeypatch):
    def refuse(path, *_):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ValueError, match=f"cannot write to --storage-path: Read-only file system: {folder}"):
        open_or_resume(args, folder)


@pytest.mark.parametrize("in_the_way", ["a folder", "a file for a folder"])
def test_a_metrics_file_that_cannot_be_written_is_a_clear_error(args, folder, in_the_way):
    metrics = Path(args.metrics_out)
    if in_the_way == "a folder":
        metrics.mkdir(parents=True)
    else:
        metrics.parent.write_text("a file")
    with pytest.raises(ValueError, match=f"cannot write to --metrics-out: .*: {metrics}"):
        open_or_resume(args, folder)


@pytest.mark.parametrize(("name", "saved"), [("model", "mlp"), ("dataset", "synthetic")])
def test_a_checkpoint_of_another_model_or_data_set_is_refused(args, folder, name, saved):
    path = save_step(folder, 20, **{name: saved})
    args = changed(args, resume=True)
    with pytest.raises(ValueError) as caught:
        open_or_resume(args, folder)
    assert str(caught.value) == f"{path} is of --{name} {saved}, but this run asks for --{name} {getattr(args, name)}"


@pytest.mark.parametrize("images", ["s3://bucket/images", "/data/images"])
def test_images_of_your_own_are_named_by_their_own_option(images):
    with pytest.raises(ValueError, match=f"^PATH is of --data-uri {images}, but this run asks for --dataset digits$"):
        runs.Run("", {"dataset": "digits"}).check_options("PATH", {"dataset": images}, Worker())


@pytest.mark.parametrize(("saved", "now", "message"), [
    ({"classes": ["cat", "dog"]}, {"classes": ["cat", "horse"]},
     "PATH is of classes cat, dog, but this run asks for classes cat, horse"),
    ({"image_size": None}, {"image_size": 64}, "PATH is of no --image-size, but this run asks for --image-size 64"),
    ({"zero_stage": 2}, {}, "PATH was not written by this training script"),
    ({}, {"zero_stage": 2}, "PATH was not written by this training script"),
])  # fmt: skip
def test_what_a_resumed_run_must_share_is_named(saved, now, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        runs.Run("", {"dataset": "digits", **now}).check_options("PATH", {"dataset": "digits", **saved}, Worker())


def test_a_value_that_an_older_checkpoint_does_not_have_may_be_missing():
    runs.Run("", {"dataset": "digits", "classes": None}).check_options("PATH", {"dataset": "digits"}, Worker())
    known = dict.fromkeys(runs.CONTENTS, "now")
    runs.Run("", {"dataset": "digits", **known}).check_options("PATH", {"dataset": "digits"}, Worker())


@pytest.mark.parametrize("name", runs.CONTENTS)
def test_what_a_run_has_read_must_be_the_same(name):
    run = runs.Run("", {"dataset": "digits", **dict.fromkeys(runs.CONTENTS, "now")})
    with pytest.raises(ValueError) as caught:
        run.check_options("PATH", {"dataset": "digits", name: "before"}, Worker())
    assert str(caught.value) == (
        f"PATH was written with {runs.CONTENTS[name]}: resume with the old one, or begin a new run with a different "
        "--run-name"
    )


@pytest.mark.parametrize("progress", [{"epoch": 1}, None, {"options": {"model": "gpt"}}])
def test_a_checkpoint_of_another_program_is_refused(args, folder, progress):
    """Lessons write checkpoints too, with a progress of their own."""
    folder.mkdir(parents=True)
    state = {} if progress is None else {"progress": progress}
    path = checkpoint.save_atomically(state, checkpoint.path_for_step(folder, 20))
    args = changed(args, resume=True)
    with pytest.raises(ValueError, match=str(path)):
        open_or_resume(args, folder)


def test_other_options_than_before_are_noted(args, folder, capsys):
    save_step(folder, 20, lr=0.5, batch_size=32)
    args = changed(args, resume=True)
    assert open_or_resume(args, folder)["progress"]["step"] == 20
    other, ignored = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert ignored.endswith(
        "note: lr 0.001 is ignored: optimizer and schedule are restored; the run was started with 0.5"
    )
    assert other.endswith("note: batch_size 64; the run was started with 32")


def test_more_epochs_are_no_other_options(args, folder, capsys):
    save_step(folder, 20)
    args = changed(args, resume=True, epochs=50)
    open_or_resume(args, folder)
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("foreign", ["checkpoint-00000020-0abc/state.pt", "experiment_state-2026-11-25_18-00-00.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_a_run_of_a_different_kind_is_refused(args, folder, foreign, resume):
    path = folder / foreign
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ValueError, match=rf"{folder} holds a run of a different kind of script \({foreign[:10]}"):
        open_or_resume(changed(args, resume=resume), folder)
    assert [each for each in folder.rglob("*") if each.is_file()] == [path]


def test_a_copy_of_a_checkpoint_that_a_user_keeps_is_not_the_runs(args, folder):
    save_step(folder, 20)
    (folder / "checkpoint-best").mkdir()
    for name in ("checkpoint-best.pt", "checkpoint-00000040.pt.bak", "checkpoint-00000040 (copy).pt"):
        (folder / name).touch()
    state = open_or_resume(changed(args, resume=True), folder)
    assert state["progress"]["step"] == 20


# --- progress and metrics --------------------------------------------------------------------------------------------


def test_a_whole_epoch_becomes_a_line_and_the_next_one_begins():
    progress, new = new_progress(10), new_progress(10).state_dict()
    progress.record_steps([3.0, 2.0], [4, 4], 2.0)
    assert progress.interrupted
    progress.record_steps([1.0], [2], 0.5)
    assert not progress.interrupted
    line = progress.finish_epoch({"val_loss": 0.5})
    assert line == {
        "epoch": 1, "train_loss": (3 * 4 + 2 * 4 + 1 * 2) / 10, "val_loss": 0.5,
        "step_losses": [3.0, 2.0, 1.0], "samples_seen": 10, "samples_per_second": 10 / 2.5,
    }  # fmt: skip
    assert progress.state_dict() == {**new, "step": 3, "epoch": 1, "metrics": [line]}
    progress.record_steps([0.5], [10], 1.0)
    assert progress.finish_epoch({"val_loss": 0.5})["epoch"] == 2
    assert line["step_losses"] == [3.0, 2.0, 1.0]  # the second epoch did not write into the first one's line
    assert [line["epoch"] for line in progress.metrics] == [1, 2]


def test_a_progress_continues_from_what_was_saved():
    progress, other = new_progress(10), new_progress(10)
    progress.record_steps([3.0], [4], 2.0)
    other.load_state_dict(progress.state_dict())
    assert other.state_dict() == progress.state_dict() and other.step == 1
    assert set(progress.state_dict()) == {
        "step", "epoch", "position", "seconds", "loss_sum", "step_losses", "metrics", "options", "num_samples", "data",
    }  # fmt: skip


def test_in_the_middle_of_an_epoch_a_progress_does_not_continue_with_different_data():
    progress = new_progress(10)
    progress.load_state_dict(new_progress(12).state_dict())  # between two epochs nothing counts samples yet
    progress.record_steps([3.0], [4], 2.0)
    with pytest.raises(UsageError, match="the epoch began with 10 training samples, but now there are 12"):
        new_progress(12).load_state_dict(progress.state_dict())
    other_order = new_progress(10, seed=1)
    with pytest.raises(
        UsageError, match="the epoch began with --seed 0; --seed 1 deals its samples in a different order"
    ):
        other_order.load_state_dict(progress.state_dict())
    old = progress.state_dict()
    del old["num_samples"]  # a checkpoint of an earlier version
    new_progress(12).load_state_dict(old)


def test_a_progress_does_not_continue_with_data_that_have_changed():
    saved = new_progress(10, data=1).state_dict()
    new_progress(10, data=1).load_state_dict(saved)
    with pytest.raises(UsageError, match=r"^the data have changed since the run was started: resume with the old"):
        new_progress(10, data=2).load_state_dict(saved)
    python = Progress(Worker(), 10, {"dataset": "text", "text_file": None}, batch_size=4, epochs=5, data=2)
    with pytest.raises(UsageError, match=r"\(without --text-file, the same release of Python\), or begin a new run"):
        python.load_state_dict({**saved, "options": {}})
    del saved["data"]  # a checkpoint of an earlier version
    new_progress(10, data=2).load_state_dict(saved)


def test_a_seed_changed_between_two_epochs_is_the_one_of_the_next_epoch():
    later = new_progress(10, seed=1)
    later.load_state_dict(new_progress(10, seed=0).state_dict())  # at the end of an epoch
    later.record_steps([3.0], [4], 2.0)
    new_progress(10, seed=1).load_state_dict(later.state_dict())
    with pytest.raises(UsageError, match="the epoch began with --seed 1; --seed 0 deals"):
        new_progress(10, seed=0).load_state_dict(later.state_dict())


@pytest.mark.parametrize("limit", [10, 100_000])
def test_a_disk_that_is_full_ends_the_run_with_one_line_and_its_checkpoints_stay(args, folder, limit):
    """Stood in for by a limit on the size of files. In the middle of a tensor torch reports it as a RuntimeError."""
    kept, run = save_step(folder, 20), runs.Run(folder, runs.options_of(args))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        wanted = r"cannot save .*-00000040.pt: File too large\. .*20.pt is saved; continue with: "
        with pytest.raises(UsageError, match=wanted):
            run.save({"model": {"weight": torch.ones(100_000)}, "progress": {"step": 40}}, Worker())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.list_newest_first() == [kept] == [path for path in folder.iterdir() if path.name != lease.NAME]


@pytest.mark.parametrize(("step", "epoch", "max_steps", "finished"), [
    (0, 0, None, False), (14, 4, None, False), (15, 5, None, True), (7, 2, 7, True), (6, 2, 7, False), (9, 3, 7, True),
])  # fmt: skip
def test_a_run_is_finished_after_its_epochs_or_its_steps(step, epoch, max_steps, finished):
    progress = new_progress(10, max_steps=max_steps)
    progress.step, progress.epoch = step, epoch
    assert progress.finished == finished
    assert progress.last_step == (max_steps or 15)


@pytest.mark.parametrize(("rank", "quiet", "prints"), [(0, False, True), (0, True, False), (1, False, False)])
def test_rank_0_says_how_far_an_epoch_is(rank, quiet, prints, monkeypatch, capsys):
    """Every few seconds: the steps, this rank's own loss since the last line, the speed and the time left."""
    assert LINE_EVERY_S == 5 and "Every five seconds rank 0 prints a line" in (ROOT / "docs/scripts.md").read_text()
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr("shared.running.progress.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("shared.running.progress.LINE_EVERY_S", 3)
    progress = Progress(Worker(rank, world_size=2), 12, {}, batch_size=4, epochs=2, quiet=quiet)
    progress.start_steps()  # at 0 s
    for loss in (1.0, 2.0, 3.0):
        progress.add_step(torch.tensor(loss / 2), 4)  # this rank's share of the mean over two ranks
    lines = capsys.readouterr().out.splitlines()
    if not prints:
        assert lines == []
        return
    # Looked at after 2 s and 4 s: two steps in 6 s, when the line is printed. Then again after two more looks.
    assert lines[0] == "[rank 0/2] epoch 1/2  step 2 of 6  loss of rank 0 alone 1.5000  1 samples/s  0:00:12 left"


@pytest.mark.parametrize("quiet", [False, True])
def test_in_a_notebook_a_bar_takes_the_place_of_the_lines(quiet, monkeypatch, capsys):
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    monkeypatch.setattr("shared.running.progress.LINE_EVERY_S", 0)
    progress = Progress(Worker(), 12, {}, batch_size=4, epochs=2, quiet=quiet)
    progress.start_steps()
    for _ in range(3):
        progress.add_step(torch.tensor(1.0), 4)
    progress.finish_steps()
    out, err = capsys.readouterr()
    assert out == "" and ("steps:" in err and "/6" in err) != quiet and (quiet is False or err == "")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_training_that_diverges_ends_and_nothing_is_noted(loss):
    progress = new_progress(4)
    progress.record_steps([3.0], [4], 1.0)
    before = progress.state_dict()
    with pytest.raises(UsageError, match=f"the loss of step 3 is {loss}"):
        progress.record_steps([2.0, loss], [4, 4], 1.0)
    assert progress.state_dict() == before
    # Only the last step's weights are spoilt: no loss has seen them yet.
    with pytest.raises(UsageError, match=f"val_loss is {loss}"):
        progress.finish_epoch({"val_loss": loss})
    assert progress.state_dict() == before


def test_an_epoch_cut_short_stays_the_current_one_and_its_line_is_replaced():
    progress = new_progress(10)
    progress.record_steps([3.0], [4], 1.0)
    cut = progress.finish_epoch({"val_loss": 0.5})
    assert (cut["samples_seen"], cut["train_loss"]) == (4, 3.0)
    assert (progress.epoch, progress.position, progress.step) == (0, 4, 1)

    progress.record_steps([2.0, 1.0], [4, 2], 1.0)
    line = progress.finish_epoch({"val_loss": 0.5})
    assert progress.metrics == [line]
    assert cut["step_losses"] == [3.0]  # a line that was handed out does not change any more
    assert (line["epoch"], line["samples_seen"], line["step_losses"]) == (1, 10, [3.0, 2.0, 1.0])
    assert line["train_loss"] == pytest.approx(2.2)
    assert (progress.epoch, progress.position, progress.step) == (1, 0, 3)


def test_as_many_losses_as_counts():
    with pytest.raises(ValueError):
        new_progress(4).record_steps([1.0, 2.0], [4], 1.0)


def test_metrics_are_one_json_line_an_epoch_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = [{"epoch": 1, "train_loss": 0.1 + 0.2}, {"epoch": 2, "train_loss": 1e-17}]
    write_metrics(path, lines)
    write_metrics(str(path), lines)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines  # floats to the last bit
    write_metrics(path, lines[:1])
    assert len(path.read_text().splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]
    write_metrics(None, lines)


@pytest.mark.parametrize("where", ["write_text", "replace"])
def test_a_crash_while_writing_metrics_leaves_the_old_ones(tmp_path, monkeypatch, where):
    path = tmp_path / "m.jsonl"
    write_metrics(path, [{"epoch": 1}])

    def crash(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(*{"write_text": (Path, "write_text"), "replace": (os, "replace")}[where], crash)
    with pytest.raises(OSError):
        write_metrics(path, [{"epoch": 1}, {"epoch": 2}])
    assert path.read_text() == '{"epoch": 1}\n'


def test_an_epoch_in_words():
    line = {"epoch": 2, "train_loss": 0.12345, "val_loss": 0.5, "val_accuracy": 0.97654, "samples_per_second": 321.7}
    assert new_progress(4).describe(line) == (
        "epoch 2/5  train_loss 0.1235  val_loss 0.5000  val_accuracy 0.977  322 samples/s"
    )


# --- the end of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [
    [], ["--epochs", "3"], ["--run-name", "mine"], ["--run-name=mine"], ["--run-name", "mine", "--resume"],
    ["--storage-path", "my runs/it's $HOME", "--metrics-out", "a;b.jsonl"],
])  # fmt: skip
def test_the_resume_command_can_be_pasted_into_a_shell(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["my scripts/train.py", *words])
    command = shlex.split(runs.Run("runs/mine").resume_command())
    assert command[:2] == ["python", "my scripts/train.py"]
    again = parse(*command[2:])
    assert again.resume and again.run_name == "mine"
    as_before = parse(*words)
    for name in ("epochs", "storage_path", "metrics_out"):
        assert getattr(again, name) == getattr(as_before, name)
    assert command.count("--resume") == 1
    assert sum(word.startswith("--run-name") for word in command) == 1


def test_the_resume_command_quotes_a_run_name_with_spaces(monkeypatch):
    command = shlex.split(runs.Run("runs/my first run").resume_command())
    assert command == ["python", "train.py", "--run-name", "my first run", "--resume"]


def test_the_resume_command_starts_as_many_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert runs.Run("runs/mine").resume_command() == (
        "torchrun --standalone --nproc-per-node 4 train.py --run-name mine --resume"
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert runs.Run("runs/mine").resume_command() == "the same command on every node, with --run-name mine --resume"


def test_the_hint_names_what_is_saved(tmp_path):
    assert runs.Run(tmp_path).resume_hint() == "nothing was saved yet"
    path = save_step(tmp_path, 20)
    assert runs.Run(tmp_path).resume_hint() == f"{path} is saved; continue with: {runs.Run(tmp_path).resume_command()}"


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    target, link = tmp_path / "elsewhere" / "m.jsonl", tmp_path / "m.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    write_metrics(link, [{"epoch": 1}])
    assert link.is_symlink() and target.read_text() == '{"epoch": 1}\n'


def test_a_device_stays_one_and_gets_each_line_once(args, folder, monkeypatch):
    controller, terminal = os.openpty()
    device = os.ttyname(terminal)
    options_ = changed(args, metrics_out=device)
    open_or_resume(options_, folder)
    for epochs in ((1,), (1, 2), (1, 2), (1, 2, 3)):
        write_metrics(device, [{"epoch": epoch} for epoch in epochs])
    written = ""
    while "3}" not in written and select.select([controller], [], [], 30)[0]:  # a terminal passes on what it has
        written += os.read(controller, 1000).decode()
    assert written.split() == ['{"epoch":', "1}", '{"epoch":', "2}", '{"epoch":', "3}"]
    for each in (controller, terminal):
        os.close(each)
    before = os.stat(os.devnull).st_rdev
    write_metrics(os.devnull, [{"epoch": 1}])
    assert os.stat(os.devnull).st_rdev == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_refused_without_opening_it(args, folder, kind, tmp_path):
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=f"cannot write to --metrics-out: not a file: {path}"):
        open_or_resume(changed(args, metrics_out=str(path)), folder)
