"""launch_multinode_ddp.sh: several nodes on this machine, and "remote" ones through a stand-in for ssh."""

import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from launcher import CHAPTER, CPU, ENDS_WITHIN, assert_nothing_runs, environment, launch, start_training

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_failing_node_ends_all_others(tmp_path):
    marker = tmp_path / "storage"
    process = start_training(["localhost", "localhost"], tmp_path, marker)
    agents = [child for child in psutil.Process(process.pid).children(recursive=True) if "--rdzv-id" in child.cmdline()]
    assert len(agents) == 2
    agents[1].kill()  # SIGKILL: its rank is left without a parent
    assert process.wait(timeout=ENDS_WITHIN) == 128 + signal.SIGKILL
    assert re.search(r"\[node [01] localhost\] ended with exit code 137", (tmp_path / "output.txt").read_text())
    assert_nothing_runs(marker)


def test_a_wrong_option_for_the_script_is_said_once_and_ends_all(tmp_path):
    marker = tmp_path / "storage"
    run = launch("localhost", "localhost", "--", "--dataset", "nope", "--storage-path", marker, folder=tmp_path, **CPU)
    assert run.returncode == 1  # torchrun's; the script's was 2
    errors = [line for line in run.stdout.splitlines() if "train_ddp.py: error:" in line]
    assert len(errors) == 1 and "nope" in errors[0]
    assert_nothing_runs(marker)


def test_dry_run_prints_the_commands_and_starts_nothing(tmp_path, fake_ssh):
    hosts, arguments = ["gpu-1", "me@gpu-2"], ["--run-name", "it's a name"]
    words = [*hosts, "--nproc-per-node", "8", "--port", "1234", "--dry-run", "--", *arguments]
    changes = {"PYTHON": "/opt/py thon", "NCCL_DEBUG": "INFO", "PET_RDZV_CONF": "join_timeout=60"}
    run = launch(*words, folder=tmp_path, **changes, **fake_ssh)
    assert run.returncode == 0 and not Path(fake_ssh["FAKE_SSH_LOG"]).exists()
    comments = [line for line in run.stdout.splitlines() if line.startswith("#")]
    assert comments == ["# node 0, gpu-1", "# node 1, me@gpu-2"]
    ids = set()
    for host, line in zip(hosts, run.stdout.splitlines()[1::2], strict=True):
        *ssh, destination, remote = shlex.split(line)
        assert ssh[:2] == ["ssh", "-tt"] and destination == host
        words = shlex.split(remote)
        assert words[:5] == ["cd", str(tmp_path), "&&", "exec", "env"] and "NCCL_DEBUG=INFO" in words
        torchrun = words[words.index("/opt/py thon") + 1 :]
        options = dict(zip(torchrun[2:-3:2], torchrun[3:-3:2], strict=True))
        ids.add(options.pop("--rdzv-id"))
        assert options.pop("--rdzv-conf") == f"is_host={int(host == 'gpu-1')},join_timeout=60"
        assert torchrun[:2] == ["-m", "torch.distributed.run"]
        assert options == {
            "--nnodes": "2", "--nproc-per-node": "8", "--rdzv-backend": "c10d", "--rdzv-endpoint": "gpu-1:1234",
            "--local-addr": host.removeprefix("me@"),
        }  # fmt: skip
        assert torchrun[-3:] == [str(CHAPTER / "train_ddp.py"), *arguments]
    assert len(ids) == 1
    run = launch("gpu-1", "--nproc-per-node", "gpu", "--dry-run", "--", "--epochs", "1", folder=tmp_path)
    assert run.returncode == 0 and "--nproc-per-node gpu " in run.stdout


def test_dry_run_of_local_nodes_can_be_pasted(tmp_path):
    runs = [launch("localhost", "localhost", "--dry-run", "--", "--help", folder=tmp_path) for _ in range(2)]
    first, second = (run.stdout.splitlines() for run in runs)
    assert first[0] == "# node 0, localhost" and first[2] == "# node 1, localhost"
    assert first[1].replace("is_host=1 --local-addr 127.0.0.1", "is_host=0 --local-addr localhost") == first[3]
    assert "OMP_NUM_THREADS=1" in first[1] and re.search(r"--rdzv-endpoint 127\.0\.0\.1:\d+ ", first[1])
    assert first[1] != second[1]  # an id of its own for each launch
    script = f"{first[1]} & one=$!; {first[3]} & wait $! && wait $one"
    pasted = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert pasted.returncode == 0 and pasted.stdout.count("--resume") >= 1, pasted.stderr


