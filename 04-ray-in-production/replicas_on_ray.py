"""Record how Ray Train replaces one lost replica and keeps the others: python replicas_on_ray.py RECORD.json

Two runs of two workers, each a replica with lesson 4.7's loop. In each, worker 1 is killed before its all-reduce. In
the second run the workers also call ray.train.report after every step. It takes about six minutes.
"""

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import ray
import ray.train
import replicas
import torch
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

QUORUM_S = 20


def train(config: dict) -> None:
    """Be a replica: the loop of lesson 4.7, its notes, and the accident."""
    import torchft
    from torch.distributed import TCPStore

    folder, name = Path(config["folder"]), "ab"[ray.train.get_context().get_world_rank()]
    accident = {"replica": "b", "step": replicas.AT_STEP, "place": "all-reduce", "signal": 9}
    run = replicas.Run(folder, name, "ab", len(list(folder.glob(f"{name}*.jsonl"))), accident)
    model, optimizer = replicas.build()

    def load(state):
        run.loads.append(manager.current_step())
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = os.environ["TORCHFT_LIGHTHOUSE"].rpartition(":")[2]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, use_async_quorum=False,
        init_sync=False, load_state_dict=load, timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=QUORUM_S),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, rank=0, world_size=1,
        hostname="localhost", store_addr="localhost", store_port=store.port, replica_id=name,
        lighthouse_addr=f"http://127.0.0.1:{port}",
    )  # fmt: skip
    (folder / f"{name}.ready").touch()
    run.wait_for("a.ready")
    run.wait_for("b.ready")
    while manager.current_step() < replicas.STEPS:
        if not config["report"]:
            run.at("quorum", manager.current_step())
        optimizer.zero_grad()
        manager.start_quorum()
        step, rank, n = manager.current_step(), manager.participating_rank(), manager.num_participants()
        images, labels = replicas.samples(replicas.global_batch(step)[rank::n])
        loss = cross_entropy(model(images), labels, reduction="sum") / replicas.BATCH * n
        loss.backward()
        gradients = [each.grad for each in model.parameters()]
        flat = torch.cat([*(each.flatten() for each in gradients), loss.detach().view(1)])
        run.at("all-reduce", step)
        manager.allreduce(flat).wait()
        vector_to_parameters(flat[:-1], gradients)
        if committed := manager.should_commit():
            optimizer.step()
        run.note(step, committed, model, n, loss=flat[-1].item())
        if config["report"]:
            ray.train.report({"loss": flat[-1].item()})
    manager.shutdown(wait=False)


def record(report: bool) -> dict:
    """Run the job and return its notes, and the error if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train, train_loop_config={"folder": folder, "report": report},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            torch_config=TorchftConfig(
                {"min_replicas": 1, "bind": "127.0.0.1:0", "heartbeat_timeout_ms": 3000}, backend="gloo"
            ),
            run_config=ray.train.RunConfig(
                storage_path=folder + "/storage", failure_config=ray.train.FailureConfig(max_failures=3)
            ),
        )  # fmt: skip
        error, started = None, time.time()
        try:
            trainer.fit()
        except Exception as problem:
            error = str(problem).splitlines()[0][:300]
        lines = [line for path in Path(folder).glob("*.jsonl") for line in replicas.read_notes(path)]
        seconds = time.time() - started
    for line in lines:
        line["time"] = round(line["time"] - started, 2)
    return {"seconds": round(seconds, 1), "error": error, "notes": sorted(lines, key=lambda line: line["time"])}


if __name__ == "__main__":
    ray.init(
        num_cpus=4, include_dashboard=False, logging_level="ERROR",
        runtime_env={"env_vars": {"RUST_LOG": "error", "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    versions = {name: metadata.version(name) for name in ("torch", "ray", "torchft")}
    runs = {"without report": record(False), "with report": record(True)}
    Path(sys.argv[1]).write_text(json.dumps({name: run | {"versions": versions} for name, run in runs.items()}))
