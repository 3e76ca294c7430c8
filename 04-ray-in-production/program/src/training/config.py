"""The two configuration files, checked before anything starts: all mistakes at once, each with its file and key."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import UsageError
from shared.options import Parser


def number(value: object) -> object:
    """YAML's yes and no are no numbers, though Python would count them."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Count = Annotated[int, BeforeValidator(number), Field(gt=0)]
Whole = Annotated[int, BeforeValidator(number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(number), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(number), Field(ge=0, lt=1)]
Range = Annotated[
    tuple[Count, Count], BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value] * 2)
]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A part of a file: a key that it does not know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Paths(Section):
    processed_data_dir: Text
    model_save_dir: Text
    log_dir: Text = "logs"


class Cluster(Section):
    num_workers: Range  # (fewest, most)
    use_gpu: bool | None = None
    resources_per_worker: dict[str, Positive] | None = None
    timeout_s: Positive = 600
    max_failures: Whole = 3


class Dataset(Section):
    kind: Literal["snippets", "file", "synthetic"]
    file: Text | None = None
    text_column: Text = "text"
    label_column: Text = "label"
    vocab_size: Annotated[int, BeforeValidator(number), Field(ge=3)]
    max_length: Count = 64
    num_samples: Annotated[int, BeforeValidator(number), Field(ge=100)] = 50_000
    loader_workers: Whole = 0


class Model(Section):
    kind: Literal["rnn", "cnn", "mlp"]
    cell: Literal["gru", "lstm"] = "gru"
    embedding_dim: Count
    hidden_dim: Count
    n_layers: Count
    bidirectional: bool
    dropout: Share


class Training(Section):
    batch_size: Count
    accumulation_steps: Count = 1
    epochs: Count
    lr: Positive
    lr_step_size: Count = 4
    lr_gamma: Annotated[float, BeforeValidator(number), Field(gt=0, le=1)] = 0.5
    max_grad_norm: Positive | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    early_stopping_patience: Count | None = None
    log_every: Count = 10
    seed: Whole = 0


class Checkpoint(Section):
    every_epochs: Count = 1
    every_steps: Count | None = None
    keep_best: Count = 3


class Bounds(Section):
    lowest: Positive
    highest: Positive


class Tuning(Section):
    num_samples: Count = 10
    lr: Bounds = Bounds(lowest=1e-4, highest=1e-2)
    epochs: Annotated[list[Count], Field(min_length=1)] = [5, 10, 20]
    scheduler: Literal["none", "asha"] = "none"
    grace_epochs: Count = 2
    resources_per_trial: dict[str, Positive] | None = None


class Config(Section):
    """Both files as one."""

    paths: Paths
    cluster: Cluster
    dataset: Dataset
    model: Model
    training: Training
    checkpoint: Checkpoint = Checkpoint()
    tuning: Tuning = Tuning()


FILES = {
    "environment.yaml": ("paths", "cluster"),
    "hyperparameters.yaml": ("dataset", "model", "training", "checkpoint", "tuning"),
}


def file_of(section: str) -> str:
    """The file that a section belongs into."""
    return next((file for file, sections in FILES.items() if section in sections), "")


