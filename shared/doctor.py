"""Check that this machine is ready: `python -m shared.doctor` prints [OK], or [FAIL] with the fix."""

import contextlib
import importlib
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

from shared import paths
from shared.errors import UsageError

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements.txt"
CGROUP = Path("/sys/fs/cgroup")  # holds a container's limits on Linux
PYTHON = Path(sys.executable).name
FIX_PACKAGES = f"{PYTHON} -m pip install -r requirements.txt"
# Where a script finds the workshop's packages. `checks` is missing after a pull, if the workshop was installed before
# it existed. Asked from elsewhere, because Python finds what lies in the folder that it was started in.
FIND_OURS = """
from importlib.util import find_spec
print(*(spec and spec.origin for spec in map(find_spec, ("shared", "checks"))), sep="\\n")
"""
OPTIONAL_LESSONS = {"07_lose_a_replica.ipynb": "torchft"}  # and the package that not everybody installs
INLINE = "module://matplotlib_inline.backend_inline"


def wrong_packages(requirements: Path) -> list[str]:
    """Return one phrase for each pin of a requirements file that this environment does not meet."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    wrong = []
    for line in requirements.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line or line.startswith("-"):
            continue
        pin = Requirement(line)
        try:
            installed = Version(metadata.version(pin.name))
        except metadata.PackageNotFoundError:
            wrong.append(f"{pin.name} is missing")
            continue
        except (TypeError, InvalidVersion):  # an interrupted installation: the version is None or invalid
            wrong.append(f"{pin.name} is damaged (its metadata names no valid version)")
            continue
        # A local label such as +cu130 says how a release was built, not which release it is.
        if not pin.specifier.contains(installed.public, prereleases=True):
            wrong.append(f"{pin.name} is {installed}, not {pin.specifier}{elsewhere(pin.name)}")
    return wrong


def elsewhere(name: str) -> str:
    """Return a phrase on where a package lies, if that is outside this environment, where pip changes nothing."""
    folder = Path(metadata.distribution(name).locate_file("")).resolve()
    if folder.is_relative_to(Path(sys.prefix).resolve()):
        return ""
    return f" (in {folder}, which comes first: take it off PYTHONPATH)"


def has_own_address(name: str) -> bool:
    """Return whether a host name is one of this machine's, as far as a name server says within five seconds."""
    import psutil

    found = set()

    def look_up() -> None:
        with contextlib.suppress(OSError):
            found.update(info[4][0] for info in socket.getaddrinfo(name, None))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(5)
    own = {each.address.partition("%")[0] for each in chain(*psutil.net_if_addrs().values())}
    return any(address in own or address.startswith("127.") for address in found)


def cpu_name() -> str:
    """Return the CPU's name on Linux, and the architecture elsewhere."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return (re.findall(r"model name\s*:\s*(.+)", info) or [platform.machine()])[0].strip()


def memory() -> tuple[int, int]:
    """Return the (free, total) bytes of memory that this process may use, within its container's limit."""
    import psutil

    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),  # cgroup v2, then v1
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        text = (CGROUP / limit).read_text().strip() if (CGROUP / limit).is_file() else ""
        if text.isdigit():  # without a limit it is "max"
            # Cached files count as used, but are dropped when memory is needed.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (CGROUP / statistics).read_text(), re.MULTILINE)
            unused = int(text) - int((CGROUP / used).read_text()) + (int(cached[1]) if cached else 0)
            free, total = min(free, unused), min(total, int(text))
    return free, total


