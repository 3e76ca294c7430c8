"""Read and check the two configuration files. Reports all errors at once, each with its file and key."""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import UsageError
from shared.running.options import Parser, refuse_resume_without_name, run_name


def reject_bool(value: object) -> object:
    """Reject YAML's yes and no, which Python would accept as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


PositiveInt = Annotated[int, BeforeValidator(reject_bool), Field(gt=0)]
NonNegativeInt = Annotated[int, BeforeValidator(reject_bool), Field(ge=0)]
PositiveFloat = Annotated[float, BeforeValidator(reject_bool), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, lt=1)]
IntRange = Annotated[
    tuple[PositiveInt, PositiveInt],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value] * 2),
]
NonEmptyStr = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base class of a section in a file. Rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def expand_local(path: str) -> str:
    """Expand ~, and reject a URI."""
    if "://" in path:
        raise ValueError("should be a path on this machine, not a URI")
    return os.path.expanduser(path)


LocalPath = Annotated[NonEmptyStr, AfterValidator(expand_local)]


class Paths(Section):
    processed_data_dir: LocalPath
    model_save_dir: Annotated[NonEmptyStr, AfterValidator(os.path.expanduser)]  # or a URI
    log_dir: LocalPath = "logs"


class Cluster(Section):
    num_workers: IntRange  # (minimum, maximum)
    use_gpu: bool | None = None
    resources_per_worker: dict[str, PositiveFloat] | None = None
    timeout_s: PositiveFloat = 600
    max_failures: NonNegativeInt = 3


class Dataset(Section):
    kind: Literal["snippets", "file", "synthetic"]
    file: LocalPath | None = None
    text_column: NonEmptyStr = "text"
    label_column: NonEmptyStr = "label"
    vocab_size: Annotated[int, BeforeValidator(reject_bool), Field(ge=3)]
    max_length: PositiveInt = 64
    num_samples: Annotated[int, BeforeValidator(reject_bool), Field(ge=100)] = 50_000
    loader_workers: NonNegativeInt = 0


class Model(Section):
    kind: Literal["rnn", "cnn", "mlp"]
    cell: Literal["gru", "lstm"] = "gru"
    embedding_dim: PositiveInt
    hidden_dim: PositiveInt
    n_layers: PositiveInt
    bidirectional: bool
    dropout: Fraction


class Training(Section):
    batch_size: PositiveInt
    accumulation_steps: PositiveInt = 1
    epochs: PositiveInt
    lr: PositiveFloat
    lr_step_size: PositiveInt = 4
    lr_gamma: Annotated[float, BeforeValidator(reject_bool), Field(gt=0, le=1)] = 0.5
    max_grad_norm: PositiveFloat | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    early_stopping_patience: PositiveInt | None = None
    log_every: PositiveInt = 10
    seed: NonNegativeInt = 0


class Checkpoint(Section):
    every_epochs: PositiveInt = 1
    every_steps: PositiveInt | None = None
    keep_best: PositiveInt = 3


class Bounds(Section):
    lowest: PositiveFloat
    highest: PositiveFloat


class Tuning(Section):
    num_samples: PositiveInt = 10
    lr: Bounds = Bounds(lowest=1e-4, highest=1e-2)
    epochs: Annotated[list[PositiveInt], Field(min_length=1)] = [5, 10, 20]
    scheduler: Literal["none", "asha"] = "none"
    grace_epochs: PositiveInt = 2
    resources_per_trial: dict[str, PositiveFloat] | None = None


class Config(Section):
    """The sections of both files."""

    paths: Paths
    cluster: Cluster
    dataset: Dataset
    model: Model
    training: Training
    checkpoint: Checkpoint = Checkpoint()
    tuning: Tuning = Tuning()


SECTIONS_OF_FILE = {
    "environment.yaml": ("paths", "cluster"),
    "hyperparameters.yaml": ("dataset", "model", "training", "checkpoint", "tuning"),
}


# What this program has in place of the options of the workshop's scripts, which messages of `shared` name.
OPTION_KEYS = {
    "--storage-path": "paths.model_save_dir",
    "--num-workers": "cluster.num_workers",
    "--no-use-gpu": "cluster.use_gpu=false",
    "--precision": "training.precision",
    "--lr": "training.lr",
    "--seed": "training.seed",
}


def name_keys(error: Exception) -> str:
    """Return an error's message with keys in place of options that this program does not have."""
    # It rewrites the text, because some errors arrive as text: argparse's, an OSError of a Ray worker and a failed
    # trial's keep no other field. And `shared` would have to set the option apart in each of its messages.
    return re.sub(r"--[a-z][a-z-]*", lambda option: OPTION_KEYS.get(option[0], option[0]), str(error))


