"""Every command on the pages is parsed by the program that it names, and run where one machine can.

What is on the pages: blocks of bash, lines with `!` and `%`, and commands inside the text. A command that no checker
knows fails, and so does one that nobody runs and that does not stand below with the reason why.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from markdown_pages import blocks, copied_out, needs, section
from notebook_rules import repository_files

import ray_images
from shared import sampling
from shared.errors import UsageError
from shared.on_ray import cluster, storage, workers
from shared.running import restarts

ROOT = Path(__file__).parents[1]
PROGRAM = "04-ray-in-production/program"
PAGES = {  # and the folder that its commands are run in
    "README.md": ".",
    "docs/set-up.md": ".",
    "docs/scripts.md": ".",
    "docs/what-else.md": ".",
    "docs/communication.md": ".",
    "docs/watching.md": ".",
    "docs/regression-alarm.md": ".",
    "docs/cluster.md": PROGRAM,
    "docs/troubles.md": ".",
    "docs/slurm.md": ".",
    "TEACHING.md": ".",
    "CONTRIBUTING.md": ".",
    "benchmarks/README.md": ".",
    "01-ddp-pytorch-only/README.md": "01-ddp-pytorch-only",
    "02-ddp-pytorch-ray/README.md": "02-ddp-pytorch-ray",
    "03-fsdp-deepspeed/README.md": "03-fsdp-deepspeed",
    "04-ray-in-production/README.md": "04-ray-in-production",
    "05-bug-gallery/README.md": "05-bug-gallery",
    "06-beyond-data-parallel/README.md": "06-beyond-data-parallel",
    f"{PROGRAM}/README.md": PROGRAM,
    f"{PROGRAM}/deployment/kubernetes/README.md": ".",
}
SAID = "(run this in that folder)"  # before a block: it is to be run in the workshop's folder
# What a reader has or makes: such paths need not be here.
READERS_OWN = re.compile(
    r"[a-z0-9]+://.*|/(mnt|tmp|shared)(/.*)?|~/(job|classifier|\.ray-cluster/env)/?.*|runs/RUN|lines\.txt|reviews\.csv"
    r"|record\.json|rows\.jsonl|base|Qwen/.*|wheelhouse|config-best|registry\.example\.com/.*|rayproject/.*|kuberay/kuberay-operator"
    r"|raycluster/training|svc/.*|RAY_IMAGE=.*|nvidia\.com/gpu"
)
# Programs that are not on every machine, or that cannot be asked whether they would take a command: bash checks the
# shape of these commands, and files that they name must be there.
ONLY_SHAPE = {
    "apt-get": "changes the machine",
    "aws": "not on every machine; asks for an account",
    "base64": "reads what comes before it",
    "cat": "reads what the machine has",
    "cp": "what it copies must be there; the blocks of the production sections are run",
    "docker": "not on every machine",
    "export": "bash's own",
    "git": "the address is the reader's",
    "grep": "reads what comes before it",
    "helm": "not on every machine",
    "hf": "downloads from the hub",
    "kill": "bash's own",
    "kubectl": "not on every machine; knows its objects from a cluster",
    "mkdir": "makes what is named",
    "nvidia-smi": "not on every machine",
    "sacct": "not on every machine",
    "scancel": "not on every machine",
    "squeue": "not on every machine",
    "ssh": "the host is the reader's",
    "ulimit": "bash's own",
    "wsl": "on Windows only",
}


class Wrong(Exception):
    """A command that its program would not take."""


@dataclass(frozen=True)
class Command:
    """One program with its words, where a page has it, and the folder that it is run in."""

    page: str
    line: int
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict, hash=False)
    folder: Path = ROOT
    inline: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    def with_words(self, words: list[str], folder: Path | None = None) -> "Command":
        """Another command in its place: one that it starts."""
        return Command(self.page, self.line, tuple(words), self.variables, folder or self.folder, self.inline)


# --- found on the pages ----------------------------------------------------------------------------------------------


def of_shell(language: str, content: str) -> bool:
    """Whether a block holds commands. One without a language may show an output."""
    return language in ("bash", "sh", "console") or (not language and content[0] in "!%")


def simple_commands(line: str) -> list[tuple[dict[str, str], list[str]]]:
    """(variables, words) of each command in a line of a shell; of those in $(...) too."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    found, words = [], []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";&|"):
            words.append(word)
        elif words:
            variables = {}
            while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
                variables[match[1]] = match[2]
                words.pop(0)
            found.append((variables, words))
            words = []
    inner = [each[1] for each in re.finditer(r"\$\((.+)\)", " ".join(w for _, words in found for w in words))]
    return found + [command for each in inner for command in simple_commands(each)]


def in_blocks(page: str, text: str) -> Iterator[Command]:
    """The commands of a page's blocks. `cd` leads on inside a block, and on Kubernetes' page from block to block."""
    start = folder = ROOT / PAGES[page]
    before = 0
    for line, language, content in blocks(text):
        if not of_shell(language, content):
            continue
        said = SAID in " ".join(text.splitlines()[before : line - 2])
        before = line + content.count("\n")
        folder = ROOT if said else folder if "kubernetes" in page else start
        for part in re.finditer(r"(?:.*\\\n)*.*\n", content):
            number = line + content.count("\n", 0, part.start())
            for variables, words in simple_commands(re.sub(r"^[!%]", "", part[0].replace("\\\n", " "))):
                command = Command(page, number, tuple(words), variables, folder)
                if words and words[0] == "cd":
                    folder = after_cd(command)
                elif words:
                    yield command


