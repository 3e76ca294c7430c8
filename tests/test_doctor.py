"""shared.doctor: what is not well is said with its fix, and the exit code tells programs."""

import collections
import os
import runpy
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import joblib
import nbformat
import psutil
import pytest
import torch
from nbclient import NotebookClient
from torch.distributed.run import get_args_parser

from shared import doctor
from shared.errors import UsageError

GIB = 2**30
Memory = collections.namedtuple("Memory", "total available")
Disk = collections.namedtuple("Disk", "total used free")


@pytest.fixture(autouse=True)
def good_machine(monkeypatch):
    """Every test starts on a machine where all is well, whatever this one is; each then breaks one thing."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor, "CGROUP", Path("no container"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(16 * GIB, 8 * GIB))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Disk(100 * GIB, 0, 50 * GIB))
    monkeypatch.setattr(metadata, "version", installed_as_pinned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("PET_LOCAL_ADDR", "")  # so that monkeypatch restores it
    monkeypatch.delenv("PET_LOCAL_ADDR")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def installed_as_pinned(name: str) -> str:
    """The version that requirements.txt pins `name` to."""
    pins = (line.partition("#")[0].strip() for line in doctor.REQUIREMENTS.read_text().splitlines())
    return next(pin.partition("==")[2] for pin in pins if pin.partition("==")[0].partition("[")[0] == name)


def failures(capsys) -> list[str]:
    """The [FAIL] lines of a check, which says False iff there are any."""
    ready = doctor.check()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("[OK] ", "[FAIL] ")) for line in lines)
    failed = [line.removeprefix("[FAIL] ") for line in lines if line.startswith("[FAIL]")]
    assert ready == (not failed)
    return failed


def test_on_a_good_machine_all_is_well(capsys):
    assert failures(capsys) == []


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """The packages of an environment, to be filled by the test: name -> version."""
    packages = {}

    def version(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(doctor, "elsewhere", lambda name: "")
    return packages


def test_checks_that_came_with_a_pull_have_to_be_installed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "FIND_OURS", doctor.FIND_OURS.replace('"checks"', '"checks_of_the_future"'))
    (said,) = failures(capsys)
    assert said.startswith("`checks`, of the exercises, is not installed: run `python") and "requirements.txt" in said


def test_packages_that_differ_from_their_pins_are_named(tmp_path, installed):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(
        "# a comment\n\n-r other.txt\ngood==1.2.3  # needed by all\nold==2.0\n"
        "ray[train,data]==2.60.0\nranged>=3,<4\n-e .\n"
    )
    installed.update(good="1.2.3", old="1.9", ranged="4.1")
    assert doctor.wrong_packages(requirements) == [
        "old is 1.9, not ==2.0", "ray is missing", "ranged is 4.1, not <4,>=3",
    ]  # fmt: skip
    installed.update(old="2.0", ray="2.60.0", ranged="3.5")
    assert doctor.wrong_packages(requirements) == []


@pytest.mark.parametrize(("version", "fits"), [
    ("2.15.0", True), ("2.15.0+cu132", True), ("2.15.0+cpu", True), ("2.15.1", False), ("2.16.0.dev1+cu132", False),
])  # fmt: skip
def test_how_a_release_was_built_is_no_difference(tmp_path, installed, version, fits):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==2.15.0\n")
    installed["torch"] = version
    assert (doctor.wrong_packages(requirements) == []) == fits


def test_a_package_outside_the_environment_is_said_to_be_there(tmp_path, monkeypatch):
    """For example on PYTHONPATH. pip would install the right one into the environment, and nothing would change."""
    (tmp_path / "numpy-1.0.dist-info").mkdir()
    (tmp_path / "numpy-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution(name).version)
    monkeypatch.syspath_prepend(tmp_path)
    (said,) = doctor.wrong_packages(tmp_path / "requirements.txt")
    assert said == f"numpy is 1.0, not ==2.0 (in {tmp_path}, which comes first: take it off PYTHONPATH)"
    monkeypatch.undo()
    (said,) = doctor.wrong_packages(tmp_path / "requirements.txt")
    assert said.endswith(", not ==2.0")


def test_a_second_copy_of_the_workshop_needs_to_be_installed(tmp_path, monkeypatch, capsys):
    lesson = tmp_path / "second/01-ddp-pytorch-only"
    lesson.mkdir(parents=True)
    monkeypatch.chdir(lesson)
    assert failures(capsys) == []
    (tmp_path / "second/shared").mkdir()
    shutil.copy(doctor.__file__, tmp_path / "second/shared/doctor.py")
    (said,) = failures(capsys)
    assert said.startswith(f"scripts import `shared` from {doctor.ROOT}, and not from {tmp_path / 'second'}. Run `")


@pytest.mark.parametrize("version", [None, "", "unknown"])
def test_a_package_without_a_valid_version_is_damaged(tmp_path, installed, version):
    """As an interrupted `pip install` leaves it: a folder of metadata in which the file METADATA is missing or cut."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("halfway==1.0\n")
    installed["halfway"] = version
    assert doctor.wrong_packages(requirements) == ["halfway is damaged (its metadata names no valid version)"]