def file_of(section: str) -> str:
    """Return the name of the file that a section belongs to, or "" for an unknown section."""
    return next((file for file, sections in SECTIONS_OF_FILE.items() if section in sections), "")


class Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys. Otherwise the last one would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key} appears twice", problem_mark=node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


def read_sections(path: Path, problems: list[str], unread: set[str]) -> dict:
    """Return the sections of one file. Adds errors to `problems`, and the names of unreadable sections to `unread`."""
    unread |= {*SECTIONS_OF_FILE[path.name]}
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}; --config-dir names the folder that contains it")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        problems.append(f"{path}:{line} not YAML: {getattr(error, 'problem', None) or error}")
        return {}
    if not isinstance(content, dict):
        known = ", ".join(SECTIONS_OF_FILE[path.name])
        problems.append(f"{path}: should contain the sections {known}, but contains {content!r}")
        return {}
    unread -= {*SECTIONS_OF_FILE[path.name]}
    for section in [*content]:
        if section not in SECTIONS_OF_FILE[path.name]:
            known = ", ".join(SECTIONS_OF_FILE[path.name])
            hint = f"it belongs in {file_of(section)}" if file_of(section) else f"it has {known}"
            problems.append(f"{path}: {section}: not a section of this file; {hint}")
            del content[section]
        elif not isinstance(content[section], dict):
            problems.append(f"{path}: {section} = {content.pop(section)!r}: should contain keys, each with a value")
            unread.add(section)
    return content


def load(folder: str | Path, changes: list[str] = ()) -> Config:
    """Load the configuration in `folder` and apply `changes` such as "training.lr=3e-4".

    Raises UsageError that lists every error.
    """
    problems, unread, content = [], set(), {}
    for file in SECTIONS_OF_FILE:
        content |= read_sections(Path(folder) / file, problems, unread)
    changed = {apply_change(content, change, problems) for change in changes}
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        for detail in error.errors():
            if not (detail["type"] == "missing" and detail["loc"][0] in unread):
                source = "--set" if detail["loc"][:2] in changed else Path(folder) / file_of(detail["loc"][0])
                problems.append(f"{source}: {describe_error(detail)}")
    else:
        problems += [f"{folder}: {problem}" for problem in contradictions(config)]
    if problems:
        raise UsageError("\n  ".join(["the configuration cannot be used:", *dict.fromkeys(problems)]))
    return config


def apply_change(content: dict, change: str, problems: list[str]) -> tuple[str, str]:
    """Apply SECTION.KEY=VALUE to `content` and return (section, key)."""
    path, equals, text = change.partition("=")
    section, *keys = path.split(".")
    if not equals or not keys or not file_of(section):
        problems.append(f"--set {change}: should be SECTION.KEY=VALUE, such as training.lr=3e-4")
        return "", ""
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError:
        value = text
    parent = content.setdefault(section, {})
    for key in keys[:-1]:
        parent[key] = parent[key] if isinstance(parent.get(key), dict) else {}
        parent = parent[key]
    parent[keys[-1]] = value
    return section, keys[0]


def describe_error(error: dict) -> str:
    """Return the message for one of pydantic's errors, with its key and value."""
    location = tuple(part for part in error["loc"] if isinstance(part, str))  # without indices of list items
    key = ".".join(location)
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key; {'.'.join(location[:-1])} has {', '.join(list_keys(location[:-1]))}"
    message = re.sub("^(Value error, |.*?(?=should))", "", error["msg"])
    return f"{key} = {error['input']!r}: {message}"