class Loader(yaml.SafeLoader):
    """YAML, without keys that stand twice: the first of them would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key} stands twice", problem_mark=node.value[number][0].start_mark
                )
        return super().construct_mapping(node, deep)


def read(path: Path, problems: list[str], unread: set[str]) -> dict:
    """The sections of one file. What is wrong with it is added to `problems`, a section without content to `unread`."""
    unread |= {*FILES[path.name]}
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}; --config-dir names the folder that holds it")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}:" if mark else ""
        problems.append(f"{path}:{place} not YAML: {getattr(error, 'problem', None) or error}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path}: should hold the sections {', '.join(FILES[path.name])}, and holds {content!r}")
        return {}
    unread -= {*FILES[path.name]}
    for section in [*content]:
        if section not in FILES[path.name]:
            known = ", ".join(FILES[path.name])
            where = f"it belongs into {file_of(section)}" if file_of(section) else f"it has {known}"
            problems.append(f"{path}: {section}: no section of this file; {where}")
            del content[section]
        elif not isinstance(content[section], dict):
            problems.append(f"{path}: {section} = {content.pop(section)!r}: should hold keys, each with a value")
            unread.add(section)
    return content


def load(folder: str | Path, changes: list[str] = ()) -> Config:
    """The configuration in `folder` with `changes` such as "training.lr=3e-4". Raises UsageError with every mistake."""
    problems, unread, content = [], set(), {}
    for file in FILES:
        content |= read(Path(folder) / file, problems, unread)
    changed = {change_in(content, change, problems) for change in changes}
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        for each in error.errors():
            if not (each["type"] == "missing" and each["loc"][0] in unread):
                source = "--set" if each["loc"][:2] in changed else Path(folder) / file_of(each["loc"][0])
                problems.append(f"{source}: {in_words(each)}")
    else:
        problems += [f"{folder}: {problem}" for problem in contradictions(config)]
    if problems:
        raise UsageError("\n  ".join(["the configuration cannot be used:", *dict.fromkeys(problems)]))
    return config


def change_in(content: dict, change: str, problems: list[str]) -> tuple[str, str]:
    """Put SECTION.KEY=VALUE into `content`; (section, key)."""
    path, equals, text = change.partition("=")
    section, *keys = path.split(".")
    if not equals or not keys or not file_of(section):
        problems.append(f"--set {change}: should be SECTION.KEY=VALUE, such as training.lr=3e-4")
        return "", ""
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError:
        value = text
    place = content.setdefault(section, {})
    for key in keys[:-1]:
        place[key] = place[key] if isinstance(place.get(key), dict) else {}
        place = place[key]
    place[keys[-1]] = value
    return section, keys[0]


def in_words(error: dict) -> str:
    """One of pydantic's errors, with its key and value."""
    place = tuple(part for part in error["loc"] if isinstance(part, str))  # no numbers of list items
    key = ".".join(place)
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key; {'.'.join(place[:-1])} has {', '.join(keys_of(place[:-1]))}"
    message = re.sub("^(Value error, |.*?(?=should))", "", error["msg"])
    return f"{key} = {error['input']!r}: {message}"


def keys_of(place: tuple) -> list[str]:
    """The keys that a section may have."""
    model = Config
    for part in place:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def contradictions(config: Config) -> Iterator[str]:
    """What is wrong though each key by itself is not."""
    dataset, training, (fewest, most) = config.dataset, config.training, config.cluster.num_workers
    if (dataset.kind == "file") != (dataset.file is not None):
        yield f"dataset.kind = {dataset.kind} and dataset.file = {dataset.file}: a file goes with kind file alone"
    if (dataset.kind == "synthetic") != (config.model.kind == "mlp"):
        yield (
            f"dataset.kind = {dataset.kind} and model.kind = {config.model.kind}: "
            "mlp goes with synthetic, rnn and cnn with texts"
        )
    if fewest > most:
        yield f"cluster.num_workers = [{fewest}, {most}]: the fewest come first"
    parts = [size * training.accumulation_steps for size in range(fewest, most + 1)]
    if bad := [size for size in parts if training.batch_size % size]:
        yield (
            f"training.batch_size = {training.batch_size}: does not divide by {bad[0]}, which is cluster.num_workers "
            f"x training.accumulation_steps (each of {fewest} to {most} workers x {training.accumulation_steps})"
        )
    if config.tuning.lr.lowest >= config.tuning.lr.highest:
        yield f"tuning.lr: lowest = {config.tuning.lr.lowest} is not below highest = {config.tuning.lr.highest}"
    gpus = (config.cluster.resources_per_worker or {}).get("GPU", 0)
    if gpus and config.cluster.use_gpu is False:
        yield f"cluster.use_gpu = false and cluster.resources_per_worker.GPU = {gpus:g}: one of them is not meant"


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every program that has a configuration."""
    parser = Parser(description)
    add = parser.add_argument
    add("--config-dir", default="config", help="folder of the two YAML files (default: ./%(default)s)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="changes",
        help="change a key for this run, such as training.lr=3e-4; may be repeated")  # fmt: skip
    add("--print-config", action="store_true", help="print the configuration as it would be used, and end")
    return parser


def run_parser(description: str) -> argparse.ArgumentParser:
    """These, and those of the programs whose runs have a name."""
    runs = parser(description)
    runs.add_argument("--run-name", help="the run's folder in paths.model_save_dir (default: a new one, by the time)")
    help_resume = "continue from the newest readable checkpoint of --run-name"
    runs.add_argument("--resume", action="store_true", help=help_resume)
    return runs


def asked_for(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Config]:
    """The options of the command line, and the configuration. Ends the program where it was only to be printed."""
    options = parser.parse_args()
    config = load(options.config_dir, options.changes)
    if options.print_config:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        sys.exit()
    return options, config


def write(config: Config, folder: str | Path) -> None:
    """Write the two files, for --config-dir."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = config.model_dump(mode="json")
    for file, sections in FILES.items():
        (folder / file).write_text(yaml.safe_dump({name: whole[name] for name in sections}, sort_keys=False))
