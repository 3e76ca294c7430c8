"""The scripts on Ray Train as a user starts them: held to train_ddp.py, killed, refused, and joined to a cluster."""

import json
import shutil
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
import ray.data
import ray.train
import torchvision
from ray._common.ray_option_utils import task_options
from ray.data.checkpoint import CheckpointConfig
from ray.train import FailureConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.nccl_ras import NCCLRASCallback, RASReport
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from runs import (
    ROOT,
    Fork,
    Run,
    assert_bit_for_bit,
    assert_on_record,
    assert_same_losses,
    assert_same_state,
    has_traceback,
    refused,
    refused_here,
    train,
)
from small_runs import UNEVEN

from shared import datasets

SCRIPT = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
DIES_WHILE_STARTING = ROOT / "tests/dies_while_starting.py"
ASYNC_VALIDATION = ROOT / "tests/async_validation_from_readme.py"
WITH_RAY_DATA = ROOT / "02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py"


@pytest.fixture
def options(small_mnist) -> tuple:
    return (*UNEVEN, "--data-dir", small_mnist, "--run-name", "run")


pytestmark = pytest.mark.usefixtures("no_ray")


def fork(folder: Path, *args: object, script: Path = SCRIPT) -> Fork:
    return Fork(0, folder, *args, script=script)


def newest(folder: Path) -> Path:
    return sorted((folder / "run").glob("checkpoint-*"))[-1] / "state.pt"


def test_what_ray_train_does_not_replace(one_process, on_cluster, small_mnist, tmp_path, monkeypatch):
    """A worker that dies while it is started, then Ray's controller; with the data in the default folder, ./data.

    Neither leaves a trace: the losses are those on record for two workers, and equal torchrun's bit for bit. (Of six
    epochs, so that there is time to kill the controller.)
    """
    monkeypatch.setenv("DIES_SCRIPT", str(SCRIPT))
    monkeypatch.setenv("DIES_LOG", str(tmp_path / "died"))
    (tmp_path / "data").symlink_to(small_mnist)
    (tmp_path / "torchrun").mkdir()
    options = (*UNEVEN, "--epochs", 6)
    by_torchrun = train(2, tmp_path / "torchrun", *options, "--data-dir", small_mnist)
    run = fork(tmp_path, *options, "--run-name", "run", "--num-workers", 2, script=DIES_WHILE_STARTING)
    run.wait_for_epoch(1)
    assert (tmp_path / "died").exists()
    (controller,) = run.ray_processes("TrainController")
    controller.kill()
    assert run.finish() == 0, run.text
    assert "again from the newest checkpoint (1 of 3)" in run.text and "(2 of 3)" in run.text, run.text
    assert run.text.count("continuing after step") == 1, run.text
    assert_on_record("Ray Train, 2 workers", run.metrics()[:2])
    assert_same_losses(one_process, run.metrics()[:2])
    assert_bit_for_bit(run.metrics(), by_torchrun)
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2


def test_four_workers_and_a_damaged_checkpoint(on_cluster, one_process, options, tmp_path):
    """They save after 4, 6 and 8 steps, go on after the sixth, in mid-epoch, and end where they have ended before.

    (A worker and the driver are killed in lesson 2.4, whose run ends where torchrun's ends, bit for bit.)
    """
    options = (*options, "--save-every-steps", 6, "--quiet")
    run = fork(tmp_path, *options, "--num-workers", 4)
    assert run.finish() == 0, run.text
    assert f"joined the Ray cluster at {on_cluster}: 4 CPUs and no GPU" in run.text
    assert_same_losses(one_process, run.metrics())
    assert {line["world_size"] for line in run.metrics()} == {4}
    said = [line.split()[0] for line in run.text.splitlines() if line.startswith(("[driver]", "[rank"))]
    # The workers' lines take a way of their own to the terminal, and may come after the driver's last.
    assert said[0] == "[driver]" and sorted(said) == ["[driver]"] * 2 + ["[rank"] * 2, run.text
    assert "Reporting training result" not in run.text and "(RayTrainWorker" not in run.text

    undisturbed, damaged = run.metrics(), newest(tmp_path)
    shutil.copy(damaged, tmp_path / "undisturbed.pt")
    damaged.write_bytes(damaged.read_bytes()[:100_000])
    assert "add --resume to continue it" in refused_here(
        SCRIPT, *options, "--num-workers", 4, "--storage-path", tmp_path
    )
    again = fork(tmp_path, *options, "--num-workers", 4, "--resume")
    assert again.finish() == 0, again.text
    assert again.text.count("[driver] skipped checkpoint-00000008") == 1, again.text
    assert again.text.count(f"[driver] resuming from {tmp_path}/run/checkpoint-00000006-") == 1, again.text
    assert_bit_for_bit(again.metrics(), undisturbed)
    (saved,) = {*(tmp_path / "run").glob("checkpoint-00000008-*/state.pt")} - {damaged}
    assert_same_state(saved, tmp_path / "undisturbed.pt")