def findings() -> Iterator[tuple[bool, str]]:
    """Check the machine, and yield (ok, finding with its fix) for each check."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 11):  # noqa: UP036
        yield True, f"Python {version}"
    else:
        yield False, f"Python {version} is too old: install 3.11 or newer, then `make lab`"

    # Each check imports its own package, so that a broken one does not hide the other findings.
    checks = {"packaging": check_packages, "joblib": check_cpus, "psutil": check_memory, "torch": check_gpus}
    for name, check_with_package in checks.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # ImportError; OSError or RuntimeError if the package lacks a library
            reason = str(error).partition("\n")[0]
            fix = f"`{PYTHON} -m pip uninstall -y {name}`, then `{FIX_PACKAGES}` in the workshop's folder"
            yield False, f"{name} cannot be imported ({reason}). Run {fix}"
        else:
            yield from check_with_package()
            if name == "psutil":
                yield from check_host_name()

    free = shutil.disk_usage(REQUIREMENTS.parent).free / 2**30
    if free >= 2:
        yield True, f"{free:.0f} GiB disk free"
    else:
        yield False, f"{free:.1f} GiB disk free: checkpoints need 2 GiB. Delete old `runs/` folders"

    try:
        paths.ray_temp_dir()
    except UsageError as error:
        yield False, str(error)
    yield from check_environment()


def check_environment() -> Iterator[tuple[bool, str]]:
    """Find what the environment sets that lessons and scripts do not work with."""
    if sys.flags.optimize:
        yield False, "no assert is executed (PYTHONOPTIMIZE, python -O), so lessons check nothing. Unset it"
    if sys.flags.safe_path:
        yield False, "scripts cannot import the modules beside them (PYTHONSAFEPATH, python -P). Unset it"
    if os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() not in ("1", "true"):
        yield False, "RAY_TRAIN_V2_ENABLED chooses an older Ray Train, which the scripts do not work with. Unset it"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield (
            False,
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it, torch 2.15's DistributedDataParallel crashes on CPUs. Unset it",
        )
    if shlex.quote(sys.prefix) != sys.prefix:
        yield (
            False,
            f"the path {sys.prefix} holds a blank or a quote, with which Ray's workers do not start in all lessons. "
            "Move the workshop to a folder without them, and run `make lab` there",
        )
    home = Path(os.path.expanduser("~"))
    if not os.access(home, os.W_OK | os.X_OK):
        yield False, f"programs cannot write their settings and caches to {home}. Set HOME to a folder of your own"


def check_packages() -> Iterator[tuple[bool, str]]:
    """Compare the installed packages with their pins."""
    if not REQUIREMENTS.exists():
        yield False, "`shared` is not installed from the workshop's folder: run `pip install -e .` there"
    elif len(found := find_ours()) < 2 or "None" in found:
        yield False, f"`checks`, of the exercises, is not installed: run `{FIX_PACKAGES}` in the workshop's folder"
    elif (other := Path(found[0]).resolve().parents[1]) != (this := workshop_here()):
        yield False, f"scripts import `shared` from {other}, and not from {this}. Run `{FIX_PACKAGES}` there"
    elif wrong := wrong_packages(REQUIREMENTS):
        yield False, f"packages: {'; '.join(wrong)}. Run `{FIX_PACKAGES}` in the workshop's folder"
    else:
        yield True, f"packages as pinned (torch {metadata.version('torch')})"


def find_ours() -> list[str]:
    """Return the files of `shared` and `checks` that scripts import; "None" for one that they do not find."""
    command = [sys.executable, "-c", FIND_OURS]
    return subprocess.run(command, cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, text=True).stdout.split("\n")


def workshop_here() -> Path:
    """Return the copy of the workshop that the working folder belongs to, or else the one of this file."""
    folders = (Path.cwd(), *Path.cwd().parents, ROOT)
    return next(each for each in folders if (each / "shared/doctor.py").is_file()).resolve()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and has not merely imported what kernels need."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def check_cpus() -> Iterator[tuple[bool, str]]:
    """Count the CPUs that this process, its container and its job may use."""
    import joblib

    cpus = joblib.cpu_count()
    if cpus >= 2:
        yield True, f"{cpus} CPUs"
    else:
        yield False, "1 CPU: everything runs, and two processes will be slower than one. Use a machine with two or more"


def check_memory() -> Iterator[tuple[bool, str]]:
    """Check that enough memory is free."""
    available, total = memory()
    amount = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB memory free"
    if available >= 3 * 2**30:
        yield True, amount
    else:
        yield False, f"{amount}: lessons need 3 GiB. Close other programs, or shut down other notebooks' kernels"


def check_host_name() -> Iterator[tuple[bool, str]]:
    """Check that torchrun's ranks will find this machine by its name. In a notebook, give them another one."""
    name = socket.gethostname()
    if "PET_LOCAL_ADDR" in os.environ or has_own_address(name):
        return
    if in_notebook():
        os.environ["PET_LOCAL_ADDR"] = "localhost"
        yield True, f"{name}, the name of this machine, has no address here: torchrun uses localhost (PET_LOCAL_ADDR)"
    else:
        yield (
            False,
            f"{name}, the name of this machine, has no address here, and torchrun would wait for minutes. Run "
            f"`export PET_LOCAL_ADDR=localhost`, or add the line `127.0.0.1 {name}` to /etc/hosts",
        )


def check_gpus() -> Iterator[tuple[bool, str]]:
    """Yield one finding for each GPU that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        yield True, "no GPU: the lessons use the CPU, and the same code uses GPUs if there are any"
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16 (use fp32)"
            yield True, f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}"
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            yield False, f"GPU {index}: {reason}. Who else uses it? `nvidia-smi`; or hide it: CUDA_VISIBLE_DEVICES="


def check() -> bool:
    """Print every finding, and return whether all checks passed.

    Also puts this environment's programs first on PATH, so that `torchrun` in a notebook's %%bash cell belongs to the
    notebook's kernel. There, raises UsageError if the kernel does not run in its lesson's folder.
    """
    programs = str(Path(sys.executable).parent)
    if os.environ["PATH"].split(os.pathsep)[0] != programs:
        os.environ["PATH"] = programs + os.pathsep + os.environ["PATH"]
    if in_notebook():
        here = Path.cwd()
        if here == ROOT or here in ROOT.parents:
            raise UsageError(
                f"this lesson runs in {here}, and needs its own folder: `papermill --cwd FOLDER`, or in VS Code the "
                "setting jupyter.notebookFileRoot = ${fileDirname}"
            )
        if not os.environ.get("MPLBACKEND", "").startswith("module://"):
            os.environ["MPLBACKEND"] = INLINE  # Agg, for example, draws pictures that nobody sees
    ready = True
    for ok, finding in findings():
        ready = ready and ok
        print(f"[{'OK' if ok else 'FAIL'}] {finding}")
    return ready


if __name__ == "__main__":
    sys.exit(0 if check() else 1)
