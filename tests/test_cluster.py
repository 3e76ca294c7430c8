"""shared.cluster: joining and starting Ray, and a run's checkpoints in Ray's storage."""

import argparse
import json
import os
from pathlib import Path

import pyarrow.fs
import pytest
import ray
from ray.cluster_utils import Cluster

from shared import checkpoint, cli, cluster
from shared.distributed import UsageError, Worker


def save(folder: Path, step: int, **more: object) -> Path:
    """A checkpoint as `cluster.report` leaves it in the storage."""
    path = folder / f"checkpoint-{step:08d}-{len(more)}abc"
    path.mkdir(parents=True)
    checkpoint.save_atomically({"progress": {"step": step}}, path / cluster.STATE_FILE)
    return path


def snapshot(folder: Path, *names: str) -> Path:
    path = folder / cluster.SNAPSHOT_FILE
    path.write_text(json.dumps({"checkpoint_results": [{"checkpoint_dir_name": name} for name in names]}))
    return path


def test_the_newest_readable_checkpoint_is_found(tmp_path):
    older, newer, newest = save(tmp_path, 4), save(tmp_path, 8), save(tmp_path, 12)
    assert cluster.list_newest_first(str(tmp_path)) == [str(newest), str(newer), str(older)]
    (newest / cluster.STATE_FILE).unlink()
    state = newer / cluster.STATE_FILE
    state.write_bytes(state.read_bytes()[:-50])
    path, state, skipped = cluster.load_newest(str(tmp_path))
    assert (path, state["progress"]["step"]) == (str(older), 4)
    assert [words.split()[0] for words in skipped] == [newest.name, newer.name]
    assert "truncated" in skipped[1]


@pytest.mark.parametrize(("resume", "stored"), [(True, None), (False, "a checkpoint"), (False, None)])
def test_a_worker_never_begins_anew_where_checkpoints_cannot_be_read(resume, stored, tmp_path, monkeypatch):
    """A share that is away for a minute must not cost the run: Ray would delete its checkpoints for the new ones."""
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: stored)
    args = argparse.Namespace(num_workers=2, folder=str(tmp_path), resume=resume)
    assert cluster.newest_state(args, Worker()) == (None, None)
    path = save(tmp_path, 4)
    assert cluster.newest_state(args, Worker())[1]["progress"]["step"] == 4
    (path / cluster.STATE_FILE).write_bytes(b"cut off")
    if not resume and stored is None:  # the first upload was cut short
        assert cluster.newest_state(args, Worker()) == (None, None)
    else:
        with pytest.raises(OSError, match=f"no readable checkpoint in {tmp_path}: {path.name}"):
            cluster.newest_state(args, Worker())


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert cluster.list_newest_first(str(tmp_path / "none")) == []
    assert cluster.load_newest(str(tmp_path / "none")) == (None, None, [])


def test_a_uri_is_a_folder_too(tmp_path):
    save(tmp_path, 4)
    assert cluster.load_newest(f"file://{tmp_path}")[1]["progress"]["step"] == 4
    with pytest.raises(ValueError, match="cannot use --storage-path: Unrecognized"):
        cluster.list_newest_first("ftp://host/runs")


def test_of_a_checkpoint_in_a_cloud_only_the_small_file_is_fetched(tmp_path, monkeypatch):
    older, newest = save(tmp_path, 4), save(tmp_path, 8)
    for path in (older, newest):
        (path / "shard").write_bytes(bytes(1000))
        state = {"progress": {"step": 4}, "files": checkpoint.check_sums(path)}
        del state["files"][cluster.STATE_FILE]
        checkpoint.save_atomically(state, path / cluster.STATE_FILE)
    (newest / "shard").write_bytes(bytes(999))
    cloud = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())  # not a LocalFileSystem itself
    monkeypatch.setattr(cluster, "file_system", lambda folder: (cloud, folder))
    path, state, skipped = cluster.load_newest("")
    assert (Path(path).name, state["progress"]["step"]) == (older.name, 4)
    assert skipped == [f"{newest.name} (truncated: shard in it is not as it was written)"]


def test_a_folder_that_this_node_does_not_see(tmp_path):
    for num_workers, folder in ((0, tmp_path / "none"), (2, tmp_path), (2, "s3://bucket/runs")):
        cluster.check_folder(argparse.Namespace(num_workers=num_workers, folder=str(folder)))
    with pytest.raises(ValueError, match=r"none is not seen from node .* a folder that all nodes share, or a URI"):
        cluster.check_folder(argparse.Namespace(num_workers=2, folder=str(tmp_path / "none")))


@pytest.mark.parametrize(("write", "stays"), [
    (lambda folder: snapshot(folder, save(folder, 4).name), True),
    (lambda folder: snapshot(folder, "checkpoint-00000008-gone"), False),
    (lambda folder: snapshot(folder).write_text('{"checkpoint_res'), False),
    (lambda folder: snapshot(folder).write_text("[]"), False),
])  # fmt: skip
def test_a_list_that_ray_would_refuse_is_deleted(write, stays, tmp_path):
    write(tmp_path)
    cluster.make_folder(str(tmp_path))
    assert (tmp_path / cluster.SNAPSHOT_FILE).exists() == stays
    assert not (tmp_path / ".writable").exists()


def test_a_folder_is_made_and_tried(tmp_path):
    cluster.make_folder(str(tmp_path / "a/b"))
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        cluster.make_folder(str(tmp_path / "file/runs"))