def after_cd(command: Command) -> Path:
    """The folder that `cd` leads to."""
    _, name = command.words
    if name == "workshop":  # as README's `git clone` calls it
        return ROOT
    if READERS_OWN.fullmatch(name):  # what was copied there has the names that it has here
        return command.folder
    if not (command.folder / name).is_dir():
        raise Wrong(f"{command}: no such folder")
    return command.folder / name


@functools.cache
def scripts() -> dict[str, Path]:
    """The repository's scripts by their names."""
    return {path.name: path for path in repository_files() if path.suffix in (".py", ".sh")}


def in_text(page: str, text: str) -> Iterator[Command]:
    """The commands between `` ` `` in a page's text: a program that is known, or a script, with words behind it."""
    plain = re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", plain):
        try:
            commands = simple_commands(re.sub(r"^[!%]", "", found[1].replace(r"\|", "|")))
        except ValueError:  # an apostrophe: no command
            continue
        for variables, words in commands:
            name = words[0] if words else ""
            script = scripts().get(Path(name).name)
            if len(words) > 1 and name != "cd" and (name in CHECKERS or name in ONLY_SHAPE or script):
                line = plain.count("\n", 0, found.start()) + 1
                command = Command(page, line, tuple(words), variables, ROOT / PAGES[page], inline=True)
                if script and script.suffix == ".py":
                    command = command.with_words(["python", script.name, *words[1:]], script.parent)
                yield command


def commands_of(page: str, text: str | None = None) -> list[Command]:
    """All commands of a page."""
    text = (ROOT / page).read_text() if text is None else text
    return [*in_blocks(page, text), *in_text(page, text)]


@functools.cache
def all_commands() -> tuple[Command, ...]:
    return tuple(command for page in PAGES for command in commands_of(page))


# --- parsed by their programs ----------------------------------------------------------------------------------------


class Reached(BaseException):
    """A program has taken its options, and would now begin."""


def reached(*_: object, **__: object) -> None:
    raise Reached


# These check more than argparse can: a program goes on until it would touch something.
GOES_ON = {
    "train_ddp", "train_ray_ddp", "train_ray_ddp_with_ray_data", "train_ray_fsdp2", "train_ray_deepspeed",
    "train_ray_mesh", "local_training", "distributed_training", "tune", "predict",
}  # fmt: skip


@functools.cache
def module_of(script: Path) -> object:
    """A script as a module, without its `main` being run."""
    if script.parent.name == "training":
        return importlib.import_module(f"training.{script.stem}")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)  # as `python SCRIPT` does
        spec.loader.exec_module(module)
    return module


def asked(command: Command, script: Path, options: list[str], ranks: int = 0) -> argparse.Namespace | None:
    """What a script makes of its options; None where it has printed its help. It ends before it does anything."""
    seen, parse = [], argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> argparse.Namespace:
        self.allow_abbrev = False  # a page says an option's whole name
        seen.append(parse(self, *args, **kwargs))
        return seen[-1] if script.stem in GOES_ON else reached()

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.chdir(command.folder)
        patch.setattr(sys, "argv", [str(script), *options])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        for owner in (restarts.RestartableRun, storage.RayRun):
            patch.setattr(owner, "open_or_resume", reached)
        patch.setattr(ray_images, "find", reached)
        patch.setattr(cluster, "start", reached)
        patch.setattr(workers, "num_processes", lambda num_workers: num_workers or ranks or 1)
        if script.parent.name == "training":
            patch.setattr(importlib.import_module("training.data"), "prepare", reached)
            patch.setattr(importlib.import_module("training.utils"), "best_state", reached)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module_of(script).main()
        except Reached:
            return seen[-1]
        except UsageError as error:
            raise Wrong(f"{command}: {error}") from None
        except SystemExit as end:
            if end.code in (0, None):  # --help
                return None
            raise Wrong(f"{command}: {errors.getvalue().strip()}") from None
    raise Wrong(f"{command}: it would have run")


def check_script(command: Command, script: Path, options: list[str], ranks: int = 0) -> None:
    """A Python script of the workshop. ranks: of torchrun; the batch has to divide by them."""
    if not script.is_file():
        raise Wrong(f"{command}: there is no {script.name} in {command.folder}")
    if script == ROOT / "shared/doctor.py":
        if options:
            raise Wrong(f"{command}: it takes no options")
        return
    options = ["config" if option == "config-best" and option != options[-1] else option for option in options]
    if "--config-dir" in options and options[-1] == "config-best":  # which the command before it makes
        options[-1] = "config"
    args = asked(command, script, options, ranks)
    if args and ranks and "batch_size" in args:
        try:
            sampling.local_batch_size(args.batch_size, ranks)
        except ValueError as error:
            raise Wrong(f"{command}: {error}") from None


def check_python(command: Command) -> None:
    """`python SCRIPT`, `python -m MODULE`, `python -c CODE`."""
    first, *rest = command.words[1:]
    if first == "-c":
        compile(rest[0], "-c", "exec")
    elif first != "-m":
        check_script(command, resolved(command, first), rest)
    elif rest[0] == "shared.doctor":
        check_script(command, ROOT / "shared/doctor.py", rest[1:])
    elif rest[0].startswith("training."):
        name = rest[0].removeprefix("training.")
        check_script(command, ROOT / PROGRAM / f"src/training/{name}.py", rest[1:])
    elif rest[:2] == ["ipykernel", "install"]:
        from ipykernel.kernelspec import InstallIPythonKernelSpecApp

        refuse_foreign(command, rest[2:], ("--user", "--name", "--display-name"))
        assert InstallIPythonKernelSpecApp  # it reads its options only while it installs: a test below runs it
    else:
        raise Wrong(f"{command}: no checker knows the module {rest[0]}")


