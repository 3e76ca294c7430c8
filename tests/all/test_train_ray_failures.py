"""The scripts on Ray Train: four workers, processes of Ray that die, and a picture that is damaged in a run."""

from pathlib import Path

import pytest
import torchvision
from runs import ROOT, Fork, assert_bit_for_bit, assert_on_record, assert_same_losses, has_traceback, train
from small_runs import UNEVEN

from shared import datasets

SCRIPT = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
DIES_WHILE_STARTING = Path(__file__).with_name("dies_while_starting.py")
WITH_RAY_DATA = ROOT / "02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py"

pytestmark = pytest.mark.usefixtures("no_ray")


def fork(folder: Path, *args: object, script: Path = SCRIPT) -> Fork:
    return Fork(0, folder, *args, script=script)


def test_four_workers(on_cluster, one_process, small_mnist, tmp_path):
    """Also in an epoch's last batch, a tail of 20 samples, of which they get 5 each."""
    run = fork(tmp_path, *UNEVEN, "--data-dir", small_mnist, "--num-workers", 4)
    assert run.finish() == 0, run.text
    assert_same_losses(one_process, run.metrics())
    assert {line["world_size"] for line in run.metrics()} == {4}


def test_what_ray_train_does_not_replace(one_process, on_cluster, small_mnist, tmp_path, monkeypatch):
    """A worker that dies when it gets the training function, then Ray's controller; the data are in the default ./data.

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
    assert (metrics[0]["val_accuracy"] * 16).is_integer() and list((tmp_path / "run").glob("checkpoint-*/state.pt"))
