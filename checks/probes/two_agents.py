"""Start two torchrun agents as two nodes of this machine, and end with the exit code of the first one that fails.

Usage: two_agents.py FOLDER PORT SCRIPT ARGUMENT...  Each node has two processes, and a folder FOLDER/node-N of its own
in NODE_DISK. The agents meet at PORT.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Start both agents, and exit."""
    folder, port, *script = sys.argv[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-id", "exercise", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    agents = []
    for node, address in enumerate(("127.0.0.1", "localhost")):  # agents are numbered by these names
        disk = Path(folder, f"node-{node}")
        disk.mkdir()
        options = ["--local-addr", address, "--rdzv-conf", f"is_host={1 - node},join_timeout=120"]
        environment = {**os.environ, "NODE_DISK": str(disk)}
        agents.append(subprocess.Popen([*torchrun, *options, *script], env=environment))
    while not any(agent.poll() for agent in agents) and None in (agent.poll() for agent in agents):
        time.sleep(0.1)
    failed = next((agent.returncode for agent in agents if agent.poll()), 0)
    if failed:
        with suppress(subprocess.TimeoutExpired):  # the other one has a few seconds to fail too
            for agent in agents:
                agent.wait(timeout=5)
    for agent in agents:
        agent.terminate()
        agent.wait()
    sys.exit(abs(failed))


if __name__ == "__main__":
    main()
