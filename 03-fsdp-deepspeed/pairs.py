"""Fine-tune on pairs of a prompt and its answer: read the rows, tokenize them, and count loss and accuracy on answers.

A row is a line of JSON: {"prompt": TEXT, "completion": TEXT}, or {"messages": [{"role": ..., "content": ...}, ...]}.
The second kind may also have "tools" and "chat_template_kwargs", and its turns "tool_calls" and a "weight" of 0 or 1.
"""

import argparse
import copy
import difflib
import json
import random
import re
import zlib
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

import pretrained
import tiny_base
from shared.datasets import SPLIT_SEED, Splits
from shared.distributed import Worker
from shared.errors import UsageError
from shared.paths import local_path
from shared.running.options import checked, positive_float
from shared.running.progress import Progress
from shared.tasks import Task

NO_TARGET = -100  # cross_entropy's ignore_index: a position whose next token is not part of an answer
Turns = list[dict[str, object]]
OTHER = "\ue000 other \ue000"  # an answer that begins and ends with a character that no text has
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # where a turn has what the model thought before its answer
ROW_KEYS = ("prompt", "completion", "messages", "tools", "chat_template_kwargs")  # others may be there, for the user
TURN_KEYS = ("role", "content", "weight", "tool_calls", "tool_call_id", "name", *THOUGHTS)
UNUSED = ("functions", "documents", "images", "videos", "audios", "chosen", "rejected")
MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\b")  # in a template that says itself what an answer is


@dataclass(frozen=True)
class Chat:
    """A row of turns. settings: what the template also gets, by name, such as `tools`."""

    turns: Turns
    settings: dict[str, object] = field(default_factory=dict)


Row = Chat | tuple[str, str]


