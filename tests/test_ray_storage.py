"""shared.on_ray.storage: a run's checkpoints in Ray's storage."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs
import pytest
import ray
import torch

import zero
from shared import checkpoint, sharded, tasks
from shared.distributed import Worker, fail_together
from shared.errors import UsageError
from shared.on_ray import options, storage, workers
from shared.on_ray.storage import RayRun
from shared.running import lease, runs


def save(folder: Path, step: int, **more: object) -> Path:
    """A checkpoint as `storage.report` leaves it in the storage."""
    path = folder / f"checkpoint-{step:08d}-{len(more)}abc"
    path.mkdir(parents=True)
    checkpoint.save_atomically({"progress": {"step": step}}, path / storage.STATE_FILE)
    return path


def save_with_shards(folder: Path, step: int) -> Path:
    """A checkpoint with the slices of two ranks beside the state."""
    path = save(folder, step)
    for rank in range(2):
        (path / f"shard-{rank}").write_bytes(bytes(1000))
    files = sharded.file_checksums(path)
    del files[storage.STATE_FILE]
    checkpoint.save_atomically({"progress": {"step": step}, "files": files}, path / storage.STATE_FILE)
    return path


def snapshot(folder: Path, *names: str) -> Path:
    path = folder / storage.SNAPSHOT_FILE
    path.write_text(json.dumps({"checkpoint_results": [{"checkpoint_dir_name": name} for name in names]}))
    return path


def named(*words: str) -> RayRun:
    """The run that a script's command line asks for."""
    args = options.ray_parser("", [tasks.ImageTask]).parse_args(words)
    return RayRun.named(
        args.storage_path, args.run_name, runs.options_of(args), local_mode=args.num_workers == 0
    )  # fmt: skip


def test_the_newest_readable_checkpoint_is_found(tmp_path):
    older, newer, newest = save(tmp_path, 4), save(tmp_path, 8), save(tmp_path, 12)
    assert RayRun(str(tmp_path)).list_newest_first() == [str(newest), str(newer), str(older)]
    (newest / storage.STATE_FILE).unlink()
    state = newer / storage.STATE_FILE
    state.write_bytes(state.read_bytes()[:-50])
    path, state, skipped = RayRun(str(tmp_path)).load_newest(Worker())
    assert (path, state["progress"]["step"]) == (str(older), 4)
    assert [words.split()[0] for words in skipped] == [newest.name, newer.name]
    assert "truncated" in skipped[1]


def test_a_copy_of_a_checkpoint_that_a_user_keeps_is_not_the_runs(tmp_path):
    newest = save(tmp_path, 8)
    for name in ("checkpoint-best", f"{newest.name}-copy", f"{newest.name} (copy)"):
        shutil.copytree(newest, tmp_path / name)
    assert RayRun(str(tmp_path)).list_newest_first() == [str(newest)]


@pytest.mark.parametrize(("resume", "stored"), [(True, None), (False, "a checkpoint"), (False, None)])
def test_a_worker_never_begins_anew_where_checkpoints_cannot_be_read(resume, stored, tmp_path, monkeypatch):
    """A share that is away for a minute must not cost the run: Ray would delete its checkpoints for the new ones."""
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: stored)
    run = RayRun(str(tmp_path))
    run.resumed_from = "a checkpoint" if resume else None
    assert run.load_on_all_ranks(Worker()) == (None, None)
    path = save(tmp_path, 4)
    assert run.load_on_all_ranks(Worker())[1]["progress"]["step"] == 4
    (path / storage.STATE_FILE).write_bytes(b"cut off")
    if not resume and stored is None:  # the first upload was cut short
        assert run.load_on_all_ranks(Worker()) == (None, None)
    else:
        with pytest.raises(OSError, match=f"no readable checkpoint in {tmp_path}: {path.name}"):
            run.load_on_all_ranks(Worker())


def test_a_worker_says_what_it_skips(tmp_path, capsys):
    older, newest = save_with_shards(tmp_path, 4), save_with_shards(tmp_path, 8)
    (newest / "shard-1").write_bytes(b"1" * 1000)
    assert RayRun(str(tmp_path)).load_on_all_ranks(Worker())[0] == str(older)
    said = f"[rank 0/1] skipped {newest.name} (damaged: shard-1 has changed since it was written)\n"
    assert capsys.readouterr().out == said