def test_a_signal_ends_the_run_and_all_of_ray(one_process, options, tmp_path):
    """Before the signal, one worker computes what one process computes."""
    run = Run(0, tmp_path, *options, "--num-workers", 1, "--epochs", 100, script=SCRIPT)
    run.wait_for_epoch(1)
    assert_bit_for_bit(run.metrics()[:1], one_process[:1])
    ray = run.descendants()
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 128 + signal.SIGINT
    assert time.monotonic() - sent < 120  # seconds, but on any machine
    (said,) = [line for line in run.text.splitlines() if "stopped by" in line]
    assert said.startswith(f"[driver] stopped by SIGINT: {tmp_path / 'run'}/checkpoint-")
    assert "--run-name run " in said and said.endswith("--resume")
    psutil.wait_procs(ray, timeout=120)
    assert not [process for process in ray if process.is_running()]


@pytest.mark.parametrize(("args", "words"), [
    (["--num-workers", "-1"], "'-1' is not a number of workers, 0 or more"),
    (["--num-workers", "0", "--resume", "--run-name", "run"], "stores no checkpoints"),
    (["--num-workers", "0:2"], "'0:2' is not a number of workers, 0 or more, or MIN:MAX with 1 <= MIN <= MAX"),
    (["--num-workers", "1:3"], "64 is not divisible by every number of ranks from 1 to 3; use 60 or 66"),
    (["--num-workers", "4", "--batch-size", "130"], "130 is not divisible by 4 ranks; use 128 or 132"),
    (["--dataset", "cats"], "invalid choice: 'cats'"),
    (["--resume", "--run-name", "none"], "nothing to resume"),
    (["--storage-path", "/proc/runs"], "cannot write to --storage-path"),
    (["--storage-path", "ftp://host/runs"], "cannot use --storage-path: Unrecognized filesystem type"),
])  # fmt: skip
def test_bad_input(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(SCRIPT, *args)


@pytest.mark.parametrize(("args", "words"), [
    (["--num-workers", "1:2"], "'1:2' is not a number of workers, 0 or more (this script takes no MIN:MAX)"),
    (["--save-every-steps", "5"], "--save-every-steps: with Ray Data an epoch that was cut short starts again"),
])  # fmt: skip
def test_what_ray_data_does_not_serve(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(WITH_RAY_DATA, *args)


def test_more_workers_than_there_is_room_for(tmp_path, monkeypatch):
    """(One that asks for GPUs: test_cluster.py, test_a_cluster_that_is_too_small.)"""
    many = ("--num-workers", "4096", "--batch-size", "4096")
    assert "4096 workers need" in refused(0, tmp_path, *many, script=SCRIPT)


def test_a_cluster_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "no Ray answers at RAY_ADDRESS=127.0.0.1:9" in refused(0, tmp_path, script=SCRIPT)


def test_ray_data_on_a_folder_of_pictures(on_cluster, small_mnist, tmp_path):
    """176 PNG files for training and 16 for validation, in a folder for each label, over two workers in steps of 16.

    An epoch is cut short and begun again: each sample is dealt once, in every epoch. Then a picture is damaged. (Data
    sets by name on two workers, and that they learn as much as a DataLoader's within one point: lesson 2.3.)
    """
    splits = datasets.load("mnist", small_mnist)
    for part, (images, labels) in (("train", splits.train.tensors), ("val", splits.val.tensors)):
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            path = tmp_path / f"pictures/{part}/digit-{label}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            torchvision.utils.save_image(image * 0.5 + 0.5, path)
    for hidden in ("digit-0/.DS_Store", "_none/0.png"):  # Ray reads the first of them, if it is not told
        (tmp_path / "pictures/train" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "pictures/train" / hidden).write_bytes(b"nobody asks for it")
    options = (
        "--data-uri", tmp_path / "pictures", "--image-size", 8, "--augment", "--model", "mlp", "--batch-size", 16,
        "--num-workers", 2, "--run-name", "run",
    )  # fmt: skip
    before = train(0, tmp_path, *options, "--epochs", 3, "--max-steps", 20, script=WITH_RAY_DATA)
    assert [line["epoch"] for line in before] == [1, 2] and before[0]["samples_seen"] == 176
    assert 0 < before[1]["samples_seen"] < 176 and sum(len(line["step_losses"]) for line in before) == 20

    run = fork(tmp_path, *options, "--epochs", 1000, "--resume", script=WITH_RAY_DATA)
    run.wait_for_epoch(3)
    path.write_bytes(path.read_bytes()[:60])
    assert run.finish() == 2
    assert f"{WITH_RAY_DATA.name}: error: cannot use an image of {path}: image file is truncated" in run.text
    assert not has_traceback(run.text)
    assert "[driver] 176 images of (3, 8, 8), labels digit-0, digit-1, " in run.text
    metrics = run.metrics()
    assert metrics[0] == before[0] and [line["epoch"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert {line["samples_seen"] for line in metrics} == {176}
    assert (metrics[0]["val_accuracy"] * 16).is_integer() and newest(tmp_path).exists()


def test_ray_data_in_local_mode(on_cluster, options, tmp_path):
    metrics = train(0, tmp_path, *options, "--num-workers", 0, script=WITH_RAY_DATA)
    assert [line["samples_seen"] for line in metrics] == [176] * 2
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]


def test_a_damaged_page_ends_the_run_and_names_its_file(on_cluster, tmp_path):
    """The first look at the data reads no images except the first one."""
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        for number in range(3):  # Ray itself looks into the first and the last file before it reads any
            table = pyarrow.table({"image": [[[0.5] * 4] * 4] * 20, "label": [0, 1] * 10})
            pyarrow.parquet.write_table(table, tmp_path / part / f"{number}.parquet")
    damaged = tmp_path / "train/1.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    run = fork(tmp_path, "--data-uri", tmp_path, "--model", "mlp", "--num-workers", 0, script=WITH_RAY_DATA)
    assert run.finish() == 2, run.text
    assert f"error: {damaged} is damaged (" in run.text and "): copy it or write it again" in run.text
    assert not has_traceback(run.text)


# --- what the pages say of Ray itself ---------------------------------------------------------------------------------


def test_validation_in_a_task_of_its_own(on_cluster, tmp_path):
    """The README's script: what its page says of the metrics, of CPUs that are taken, and of what fails."""
    run = Fork(0, tmp_path, tmp_path / "found.json", script=ASYNC_VALIDATION, trains=False)
    assert run.finish() == 0, run.text
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["events"] == [
        "held", "reported 1", "reported 2", "1 begins", "reported 3", "trained", "workers have gone", "1 ends",
        "2 begins", "3 begins", "3 begins", "3 ends",
    ]  # fmt: skip
    first, _, third = found["direct"]
    assert found["metrics"] == [{"epoch": 1, **first}, {"epoch": 2}, {"epoch": 3, **third}]  # bit for bit
    assert third["val_loss"] < first["val_loss"] < 2 and len(list(tmp_path.glob("runs/*/checkpoint_2*"))) == 3
    assert found["timeout"] == [{}, "VALIDATION_TIMEOUT"] and found["dead"] == "WorkerCrashedError"
    assert task_options["max_retries"].default_value == 3 and "validation: [Alpha]" in ray.train.report.__doc__


def test_the_detector_of_nccl_hangs(monkeypatch):
    """Off by default. It acts if the ranks' counts of collectives differ, and none grows for ten minutes."""
    trainer = TorchTrainer(print, scaling_config=ray.train.ScalingConfig(num_workers=2))

    def detectors() -> list[NCCLRASCallback]:
        return [each for each in trainer._create_default_callbacks() if isinstance(each, NCCLRASCallback)]

    def minutes_until_it_raises(growth: int = 0) -> float | None:
        (detector,) = detectors()
        monkeypatch.setattr(detector, "fetch_ras_human_report", lambda: None)
        monkeypatch.setattr(detector, "capture_diagnostic", lambda what, capture: saved.append(what))
        for poll in range(100):
            counts = {rank: {"AllReduce": 7 + rank + growth * poll} for rank in (0, 1)}  # rank 0 is one behind
            report = RASReport(str(poll), {"world": counts}, {"world": dict.fromkeys(counts, "RUNNING")})
            try:
                detector.evaluate_comm_mismatch(report)
            except ray.train.NCCLHangError as error:
                assert DefaultFailurePolicy(FailureConfig(max_failures=1)).make_decision(error).value == "RETRY"
                return poll * detector._poll_interval_s / 60
            detector.prev_report = report
        return None

    saved: list[str] = []
    for name in ("ENABLE_NCCL_HANG_DETECTOR", "NCCL_RAS_ACTION", "NCCL_RAS_CONFIRM_DURATION_S"):
        monkeypatch.delenv(f"RAY_TRAIN_{name}", raising=False)
    assert detectors() == []
    monkeypatch.setenv("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
    assert minutes_until_it_raises() is None and "worker stack traces" in saved
    monkeypatch.setenv("RAY_TRAIN_NCCL_RAS_ACTION", "fail")
    assert minutes_until_it_raises() == 10 and minutes_until_it_raises(growth=1) is None


@pytest.fixture
def ray_data(on_cluster, monkeypatch) -> ray.data.DataContext:
    """Ray Data's settings, in a driver that has joined the cluster."""
    ray.init(on_cluster, log_to_driver=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "enable_progress_bars", False)
    monkeypatch.setattr(context, "use_datasource_v2", False)  # it would join small files into one block
    yield context
    ray.shutdown()


def test_two_data_sets_mixed_and_a_pipeline_interrupted(ray_data, monkeypatch, tmp_path):
    """What the fold of lesson 2.3 says, by the order of rows and by ids."""
    ids_of = {"a": range(120), "b": range(120, 240)}
    first, second = (ray.data.from_items([*ids], override_num_blocks=12) for ids in ids_of.values())
    stop = ray.data.MixStoppingCondition.STOP_ON_SHORTEST
    for expected, options in ((240, {}), (160, {"stopping_condition": stop})):
        ids = [row["item"] for row in first.mix(second, weights=[3, 1], **options).take_all()]
        from_first = [number in ids_of["a"] for number in ids]
        assert len(ids) == len(set(ids)) == expected
        # Three quarters, to one block of 10 rows, until the 120 rows of the first one end.
        assert all(abs(sum(from_first[:rows]) - 0.75 * rows) <= 10 for rows in range(161))
        assert not any(from_first[160:])

    (tmp_path / "in").mkdir()
    for number in range(5):
        ids = range(10 * number, 10 * number + 10)
        pyarrow.parquet.write_table(pyarrow.table({"id": ids}), tmp_path / f"in/{number}.parquet")
    config = CheckpointConfig("id", str(tmp_path / "ids"), delete_checkpoint_on_success=False)
    monkeypatch.setattr(ray_data, "checkpoint_config", config)

    def process(batch):
        if 25 in batch["id"] and not (tmp_path / "repaired").exists():
            while not [path for path in (tmp_path / "ids").glob("*.parquet") if "pending" not in path.name]:
                time.sleep(0.05)
            raise ValueError("planted")
        with open(tmp_path / "processed", "a") as file:
            file.writelines(f"{number}\n" for number in batch["id"])
        return batch

    def written() -> list[int]:
        return sorted(pyarrow.parquet.read_table(tmp_path / "out")["id"].to_pylist())

    def run() -> list[int]:
        (tmp_path / "processed").write_text("")
        blocks = ray.data.read_parquet(str(tmp_path / "in"), override_num_blocks=5)
        blocks.map_batches(process).write_parquet(str(tmp_path / "out"))
        return sorted(map(int, (tmp_path / "processed").read_text().split()))

    with pytest.raises(ray.exceptions.RayTaskError, match="planted"):
        run()
    done = written()
    assert 0 < len(done) < 50
    (tmp_path / "repaired").touch()
    assert run() == sorted(set(range(50)) - set(done)) and written() == list(range(50))


@pytest.mark.parametrize("script", [SCRIPT, WITH_RAY_DATA])
def test_help_is_the_manual(script, tmp_path):
    run = Fork(0, tmp_path, "--help", script=script, trains=False)
    assert run.finish() == 0, run.text
    assert "--num-workers" in run.text and "--no-use-gpu" in run.text and "RAY_ADDRESS" in run.text