def list_keys(location: tuple) -> list[str]:
    """Return the keys that a section may have."""
    model = Config
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def contradictions(config: Config) -> Iterator[str]:
    """Yield a message for each conflict between keys that are valid on their own."""
    dataset, training, (fewest, most) = config.dataset, config.training, config.cluster.num_workers
    if (dataset.kind == "file") != (dataset.file is not None):
        yield f"dataset.kind = {dataset.kind} and dataset.file = {dataset.file}: only kind file needs a file"
    if (dataset.kind == "synthetic") != (config.model.kind == "mlp"):
        yield (
            f"dataset.kind = {dataset.kind} and model.kind = {config.model.kind}: "
            "mlp is for synthetic data, rnn and cnn are for texts"
        )
    if config.tuning.scheduler == "asha" and config.tuning.grace_epochs > max(config.tuning.epochs):
        yield (
            f"tuning.grace_epochs = {config.tuning.grace_epochs}: asha would wait longer than any trial trains, "
            f"tuning.epochs = {config.tuning.epochs}"
        )
    if fewest > most:
        yield f"cluster.num_workers = [{fewest}, {most}]: the minimum must come first"
    divisors = [size * training.accumulation_steps for size in range(fewest, most + 1)]
    if bad := [divisor for divisor in divisors if training.batch_size % divisor]:
        yield (
            f"training.batch_size = {training.batch_size}: is not divisible by {bad[0]}, which is cluster.num_workers "
            f"x training.accumulation_steps (each of {fewest} to {most} workers x {training.accumulation_steps})"
        )
    if config.tuning.lr.lowest >= config.tuning.lr.highest:
        yield f"tuning.lr: lowest = {config.tuning.lr.lowest} is not below highest = {config.tuning.lr.highest}"
    if training.lr > 1e37 and training.precision != "fp64":
        yield f"training.lr = {training.lr}: overflows in the optimizer, which computes in float32"
    gpus = (config.cluster.resources_per_worker or {}).get("GPU", 0)
    if gpus and config.cluster.use_gpu is False:
        yield f"cluster.use_gpu = false and cluster.resources_per_worker.GPU = {gpus:g}: they contradict each other"


def parser(description: str) -> Parser:
    """Return a parser with the options of every program that reads the configuration."""
    parser = Parser(description)
    add = parser.add_argument
    add("--config-dir", default="config", help="folder with the two YAML files (default: ./%(default)s)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="changes",
        help="change a key for this run, such as training.lr=3e-4; may be repeated")  # fmt: skip
    add("--print-config", action="store_true", help="print the resulting configuration and exit")
    return parser


def run_parser(description: str) -> Parser:
    """Return a parser that also has the options of programs whose runs have a name."""
    runs = parser(description)
    runs.add_argument(
        "--run-name",
        type=run_name,
        help="the run's folder in paths.model_save_dir (default: a new one, named after the time)",
    )
    help_resume = "continue from the newest readable checkpoint of --run-name"
    runs.add_argument("--resume", action="store_true", help=help_resume)
    runs.completions.append(refuse_resume_without_name)
    return runs


def parse_command_line(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Config]:
    """Return the command line's options and the configuration. Exits after printing it if --print-config is set."""
    options = parser.parse_args()
    config = load(options.config_dir, options.changes)
    if options.print_config:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        sys.exit()
    return options, config


def prepare_to_write(folder: str, config_dir: str, may_replace: bool) -> None:
    """Make the folder that `write` will need. Raises ValueError if it holds a configuration that must stay, or OSError.

    may_replace: a resumed search writes its result again. The configuration that it reads stays in any case.
    """
    existing = [name for name in SECTIONS_OF_FILE if Path(folder, name).exists()]
    if existing and (not may_replace or Path(folder).resolve() == Path(config_dir).resolve()):
        raise ValueError(f"--out {folder} holds a configuration already ({existing[0]}): choose a different folder")
    Path(folder).mkdir(parents=True, exist_ok=True)


def write(config: Config, folder: str | Path) -> None:
    """Write the configuration as two files that --config-dir accepts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = config.model_dump(mode="json")
    for file, sections in SECTIONS_OF_FILE.items():
        (folder / file).write_text(yaml.safe_dump({name: values[name] for name in sections}, sort_keys=False))