@pytest.mark.parametrize(("content", "hosts"), [
    (b"\xef\xbb\xbfgpu-1\ngpu-2\n", ["gpu-1", "gpu-2"]),  # Notepad's "UTF-8 with BOM"
    (b"\xef\xbb\xbf# the cluster\r\ngpu-1\r\n\r\n  gpu-2\t# the second\r\n", ["gpu-1", "gpu-2"]),
    (b"\xef\xbb\xbf\r\ngpu-1\r\ngpu-2", ["gpu-1", "gpu-2"]),  # without an end of the last line
    (b"gpu-1 gpu-2", ["gpu-1", "gpu-2"]),
])  # fmt: skip
def test_host_files_of_other_editors(content, hosts, tmp_path):
    (tmp_path / "hosts.txt").write_bytes(content)
    run = launch("--hostfile", "hosts.txt", "--dry-run", "--", "--epochs", "1", folder=tmp_path)
    comments = [line for line in run.stdout.splitlines() if line.startswith("#")]
    assert comments == [f"# node {number}, {host}" for number, host in enumerate(hosts)], run.stderr


@pytest.mark.parametrize(("content", "words"), [
    ("\ufeffgpu-1\r\n".encode("utf-16-le"), "the hostfile hosts.txt is not UTF-8: save it"),  # PowerShell's `>`
    ("\ufeffgpu-1\n".encode("utf-16-be"), "the hostfile hosts.txt is not UTF-8"),
    (b"\xef\xbb\xbf", "no host"),
    (b"gpu-1\ngpu-1\n", "gpu-1 is named twice"),
])  # fmt: skip
def test_host_files_that_are_refused(content, words, tmp_path):
    (tmp_path / "hosts.txt").write_bytes(content)
    run = launch("--hostfile", "hosts.txt", "--", "--epochs", "1", folder=tmp_path)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and words in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("num_gpus", "expected"), [(0, [None, None]), (3, ["", ""]), (4, ["0,1", "2,3"]), (8, ["0,1", "2,3"])]
)  # fmt: skip
def test_local_nodes_share_the_gpus_of_the_machine(tmp_path, num_gpus, expected):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nseq 0 {num_gpus - 1}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    words = ["localhost", "localhost", "--nproc-per-node", "2", "--dry-run", "--", "--epochs", "1"]
    changes = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    run = launch(*words, folder=tmp_path, **changes)
    found = [re.search(r"CUDA_VISIBLE_DEVICES=(\S*) ", line) for line in run.stdout.splitlines()[1::2]]
    assert [match and match[1] for match in found] == expected
    run = launch(*words, folder=tmp_path, CUDA_VISIBLE_DEVICES="5,6,7,8", **changes)
    assert "CUDA_VISIBLE_DEVICES=7,8 " in run.stdout.splitlines()[3]


def test_help_is_the_manual(tmp_path):
    for option in ("-h", "--help"):
        run = launch(option, folder=tmp_path)
        assert run.returncode == 0 and run.stderr == ""
        for word in ("HOST", "--nproc-per-node", "--port", "--hostfile", "--dry-run", "PYTHON", "ssh"):
            assert word in run.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no host"),
        (["--", "--epochs", "1"], "no host"),
        (["localhost", "--hosts", "x", "--", "--epochs", "1"], "unknown option --hosts"),
        (["localhost", "--epochs", "1"], "unknown option --epochs"),
        (["localhost", "--"], "behind --"),
        (["localhost"], "behind --"),
        (["localhost", "--port"], "--port needs a value"),
        (["localhost", "--port", "--", "--epochs", "1"], "--port needs a value"),
        (["localhost", "--port", "70000", "--", "--epochs", "1"], "70000"),
        (["localhost", "--nproc-per-node", "0", "--", "--epochs", "1"], "--nproc-per-node 0"),
        (["localhost", "--hostfile", "no-such-file", "--", "--epochs", "1"], "cannot read the hostfile no-such-file"),
        (["--hostfile", "wide.txt", "--", "--epochs", "1"], "slots=8 is no host name"),
        (["localhost", "gpu-1", "--", "--epochs", "1"], "localhost"),
        (["localhost", "localhost", "--nproc-per-node", "gpu", "--", "--epochs", "1"], "need a number"),
        (["-oProxyCommand=x", "--", "--epochs", "1"], "unknown option -oProxyCommand=x"),
        (["127.0.0.1", "nowhere", "--", "--epochs", "1"], "nowhere is not ready: ssh: Could not resolve hostname"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path, fake_ssh, words, expected):
    (tmp_path / "wide.txt").write_text("gpu-1 slots=8\n")
    run = launch(*words, folder=tmp_path, **fake_ssh)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and expected in run.stderr, run.stderr


def test_a_host_without_the_workshop_and_a_missing_python_and_a_busy_port_are_found_first(tmp_path, fake_ssh):
    run = launch("127.0.0.1", "--", "--epochs", "1", folder=tmp_path, PYTHON="/no/python", **fake_ssh)
    assert run.returncode == 2 and "127.0.0.1 is not ready" in run.stderr and "/no/python" in run.stderr
    run = launch("localhost", "--", "--epochs", "1", folder=tmp_path, PYTHON="/no/python")
    assert run.returncode == 2 and "/no/python" in run.stderr and run.stderr.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        run = launch("localhost", "--port", port, "--", "--epochs", "1", folder=tmp_path)
        assert run.returncode == 2 and f"port {port} is in use" in run.stderr