class Pairs(Dataset):
    """Tokenized rows: (int64 tokens (T,), int64 targets (T,)), where a target is the next token, or NO_TARGET.

    The rows of a batch are padded on the right to the longest of them. In a decoder no token sees what comes after it,
    so padding needs no attention mask.
    """

    def __init__(self, rows: Sequence[tuple[list[int], list[bool]]]) -> None:
        """rows: for each row its tokens, and which of them belong to an answer."""
        self.rows = [(torch.tensor(tokens, dtype=torch.int32), torch.tensor(answer)) for tokens, answer in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        longest = max(len(self.rows[index][0]) for index in indices) - 1
        batch = []
        for index in indices:
            row, is_answer = self.rows[index]
            tokens, targets = torch.zeros(longest, dtype=torch.int64), torch.full((longest,), NO_TARGET)
            tokens[: len(row) - 1] = row[:-1]
            targets[: len(row) - 1] = torch.where(is_answer[1:], row[1:].long(), NO_TARGET)
            batch.append((tokens, targets))
        return batch

    def checksum(self) -> int:
        """Return a number that other rows would change."""
        value = 0
        for tokens, is_answer in self.rows:
            value = zlib.crc32(is_answer.numpy(), zlib.crc32(tokens.numpy(), value))
        return value


class PairTask(Task):
    """Fine-tune a pretrained decoder on pairs."""

    name, differ = "pairs", "the nodes' rows differ: give --data-file a file that is the same on all of them"
    dataset_names = ("pairs",)
    model_names = ("pretrained",)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--base", metavar="FOLDER", type=local_path,
            help="a Hugging Face folder; every node needs it at this path (default: a tiny Llama, made in "
            "--data-dir)")  # fmt: skip
        add("--data-file", metavar="FILE", type=local_path,
            help='JSON lines, {"prompt": ..., "completion": ...} or {"messages": [...]}; every node needs it '
            "(default: lines of Python and what they are, made in --data-dir)")  # fmt: skip
        add("--val-file", metavar="FILE", type=local_path,
            help="validation rows (default: a tenth of --data-file; equal prompts stay together)")  # fmt: skip
        rank = checked(int, lambda value: value >= 0, "a whole number, 0 or more")
        add("--lora-rank", type=rank, default=0, metavar="R",
            help="train adapters of this rank, and freeze the base (default: 0, train all weights)")  # fmt: skip
        add("--lora-alpha", type=positive_float, help="adapters are scaled by ALPHA / R (default: 2 R)")
        add("--lora-targets", type=lambda text: text.split(","), metavar="NAME,NAME",
            help="the linear layers that get adapters (default: all-linear)")  # fmt: skip
        add("--lora-dropout", type=checked(float, lambda share: 0 <= share < 1, "a number from 0 to below 1"),
            help="dropout in front of the adapters (default: 0)")  # fmt: skip
        add("--lr", type=positive_float,
            help="AdamW's learning rate (default: 2e-5, with LoRA 2e-4; for the tiny Llama 1e-3 and 1e-2, because a "
            "small model needs more)")  # fmt: skip
        add("--activation-checkpointing", action="store_true",
            help="keep only the blocks' inputs, and recompute the rest in the backward pass")  # fmt: skip

    @classmethod
    def complete_options(cls, options: argparse.Namespace) -> None:
        super().complete_options(options)
        given = [name for name in ("lora_alpha", "lora_targets", "lora_dropout") if getattr(options, name) is not None]
        if options.lora_rank == 0 and given:
            raise UsageError(f"--{given[0].replace('_', '-')} goes with --lora-rank")
        if options.val_file and not options.data_file:
            raise UsageError("--val-file goes with --data-file")
        is_tiny = options.base in (None, str(Path(options.data_dir, tiny_base.BASE)))
        options.lora_alpha = options.lora_alpha or 2.0 * options.lora_rank
        options.lora_targets = options.lora_targets or [pretrained.ALL_LINEAR]
        options.lora_dropout = options.lora_dropout or 0.0
        options.lr = options.lr or (2e-4 if options.lora_rank else 2e-5) * (50 if is_tiny else 1)
        options.base = options.base or str(Path(options.data_dir, tiny_base.BASE))
        if options.data_file is None:
            options.data_file, options.val_file = (str(Path(options.data_dir, file)) for file in tiny_base.PAIRS)

    @staticmethod
    def load(args: Namespace) -> Splits:
        config, tokenizer = pretrained.read_config(args.base), pretrained.read_tokenizer(args.base)
        rows = read_rows(args.data_file)
        parts = (rows, read_rows(args.val_file)) if args.val_file else split(rows)
        train, val = (Pairs(tokenize(part, tokenizer, config)) for part in parts)
        return Splits(train, val, Pairs([]), ())

    def __init__(self, args: Namespace, splits: Splits, device: torch.device) -> None:
        super().__init__(args, splits, device)
        self.tokenizer = pretrained.read_tokenizer(args.base)
        self.context = context_of(pretrained.read_config(args.base))
        self.ends = sorted(set().union(*(end_tokens(*row) for row in splits.train.rows)))

    def checksum(self) -> int:
        """Return a number that differs between nodes with different rows."""
        return zlib.crc32(repr((self.splits.train.checksum(), self.splits.val.checksum())).encode())

    def build_model(self) -> nn.Module:
        return pretrained.build(self.args, self.dtype)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.args.lr)

    def to_device(self, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, targets) on the device. A batch of no rows becomes one row without a target.

        Its loss and its gradients are 0, and so a rank that has no row left still takes part in the pass.
        """
        tokens, targets = super().to_device(batch)
        if len(tokens) == 0:
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            targets = torch.full_like(tokens, NO_TARGET)
        return tokens, targets

    def count_answer_tokens(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return how many tokens of a batch belong to answers, on the device."""
        return (batch[1] != NO_TARGET).sum().to(self.device)

    def split(self, batch: Sequence[torch.Tensor], num_passes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tokens, targets) for each of `num_passes` passes, equally many on every rank, with equally many rows.

        In an epoch's last batch there may be too few rows, and some passes get none.
        """
        for part in zip(*(tensor.tensor_split(num_passes) for tensor in batch), strict=True):
            yield self.to_device(part)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each answer token, summed over the batch."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")

    def metric_sums(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return (loss, correct answer tokens, answer tokens, rows whose whole answer is correct, rows), as float64.

        An answer token is correct if it gets the highest logit after the true tokens before it.
        """
        is_answer = targets != NO_TARGET
        correct = (logits.argmax(dim=-1) == targets) & is_answer
        has_answer = is_answer.any(dim=1)
        exact = (correct == is_answer).all(dim=1) & has_answer
        counts = torch.stack([correct.sum(), is_answer.sum(), exact.sum(), has_answer.sum()])
        return torch.cat([self.loss(logits, targets).double()[None], counts.double()])