def test_the_metrics_file_has_one_line_an_epoch_whatever_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    report = cluster.MetricsFile(str(path), [{"epoch": 1, "loss": 3.0}])
    for line in ({"epoch": 0}, {"epoch": 2, "loss": 2.0}, {"epoch": 2, "loss": 1.5}, {"epoch": 3, "loss": 1.0}):
        report.after_report(None, [line, {}], None)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [3.0, 1.5, 1.0]
    cluster.MetricsFile(None, []).after_report(None, [{"epoch": 1}], None)


def arguments(*words: str) -> argparse.Namespace:
    return cluster.training_parser("").parse_args(words)


def test_the_run_folder_is_a_path_or_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cluster.run_folder(arguments("--run-name", "mine")) == str(tmp_path / "runs/mine")
    args = arguments("--storage-path", "s3://bucket/runs/", "--run-name", "mine")
    assert cluster.run_folder(args) == "s3://bucket/runs/mine"
    args.run_name = None
    assert cluster.run_folder(args).startswith("s3://bucket/runs/" + cli.new_run_name()[:8])
    with pytest.raises(UsageError, match="takes no options"):
        cluster.run_folder(arguments("--storage-path", "s3://bucket/runs?scheme=http"))


def test_the_world_is_the_workers_or_torchruns(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cluster.world_size(arguments("--num-workers", "3")) == 3
    assert cluster.world_size(arguments("--num-workers", "0")) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cluster.world_size(arguments("--num-workers", "0")) == 2


def test_resources_in_words():
    assert cluster.in_words({"CPU": 1.0}) == "1 CPU and no GPU"
    assert cluster.in_words({"CPU": 8.0, "GPU": 1.0}) == "8 CPUs and 1 GPU"
    assert cluster.in_words({"GPU": 2.0}) == "0 CPUs and 2 GPUs"
    assert cluster.enough({"CPU": 2.0}, {"CPU": 2, "GPU": 0})
    assert not cluster.enough({"CPU": 2.0}, {"CPU": 2, "GPU": 1})


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RAY_DATA_LOG_LEVEL": "DEBUG"})
    own, joined = cluster.quiet_settings(own=True), cluster.quiet_settings(own=False)
    assert own["RAY_DATA_LOG_LEVEL"] == joined["RAY_DATA_LOG_LEVEL"] == "DEBUG"
    assert own["RAY_TRAIN_ENABLE_PRINT_PATCH"] == os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"
    assert own.keys() - joined.keys() == {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"}


@pytest.mark.parametrize(("variables", "address"), [
    ({}, "local"),
    ({"ANYSCALE_CLI_TOKEN": "a laptop has one too"}, "local"),
    ({"ANYSCALE_CLUSTER_ID": "ses_1"}, "auto"),
    ({"RAY_ADDRESS": "auto", "ANYSCALE_CLUSTER_ID": "ses_1"}, "auto"),
])  # fmt: skip
@pytest.mark.parametrize(("words", "spare_cpus", "num_cpus"), [
    (["--num-workers", "1"], 0, 2), (["--num-workers", "2"], 1, 3), (["--num-workers", "4"], 1, 5),
    (["--num-workers", "64"], 0, 4),
])  # fmt: skip
def test_where_ray_is_looked_for(variables, address, words, spare_cpus, num_cpus, monkeypatch):
    def init(where: str, **options) -> None:
        assert where == address
        assert options.get("num_cpus") == (num_cpus if address == "local" else None)
        assert ("runtime_env" in options) == (address != "local")
        raise ConnectionError("seen enough")

    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=f"cannot join Ray at {address}: seen enough"):
        cluster.start(arguments(*words), spare_cpus=spare_cpus)
    assert os.environ.get("RAY_ADDRESS") == variables.get("RAY_ADDRESS")


def test_the_driver_has_no_rank_in_its_lines(capsys):
    cluster.Driver().log("hello")
    assert capsys.readouterr().out == "[driver] hello\n"
    assert isinstance(cluster.Driver(), Worker)


# --- with a Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Join a cluster, and leave it at the test's end."""

    def join(address: str, *words: str, spare_cpus: int = 0) -> argparse.Namespace:
        monkeypatch.setenv("RAY_ADDRESS", address)
        args = arguments(*words)
        cluster.start(args, spare_cpus)
        return args

    yield join
    ray.shutdown()


def test_a_cluster_that_is_too_small(joined, monkeypatch, capsys):
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True})
    try:
        args = joined(nodes.address, "--num-workers", "2")
        assert args.use_gpu is False
        assert f"[driver] joined the Ray cluster at {nodes.address}: 2 CPUs and no GPU" in capsys.readouterr().out
        ray.shutdown()

        monkeypatch.setattr(cluster, "PATIENCE_S", 3)
        with pytest.raises(UsageError, match="16 workers need 16 CPUs and no GPU, and there are 2 CPUs and no GPU"):
            joined(nodes.address, "--num-workers", "16")
        ray.shutdown()
        with pytest.raises(UsageError, match="2 workers need 3 CPUs and no GPU, and there are 2 CPUs and no GPU"):
            joined(nodes.address, "--num-workers", "2", spare_cpus=1)  # Ray Data's tasks would wait for ever
        ray.shutdown()

        # No autoscaler runs here: this is what one reports once it has begun.
        begun = argparse.Namespace(pending_launches=["a node"], pending_nodes=[])
        monkeypatch.setattr(cluster, "get_cluster_status", lambda address: begun)
        joined(nodes.address, "--num-workers", "16")
        assert "the cluster is starting nodes; waiting for 16 times 1 CPU" in capsys.readouterr().out
        ray.shutdown()

        nodes.add_node(num_cpus=2)
        joined(nodes.address, "--num-workers", "4")
        assert "4 CPUs and no GPU" in capsys.readouterr().out
    finally:
        ray.shutdown()
        nodes.shutdown()
