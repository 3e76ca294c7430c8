"""How processes find each other: a free port, gloo's network interface, and a name for each start of the same job."""

import os
import random
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil
import torch.distributed as dist

given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port where nobody listens, for a process that binds it some seconds later.

    It is below the ports that Linux hands out to processes that ask for any port: one of those is free now, and a
    moment later another process may hold it for a connection. And it is above the ports of Ray's workers. A process is
    given each port once.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000)  # the one generator that nobody seeds
        with suppress(OSError), socket.create_server(("", port)):
            if port not in given_ports:
                given_ports.add(port)
                return port


def choose_gloo_interface(address: str) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface by which this node reaches `address`.

    Left to itself, gloo takes the address to which the node's own host name leads. On Debian and Ubuntu that is a
    loopback address by default, where no other node can reach it. address: of a node that all ranks reach, or of this
    one. A loopback address is no help, except where all ranks are on this node, and then gloo needs none.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own_address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own_address in (each.address for each in addresses) and not own_address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def name_this_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A word that all ranks of this start share and no earlier start has used. Rank 0 makes it up.

    torchrun keeps one store over all its restarts, and it holds the addresses of dead processes: a rank that reads an
    old one waits forever (pytorch/pytorch issue 135712). TORCHELASTIC_RESTART_COUNT does not tell the starts apart,
    because each node counts its own. So every rank calls with a random word, rank 0 answers the call with the name, and
    repeats that until the rank has confirmed this very name. Raises TimeoutError if a rank does not come.
    """
    own_word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def wait_until(reached: Callable[[], bool], missing: int) -> None:
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing} has not come within {timeout_s:.0f} s")
            time.sleep(0.01)

    def confirmed(other: int) -> bool:
        store.set(f"workshop/name/{other}", f"{own_word} for {read(f'workshop/call/{other}')}")
        return read(f"workshop/confirmed/{other}") == own_word

    if rank == 0:
        for other in range(1, world_size):
            wait_until(partial(confirmed, other), missing=other)
        return own_word
    store.set(f"workshop/call/{rank}", own_word)
    wait_until(lambda: read(f"workshop/name/{rank}").endswith(own_word), missing=0)
    name = read(f"workshop/name/{rank}").split()[0]
    store.set(f"workshop/confirmed/{rank}", name)
    return name
