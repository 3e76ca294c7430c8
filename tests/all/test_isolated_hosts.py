"""On hosts that share nothing but a wire, with a store that speaks S3: torchrun, Ray, and a connection that is cut."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

import hosts
import pytest
from runs import LIMIT, ROOT, assert_same_losses, train

from shared.rendezvous import free_port

WHY_NOT = hosts.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Credentials belong to the nodes. Ray looks for lost nodes more often than it would by itself.
NODE = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true",
    "RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}  # fmt: skip
RAY_START = [
    sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--include-log-monitor=false",
    "--object-store-memory=100000000",
]  # fmt: skip
TRAINING = ["--model", "resnet8", "--precision", "fp64", "--epochs", 2, "--quiet"]


def wait_until(reached: Callable[[], object], process: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory):
    """(this machine's address for the hosts, a host without CPUs, two others)."""
    with hosts.hosts(3, tmp_path_factory.mktemp("hosts")) as (address, made):
        yield address, made


@pytest.fixture(scope="module")
def store(three_hosts, tmp_path_factory):
    """The address of a store that speaks S3, with one bucket."""
    port, output = free_port(), tmp_path_factory.mktemp("store") / "output"
    python = Path(sys.prefix, "s3/bin/python")
    if not python.exists():
        pytest.skip("`make test-all` installs tests/all/s3.txt, and could not: there is no server that speaks S3")
    with open(output, "w") as file:
        command = [python, "-m", "moto.server", "-H", three_hosts[0], "-p", str(port)]
        server = subprocess.Popen(command, stdout=file, stderr=file)
    wait_until(lambda: "Running on" in output.read_text(), server, output)
    urlopen(Request(f"http://{three_hosts[0]}:{port}/bucket", method="PUT"), timeout=LIMIT)
    yield f"http://{three_hosts[0]}:{port}"
    server.kill()
    server.wait(LIMIT)


@pytest.fixture(scope="module")
def driver_of(three_hosts, store, tmp_path_factory):
    """Starts train_ray_ddp.py on the head of a Ray of these hosts, whose nodes know nothing of the store."""
    folder, (head, *others) = tmp_path_factory.mktemp("ray"), three_hosts[1]
    address = f"{head.address}:6379"
    options = {head: ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]}
    options |= {host: [f"--address={address}", "--num-cpus=1"] for host in others}
    for host in options:
        output = folder / host.name
        node = host.start([*RAY_START, f"--node-ip-address={host.address}", *options[host]], output, **NODE)
        wait_until(lambda: "Ray runtime started" in output.read_text(), node, output)  # noqa: B023

    def start(output: Path, *words: object) -> subprocess.Popen:
        command = [sys.executable, ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py", *TRAINING, *words]
        command += ["--storage-path", "s3://bucket/runs"]
        settings = {"RAY_ADDRESS": address, "AWS_ENDPOINT_URL": store, "AWS_REGION": "us-east-1"}
        return head.start(command, output, **NODE, **settings)

    return start


def test_torchrun_on_two_hosts_whose_names_lead_each_to_itself(three_hosts, tmp_path):
    """Each host's own name leads to 127.0.1.1 there, which gloo would tell the other one."""
    (_, first, second), processes = three_hosts[1], []
    for number, host in enumerate((first, second)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{first.name}:29500", "--rdzv-conf", f"is_host={1 - number}"]
        command += ["--local-addr", host.address, ROOT / "01-ddp-pytorch-only/train_ddp.py", *TRAINING]
        command += ["--max-steps", 3, "--storage-path", "/tmp/runs", "--metrics-out", "/tmp/metrics.jsonl"]
        processes.append(host.start(command, tmp_path / host.name))
    ended = [process.wait(LIMIT) for process in processes]
    assert ended == [0, 0], (tmp_path / first.name).read_text() + (tmp_path / second.name).read_text()
    lines = [json.loads(line) for line in (first.tmp / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["world_size"] == 2
    assert_same_losses(lines, train(1, tmp_path, *TRAINING, "--max-steps", 3))


def test_a_node_that_cannot_reach_the_store_is_named_before_the_training(three_hosts, driver_of, tmp_path):
    address, (_, _, second) = three_hosts
    second.call("ip", "route", "add", "blackhole", f"{address}/32")
    driver = driver_of(tmp_path / "driver", "--num-workers", 2)
    assert driver.wait(LIMIT) == 2
    second.call("ip", "route", "del", "blackhole", f"{address}/32")
    last = (tmp_path / "driver").read_text().splitlines()[-1]
    where = f"node {second.name} ({second.address}) cannot use --storage-path s3://bucket/runs/train_ray_ddp-"
    assert last.startswith(f"train_ray_ddp.py: error: {where}"), (tmp_path / "driver").read_text()


def test_a_run_on_two_hosts_that_loses_one_ends_like_one_that_nobody_disturbed(three_hosts, driver_of, tmp_path):
    """Endpoint and region reach the workers, though their nodes were started without them."""
    head, _, second = three_hosts[1]
    metrics, output = head.tmp / "metrics.jsonl", tmp_path / "driver"
    options = ("--num-workers", "1:2", "--save-every-steps", 10, "--metrics-out", "/tmp/metrics.jsonl")
    driver = driver_of(output, *options)
    wait_until(lambda: metrics.exists() and metrics.read_text(), driver, output)
    second.cut()
    assert driver.wait(LIMIT) == 0, output.read_text()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["world_size"] for line in lines] == [2, 1], output.read_text()
    assert_same_losses(lines, train(1, tmp_path, *TRAINING))
