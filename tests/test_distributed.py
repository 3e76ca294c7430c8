"""shared.distributed: what four ranks see of each other, and what one process does without a group."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import TORCHRUN

from shared import distributed, rendezvous
from shared.errors import UsageError


def test_four_ranks_meet(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "4", Path(__file__).with_name("ranks_meet.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)  # above the ranks' own 600 s
    assert done.returncode == 0, done.stderr


def test_one_process_needs_no_group():
    values = torch.ones(2)
    assert distributed.global_sum(values).tolist() == [1.0, 1.0]
    assert distributed.gather_objects("mine") == ["mine"] and distributed.from_rank_zero("mine") == "mine"
    distributed.check_same("mine", "not raised")
    with pytest.raises(UsageError, match="disk full"), distributed.fail_together():
        raise OSError("disk full")
    with pytest.raises(KeyError), distributed.fail_together():
        raise KeyError("a bug is not the user's mistake")
    distributed.wait_for_all()


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_PORT"])
def test_half_a_description_of_a_group_is_refused(missing, monkeypatch):
    for name in distributed.FROM_TORCHRUN:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(missing)
    with pytest.raises(UsageError, match=f"RANK is set without {missing}: start with torchrun"):
        distributed.join()


def test_a_free_port_is_not_one_that_linux_hands_out_by_itself():
    ports = {rendezvous.free_port() for _ in range(50)}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(ports) > 40 and ports <= set(range(20_000, 29_000))  # above those of Ray's workers
    assert low < 29_000 or not ports & set(range(low, high + 1))  # a host may be set otherwise


def test_gloo_takes_the_interface_by_which_an_address_is_reached(monkeypatch):
    """The address 192.0.2.7 is of RFC 5737, which nobody has; a connected UDP socket sends nothing."""
    addresses = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth0": [SimpleNamespace(address="192.0.2.7")]}

    class Probe(socket.socket):
        def connect(self, address):
            self.reached = address[0]

        def getsockname(self):
            return ("127.0.0.1" if self.reached.startswith("127.") else "192.0.2.7", 5)

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(os, "environ", {})
    rendezvous.choose_gloo_interface("127.0.1.1")
    assert os.environ == {}  # all ranks are on this node
    rendezvous.choose_gloo_interface("192.0.2.1")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "eth0"}
    rendezvous.choose_gloo_interface("192.0.2.1")
    os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    rendezvous.choose_gloo_interface("192.0.2.1")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "chosen"}


def test_a_group_is_joined_over_the_interface_that_reaches_its_master(monkeypatch):
    """Otherwise a host whose name leads to a loopback address would tell that to the others and hang
    (all/test_isolated_hosts.py)."""
    for name in distributed.FROM_TORCHRUN:
        monkeypatch.setenv(name, "1" if name.endswith("WORLD_SIZE") else "0")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")

    class Chosen(Exception):
        pass

    def choose(address):
        raise Chosen(address)

    monkeypatch.setattr(distributed, "choose_gloo_interface", choose)
    with pytest.raises(Chosen, match=r"192\.0\.2\.1"):
        distributed.join()


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    taken = rendezvous.free_port()
    with socket.create_server(("", taken)):
        other = rendezvous.free_port()
        monkeypatch.setattr(rendezvous, "given_ports", set())
        drawn = iter([taken, taken, other])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert rendezvous.free_port() == other


def test_a_process_is_given_each_port_once(monkeypatch):
    first, other = rendezvous.free_port(), rendezvous.free_port()
    monkeypatch.setattr(rendezvous, "given_ports", {first})
    drawn = iter([first, other])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
    assert rendezvous.free_port() == other


LEAVES = """
import sys
import torch
from shared import distributed

worker = distributed.join()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
distributed.leave()
{then}
"""


def test_a_script_that_has_left_keeps_its_exit_code(tmp_path):
    expected, processes = {"": 0, "sys.exit(3)": 3, "raise SystemExit(4)": 4, "1 / 0": 1}, []
    for then in expected:
        alone = dict.fromkeys(distributed.FROM_TORCHRUN, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.free_port())}
        command = [sys.executable, "-c", LEAVES.format(then=then)]
        processes.append(subprocess.Popen(command, env={**os.environ, **alone}, stderr=subprocess.DEVNULL))
    assert [process.wait(600) for process in processes] == list(expected.values())


WARM_UP = """
import torch
import torch.distributed as dist
from torch import nn
from shared import checkpoint, distributed

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.head, self.extra = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return {"logits": self.head(hidden), **({"extra": self.extra(hidden)} if self.training else {})}

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = TwoHeads()
before = {name: value.clone() for name, value in model.state_dict().items()}
generators = torch.get_rng_state()
ddp_model = nn.parallel.DistributedDataParallel(model)
distributed.warm_up_ddp_buckets(ddp_model, lambda: sum(each.sum() for each in ddp_model(torch.empty(0, 4)).values()))
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
assert torch.equal(torch.get_rng_state(), generators)
assert all(module.training for module in ddp_model.modules())
assert all(parameter.grad is None for parameter in model.parameters())
sum(each.sum() for each in ddp_model(torch.ones(2, 4)).values()).backward()  # DDP has finished the pass before
distributed.leave()
"""


def test_the_warm_up_leaves_no_trace_even_in_a_model_that_does_less_in_eval_mode():
    subprocess.run([sys.executable, "-c", WARM_UP], check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
