"""Load labeled texts, split them three ways, and encode them with a vocabulary."""

import csv
import io
import json
import random
import re
import reprlib
import shutil
import sysconfig
import textwrap
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from training import config as configuration

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")  # in every Python since 3.11
SNIPPETS, SNIPPET_LINES = 800, 6  # snippets per package, lines per snippet
SPLITS = ("train", "val", "test")
SUFFIXES = (".csv", ".jsonl")  # in upper or lower case
SHOWN = 5  # labels at either end of the list that `describe_rows` makes
HELD_OUT = 10  # every tenth row is for validation, and another tenth of the rows for the test
PADDING, UNKNOWN = 0, 1
FEATURES, CLASSES = 784, 10  # for synthetic data


@dataclass(frozen=True)
class Vocabulary:
    """Map tokens to ids and class ids to labels. A model is useless without the vocabulary it was trained with."""

    tokens: list[str]  # tokens[i] has the id i + 2
    labels: list[str]
    max_length: int

    @classmethod
    def from_rows(cls, rows: list[dict], vocab_size: int, max_length: int) -> "Vocabulary":
        """Build the vocabulary from the most frequent tokens of a training set.

        vocab_size: includes the padding token and the unknown token.
        """
        counts = Counter(token for row in rows for token in tokenize(row["text"]))
        frequent = sorted(counts, key=lambda token: (-counts[token], token))
        return cls(frequent[: vocab_size - 2], sorted({row["label"] for row in rows}), max_length)

    def encode(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids (texts, max_length), padded at the end, and lengths (texts) of at least one."""
        ids = {token: index for index, token in enumerate(self.tokens, start=2)}
        rows = [[ids.get(token, UNKNOWN) for token in tokenize(text)[: self.max_length]] or [UNKNOWN] for text in texts]
        padded = torch.full((len(rows), self.max_length), PADDING)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return padded, torch.tensor([len(tokens) for tokens in rows])


@dataclass(frozen=True)
class Splits:
    """The three data sets. A sample is a tuple of inputs and the class id. vocabulary: None for synthetic data."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    vocabulary: dict | None
    num_tokens: int
    num_classes: int
    name: str  # identifies the rows and how they were split, for `check_same`


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and single characters that are not letters."""
    return re.findall(r"[a-z]+|[^\sa-z]", text.lower())


def prepare(
    dataset: configuration.Dataset, parent: str, max_workers: int, log: Callable[[str], None] = lambda message: None
) -> str:
    """Write the three splits to a folder in `parent`, unless it exists, and return the folder.

    The folder's name contains a checksum of the splits, so different splits get different folders. max_workers: each
    gets a row to validate on. log: receives a line with the number of rows and labels. Raises ValueError for a source
    that cannot be used.
    """
    if dataset.kind == "synthetic":
        return ""
    rows = list(snippets()) if dataset.kind == "snippets" else list(read_file(dataset))
    check_rows(rows, dataset.file, max_workers)
    log(describe_rows(rows))
    random.Random(0).shuffle(rows)
    parts = {"test": rows[0::HELD_OUT], "val": rows[1::HELD_OUT]}
    parts["train"] = [row for number, row in enumerate(rows) if number % HELD_OUT > 1]
    if unseen := {row["label"] for row in rows} - {row["label"] for row in parts["train"]}:
        raise ValueError(
            f"dataset.file = {dataset.file}: no training row has the label {reprlib.repr(sorted(unseen))}: add more "
            "rows with it"
        )
    digest = zlib.crc32(json.dumps(parts).encode())
    folder = Path(parent).absolute() / f"{dataset.kind}-{digest:08x}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        for name, part in parts.items():
            (partial / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        try:
            partial.rename(folder)
        except OSError:  # another run has created it meanwhile
            shutil.rmtree(partial)
    return str(folder)


def snippets() -> Iterator[dict]:
    """Yield the same number of snippets of each package's source, without empty lines."""
    for package in PACKAGES:
        pieces = []
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            pieces += ["\n".join(lines[start : start + SNIPPET_LINES]) for start in range(0, len(lines), SNIPPET_LINES)]
        random.Random(0).shuffle(pieces)
        yield from ({"text": text, "label": package} for text in pieces[:SNIPPETS])


def read_file(dataset: configuration.Dataset) -> Iterator[dict]:
    """Yield text and label of each row of a CSV or JSONL file. Raises ValueError that names the file and the line."""
    path = Path(dataset.file)
    try:
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(
                "should end with .csv or .jsonl; unpack a compressed file, and save any other kind as one of these "
                "(in .jsonl each line is a JSON object)"
            )
        lines = io.StringIO(decode(path.read_bytes()), newline="")
        rows = read_csv(lines, dataset) if path.suffix.lower() == ".csv" else read_jsonl(lines, dataset)
        for line, row in rows:
            yield {name: check_value(row, name, dataset, line) for name in ("text", "label")}
    except OSError as error:
        raise ValueError(f"dataset.file = {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"dataset.file = {path}: {error}") from error


def decode(content: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark, which Excel writes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not text in UTF-8 ({error.reason}): save it as UTF-8, or unpack it if it is compressed"
        ) from error


def read_csv(lines: Iterable[str], dataset: configuration.Dataset) -> Iterator[tuple[int, dict]]:
    """Yield the number of each row's first line, and the row. Raises ValueError for a row unlike the header."""
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the default of 131,072 characters
    reader, header, line = csv.reader(lines, strict=True, skipinitialspace=True), None, 1
    try:
        for fields in reader:
            if fields and header is None:
                header = [name.strip() for name in fields]
                check_columns(reject_duplicates([(name, None) for name in header if name]), dataset, line)
            elif fields:  # a blank line has none
                if len(fields) != len(header):
                    raise ValueError(
                        f"line {line} has {len(fields)} field{'s' * (len(fields) != 1)}, and the header {len(header)}: "
                        "separate fields by commas, and put a text that contains one in quotes"
                    )
                yield line, dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"line {line}: {error}: a quote that begins a field must also end it, and a quote inside is written twice"
        ) from error


def read_jsonl(lines: Iterable[str], dataset: configuration.Dataset) -> Iterator[tuple[int, dict]]:
    """Yield the number of each line that is not blank, and its object. Raises ValueError for anything else."""
    for line, content in enumerate(lines, start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content, object_pairs_hook=reject_duplicates)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without the position, which counts lines from this one
            raise ValueError(f"line {line} is not JSON ({reason}): write one object per line") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {line} is {reprlib.repr(row)}, not a JSON object: write one object per line")
        check_columns(row, dataset, line)
        yield line, row


def reject_duplicates(pairs: list[tuple]) -> dict:
    """Return the pairs as a dictionary. Raises ValueError for a name that appears twice: the last one would win."""
    row = {}
    for name, value in pairs:
        if name in row:
            raise ValueError(f"the name {name} appears twice")
        row[name] = value
    return row


def check_columns(names: Iterable[str], dataset: configuration.Dataset, line: int) -> None:
    """Raise ValueError if the names lack one of the two columns."""
    for key in ("text_column", "label_column"):
        if (column := getattr(dataset, key)) not in names:
            raise ValueError(f"line {line} has no {column} (dataset.{key}), only {reprlib.repr(list(names))}")


def check_value(row: dict, name: str, dataset: configuration.Dataset, line: int) -> str:
    """Return a row's text or label. Spaces around a label do not count. Raises ValueError if it cannot be used."""
    column = getattr(dataset, f"{name}_column")
    where, value = f"{column} (dataset.{name}_column)", row[column]
    if value is None or not str(value).strip():
        raise ValueError(f"line {line} has an empty {where}")
    if not isinstance(value, str | int):
        raise ValueError(f"line {line} has {reprlib.repr(value)} as its {where}: use a string or a whole number")
    if re.search("[\0\ud800-\udfff]", str(value)):  # NUL, or half of a pair in UTF-16
        raise ValueError(f"line {line} has a character in its {where} that no text has: {reprlib.repr(value)}")
    return str(value).strip() if name == "label" else str(value)


def describe_rows(rows: list[dict]) -> str:
    """Count the rows and the labels: all of them, or the most frequent ones and the rarest ones."""
    counts = Counter(row["label"] for row in rows).most_common()
    parts = [f"{textwrap.shorten(label, 40, placeholder='...')} {count}" for label, count in counts]
    if len(parts) > 2 * SHOWN:
        parts[SHOWN:-SHOWN] = [f"{len(parts) - 2 * SHOWN} more"]
    return f"{len(rows)} rows, {len(counts)} labels: {', '.join(parts)}"


def check_rows(rows: list[dict], file: str | None, max_workers: int) -> None:
    """Raise ValueError for too few rows or fewer than two labels."""
    labels = {row["label"] for row in rows}
    if len(rows) < HELD_OUT * max_workers:
        raise ValueError(
            f"dataset.file = {file}: has {len(rows)} rows; at least {HELD_OUT * max_workers} are needed, "
            f"so that a tenth of them gives each of {max_workers} workers a row to validate on"
        )
    if len(labels) < 2:
        raise ValueError(f"dataset.file = {file}: all rows have the same label, {labels.pop()}")


def load(dataset: configuration.Dataset, folder: str) -> Splits:
    """Load the splits that `prepare` wrote, as tensors. Raises OSError on a node that does not see the folder."""
    if dataset.kind == "synthetic":
        return synthetic_splits(dataset.num_samples)
    try:
        rows = {name: [json.loads(line) for line in open(Path(folder, f"{name}.jsonl"))] for name in SPLITS}  # noqa: SIM115
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} does not exist on this node: paths.processed_data_dir must be on storage that all nodes share"
        ) from error
    vocabulary = Vocabulary.from_rows(rows["train"], dataset.vocab_size, dataset.max_length)
    parts = {name: to_tensors(vocabulary, part) for name, part in rows.items()}
    return Splits(
        **parts,
        vocabulary=asdict(vocabulary),
        num_tokens=len(vocabulary.tokens) + 2,
        num_classes=len(vocabulary.labels),
        name=Path(folder).name,
    )