class FinetuneProgress(Progress):
    """Progress that also keeps, for each step of the epoch, the gradient's norm and the number of answer tokens.

    evaluations: the epoch's evaluations inside it, by --eval-every-steps.
    """

    saved = (*Progress.saved, "step_grad_norms", "step_answer_tokens", "evaluations")

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.step_grad_norms, self.step_answer_tokens, self.evaluations = [], [], []

    def start_steps(self) -> list[int]:
        self.numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        return super().start_steps()

    def finish_steps(self) -> None:
        super().finish_steps()
        for norm, tokens in self.numbers:
            self.step_grad_norms = [*self.step_grad_norms, norm.item()]
            self.step_answer_tokens = [*self.step_answer_tokens, int(tokens)]

    def due(self, every: int | None) -> bool:
        """Whether the steps so far are a multiple of `every`, which None never is."""
        return every is not None and self.step % every == 0

    def add_numbers(self, grad_norm: torch.Tensor, answer_tokens: torch.Tensor) -> None:
        """Record a step's numbers, which are the same on all ranks. No rank waits here."""
        self.numbers.append((grad_norm.detach(), answer_tokens))

    def add_evaluation(self, measured: dict) -> None:
        """Keep what was measured inside the epoch, and let rank 0 print it."""
        self.evaluations = [*self.evaluations, {"step": self.step, **measured}]
        if self.worker.rank == 0:
            self.worker.log(f"step {self.step}  {in_words(measured)}")

    def describe(self, line: dict) -> str:
        return (
            f"epoch {line['epoch']}/{self.epochs}  train_loss {line['train_loss']:.4f}  {in_words(line)}  "
            f"{line['samples_per_second']:.0f} samples/s"
        )

    def epoch_metrics(self) -> dict:
        """Return the metrics that fine-tuning adds, all global. train_loss is the mean over the answer tokens."""
        tokens = self.step_answer_tokens
        total = sum(loss * count for loss, count in zip(self.step_losses, tokens, strict=True))
        more = {"evaluations": self.evaluations} if self.evaluations else {}
        return {
            "train_loss": total / max(1, sum(tokens)), "answer_tokens": sum(tokens),
            "step_grad_norms": self.step_grad_norms, **more,
        }  # fmt: skip


def in_words(measured: dict) -> str:
    """Return an evaluation's numbers as a line of text."""
    return f"val_loss {measured['val_loss']:.4f}  answers exactly right {measured['val_exact_match']:.1%}"


def check(args: Namespace, driver: Worker) -> dict:
    """Check base, rows and adapters on the driver, and return what a resumed run must share of them.

    Makes the workshop's own base and rows first, if they are asked for and missing. Raises ValueError and OSError.
    """
    for name, given in ((tiny_base.BASE, args.base), (tiny_base.PAIRS[0], args.data_file)):
        if Path(args.data_dir, name) == Path(given):
            tiny_base.make(args.data_dir, name, driver.log)
    splits = PairTask.load(args)
    pretrained.check_copies(pretrained.build(args, torch.float32), Path(args.base))
    pretrained.known_ends(Path(args.base))
    driver.log(f"{len(splits.train)} rows to train on, {len(splits.val)} to validate with")
    first = marked(splits.train.rows[0], pretrained.read_tokenizer(args.base))
    driver.log(f"the first row, with what is learned in double brackets: {first}")
    return pretrained.contents(args.base) | {
        "base": f"with weights {pretrained.checksum(args.base, driver.log)}",
        "data_file": f"with checksum {file_checksum(args.data_file)}", "validation_rows": validation_checksum(args),
        "lora_rank": args.lora_rank, "lora_targets": ",".join(args.lora_targets), "lora_alpha": args.lora_alpha,
    }  # fmt: skip