def test_each_rank_checks_its_share_of_the_files(tmp_path, monkeypatch):
    run, path = RayRun(str(tmp_path)), save_with_shards(tmp_path, 4)
    checked, sent = [], []
    monkeypatch.setattr(RayRun, "verify", lambda run, path, written: checked.append(list(written)))
    monkeypatch.setattr(storage, "from_rank_zero", lambda value: sent.append(value) or value)
    assert run.load_on_all_ranks(Worker(world_size=3))[0] == str(path)
    for rank in (1, 2):  # one after the other, with what rank 0 has sent
        received = iter(sent)
        monkeypatch.setattr(storage, "from_rank_zero", lambda value, received=received: next(received))
        assert run.load_on_all_ranks(Worker(rank, world_size=3))[0] == str(path)
    assert checked == [["shard-0"], ["shard-1"], []]


def test_a_checkpoint_that_the_driver_has_checked_is_not_read_again(tmp_path, monkeypatch):
    path = save_with_shards(tmp_path / "mine", 4)
    state = checkpoint.load(path / storage.STATE_FILE)
    run = named("--storage-path", str(tmp_path), "--run-name", "mine")
    state["progress"] = {"step": 4, "metrics": [{"epoch": 1}], "options": run.options}
    checkpoint.save_atomically(state, path / storage.STATE_FILE)
    run.open_or_resume(True, Worker())
    assert (run.folder, run.metrics, run.resumed_from) == (str(tmp_path / "mine"), [{"epoch": 1}], str(path))
    monkeypatch.setattr(sharded, "file_checksums", None)
    assert run.load_on_all_ranks(Worker())[1]["progress"]["step"] == 4


def test_local_mode_has_nothing_to_resume(tmp_path):
    words = ("--storage-path", str(tmp_path), "--run-name", "mine", "--num-workers", "0")
    run = named(*words)
    assert run.open_or_resume(False, Worker()) is None and run.load_on_all_ranks(Worker()) == (None, None)
    for parser in (options.ray_parser, options.elastic_parser):
        with pytest.raises(UsageError, match="stores no checkpoints"):
            parser("", [tasks.ImageTask]).parse_args([*words, "--resume"])


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert RayRun(str(tmp_path / "none")).list_newest_first() == []
    assert RayRun(str(tmp_path / "none")).load_newest(Worker()) == (None, None, [])


def test_a_uri_is_a_folder_too(tmp_path):
    save(tmp_path, 4)
    assert RayRun(f"file://{tmp_path}").load_newest(Worker())[1]["progress"]["step"] == 4
    with pytest.raises(ValueError, match="cannot use --storage-path: Unrecognized"):
        RayRun("ftp://host/runs").list_newest_first()


def test_of_a_checkpoint_in_a_cloud_only_the_small_file_is_fetched(tmp_path, monkeypatch):
    older, newest = save_with_shards(tmp_path, 4), save_with_shards(tmp_path, 8)
    (newest / "shard-1").write_bytes(bytes(999))
    cloud = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())  # not a LocalFileSystem itself
    monkeypatch.setattr(storage, "file_system", lambda folder: (cloud, folder))
    path, state, skipped = RayRun("").load_newest(Worker())
    assert (Path(path).name, state["progress"]["step"]) == (older.name, 4)
    assert skipped == [f"{newest.name} (truncated: shard-1 has changed since it was written)"]