@pytest.mark.parametrize("name", ["joblib", "packaging", "psutil", "torch"])
@pytest.mark.parametrize("error", [
    ModuleNotFoundError("No module named 'it'"), OSError("libcudart.so.13: cannot open shared object file\nmore"),
    RuntimeError("module compiled against ABI version 2 but this one is 1"),
])  # fmt: skip
def test_a_package_that_cannot_be_imported_is_reported_and_the_other_checks_run(name, error, monkeypatch, capsys):
    class Broken:
        def find_spec(self, module, path=None, target=None):
            if module == name:
                raise error

    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(doctor.__file__, run_name="__main__")
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith(f"[FAIL] {name} ")]
    reason = str(error).splitlines()[0]
    assert f"{name} cannot be imported ({reason})" in failed and f"pip uninstall -y {name}" in failed
    others = {"joblib": " CPUs", "psutil": "GiB memory free", "torch": "no GPU", "packaging": "packages"}
    for words in ("Python 3", "GiB disk free", *(words for package, words in others.items() if package != name)):
        assert any(line.startswith("[") and words in line for line in lines), (words, lines)


def test_a_gpu_that_does_not_answer_is_reported(capsys, monkeypatch):
    def busy(index):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    (failure,) = failures(capsys)
    assert failure.startswith("GPU 0: CUDA error: all CUDA-capable devices are busy") and "nvidia-smi" in failure


def test_a_wrong_package_fails_with_the_command_that_mends_it(capsys, installed):
    (failure,) = failures(capsys)
    assert "torch is missing" in failure and "pip install -r requirements.txt" in failure


def test_a_package_installed_from_elsewhere_fails(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "REQUIREMENTS", tmp_path / "requirements.txt")
    (failure,) = failures(capsys)
    assert "pip install -e ." in failure


# --- the machine -----------------------------------------------------------------------------------------------------


def test_an_old_python_fails(capsys, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    (failure,) = failures(capsys)
    assert failure == "Python 3.10.4 is too old: install 3.11 or newer, then `make lab`"


def test_one_cpu_fails(capsys, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    (failure,) = failures(capsys)
    assert failure.startswith("1 CPU: ") and "Use a machine with two or more" in failure


def test_only_the_cpus_that_may_be_used_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 6)
    doctor.check()
    assert "[OK] 6 CPUs" in capsys.readouterr().out


def test_affinity_is_obeyed():
    """As a batch system or a pinned container leaves it; cgroup limits are joblib's own affair too."""
    one = {min(os.sched_getaffinity(0))}
    command = [sys.executable, "-m", "shared.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, one))
    assert "[FAIL] 1 CPU: " in done.stdout


@pytest.mark.parametrize("v1", [False, True])
def test_a_containers_memory_counts_and_not_its_hosts(v1, monkeypatch, tmp_path):
    folder, names = tmp_path, ("memory.max", "memory.current", "memory.stat")
    if v1:
        folder, names = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        folder.mkdir()
    inactive = f"{'total_' * v1}inactive_file {GIB}\nanon 7\n"
    for name, text in zip(names, (f"{4 * GIB}\n", f"{3 * GIB}\n", inactive), strict=True):
        (folder / name).write_text(text)
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(64 * GIB, 60 * GIB))
    assert doctor.memory() == (2 * GIB, 4 * GIB)
    (folder / names[0]).write_text(str(2**63 - 4096) if v1 else "max\n")
    assert doctor.memory() == (60 * GIB, 64 * GIB)


def test_little_memory_fails(capsys, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 * GIB, 1.25 * GIB))
    (failure,) = failures(capsys)
    assert failure.startswith("1.2 of 8.0 GiB memory free: lessons need 3 GiB. Close")