def validation_checksum(args: Namespace) -> str:
    """Return a checksum of the validation rows: of --val-file, or of their numbers in --data-file."""
    if args.val_file:
        return file_checksum(args.val_file)
    rows = [row for _, row in read_rows(args.data_file)]
    return f"{zlib.crc32(str([number for number, _ in split(list(enumerate(rows)))[1]]).encode()):08x}"


def file_checksum(file: str) -> str:
    """Return a checksum of rows, whatever their line ends. Not of their tokens: some templates write today's date."""
    content = Path(file).read_bytes().replace(b"\r\n", b"\n")
    return f"{zlib.crc32(content):08x}"


def marked(row: tuple[torch.Tensor, torch.Tensor], tokenizer: object, longest: int = 200) -> str:
    """Return a row as text, with [[ ]] around the tokens that count. Long pieces are cut in the middle."""
    tokens, is_answer = row
    text = ""
    for is_learned, piece in groupby(zip(tokens.tolist(), is_answer.tolist(), strict=True), key=itemgetter(1)):
        piece = repr(tokenizer.decode([token for token, _ in piece]))[1:-1]
        piece = piece if len(piece) <= longest else f"{piece[: longest // 2]} ... {piece[-longest // 2 :]}"
        text += f"[[{piece}]]" if is_learned else piece
    return text


def end_tokens(tokens: torch.Tensor, is_answer: torch.Tensor) -> set[int]:
    """Return the last token of each answer in a row."""
    continues = torch.cat([is_answer[1:], is_answer.new_zeros(1)])
    return set(tokens[is_answer & ~continues].tolist())