def check_same(state: dict, splits: Splits) -> None:
    """Raise ValueError if a checkpoint was made with other rows than `splits`, or with a different vocabulary.

    Adding rows reshuffles all of them, so rows that the model was trained on would end up in its test set.
    """
    if "data" not in state:
        raise ValueError(
            "the run was made by an older version of this program, which did not record its data: start a new run"
        )
    if state["data"] != splits.name:
        raise ValueError(
            f"the run was started with {state['data']}, and the data are now {splits.name}: restore the original rows "
            "(for snippets: use the same release of Python), or start a new run"
        )
    if state["vocabulary"] != splits.vocabulary:
        raise ValueError("the run was started with a different dataset.vocab_size or max_length")


def to_tensors(vocabulary: Vocabulary, rows: list[dict]) -> TensorDataset:
    """Convert rows to a data set of (token ids, length, class id)."""
    labels = torch.tensor([vocabulary.labels.index(row["label"]) for row in rows])
    return TensorDataset(*vocabulary.encode([row["text"] for row in rows]), labels)


def synthetic_splits(num_samples: int) -> Splits:
    """Make random vectors (num_samples, 784), labeled by the largest of their projections on ten random directions."""

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_samples, FEATURES, generator=generator)
    labels = (features @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
    held_out = num_samples // HELD_OUT
    sizes = (num_samples - 2 * held_out, held_out, held_out)
    parts = [TensorDataset(*part) for part in zip(features.split(sizes), labels.split(sizes), strict=True)]
    return Splits(*parts, vocabulary=None, num_tokens=0, num_classes=CLASSES, name=f"synthetic-{num_samples}")