def test_a_full_disk_fails(capsys, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Disk(100 * GIB, 99 * GIB, 0.5 * GIB))
    (failure,) = failures(capsys)
    assert failure.startswith("0.5 GiB disk free: ") and "Delete old `runs/` folders" in failure


def test_a_temporary_folder_that_ray_cannot_use_fails(capsys, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + 100 * "a")
    (failure,) = failures(capsys)
    assert failure.startswith("RAY_TMPDIR=/tmp/aaa") and "set RAY_TMPDIR to a shorter folder" in failure


def test_all_that_is_wrong_is_said_at_once(capsys, monkeypatch, installed):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(GIB, GIB))
    assert len(failures(capsys)) == 3


@pytest.mark.parametrize(("has_bf16", "words"), [(True, "bf16"), (False, "no bf16 (use fp32)")])
def test_each_gpu_is_named_with_its_bf16_support(capsys, monkeypatch, has_bf16, words):
    class Properties:
        name, total_memory = "NVIDIA A10G", 24 * GIB

    class OnDevice:
        def __init__(self, index):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: Properties,
        "device": OnDevice,
        "is_bf16_supported": lambda including_emulation: has_bf16 or including_emulation,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    doctor.check()
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if "GPU" in line] == [
        f"[OK] GPU {index}: NVIDIA A10G, 24 GiB, {words}" for index in (0, 1)
    ]


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "code"), [(50 * GIB, 0), (GIB, 1)])
def test_the_exit_code_says_whether_all_is_well(capsys, monkeypatch, free, code):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Disk(100 * GIB, 0, free))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(doctor.__file__, run_name="__main__")
    assert caught.value.code == code
    assert ("[FAIL]" in capsys.readouterr().out) == bool(code)


def test_the_environments_programs_come_first_on_the_path(capsys, monkeypatch):
    programs = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", programs]))
    doctor.check()
    doctor.check()
    assert os.environ["PATH"].split(os.pathsep) == [programs, "/usr/bin", programs]


# --- the environment -------------------------------------------------------------------------------------------------


def test_variables_that_spoil_lessons_or_scripts_are_named(tmp_path):
    spoiled = {"PYTHONOPTIMIZE": "1", "PYTHONSAFEPATH": "1", "RAY_TRAIN_V2_ENABLED": "0",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "HOME": str(tmp_path / "missing")}  # fmt: skip
    command = [sys.executable, "-m", "shared.doctor"]
    done = subprocess.run(command, env={**os.environ, **spoiled}, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1
    for name, value in spoiled.items():
        said = value if name == "HOME" else name
        assert sum(line.startswith("[FAIL] ") and said in line for line in done.stdout.splitlines()) == 1, (name, done)


def test_a_folder_whose_name_a_shell_would_split(monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", "/it's a course/.venv")
    (said,) = failures(capsys)
    assert said.startswith("the path /it's a course/.venv holds a blank or a quote, with which Ray's workers do not st")


@pytest.mark.parametrize("addresses", [[], ["192.0.2.77"]], ids=["none", "of another machine"])
def test_a_machine_whose_name_is_no_address_of_it(addresses, monkeypatch, capsys, tmp_path):
    def look_up(name, port):
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "my-laptop")
    (said,) = failures(capsys)
    assert said.startswith("my-laptop, the name of this machine, has no address here, and torchrun would wait")
    assert "`export PET_LOCAL_ADDR=localhost`" in said and "/etc/hosts" in said
    monkeypatch.setattr(doctor, "in_notebook", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert failures(capsys) == []
    assert get_args_parser().parse_args(["script.py"]).local_addr == os.environ["PET_LOCAL_ADDR"] == "localhost"


@pytest.mark.parametrize("folder", [doctor.ROOT, doctor.ROOT.parent], ids=["root", "above"])
def test_a_lesson_that_runs_in_another_folder_says_so_in_its_first_cell(folder, monkeypatch):
    monkeypatch.chdir(folder)
    doctor.check()
    monkeypatch.setattr(doctor, "in_notebook", lambda: True)
    with pytest.raises(UsageError, match=f"this lesson runs in {folder}, and needs its own folder: `papermill --cwd"):
        doctor.check()


PICTURE = """from shared import doctor
doctor.check()
from shared import plots
plots.bars({"one": 1}, "a picture");"""


def test_a_lesson_shows_its_pictures_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PICTURE)])
    NotebookClient(notebook, resources={"metadata": {"path": doctor.ROOT / "tests"}}).execute()
    assert any("image/png" in output.get("data", {}) for output in notebook.cells[0].outputs)