def sample_answers(model: nn.Module, task: PairTask, count: int = 3) -> str:
    """Return what the model now answers to some validation prompts. Every rank writes the same answers. Collective.

    Nothing is drawn: each token is the most probable one.
    """
    rows = task.splits.val.rows
    lines = []
    for tokens, is_answer in rows[:: max(1, len(rows) // count)][:count]:
        prompt = tokens[: int(is_answer.nonzero()[0])].long()
        longest = min(2 * int(is_answer.sum()), 64, task.context - len(prompt))  # each token gathers the model once
        answer = pretrained.generate(model, prompt.to(task.device), longest, task.ends)
        asked, answered = (task.tokenizer.decode(each, skip_special_tokens=True) for each in (prompt, answer))
        lines.append(f"{asked.strip()[-60:]!r} -> {answered.strip()!r}")
    return "; ".join(lines)


# --- Rows ----------------------------------------------------------------------------------------------------------


def read_rows(file: str | Path) -> list[tuple[str, Row]]:
    """Return (place, row) for each line of `file`: a pair (prompt, completion), or a chat.

    place names file and line, for messages. Raises ValueError for a row that is neither, and OSError.
    """
    rows = []
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{Path(file).name}, line {number}"
                    rows.append((place, parse_row(line, place)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the rows in {file}: {error.strerror}") from error
    if not rows:
        raise ValueError(f"{file} holds no rows")
    return rows


def parse_row(line: str, place: str) -> Row:
    """Return the row in a line of JSON. Raises ValueError with its place."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON, with one row per line ({error})") from error
    if not isinstance(row, dict) or not row.keys() & {"prompt", "completion", "messages"}:
        raise ValueError(f'{place}: a row is {{"prompt": ..., "completion": ...}} or {{"messages": [...]}}')
    check_spelling(row, ROW_KEYS, place)
    if row.get("weight", 1) != 1:
        raise ValueError(f'{place}: "weight" belongs to a turn of "messages"')
    for name in UNUSED:
        if row.get(name):
            raise ValueError(f'{place}: "{name}" would change what is learned, and this script does not use it')
    settings = {}
    for name, kind, words in (("chat_template_kwargs", dict, "an object"), ("tools", list, "a list of objects")):
        if row.get(name):
            if not isinstance(row[name], kind):
                raise ValueError(f'{place}: "{name}" is not {words}')
            settings |= row[name] if kind is dict else {name: row[name]}
    if row.get("messages") is not None:
        return parse_chat(row["messages"], settings, place)
    if settings:
        raise ValueError(f'{place}: "{next(iter(settings))}" goes with "messages"')
    for name in ("prompt", "completion"):
        if not isinstance(row.get(name), str):
            raise ValueError(f'{place}: "{name}" is missing, or is not text')
    if not row["completion"].strip():
        raise ValueError(f"{place}: the completion is empty")
    return row["prompt"], row["completion"]


def check_spelling(keys: Iterable[str], known: Sequence[str], place: str) -> None:
    """Raise ValueError for a key that is nearly one of the known ones, and would be ignored."""
    for key in keys:
        meant = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and meant and abs(len(key) - len(meant[0])) <= 1:
            raise ValueError(f'{place}: "{key}" is not used; is "{meant[0]}" meant?')


def parse_chat(turns: object, settings: dict[str, object], place: str) -> Chat:
    """Return a chat. A turn that calls tools may have no content. Raises ValueError with its place."""
    for turn in turns if isinstance(turns, list) else []:
        check_spelling(turn if isinstance(turn, dict) else (), TURN_KEYS, place)
    if not (isinstance(turns, list) and all(is_turn(turn) for turn in turns)):
        raise ValueError(
            f'{place}: "messages" is a list of {{"role": TEXT, "content": TEXT}}, and a call in "tool_calls" is '
            '{"function": {"name": TEXT, "arguments": ...}}'
        )
    turns = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
    turns = [{"content": "", **turn} for turn in turns]
    for number, turn in enumerate(turns, start=1):
        if turn.get("weight", 1) not in (0, 1):
            raise ValueError(f'{place}: the "weight" of turn {number} is {turn["weight"]!r}; it can be 0 or 1')
    answers = [turn for turn in turns if is_learned(turn)]
    says_something = [bool(turn["content"].strip() or turn.get("tool_calls")) for turn in answers]
    if not any(says_something):
        raise ValueError(f"{place}: there is no answer, a turn of the assistant with content")
    if not all(says_something):
        raise ValueError(f"{place}: a turn of the assistant is empty; it would teach the model to end at once")
    return Chat(turns, settings)


def is_turn(turn: object) -> bool:
    """Whether this is a turn of a chat: a role, and text or calls of tools."""
    match turn:
        case {"role": str(), "tool_calls": [*calls]} if calls:
            return isinstance(turn.get("content") or "", str) and all(is_call(call) for call in calls)
        case {"role": str(), "content": str()}:
            return not turn.get("tool_calls")
    return False


def is_call(call: object) -> bool:
    """Whether this is a call of a tool, in either of the forms that templates know."""
    match call:
        case {"function": {"name": str()}}:
            return True
        case {"name": str()}:
            return "function" not in call
    return False


def function_of(call: dict[str, object]) -> dict[str, object]:
    """Return name and arguments of a call of a tool."""
    return call.get("function", call)


def split(rows: list) -> tuple[list, list]:
    """Return training and validation rows: about a tenth, by a fixed seed, in the file's order.

    Rows with equal prompts stay together. Otherwise the model would be asked what it was told. It is at most a tenth of
    the rows and of the prompts, unless that would be none.
    """

    def prompt(row: Row) -> str:
        is_pair = isinstance(row, tuple)
        return json.dumps(row[0] if is_pair else [turn for turn in row.turns if turn["role"] != "assistant"])

    groups: dict[str, list[int]] = {}
    for index, (_, row) in enumerate(rows):
        groups.setdefault(prompt(row), []).append(index)
    order = sorted(groups)
    random.Random(SPLIT_SEED).shuffle(order)
    if len(order) < 2:
        raise ValueError("--data-file needs at least two different prompts, or give --val-file")
    most_rows, most_prompts = max(1, len(rows) // 10), max(1, len(order) // 10)
    chosen: set[int] = set()
    for key in [key for key in order if len(groups[key]) <= most_rows][:most_prompts]:
        if len(chosen) + len(groups[key]) <= most_rows:
            chosen.update(groups[key])
    chosen = chosen or set(min(groups.values(), key=len))
    return [row for n, row in enumerate(rows) if n not in chosen], [row for n, row in enumerate(rows) if n in chosen]


def context_of(config: object) -> int:
    """Return how many tokens the model takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


def tokenize(rows: Iterable, tokenizer: object, config: object) -> list[tuple[list[int], list[bool]]]:
    """Return, for each row of `read_rows`, its tokens, and which of them belong to an answer and so to the loss.

    These are the tokens of each assistant turn and its end token, unless its weight is 0. Raises ValueError with the
    row's place if it is longer than the model's context, or holds a token that the model's embedding does not have.
    """
    longest, num_embeddings = context_of(config), config.get_text_config().vocab_size
    result = []
    for place, row in rows:
        try:
            tokens, answer = (
                tokenize_turns(row, tokenizer) if tokenizer.chat_template else tokenize_pair(row, tokenizer)
            )
        except Exception as error:  # a template raises Jinja's errors, and one that it likes
            reason, _, _ = str(error).partition("\n")
            raise ValueError(f"{place}: {reason}") from error
        if len(tokens) > longest:
            raise ValueError(f"{place}: {len(tokens)} tokens, but the model takes {longest}")
        if tokens and max(tokens) >= num_embeddings:
            raise ValueError(f"{place}: token {max(tokens)} is beyond the model's {num_embeddings} embeddings")
        if answer[0]:
            raise ValueError(f"{place}: the prompt is empty, so there is nothing that the answer could follow")
        result.append((tokens, answer))
    return result


def tokenize_pair(row: Row, tokenizer: object) -> tuple[list[int], list[bool]]:
    """Return tokens and answer mask of prompt, completion and end token, without a chat template.

    The tokenizer's special tokens before a text are kept. An end token that it adds after a text would end the prompt,
    so it is left out. Raises ValueError for a chat, or if the tokenizer has no end token.
    """
    if isinstance(row, Chat):
        raise ValueError('"messages" need a chat template, and this tokenizer has none')
    if tokenizer.eos_token_id is None:
        raise ValueError("this tokenizer has no end token (eos_token) that could end an answer")
    text = "".join(row)
    tokens, [(first, _)] = encode(tokenizer, text, [(len(row[0]), len(text))], special=set())
    with_special = tokenizer(text, return_special_tokens_mask=True)
    before = with_special["input_ids"][: with_special["special_tokens_mask"].index(0)]
    tokens = [*before, *tokens, tokenizer.eos_token_id]
    return tokens, [number >= len(before) + first for number in range(len(tokens))]


def tokenize_turns(row: Row, tokenizer: object) -> tuple[list[int], list[bool]]:
    """Return tokens and answer mask of a chat, as the tokenizer's template writes it. A pair is a chat of two turns.

    An answer is a turn of the assistant whose weight is not 0, up to the special token that ends it. Raises ValueError
    if the template ignores part of the chat, if an answer cannot be found, or if no special token ends it.
    """
    if not isinstance(row, Chat):
        row = Chat([{"role": "user", "content": row[0]}, {"role": "assistant", "content": row[1]}])
    if not tokenizer.is_fast:
        raise ValueError("a chat needs a tokenizer that says where its tokens are in the text (tokenizer.json)")
    template = tokenizer.get_chat_template(tools=row.settings.get("tools"))
    check_used(row, template)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    if MARKS_ANSWERS.search(template):
        text, places = marked_answers(row, tokenizer, template)
    else:
        text, places = find_answers(row, tokenizer, tokenizer.convert_ids_to_tokens(sorted(special)))
    check_asked(row, text)
    tokens, answers = encode(tokenizer, text, places, special)
    mask = [False] * len(tokens)
    for first, stop in answers:
        while stop > first and not tokenizer.decode([tokens[stop - 1]]).strip():
            stop -= 1  # `generate` never writes the newline after an end token
        if stop == first or tokens[stop - 1] not in special:
            raise ValueError("the chat template ends an answer without a special token, so it would never end")
        mask[first:stop] = [True] * (stop - first)
    return tokens, mask


def check_used(row: Chat, template: str) -> None:
    """Raise ValueError if the template ignores the row's settings or what the model has thought."""
    used = set(re.findall(r"\w+", template))
    thoughts = {name for turn in row.turns for name in THOUGHTS if turn.get(name)}
    unused = sorted(row.settings.keys() - used) or (sorted(thoughts) if not used & set(THOUGHTS) else [])
    if unused:
        raise ValueError(f'the chat template does not use "{unused[0]}"')


def check_asked(row: Chat, text: str) -> None:
    """Raise ValueError if `text`, the chat as the template writes it, lacks what a turn of another role says."""
    for number, turn in enumerate(row.turns, start=1):
        content = turn["content"].strip()
        written = (content, *(json.dumps(content, ensure_ascii=each)[1:-1] for each in (True, False)))
        if turn["role"] != "assistant" and not any(each in text for each in written):
            raise ValueError(f'the chat template leaves out turn {number}, of the role "{turn["role"]}"')


def marked_answers(row: Chat, tokenizer: object, template: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the (start, end) of each answer in it, as a template with {% generation %} marks them.

    Raises ValueError if the template does not mark one whole answer per turn of the assistant.
    """
    settings = {**tokenizer.special_tokens_map, **row.settings, "return_assistant_tokens_mask": True}
    [text], [marked] = render_jinja_template([row.turns], chat_template=template, **settings)
    places: list[tuple[int, int]] = []
    for start, end in marked:  # a template may mark the parts of an answer one by one
        if places and places[-1][1] == start:
            start, _ = places.pop()
        places.append((start, end))
    turns = [turn for turn in row.turns if turn["role"] == "assistant"]
    if len(places) != len(turns):
        raise ValueError(f"the chat template marks {len(places)} answers in {len(turns)} turns of the assistant")
    places = [place for place, turn in zip(places, turns, strict=True) if is_learned(turn)]
    for turn, (start, end) in zip(filter(is_learned, turns), places, strict=True):
        check_whole(turn, text[start:end])
    return text, places


def find_answers(row: Chat, tokenizer: object, special: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the (start, end) of each answer in it, by rendering the chat with other answers.

    An answer begins where the template asks for it. It ends with what the template writes after it both in a chat that
    ends there and in one that continues. special: the tokenizer's special tokens. Raises ValueError if the template
    does not write the whole answer.
    """

    def render(turns: Turns, **options: object) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **row.settings, **options)

    def text_after(text: str, turns: Turns, count: int) -> str:
        """Return what follows the answer in turn `count` of a rendered chat: what stays with a different answer."""
        other = render([*turns[:count], with_other_answer(turns[count]), *turns[count + 1 :]])
        return text[len(text) - common_length(text[::-1], other[::-1]) :]

    text, places = render(row.turns), []
    for count, turn in enumerate(row.turns):
        if not is_learned(turn):
            continue
        before, until = row.turns[:count], row.turns[: count + 1]
        if before:
            prompt = render(before, add_generation_prompt=True)
        else:  # nothing asks for it
            prompt = text[: common_length(text, render([{"role": "assistant", "content": OTHER}, *row.turns[1:]]))]
        if not text.startswith(prompt):
            raise ValueError(
                "the chat template begins an answer in one way, and asks for it in another: mark the answers in the "
                "template with {% generation %}"
            )
        other_turns = until if len(until) < len(row.turns) else [*until, reply_to(turn)]
        after, other_after = text_after(text, row.turns, count), text_after(render(other_turns), other_turns, count)
        rest = after[ending_length(after, other_after, special) :].lstrip()
        start, end = len(prompt), len(text) - len(rest)
        written = text[start:end]
        if before and missing_part(turn, written):  # a template may ask for an answer with its first words: <think>
            written = text[common_length(prompt, render(before)) : end]
        check_whole(turn, written)
        places.append((start, end))
    return text, places


def ending_length(after: str, other_after: str, special: Sequence[str]) -> int:
    """Return how many characters after an answer belong to it.

    after, other_after: what follows it in two chats, of which one ends with the answer and one continues.
    """
    # A template may end a chat with a token of its own. Then the answer ends with the special token after it.
    lengths = [max((len(token) for token in special if text.startswith(token)), default=0)
        for text in (after, other_after)]  # fmt: skip
    return max(common_length(after, other_after), lengths[0] if all(lengths) else 0)


def is_learned(turn: dict[str, object]) -> bool:
    """Whether this is an answer that counts."""
    return turn["role"] == "assistant" and turn.get("weight") != 0


def check_whole(turn: dict[str, object], written: str) -> None:
    """Raise ValueError if a template leaves out a part of an answer. written: the turn as the template writes it."""
    if part := missing_part(turn, written):
        raise ValueError(f"the chat template does not write all of an answer: {part.strip()[:40]!r} is missing")


def missing_part(turn: dict[str, object], written: str) -> str | None:
    """Return content, or a call's name or textual arguments, if `written` lacks it. Blanks may differ."""
    functions = [function_of(call) for call in turn.get("tool_calls") or []]
    parts = [turn["content"], *(function.get(name) for function in functions for name in ("name", "arguments"))]
    written = "".join(written.split())
    return next((part for part in parts if isinstance(part, str) and "".join(part.split()) not in written), None)


def with_other_answer(turn: dict[str, object]) -> dict[str, object]:
    """Return a turn of the assistant with different content, or with different arguments in its last call of a tool."""
    if not turn.get("tool_calls"):
        return {**turn, "content": OTHER}
    other = copy.deepcopy(turn)
    function = function_of(other["tool_calls"][-1])
    function["arguments"] = OTHER if isinstance(function.get("arguments"), str) else {OTHER: OTHER}
    return other


def reply_to(turn: dict[str, object]) -> dict[str, object]:
    """Return a turn that can follow a turn of the assistant."""
    if not turn.get("tool_calls"):
        return {"role": "user", "content": "."}
    call = turn["tool_calls"][-1]
    return {"role": "tool", "content": ".", "name": function_of(call)["name"], "tool_call_id": call.get("id")}


def common_length(one: str, other: str) -> int:
    """Return with how many equal characters two texts begin."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


def encode(
    tokenizer: object, text: str, places: Sequence[tuple[int, int]], special: set[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text, and the (first, stop) of each of its answers in them.

    The text is tokenized as a whole, because some tokenizers begin every text with a blank. But `generate` sees only
    the text before an answer. If that has different tokens, because one would reach into the answer, the text is
    tokenized in pieces, which begin where the answers begin. Raises ValueError if the pieces are not the text.

    places: (start, end) of the answers in the text. special: the special tokens; no token reaches across one of them.
    """

    def tokenize_part(start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a part of the text, and the (start, end) of each in the text."""
        encoded = tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        offsets = encoded["offset_mapping"] if tokenizer.is_fast else []
        return encoded["input_ids"], [(start + first, start + last) for first, last in offsets]

    def tokens_until(place: int) -> int:
        """Return how many tokens end at a place or before it."""
        return bisect_right(offsets, place, key=itemgetter(1))

    tokens, offsets = tokenize_part(0, len(text))
    firsts, is_whole = [], True
    for start, _ in places:
        last_special = next((n for n in range(tokens_until(start) - 1, -1, -1) if tokens[n] in special), 0)
        before, _ = tokenize_part(offsets[last_special][0] if last_special else 0, start)
        firsts.append(last_special + len(before))
        is_whole = is_whole and tokens[last_special : firsts[-1]] == before
    if not is_whole:
        edges = [0, *(start for start, _ in places), len(text)]
        pieces = [tokenize_part(*edge) for edge in pairwise(edges)]
        joined = [token for piece, _ in pieces for token in piece]
        written, expected = (tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (joined, tokens))
        if written != expected:
            raise ValueError("an answer begins inside a token: end the prompt before a blank, not after it")
        tokens, offsets = joined, [offset for _, piece in pieces for offset in piece]
        firsts = list(accumulate(len(piece) for piece, _ in pieces[:-1]))
    return tokens, [(first, tokens_until(end)) for first, (_, end) in zip(firsts, places, strict=True)]
