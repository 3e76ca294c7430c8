"""What the pages say of Ray itself: validation in a task, the detector of NCCL hangs, data sets that are mixed."""

import json
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import ray.data
import ray.train
from ray._common.ray_option_utils import task_options
from ray.data.checkpoint import CheckpointConfig
from ray.exceptions import RayActorError
from ray.train import FailureConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.nccl_ras import NCCLRASCallback, RASReport
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from runs import Fork

ASYNC_VALIDATION = Path(__file__).with_name("async_validation_from_readme.py")
CHECKPOINTS = Path(__file__).with_name("checkpoints_in_storage.py")

pytestmark = pytest.mark.usefixtures("no_ray")


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


@pytest.fixture(scope="module")
def checkpoints(ray_cluster, tmp_path_factory) -> dict:
    """What checkpoints_in_storage.py has found: for each of its two runs the events, and what is left."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_cluster)
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        run = Fork(0, folder, folder / "found.json", script=CHECKPOINTS, trains=False)
        assert run.finish() == 0, run.text
    return json.loads((folder / "found.json").read_text())


def in_storage(events: list[str]) -> list[int]:
    """How many checkpoints were in the storage after each upload."""
    return [int(event.split()[-3]) for event in events if "is stored" in event]


def test_the_disk_that_checkpoints_need(checkpoints):
    """K + 2 with a score, for K = 2; K + 1 without, for K = 1, and more if the reports are not collected in time."""
    assert in_storage(checkpoints["scored"]["events"]) == [1, 2, 3, 3, 3, 4]
    assert checkpoints["scored"]["left"] == ["epoch-2", "epoch-4", "epoch-6"]
    *_, last = after_the_kill = in_storage(checkpoints["orphan"]["events"])
    assert after_the_kill[:2] == [1, 2] and last - 1 == 3  # the orphan is counted too


def test_a_report_that_is_not_collected_leaves_an_orphan(checkpoints):
    """Its checkpoint is stored whole when the worker dies. The next worker gets the one before, and it stays."""
    events = checkpoints["orphan"]["events"]
    second = events.index("starts with epoch-1")
    assert events[0] == "starts with None" and events[second - 1] == "epoch-2 returned"
    assert checkpoints["orphan"]["left"] == ["epoch-2", "epoch-6"]


def test_an_asynchronous_upload(checkpoints):
    """Two reports return before their uploads end, and one thread uploads, one checkpoint after the other."""
    events = [event.partition(",")[0] for event in checkpoints["orphan"]["events"]]
    place = {event: number for number, event in enumerate(events)}
    assert place["epoch-4 returned"] < place["epoch-3 is stored"] < place["epoch-4 begins"]
    assert place["epoch-5 is stored"] < place["epoch-5 returned"]  # synchronously it is the other way round


def test_a_start_that_fails_is_repeated_without_a_limit():
    """A worker that dies in a start, or no room for it; the death at the hand-over of the function ends the run."""
    policy = DefaultFailurePolicy(FailureConfig(max_failures=0))

    def decision(failure: Exception) -> str:
        return policy.make_decision(ray.train.ControllerError(failure)).value

    for failure in (WorkerGroupStartupFailedError("a worker died"), WorkerGroupStartupTimeoutError(2)):
        assert {decision(failure) for _ in range(100)} == {"RETRY"}
    assert decision(RayActorError()) == "RAISE"


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
