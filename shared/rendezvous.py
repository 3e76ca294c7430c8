"""Help processes find each other: a free port, gloo's network interface, and a name for each start of a job."""

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
    """Return a free TCP port, for a process that binds it some seconds later.

    The port is below those that Linux gives to processes that ask for any port, because one of those may be taken a
    moment later. It is above the ports of Ray's workers. A process never gets the same port twice.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000)  # the only generator that nobody seeds
        with suppress(OSError), socket.create_server(("", port)):
            if port not in given_ports:
                given_ports.add(port)
                return port


def choose_gloo_interface(address: str) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface by which this node reaches `address`.

    By default gloo uses the address of the node's own host name. On Debian and Ubuntu that is a loopback address, which
    no other node can reach. address: of a node that all ranks reach, or of this node. A loopback address sets nothing.
    It is used only when all ranks are on this node, and then gloo needs no help.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own_address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own_address in (each.address for each in addresses) and not own_address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def name_this_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that all ranks of this start share and that no earlier start has used. Collective.

    torchrun keeps one store over all its restarts, and the store holds the addresses of dead processes. A rank that
    reads an old address waits forever (pytorch/pytorch issue 135712). TORCHELASTIC_RESTART_COUNT does not distinguish
    the starts, because each node counts its own. So every rank publishes a random word, and rank 0 answers with that
    word and the name. It repeats this until the rank has confirmed the name. Raises TimeoutError if a rank does not
    answer in time.
    """
    own_word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def wait_until(reached: Callable[[], bool], missing: int) -> None:
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing} did not arrive within {timeout_s:.0f} s")
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