def writer_of(kind: str, model: torch.nn.Module) -> Callable[[str], None]:
    """What writes a sharded checkpoint of `model` after a step, as the scripts of chapter 3 do."""
    if kind == "deepspeed":
        engine = SimpleNamespace(module=model, save_checkpoint=lambda folder, **_: (Path(folder) / "zero/0").touch())
        return lambda folder: zero.save_zero(folder, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return lambda folder: sharded.save_sharded(folder, model, optimizer)


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_a_sharded_checkpoint_records_that_its_weights_were_finite(kind, tmp_path, monkeypatch):
    def keep(metrics: dict, checkpoint: ray.train.Checkpoint, checkpoint_dir_name: str) -> None:
        checkpoint.to_directory(tmp_path / checkpoint_dir_name)

    monkeypatch.setattr("ray.train.report", keep)
    run, model = RayRun(str(tmp_path)), torch.nn.Linear(2, 1)
    write = writer_of(kind, model)
    run.report({"progress": {"step": 4}}, {}, Worker(), write)
    with torch.no_grad():
        model.bias.fill_(torch.nan)
    with pytest.raises(UsageError, match=r"diverged: bias is not finite \(not saved\)"):
        run.report({"progress": {"step": 8}}, {}, Worker(), write)
    (path,) = run.list_newest_first()
    assert run.load(path)["progress"] == {"step": 4} and run.load(path)["finite"] is True
    assert run.load_newest(Worker())[0] == path


@pytest.mark.parametrize("in_a_cloud", [False, True])
@pytest.mark.parametrize("older", [{"finite": True}, {}])  # the second one of an earlier version
def test_a_sharded_checkpoint_that_diverged_is_passed_over(older, in_a_cloud, tmp_path, monkeypatch, capsys):
    """The slices are not read for it: the record is in the small file."""
    for step, record in ((4, older), (8, {"finite": False})):
        state = {"progress": {"step": step}, "files": {}, **record}
        checkpoint.save_atomically(state, save(tmp_path, step) / storage.STATE_FILE)
    run = RayRun(str(tmp_path))
    if in_a_cloud:
        cloud = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
        monkeypatch.setattr(storage, "file_system", lambda folder: (cloud, ""))
    path, state, skipped = run.load_newest(Worker())
    newest = "checkpoint-00000008-0abc"
    assert (Path(path).name, state["progress"]["step"]) == ("checkpoint-00000004-0abc", 4)
    assert skipped == [f"{newest} (diverged: its weights were not finite)"]
    assert run.load_on_all_ranks(Worker())[1]["progress"]["step"] == 4
    assert capsys.readouterr().out == f"[rank 0/1] skipped {skipped[0]}\n"


def test_a_run_whose_sharded_checkpoints_have_all_diverged_is_not_resumed(tmp_path, capsys):
    run = named("--storage-path", str(tmp_path), "--run-name", "mine")
    for step in (4, 8):
        state = {"progress": {"step": step, "options": run.options}, "files": {}, "finite": False}
        checkpoint.save_atomically(state, save(tmp_path / "mine", step) / storage.STATE_FILE)
    with pytest.raises(ValueError, match=r"nothing to resume: no readable checkpoint in .*/mine"):
        run.open_or_resume(True, Worker())
    assert capsys.readouterr().out.count("(diverged: its weights were not finite)\n") == 2


@pytest.mark.parametrize(("saved", "patience_s"), [(None, 10), ("something", 60)])
def test_a_folder_that_this_node_does_not_see(saved, patience_s, tmp_path, monkeypatch):
    """A mount may be late. It is waited for longer if the run has seen it before."""
    now = [0.0]
    monkeypatch.setattr("ray.train.get_checkpoint", lambda: saved)
    monkeypatch.setattr("shared.distributed.time.monotonic", lambda: now[0])
    monkeypatch.setattr("shared.distributed.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    for folder in (tmp_path, "s3://bucket/runs"):
        RayRun(str(folder)).check_folder()
    assert now == [0.0]
    run = RayRun(str(tmp_path / "none"))
    with pytest.raises(OSError, match=r"node .* does not see .*none: .* a folder that all nodes share, or a URI"):
        run.check_folder()
    assert now == [patience_s]
    monkeypatch.setattr("shared.distributed.time.sleep", lambda seconds: (tmp_path / "none").mkdir())
    run.check_folder()
    local = RayRun(str(tmp_path / "nowhere"))
    local.local_mode = True
    local.check_folder()


@pytest.mark.parametrize(("error", "saved", "retried"), [
    (FileNotFoundError("the mount is not there"), "something", True),
    (FileNotFoundError("the mount is not there"), None, False),
    (ValueError("a user's mistake"), "something", False),
])  # fmt: skip
def test_ray_starts_the_workers_again_only_for_files_that_were_there_before(error, saved, retried, monkeypatch):
    def train(worker: Worker, run: RayRun) -> None:
        with fail_together():
            raise error

    monkeypatch.setattr("ray.train.get_checkpoint", lambda: saved)
    monkeypatch.setattr(workers, "current_worker", Worker)
    train_worker, config = workers.on_workers(train), {"run": RayRun("s3://bucket/runs/mine")}
    if retried:
        with pytest.raises(OSError, match="the mount is not there"):
            train_worker(config)
    else:
        returned = train_worker(config)
        assert isinstance(returned, UsageError) and str(returned) == str(error)


@pytest.mark.parametrize(("write", "stays"), [
    (lambda folder: snapshot(folder, save(folder, 4).name), True),
    (lambda folder: snapshot(folder, "checkpoint-00000008-gone"), False),
    (lambda folder: snapshot(folder).write_text('{"checkpoint_res'), False),
    (lambda folder: snapshot(folder).write_text("[]"), False),
])  # fmt: skip
def test_a_list_that_ray_would_refuse_is_deleted(write, stays, tmp_path):
    write(tmp_path)
    RayRun(str(tmp_path)).make_folder()
    assert (tmp_path / storage.SNAPSHOT_FILE).exists() == stays
    assert not (tmp_path / ".writable").exists()


def test_a_folder_is_made_and_tried(tmp_path):
    RayRun(str(tmp_path / "a/b")).make_folder()
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        RayRun(str(tmp_path / "file/runs")).make_folder()


def test_the_metrics_file_has_one_line_an_epoch_whatever_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    report = storage.MetricsFile(str(path), [{"epoch": 1, "loss": 3.0}])
    for line in ({"epoch": 0}, {"epoch": 2, "loss": 2.0}, {"epoch": 2, "loss": 1.5}, {"epoch": 3, "loss": 1.0}):
        report.after_report(None, [line, {}], None)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [3.0, 1.5, 1.0]
    storage.MetricsFile(None, []).after_report(None, [{"epoch": 1}], None)


def test_a_second_controller_goes_on_with_the_metrics_of_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for epochs in ((1, 2), (3,)):
        report = storage.MetricsFile(str(path), [])  # as the driver has made it
        for epoch in epochs:
            report.after_report(None, [{"epoch": epoch}], None)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_what_a_killed_worker_was_writing_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = "import os; from shared.on_ray import storage; folder = storage.new_folder(); os._exit(0)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", make], env=environment, check=True)
    (left,) = tmp_path.iterdir()
    (left / "slice").write_text("half of it")
    prefix = os.path.basename(storage.temporary_prefix())
    container = tmp_path / left.name.replace(f"-{lease.pid_namespace()}_", "-4026539999_")  # same /tmp, same host name
    others = {tmp_path / left.name.replace(prefix, "ray-train-checkpoint-another-host-"), container}
    for other in others:
        other.mkdir()
    with storage.new_folder() as first, storage.new_folder() as second:
        assert set(tmp_path.iterdir()) == {Path(first), Path(second), *others}
    assert set(tmp_path.iterdir()) == others


@pytest.mark.parametrize("foreign", ["checkpoint-00000020.pt", "experiment_state-2026-11-25_18-00-00.json"])
def test_a_folder_with_a_run_of_a_different_kind_is_refused(foreign, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / foreign).touch()
    with pytest.raises(ValueError, match=f"mine holds a run of a different kind of script .{foreign[:10]}"):
        named("--storage-path", str(tmp_path), "--run-name", "mine").open_or_resume(True, Worker())


def test_the_run_folder_is_a_path_or_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RayRun.named("runs", "mine").folder == str(tmp_path / "runs/mine")
    assert RayRun.named("s3://bucket/runs/", "mine").folder == "s3://bucket/runs/mine"
    assert RayRun.named("s3://bucket/runs/", None).folder.startswith("s3://bucket/runs/" + runs.new_name()[:8])
    with pytest.raises(UsageError, match="takes no options"):
        RayRun.named("s3://bucket/runs?scheme=http", None)
