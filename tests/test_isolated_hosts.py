"""On hosts that share nothing but a wire, with a store that speaks S3: training, a cut connection, torchrun."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import hosts
import pytest
from moto.server import ThreadedMotoServer
from runs import LIMIT, ROOT, assert_same_losses, train

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
TRAINING = ["--model", "resnet8", "--precision", "fp64", "--epochs", 3, "--run-name", "cut", "--quiet"]


def wait_until(reached: Callable[[], object], process: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """(the address of a store that speaks S3, a head without CPUs and two hosts with one each)."""
    folder = tmp_path_factory.mktemp("hosts")
    with hosts.hosts(3, folder) as (own_address, made):
        store = ThreadedMotoServer(ip_address=own_address, port=0, verbose=False)
        store.start()
        try:
            endpoint = "http://{}:{}".format(*store.get_host_and_port())
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=LIMIT)
            yield endpoint, made
        finally:
            store.stop()


def test_a_run_on_two_hosts_that_loses_one_ends_like_one_that_nobody_disturbed(three, tmp_path):
    """Endpoint and region reach the workers, though their nodes were started without them."""
    endpoint, (head, *others) = three
    address = f"{head.address}:6379"
    options = {head: ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]}
    options |= {host: [f"--address={address}", "--num-cpus=1"] for host in others}
    for host in options:
        output = tmp_path / f"ray-{host.name}"
        node = host.start([*RAY_START, f"--node-ip-address={host.address}", *options[host]], output, **NODE)
        if host is head:
            wait_until(lambda: "Ray runtime started" in output.read_text(), node, output)  # noqa: B023
    metrics, output = head.tmp / "metrics.jsonl", tmp_path / "driver"
    command = [sys.executable, ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py", *TRAINING, "--num-workers", "1:2"]
    command += ["--save-every-steps", 10, "--storage-path", "s3://bucket/runs", "--metrics-out", "/tmp/metrics.jsonl"]
    driver = head.start(command, output, **NODE, RAY_ADDRESS=address, AWS_ENDPOINT_URL=endpoint, AWS_REGION="us-east-1")
    wait_until(lambda: metrics.exists() and metrics.read_text(), driver, output)
    others[1].cut()
    assert driver.wait(LIMIT) == 0, output.read_text()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["world_size"] for line in lines] == [2, 1, 1], output.read_text()
    assert_same_losses(lines, train(1, tmp_path, *TRAINING))
