"""Labelled texts in three splits, their vocabulary, and the batches of a rank."""

import csv
import json
import random
import re
import shutil
import sysconfig
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from training.config import Config

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")  # that every Python from 3.11 on has
SNIPPETS, SNIPPET_LINES = 800, 6  # of each package, and lines of each
SPLITS = ("train", "val", "test")
HELD_OUT = 10  # one in so many is for validation, and another one for the test
PADDING, UNKNOWN = 0, 1
FEATURES, CLASSES = 784, 10  # of synthetic data


@dataclass(frozen=True)
class Vocabulary:
    """What turns texts into numbers, and numbers into labels. A model is worth nothing without its own."""

    tokens: list[str]  # the token with number i + 2
    labels: list[str]
    max_length: int

    @classmethod
    def of(cls, rows: list[dict], vocab_size: int, max_length: int) -> "Vocabulary":
        """The vocabulary of a training set: its most frequent tokens; padding and the unknown token count as two."""
        counts = Counter(token for row in rows for token in tokenize(row["text"]))
        frequent = sorted(counts, key=lambda token: (-counts[token], token))
        return cls(frequent[: vocab_size - 2], sorted({row["label"] for row in rows}), max_length)

    def encode(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token numbers (texts, max_length), padded at the end, and how many of them count (texts), at least one."""
        numbers = {token: number for number, token in enumerate(self.tokens, start=2)}
        rows = [
            [numbers.get(token, UNKNOWN) for token in tokenize(text)[: self.max_length]] or [UNKNOWN] for text in texts
        ]
        padded = torch.full((len(rows), self.max_length), PADDING)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return padded, torch.tensor([len(tokens) for tokens in rows])


@dataclass(frozen=True)
class Splits:
    """Samples are tuples of inputs and, last, the label's number. vocabulary: as plain data; None for synthetic."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    vocabulary: dict | None
    num_tokens: int
    num_classes: int
    name: str  # tells the rows and how they were dealt, for `check_same`


def tokenize(text: str) -> list[str]:
    """Words in lower case, and every other sign by itself."""
    return re.findall(r"[a-z]+|[^\sa-z]", text.lower())


def prepare(config: Config) -> str:
    """Write the three splits into a folder of paths.processed_data_dir, unless they are there; the folder.

    Its name tells the source's content and how it is dealt, so that other splits get another folder. Raises ValueError
    for a source that cannot be used.
    """
    if config.dataset.kind == "synthetic":
        return ""
    rows = list(snippets()) if config.dataset.kind == "snippets" else list(read_file(config))
    check(rows, config)
    random.Random(0).shuffle(rows)
    parts = {"test": rows[0::HELD_OUT], "val": rows[1::HELD_OUT]}
    parts["train"] = [row for number, row in enumerate(rows) if number % HELD_OUT > 1]
    digest = zlib.crc32(json.dumps(parts).encode())
    folder = Path(config.paths.processed_data_dir).absolute() / f"{config.dataset.kind}-{digest:08x}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        for name, part in parts.items():
            (partial / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        try:
            partial.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(partial)
    return str(folder)


def snippets() -> Iterator[dict]:
    """The same number of pieces of each package's source, some lines each, without empty ones."""
    for package in PACKAGES:
        found = []
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            found += ["\n".join(lines[start : start + SNIPPET_LINES]) for start in range(0, len(lines), SNIPPET_LINES)]
        random.Random(0).shuffle(found)
        yield from ({"text": text, "label": package} for text in found[:SNIPPETS])


def read_file(config: Config) -> Iterator[dict]:
    """The rows of a CSV or JSONL file. Raises ValueError that names the line."""
    path, text, label = Path(config.dataset.file), config.dataset.text_column, config.dataset.label_column
    if path.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"dataset.file = {path}: should end with .csv or .jsonl")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # Excel begins with a byte order mark
            if path.suffix == ".csv":
                reader = csv.DictReader(file, restkey="")
                rows = ((reader.line_num, row) for row in reader)
            else:
                rows = ((number, json.loads(line)) for number, line in enumerate(file, start=1) if line.strip())
            for number, row in rows:
                columns = list(row) if isinstance(row, dict) else []
                for key, column in (("text_column", text), ("label_column", label)):
                    if column not in columns:
                        has = ", ".join(columns) or repr(row)
                        raise ValueError(f"line {number} has no {column} (dataset.{key}), but {has}")
                    if row[column] is None or not str(row[column]).strip():
                        raise ValueError(f"line {number} has nothing in {column} (dataset.{key})")
                yield {"text": str(row[text]), "label": str(row[label])}
    except OSError as error:
        raise ValueError(f"dataset.file = {path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise ValueError(f"dataset.file = {path}: not {path.suffix[1:].upper()} in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"dataset.file = {path}: {error}") from error


def check(rows: list[dict], config: Config) -> None:
    """Raises ValueError for too few rows, and for fewer than two labels."""
    labels = {row["label"] for row in rows}
    most = config.cluster.num_workers[1]
    if len(rows) < HELD_OUT * most:
        raise ValueError(
            f"dataset.file = {config.dataset.file}: holds {len(rows)} rows; {HELD_OUT * most} are the fewest of which "
            f"a tenth can be validated on by {most} workers"
        )
    if len(labels) < 2:
        raise ValueError(f"dataset.file = {config.dataset.file}: all rows have one label, {labels.pop()}")


def load(config: Config, folder: str) -> Splits:
    """The splits that `prepare` has written, as numbers. Raises ValueError on a node that does not see the folder."""
    if config.dataset.kind == "synthetic":
        return synthetic(config.dataset.num_samples)
    try:
        rows = {name: [json.loads(line) for line in open(Path(folder, f"{name}.jsonl"))] for name in SPLITS}  # noqa: SIM115
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not seen here: paths.processed_data_dir must be on all nodes") from error
    vocabulary = Vocabulary.of(rows["train"], config.dataset.vocab_size, config.dataset.max_length)
    if unseen := {row["label"] for part in rows.values() for row in part} - set(vocabulary.labels):
        raise ValueError(f"no row for training has the label {', '.join(sorted(unseen))}: it needs more rows")
    parts = {name: tensors(vocabulary, part) for name, part in rows.items()}
    return Splits(
        **parts,
        vocabulary=asdict(vocabulary),
        num_tokens=len(vocabulary.tokens) + 2,
        num_classes=len(vocabulary.labels),
        name=Path(folder).name,
    )


def check_same(state: dict, splits: Splits) -> None:
    """Raises ValueError where a checkpoint is of other rows than `splits`, or counts and cuts their words otherwise.

    Rows that were added deal all of them anew: what the model was trained on would be in its test set.
    """
    if "data" not in state:
        raise ValueError("the run is of an older version of this program, which did not name its data: start a new run")
    if state["data"] != splits.name:
        raise ValueError(
            f"the run was started with {state['data']}, and the data are now {splits.name}: put the rows back as they "
            "were (snippets: use the same release of Python), or start a new run"
        )
    if state["vocabulary"] != splits.vocabulary:
        raise ValueError("the run was started with another dataset.vocab_size or max_length")


def tensors(vocabulary: Vocabulary, rows: list[dict]) -> TensorDataset:
    """Rows as (tokens, length, label)."""
    labels = torch.tensor([vocabulary.labels.index(row["label"]) for row in rows])
    return TensorDataset(*vocabulary.encode([row["text"] for row in rows]), labels)


def synthetic(num_samples: int) -> Splits:
    """Random vectors (num_samples, 784), labelled by which of ten random directions they go most into."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_samples, FEATURES, generator=generator)
    labels = (features @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
    held_out = num_samples // HELD_OUT
    sizes = (num_samples - 2 * held_out, held_out, held_out)
    parts = [TensorDataset(*part) for part in zip(features.split(sizes), labels.split(sizes), strict=True)]
    return Splits(*parts, vocabulary=None, num_tokens=0, num_classes=CLASSES, name=f"synthetic-{num_samples}")