def resolved(command: Command, path: str) -> Path:
    """Where a path leads; in the image of chapter 4 the workshop lies in /workshop."""
    return ROOT / path.removeprefix("/workshop/") if path.startswith("/workshop/") else command.folder / path


def check_torchrun(command: Command) -> None:
    from torch.distributed.run import get_args_parser

    args = by_argparse(command, get_args_parser(), command.words[1:])
    ranks = int(args.nproc_per_node) * int(args.nnodes.split(":")[-1])
    check_script(command, resolved(command, args.training_script), args.training_script_args, ranks)


def by_argparse(command: Command, parser: argparse.ArgumentParser, words: tuple[str, ...]) -> argparse.Namespace:
    """What a parser of argparse or optparse makes of the words."""
    parser.allow_abbrev = False
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        try:
            return parser.parse_args(list(words))
        except SystemExit:
            raise Wrong(f"{command}: {errors.getvalue().strip().splitlines()[-1]}") from None


def refuse_foreign(command: Command, words: list[str], known: tuple[str, ...] | set[str]) -> None:
    """Raises Wrong for an option that is not one of those that are known."""
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in known:
            raise Wrong(f"{command}: no option {word}")


def check_make(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        raise Wrong(f"{command}: {shown.stderr.strip()}")
    for name, value in (word.split("=", 1) for word in command.words[1:] if "=" in word):
        if f"$({name})" not in makefile:
            raise Wrong(f"{command}: the Makefile has no {name}")
        words = shlex.split(value)
        if name == "LAB_ARGS":
            check_jupyter(command.with_words(["jupyter", "lab", *words]))
        elif name == "PYTEST_ARGS":
            check_pytest(command.with_words(["pytest", *words]))
        elif name == "PIP_ARGS":  # first uv gets them, then pip
            check_uv(command.with_words(["uv", "pip", "install", *words, "-r", "requirements.txt"], ROOT))
            check_pip(command.with_words(["pip", "install", *words, "-r", "requirements.txt"], ROOT))
        elif name == "LESSON":
            exists(command, value)
        elif name == "PYTHON":
            if not re.fullmatch(r"python3\.1[1-3]", value):
                raise Wrong(f"{command}: {value} is none of the Pythons that the workshop is for")
        else:
            raise Wrong(f"{command}: no checker knows what {name} may be")


def check_pip(command: Command) -> None:
    from pip._internal.commands import create_command
    from pip._internal.exceptions import CommandError

    try:
        pip = create_command(command.words[1])
    except (CommandError, KeyError):
        raise Wrong(f"{command}: pip has no command {command.words[1]}") from None
    options, names = by_argparse(command, pip, command.words[2:])
    if not (command.inline and len(command.words) == 2):  # the mention of a command
        for file in [*getattr(options, "requirements", []), *(name for name in names if name.startswith("."))]:
            exists(command, file)


def check_uv(command: Command) -> None:
    if shutil.which("uv"):  # `make lab` installs it where it can; --help comes last, and what is before it is parsed
        done = subprocess.run([*command.words, "--help"], capture_output=True, text=True)
        if done.returncode:
            raise Wrong(f"{command}: {done.stderr.strip().splitlines()[0]}")
    check_paths(command)


def check_jupyter(command: Command) -> None:
    from jupyter_client.kernelspecapp import KernelSpecApp
    from jupyterlab.labapp import LabApp

    app, rest = {"lab": LabApp, "kernelspec": KernelSpecApp}.get(command.words[1]), command.words[2:]
    if app is KernelSpecApp:
        app, rest = KernelSpecApp().subcommands.get(rest[0], [None])[0], rest[1:]
    if app is None:
        raise Wrong(f"{command}: no checker knows this command of jupyter")
    refuse_foreign(command, rest, {f"--{name}" for name in [*app.flags, *app.aliases]})


def check_pytest(command: Command) -> None:
    """By the parser of the pytest that runs this, with its plugins."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            args = CONFIG[0]._parser.parse(list(command.words[1:]))
        except pytest.UsageError as error:
            raise Wrong(f"{command}: {error}") from None
    for path in args.file_or_dir:
        exists(command, path)


def check_ray(command: Command) -> None:
    import click
    from ray.scripts.scripts import cli

    try:
        context = cli.make_context("ray", list(command.words[1:]))
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            name, found, rest = context.command.resolve_command(context, rest)
            if command.inline and not rest:
                return  # the mention of a command
            context = found.make_context(name, rest, parent=context)
    except click.ClickException as error:
        raise Wrong(f"{command}: {error.format_message()}") from None
    if entrypoint := context.params.get("entrypoint"):
        folder = command.folder / (context.params["working_dir"] or ".")
        check(command.with_words(list(entrypoint), folder))


def check_source(command: Command) -> None:
    (path,) = command.words[1:]
    if path == "~/.ray-cluster/env":
        assert "source $NOTES/env" in (ROOT / PROGRAM / "deployment/ray_cluster_setup.sh").read_text()
    elif not path.endswith(".venv/bin/activate"):
        exists(command, path)
    elif ROOT / ".venv/bin/activate" not in [Path(os.path.normpath(each / path)) for each in folders(command)]:
        raise Wrong(f"{command}: `make lab` makes it in the workshop's folder")


def check_bash(command: Command) -> None:
    """`bash SCRIPT`, or the script by its own path."""
    path, *options = command.words[1:] if command.words[0] == "bash" else command.words
    script = resolved(command, path)
    if not script.is_file():
        raise Wrong(f"{command}: there is no {path} in {command.folder}")
    subprocess.run(["bash", "-n", script], check=True)
    if command.words[0] != "bash" and not os.access(script, os.X_OK):
        raise Wrong(f"{command}: {path} is not executable")
    if script.name == "launch_multinode_ddp.sh":
        dry_run = [script, "--dry-run", *options]
        done = subprocess.run(
            dry_run, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}, cwd=command.folder
        )
        if done.returncode:
            raise Wrong(f"{command}: {done.stderr.strip()}")
        nodes = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
        hosts, rest = len(nodes), options[options.index("--") + 1 :] if "--" in options else []
        nproc = re.search(r"--nproc-per-node (\d+)", done.stdout)[1]
        check_script(command, script.with_name("train_ddp.py"), rest, hosts * int(nproc))
    elif script.name == "run_distributed_training.sh":  # its options are those of the program
        if not command.variables.get("STORAGE", "").startswith("/"):
            raise Wrong(f"{command}: it asks for STORAGE, a full path")
        training = ROOT / PROGRAM / "src/training/distributed_training.py"
        check_script(command.with_words(list(command.words), ROOT / PROGRAM), training, options)
    elif script.name == "ray_cluster_setup.sh":
        takes = re.findall(r"^    (\w+)\) ", script.read_text(), re.MULTILINE)
        if not options or options[0] not in takes or (len(options) > 1) != (options[0] == "start"):
            raise Wrong(f"{command}: takes {', '.join(takes)}; `start` with hosts")
    else:
        raise Wrong(f"{command}: no checker knows this script")


def check_sbatch(command: Command) -> None:
    """A file for Slurm, with its options of Slurm before it and those of the script that it starts after it."""
    (file,) = [word for word in command.words if word.endswith(".sbatch")]
    exists(command, file)
    text, place = (command.folder / file).read_text(), command.words.index(file)
    refuse_foreign(command, list(command.words[1:place]), set(re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)))
    (script,) = re.findall(r"\b0\d-\S+\.py", text)
    check_script(command, ROOT / script, list(command.words[place + 1 :]))


def check_shape(command: Command) -> None:
    """What bash says to it; and what it starts after `--` is checked."""
    done = subprocess.run(["bash", "-n", "-c", shlex.join(command.words)], capture_output=True, text=True)
    if done.returncode:
        raise Wrong(f"{command}: {done.stderr.strip()}")
    words = list(command.words)
    if words[0] in ("kubectl", "docker") and "--" in words:
        started = words[words.index("--") + 1 :]
        check(command.with_words(started))
        words = words[: words.index("--")]
    check_paths(command.with_words(words))
    if words[:3] == ["kubectl", "apply", "-k"] or words[:3] == ["kubectl", "delete", "-k"]:
        exists(command, f"{words[3]}/kustomization.yaml")


def check_sudo(command: Command) -> None:
    check(command.with_words(list(command.words[1:])))


def folders(command: Command) -> list[Path]:
    """Where a command's paths begin: one inside the text may be meant for the workshop's folder."""
    return [command.folder, ROOT] if command.inline else [command.folder]


def exists(command: Command, path: str) -> None:
    """Raises Wrong for a path that is not there."""
    if not READERS_OWN.fullmatch(path) and not any((each / path).exists() for each in folders(command)):
        raise Wrong(f"{command}: there is no {path} in {command.folder.relative_to(ROOT)}/")


def check_paths(command: Command) -> None:
    """What looks like a path must be one."""
    for word in command.words[1:]:
        if re.fullmatch(r"[\w.~/-]*/[\w./-]*|[\w-]+\.(py|sh|txt|yaml|json|md|ipynb|csv)", word):
            exists(command, word)


CHECKERS: dict[str, Callable[[Command], None]] = {
    "bash": check_bash,
    "jupyter": check_jupyter,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "ray": check_ray,
    "sbatch": check_sbatch,
    "source": check_source,
    "sudo": check_sudo,
    "torchrun": check_torchrun,
    "uv": check_uv,
}
CONFIG: list[pytest.Config] = []
PASSED: set[tuple] = set()  # several pages have some commands


@pytest.fixture(autouse=True, scope="module")
def config(pytestconfig) -> None:
    CONFIG[:] = [pytestconfig]


def check(command: Command) -> None:
    """Raises Wrong for a command that its program would not take, and for a program that nobody knows here."""
    name, key = command.words[0], (command.words, command.folder, command.inline, tuple(command.variables.items()))
    if key in PASSED:
        return
    if name in CHECKERS:
        CHECKERS[name](command)
    elif name.endswith(".sh"):
        check_bash(command)
    elif name in ONLY_SHAPE:
        check_shape(command)
    else:
        raise Wrong(f"{command}: no checker knows the program {name}")
    PASSED.add(key)


# --- applied ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_its_program_takes(page):
    wrong = []
    for command in commands_of(page):
        try:
            check(command)
        except Wrong as error:
            wrong.append(str(error))
    assert wrong == []


def test_all_pages_with_commands_are_read():
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")} - {"CHANGELOG.md"}
    pages |= {path.relative_to(ROOT).as_posix() for glob in ("0*/README.md", "docs/*.md") for path in ROOT.glob(glob)}
    assert pages <= set(PAGES)
    assert len(all_commands()) > 80


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_commands_say_that_they_are(page):
    """So that none of them is taken for an output, and bash can read all that say it."""
    for line, language, content in blocks((ROOT / page).read_text()):
        first = content.split()[0].lstrip("!%")
        if of_shell(language, content) and content[0] not in "!%":
            done = subprocess.run(["bash", "-n"], input=content, capture_output=True, text=True)
            assert done.returncode == 0, f"{page}:{line}: {done.stderr}"
        else:
            assert content[0] in "!%" or not (first in CHECKERS or first in ONLY_SHAPE), f"{page}:{line}: say bash"


def test_what_is_made_or_installed_is_so_in_the_workshops_folder():
    """`make` looks for the Makefile in the current folder, and `-e .` in requirements.txt is the current folder."""
    for page in ("README.md", "docs/set-up.md"):
        found = 0
        for line, language, content in blocks((ROOT / page).read_text()):
            if of_shell(language, content) and re.search(r"^[!%]?(make|pip|uv|source) ", content, re.MULTILINE):
                assert re.match(r"(!?git clone ADDRESS workshop( && |\n%))?cd workshop\b", content), f"{page}:{line}"
                found += 1
        assert found


# --- run -------------------------------------------------------------------------------------------------------------

# What of the suite runs a command, or one that differs in its sizes and paths alone, some of them forked (runs.Fork).
RUN_BY = {
    r"python train_ddp\.py": "01-ddp-pytorch-only/04_torchrun.ipynb",
    r"torchrun --standalone --nproc-per-node 2 .*train_ddp\.py": "01-ddp-pytorch-only/04_torchrun.ipynb",
    r"torchrun .* --max-restarts 3 .*": "01-ddp-pytorch-only/04_torchrun.ipynb",
    r"torchrun .* --resume": "tests/test_train_ddp.py::test_the_whole_job_is_killed_and_resumed",
    r".*launch_multinode_ddp\.sh localhost .*": "01-ddp-pytorch-only/05_two_nodes.ipynb",
    r".*launch_multinode_ddp\.sh host1 .*": "tests/all/test_launcher_ends.py::test_remote_nodes_end_with_the_launcher",
    r"python .*train_ray_ddp\.py --num-workers 1": (
        "tests/test_train_ray.py::test_a_signal_ends_the_run_and_all_of_ray"
    ),
    r"python .*train_ray_ddp\.py (--num-workers 2|--run-name first)": "02-ddp-pytorch-ray/02_nothing_changed.ipynb",
    r"python train_ray_ddp\.py --run-name first --resume": (
        "tests/test_train_ray.py::test_two_workers_and_a_damaged_checkpoint"
    ),
    r"python train_ray_ddp\.py --num-workers 0.*": (
        "tests/test_small_runs.py::test_other_ranks_compute_what_one_process_does"
    ),
    r"python train_ray_ddp\.py --num-workers 4:6 .*": "tests/all/test_elastic.py::test_two_workers_one_and_two_again",
    r"python .*train_ray_ddp\.py --num-workers 16 .*": ("tests/all/test_train_ray_failures.py::test_four_workers"),
    r"python train_ray_ddp_with_ray_data\.py --num-workers 2": "02-ddp-pytorch-ray/03_ray_data.ipynb",
    r"python train_ray_ddp_with_ray_data\.py --data-uri .*": (
        "tests/all/test_train_ray_failures.py::test_ray_data_on_a_folder_of_pictures"
    ),
    r"python train_ray_fsdp2\.py --num-workers 2": "03-fsdp-deepspeed/03_sharded_checkpoints.ipynb",
    r"python train_ray_mesh\.py --num-workers 2 --tensor-parallel 2": (
        "tests/test_train_ray_mesh.py::test_a_killed_worker_of_a_tensor_group_is_replaced"
    ),
    r"torchrun .* train_ray_mesh\.py --num-workers 0 .*": (
        "tests/test_train_ray_mesh.py::test_a_mesh_computes_what_one_process_computes"
    ),
    r"python train_ray_fsdp2\.py --num-workers 0 .*": (
        "tests/test_train_ray_gpt.py::test_fsdp2_computes_what_one_process_computes"
    ),
    r"python .*train_ray_ddp\.py --num-workers 2 --dataset text": "03-fsdp-deepspeed/05_choosing.ipynb",
    r"python train_ray_deepspeed\.py --num-workers 2 .*": "03-fsdp-deepspeed/04_deepspeed_zero.ipynb",
    r"python train_ray_finetune\.py --num-workers 2 --export tuned": (
        "tests/test_finetune.py::test_the_default_base_and_rows"  # two ranks, in local mode
    ),
    r"python train_ray_finetune\.py --num-workers 2 --lora-rank .*": (
        "tests/test_finetune.py::test_a_killed_worker_leaves_no_trace"
    ),
    r"python train_ray_finetune\.py --num-workers 2 --base .*": (
        "tests/test_finetune.py::test_a_merged_export_is_base_and_adapter_in_one"  # two ranks, in local mode
    ),
    r"sbatch .*torchrun\.sbatch .*": (
        "tests/all/test_slurm_jobs.py::test_a_job_with_torchrun_is_requeued_and_ends_like_one_process"
    ),
    r"sbatch .*ray\.sbatch .*": "tests/all/test_slurm_jobs.py::test_a_job_with_ray_computes_what_one_process_does",
    r"ray job submit .*": "tests/all/test_troubleshooting.py::test_a_job_without_its_folder_and_with_it",
    r"ray start --head": "tests/all/test_troubleshooting.py::test_a_head_whose_port_for_clients_is_taken",
    r"ray start --address=.*": (
        "tests/all/test_troubleshooting.py::test_a_node_tries_for_minutes_where_nobody_listens"
    ),
    r"ray status": (
        "tests/all/test_troubleshooting.py::test_a_fit_that_asks_for_too_much_waits_and_where_its_files_are"
    ),
    r"python 04-ray-in-production/reporting_run\.py .*": (
        "tests/all/test_reporting_run.py::test_ray_knows_the_processes_of_the_run_and_their_ranks"
    ),
    r"python benchmarks/check_regression\.py OLD NEW": (
        "tests/all/test_check_regression.py::test_a_checkout_that_sleeps_in_each_step_raises_the_alarm"
    ),
    r"python benchmarks/alarm_on_noise\.py": (
        "tests/all/test_check_regression.py::test_the_tables_of_the_page_are_those_of_the_program"
    ),
    r"python elastic\.py .*": "tests/all/test_elastic.py::test_two_workers_one_and_two_again",
    r"python -m training\.local_training --set .*": "tests/test_program.py::test_a_file_of_one_s_own",
    r"python -m training\.distributed_training --set dataset\.kind=synthetic .*": (
        "tests/all/test_program_models.py::test_the_other_models_learn"  # in one process
    ),
    r"python -m training\.(local_training|distributed_training|predict .*)": (
        "tests/test_program.py::test_one_process_and_two_workers_have_the_same_losses"
    ),
    r"python -m training\.(tune .*|distributed_training --config-dir .*)": (
        "tests/all/test_searches.py::test_a_search_is_killed_and_resumed_and_writes_its_winner"
    ),
    r"deployment/ray_cluster_setup\.sh .*|source ~/\.ray-cluster/env|python scripts/(verify|monitor)_\w+\.py .*|"
    r".*scripts/run_distributed_training\.sh.*": (
        "tests/all/test_program_cluster.py::test_a_cluster_is_started_verified_trained_on_watched_and_stopped"
    ),
    r"pip install \.": "tests/test_program.py::test_one_process_and_two_workers_have_the_same_losses",
    r"python -m shared\.doctor": "tests/test_doctor.py::test_the_exit_code_says_whether_all_is_well",
    r"make reset .*": ("tests/test_repository.py::test_make_reset_brings_a_lesson_back_and_keeps_the_learners_own"),
    r"make diffs": "tests/test_repository.py::test_a_stale_diff_is_found_and_renewed",
    r"python \S+ --help": "tests/test_commands.py::test_every_command_is_one_that_its_program_takes",
    r"python -c .*": "tests/test_commands.py::test_every_command_is_one_that_its_program_takes",
    r"(mkdir|cp) .*": "tests/all/test_copies.py::test_a_copy_trains_on_data_of_ones_own",
    r"python -m ipykernel install .*|jupyter kernelspec .*": (
        "tests/test_commands.py::test_the_kernel_is_made_found_and_taken_away"
    ),
    r"pytest --nbmake .*": "tests/test_commands.py::test_pytest_finds_a_chapter_s_lessons",
}
# These nobody runs, beside the programs of which only the shape is checked; their options are parsed all the same.
NOT_RUN = {
    r"make test.*": "is what runs this",
    r"make smoke": "is a part of what runs this",
    r"make lab.*": "opens a server that stays; set up as for `make test`",
    r"make bench": "an hour of measuring",
    r"make book|make book-check": "half an hour; tests/test_book.py makes the book without running the lessons",
    r"make lint|make hooks": "for those who commit, not for learners",
    r"make wheelhouse": "needs a network, and 3 GB",
    r"make torchft": "needs a network; `make test` installs the same line of requirements-dev.txt",
    r"(uv )?pip install -?-.*|uv venv .*": "needs a network; `make lab` and `make test` install the same files by it",
    r"pip install|ray (up|down|start|stop|symmetric-run)": "the mention of a command",
    r"ray (timeline|logs|list actors|job (list|submit))": "the mention of a command",
    r"ray get-auth-token.*": "prints a secret of the machine that it is run on",
    r"source .*": "a shell's own; its file is what `make lab` makes",
    r"torchrun .* --nproc-per-node 8 .*": "needs eight GPUs and a download",
    r"python train_ray_ddp\.py --dataset mnist": "needs a download",
    r"python benchmarks/gpu_paths\.py": "needs a GPU; tests/test_results.py holds what it has written",
    r"python train_ray_(fsdp2|mesh)\.py --num-workers 16 .*": "needs sixteen GPUs",
    r"sudo .*": "changes the machine",
}


def rows_for(command: Command) -> list[str]:
    """The rows above that speak of a command."""
    return [pattern for pattern in (*RUN_BY, *NOT_RUN) if re.fullmatch(pattern, command.text)]


def test_every_command_is_run_or_said_not_to_be():
    missing = {str(each) for each in all_commands() if not rows_for(each) and each.words[0] not in ONLY_SHAPE}
    assert missing == set()
    used = {pattern for command in all_commands() for pattern in rows_for(command)}
    assert {*RUN_BY, *NOT_RUN} - used == set(), "no page has such a command any more"
    assert set(ONLY_SHAPE) - {command.words[0] for command in all_commands()} <= {
        "apt-get",
        "cat",
        "nvidia-smi",
    }  # started by others


@pytest.mark.parametrize("runner", sorted(set(RUN_BY.values())))
def test_what_runs_a_command_is_there(runner):
    path, _, name = runner.partition("::")
    text = (ROOT / path).read_text()
    if name:
        assert f"\ndef {name}(" in text
    else:  # a lesson, in which the script or the command's name stands
        commands = [command for command in all_commands() if runner in map(RUN_BY.get, rows_for(command))]
        by_name = [command.words[1] for command in commands if command.words[0] == "ray"]
        by_file = [command.words[1] for command in commands if command.words[0] == "python"]
        by_file += [command.words[0] for command in commands if command.words[0].endswith(".sh")]
        names = {*by_name, *(Path(file).name for file in by_file)}
        assert names and [name for name in names if name not in text] == []


def test_the_kernel_is_made_found_and_taken_away(tmp_path):
    """As docs/set-up.md says, in a home of its own."""
    wanted = ("python -m ipykernel install", "jupyter kernelspec list", "jupyter kernelspec remove")
    commands = [command for command in all_commands() if command.text.startswith(wanted)]
    environment = {**os.environ, "HOME": str(tmp_path), "JUPYTER_DATA_DIR": str(tmp_path / "data")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = []
    for command in commands:
        options = {"cwd": tmp_path, "env": environment, "input": "y\n", "capture_output": True, "text": True}
        done = subprocess.run(command.words, **options)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said.append(done.stdout + done.stderr)
        kernels = [path.name for path in (tmp_path / "data/kernels").glob("*")]
        assert kernels == ([] if "remove" in command.words else ["ray-train-env"])
    assert len(said) == 3 and "ray-train-env" in said[1]


def test_pytest_finds_a_chapter_s_lessons():
    (command,) = [command for command in all_commands() if command.words[0] == "pytest"]
    words = [sys.executable, "-m", *command.words, "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    assert len(re.findall(r"^01-ddp-pytorch-only/(?:solutions/)?\d\d_\w+\.ipynb::", found, re.MULTILINE)) == 12, found


# --- copied out ------------------------------------------------------------------------------------------------------

FIRST = {
    "checkpoint", "datasets", "distributed", "errors", "models", "paths", "rendezvous", "running", "sampling",
    "tasks",
}  # fmt: skip


@pytest.mark.parametrize(("script", "before", "named"), [
    ("01-ddp-pytorch-only/train_ddp.py", None, FIRST),
    ("02-ddp-pytorch-ray/train_ray_ddp.py", "01-ddp-pytorch-only/train_ddp.py", {"on_ray", "sharded"}),
    ("02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py", "02-ddp-pytorch-ray/train_ray_ddp.py", {"ray_images"}),
    ("03-fsdp-deepspeed/train_ray_fsdp2.py", "02-ddp-pytorch-ray/train_ray_ddp.py", {"measure"}),
    ("03-fsdp-deepspeed/train_ray_deepspeed.py", "02-ddp-pytorch-ray/train_ray_ddp.py",
     {"ds_settings", "measure", "zero"}),
    ("03-fsdp-deepspeed/train_ray_finetune.py", "02-ddp-pytorch-ray/train_ray_ddp.py",
     {"measure", "pairs", "pretrained", "tiny_base"}),
    ("06-beyond-data-parallel/train_ray_mesh.py", "03-fsdp-deepspeed/train_ray_fsdp2.py", set()),
])  # fmt: skip
def test_what_travels_is_what_the_page_says(script, before, named):
    path = ROOT / script
    assert needs(path) - (needs(ROOT / before) if before else set()) == named
    text = section(path.parent.relative_to(ROOT).joinpath("README.md").as_posix())
    assert {name for name in named if f"`{name}`" not in text and f"`{name}.py`" not in text} == set()


def program_needs() -> set[str]:
    """What chapter 4's program imports of `shared`."""
    return set().union(*(needs(path) for path in (ROOT / PROGRAM).glob("src/training/*.py")))


def test_what_travels_with_the_program_is_what_its_page_says():
    all_of_them = {path.stem for path in (ROOT / "shared").glob("*")} - {"__init__", "__pycache__"}
    assert all_of_them - program_needs() == {"doctor", "measure", "pipeline_runner", "plots", "ranks", "schedules"}
    names = "`doctor`, `measure`, `pipeline_runner`, `plots`, `ranks` and `schedules`"
    assert f"all except {names}" in section(f"{PROGRAM}/README.md")


def test_a_copy_of_the_program_has_all_that_it_imports(tmp_path):
    """(That a copy runs, installed, is test_program.py's.)"""
    page = f"{PROGRAM}/README.md"
    copied_out(page, tmp_path)
    copy = tmp_path / "classifier"
    assert {path.stem for path in (copy / "src").rglob("*")} >= program_needs()
    assert "cd ~/classifier && PYTHONPATH=src python -m training.local_training" in section(page)
    assert (copy / "src/training/local_training.py").is_file() and (copy / "config").is_dir()
    assert all((copy / f"src/{name}/__init__.py").is_file() for name in ("training", "shared"))  # so pip finds both


# --- proven ----------------------------------------------------------------------------------------------------------


def wrong_with(content: str, page: str = "01-ddp-pytorch-only/README.md", inline: bool = False) -> str:
    """What is said of a page that holds these lines."""
    text = content if inline else f"```bash\n{content}\n```\n"
    with pytest.raises(Wrong) as caught:
        for command in commands_of(page, text):
            check(command)
    return str(caught.value)


@pytest.mark.parametrize(("line", "words"), [
    ("python train_ddp.py --epochs 2 --batchsize 64", "unrecognized arguments: --batchsize 64"),
    ("python train_ddp.py --epochs two", "argument --epochs: 'two' is not a whole number above 0"),
    ("python train_dpp.py", "there is no train_dpp.py in "),
    ("python 01-ddp-pytorch-only/train_ddp.py", "there is no train_ddp.py in "),  # from another folder
    ("python train_ddp.py --epoch 2", "unrecognized arguments: --epoch 2"),  # argparse alone would take it
    ("torchrun --standalone --nproc-per-nod 2 train_ddp.py", "unrecognized arguments: --nproc-per-nod"),
    ("torchrun --standalone --procs 2 train_ddp.py", "unrecognized arguments: --procs"),
    ("torchrun --standalone --nproc-per-node 3 train_ddp.py", "64 is not divisible by 3 ranks"),
    ("torchrun --standalone --nproc-per-node 2", "required: training_script"),
    ("./launch_multinode_ddp.sh localhost --hosts 2 -- --epochs 2", "unknown option --hosts"),
    ("./launch_multinode_ddp.sh host1 host2 -- --epoch2 2", "unrecognized arguments: --epoch2 2"),
    ("./launch_multinode_ddp.sh h1 h2 h3 -- --epochs 2", "64 is not divisible by 3 ranks"),
    ("./launch.sh localhost", "there is no ./launch.sh in "),
    ("python ../02-ddp-pytorch-ray/train_ray_ddp.py --num-workers 8:16", "not divisible by every number of ranks"),
    ("python ../03-fsdp-deepspeed/train_ray_fsdp2.py --strategy ddp", "for DDP use train_ray_ddp.py --dataset text"),
    ("python ../03-fsdp-deepspeed/train_ray_deepspeed.py --ds-config none.json", "No such file or directory"),
    ("ray job submit --adress http://h:8265 -- python train_ddp.py", "No such option"),
    ("ray job submt -- python train_ddp.py", "No such command"),
    ("ray job submit --working-dir .. -- python train_ddp.py", "there is no train_ddp.py in "),
    ("ray job submit -- python train_ddp.py --bogus", "unrecognized arguments: --bogus"),
    ("make labb", "No rule to make target"),
    ("make lab LAB_ARG=--no-browser", "the Makefile has no LAB_ARG"),
    ('make lab LAB_ARGS="--no-brwser"', "no option --no-brwser"),
    ('make lab PIP_ARGS="--no-indx"', "--no-indx"),
    ("make lab PYTHON=python3.10", "none of the Pythons"),
    ('make test PYTEST_ARGS="--bogus"', "unrecognized arguments: --bogus"),
    ("make reset LESSON=01-ddp-pytorch-only/09_none.ipynb", "there is no 01-ddp-pytorch-only/09_none.ipynb"),
    ("pip install -r requirement.txt", "there is no requirement.txt"),
    ("pip instal torch", "pip has no command instal"),
    ("pip install --bogus torch", "no such option: --bogus"),
    ("pytest --nbmak .", "--nbmak"),
    ("pytest --nbmake 06-none", "there is no 06-none"),
    ("jupyter kernelspec lst", "no checker knows this command of jupyter"),
    ("jupyter kernelspec list --all", "no option --all"),
    ("python -m ipykernel install --usr", "no option --usr"),
    ("python -m shared.docter", "no checker knows the module shared.docter"),
    ("python -m shared.doctor --fix", "it takes no options"),
    ("source .venv/bin/activate", "`make lab` makes it in the workshop's folder"),
    ("source settings.sh", "there is no settings.sh"),
    ("cd ../06-none && python train.py", "no such folder"),
    ("cp -r shared/ job/", "there is no shared/"),
    ("kubectl apply -f none.yaml", "there is no none.yaml"),
    ("kubectl apply -k .", "there is no ./kustomization.yaml"),
    ("kubectl exec POD -- frobnicate", "no checker knows the program frobnicate"),
    ("frobnicate --now", "no checker knows the program frobnicate"),
    ("python train_ddp.py --help && frobnicate", "no checker knows the program frobnicate"),
    ('export TOKEN="$(frobnicate)"', "no checker knows the program frobnicate"),
    ("sbatch --node=2 ../docs/slurm/ray.sbatch", "no option --node"),
    ("sbatch ../docs/slurm/ray.sbatch --epoch 2", "unrecognized arguments: --epoch 2"),
    ("sbatch none.sbatch", "there is no none.sbatch"),
    ("python train_ddp.py \\\n    --bogus", "unrecognized arguments: --bogus"),
])  # fmt: skip
def test_a_wrong_command_is_found(line, words):
    assert words in wrong_with(line)


@pytest.mark.parametrize(("line", "words"), [
    ("python -m training.local_training --set training.lr=fast", "training.lr"),
    ("python -m training.local_training --set training.rate=1", "training.rate"),
    ("python -m training.distributed_training --set cluster.num_workers=[4,8]", "is not divisible by 5"),
    ("python -m training.predictt runs/RUN", "there is no predictt.py"),
    ("python scripts/monitor_training.py /tmp --onse", "unrecognized arguments: --onse"),
    ("bash scripts/run_distributed_training.sh", "it asks for STORAGE"),
    ("STORAGE=/mnt/shared bash scripts/run_distributed_training.sh --set a.b=1", "a.b"),
    ("deployment/ray_cluster_setup.sh begin localhost", "takes start, status, stop"),
    ("deployment/ray_cluster_setup.sh stop localhost", "takes start, status, stop"),
])  # fmt: skip
def test_a_wrong_command_of_the_program_is_found(line, words):
    assert words in wrong_with(line, f"{PROGRAM}/README.md")


def test_wrong_commands_in_the_text_are_found():
    assert "unrecognized arguments: --bogus" in wrong_with("Run `train_ddp.py --bogus` now.", inline=True)
    assert "No rule to make target" in wrong_with("Then `make lunch`.", inline=True)
    assert commands_of("README.md", "`--epochs 2`, `python`, `it's make up`, `x = 1`") == []


def test_commands_are_taken_apart():
    block = (
        "A=1 B='x y' python a.py \\\n    --epochs 2   # two\n# nothing\n"
        'cd 01-ddp-pytorch-only && bash run.sh | grep "a # b" &\n'
    )
    text = f"text\n```bash\n{block}```\n```\n!pip install x\n```\n```\nan output\n```\n```python\nmake = 1\n```\n"
    found = commands_of("README.md", text)
    assert [command.words for command in found] == [
        ("python", "a.py", "--epochs", "2"), ("bash", "run.sh"), ("grep", "a # b"), ("pip", "install", "x"),
    ]  # fmt: skip
    assert found[0].variables == {"A": "1", "B": "x y"}
    assert [command.line for command in found] == [3, 6, 6, 9]
    assert [command.folder.name for command in found[:3]] == [ROOT.name, *["01-ddp-pytorch-only"] * 2]
