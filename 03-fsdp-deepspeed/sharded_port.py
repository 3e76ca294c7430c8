"""The parts of lesson 3.6's script as functions, and what one process computes, for lesson 3.8.

torchrun --standalone --nproc-per-node 2 sharded_port.py FIRST_FAULT.py [LOAD_GEMMA.py]

prints what first_fault of the first file returns for the port of data/tiny-gemma. The port loads with load_gemma of the
second file, or else with `load_sharded`.
"""

import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # PeakMemory does not see what from_pretrained loads in other threads

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

from shared import distributed
from shared.distributed import Worker

logging.disable_progress_bar()
LEARNING_RATE = 0.1
NO_TARGET = -100
TEXT = '''
def read(self, size=-1):
    """Return at most size bytes, or all of them."""
    if self.closed:
        raise ValueError("I/O operation on closed file")
    return self.file.read(size)


class Reader(object):
    def __init__(self, name, mode="r"):
        self.name = name
        self.file = open(name, mode)
'''


class Port(NamedTuple):
    """A port to several ranks, as three functions that every rank calls.

    load(base, worker): returns the sharded model, in float64, with the weights of the folder `base`.
    train_step(model, tokens, targets, worker): takes a step of gradient descent on the rank's own rows. It returns the
        mean loss over the answer tokens of all ranks, and leaves the gradient in `.grad`, as a DTensor.
    export(model, base, folder, worker): writes the model to `folder` in float32. Rank 0 is the last to finish.
    """

    load: Callable[[Path, Worker], nn.Module]
    train_step: Callable[[nn.Module, torch.Tensor, torch.Tensor, Worker], float]
    export: Callable[[nn.Module, Path, Path, Worker], None]


class Reference(NamedTuple):
    """What one process computes, without shards, in float64.

    base: the folder with the pretrained model.
    tokens, targets: a batch (rows, length). Rank r of N trains on the rows r, r + N, ...; -100 is no target.
    logits: of all of `tokens`, before the step.
    loss: the mean over the answer tokens of the whole batch.
    gradients: of that loss, whole, by the parameters' names.
    exported: the tensors that the exported file holds after the step, by name.
    num_bytes: of the whole model's weights, in float64.
    """

    base: Path
    tokens: torch.Tensor
    targets: torch.Tensor
    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]
    exported: dict[str, torch.Tensor]
    num_bytes: int


# --- Lesson 3.6's functions ------------------------------------------------------------------------------------------


def load_sharded(base: Path, worker: Worker) -> nn.Module:
    """Return the model in shards, with the values of the files in `base`. Collective."""
    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for part in (*model.model.layers, model):
        fully_shard(part)
    model.to_empty(device="cpu")
    with torch.no_grad():  # new memory can hold anything; zeros make your results match ours
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(base)))
    return model


def train_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, worker: Worker) -> float:
    """Take one step of gradient descent and return the mean loss over the answer tokens of all ranks. Collective."""
    answer_tokens = distributed.global_sum((targets != NO_TARGET).sum())
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum") / answer_tokens
    model.zero_grad()
    (loss * worker.world_size).backward()  # FSDP will divide by the world size
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return distributed.global_sum(loss).item()


def export(model: nn.Module, base: Path, folder: Path, worker: Worker) -> None:
    """Write the model to `folder` in float32, as a Hugging Face folder. Collective."""
    weights = {name: weight.detach().float() for name, weight in model.named_parameters()}
    save_weights(weights, base, folder, worker)


def save_weights(weights: dict[str, torch.Tensor], base: Path, folder: Path, worker: Worker) -> None:
    """Write the slices of all ranks into one file, and copy the config and the tokenizer. Collective."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer)
    if worker.rank == 0:
        shutil.rmtree(folder / "sharded")  # the ranks' own files
        for path in base.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copy(path, folder)


LESSON_3_6 = Port(load_sharded, train_step, export)


# --- One process -----------------------------------------------------------------------------------------------------


def one_process(base: Path, tokens: torch.Tensor, targets: torch.Tensor) -> Reference:
    """Compute the reference: a step of gradient descent, in this process alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    exported = {name: (each.detach() - LEARNING_RATE * each.grad).float() for name, each in parameters.items()}
    num_bytes = sum(each.nbytes for each in parameters.values())
    return Reference(base, tokens, targets, logits.detach(), loss.item(), gradients, exported, num_bytes)


def mask_prompts(tokens: torch.Tensor) -> torch.Tensor:
    """Return the targets of four rows. The first targets of each row belong to its prompt; their number differs."""
    targets = tokens[:, 1:].clone()
    for row, prompt in zip(targets, (2, 13, 4, 11), strict=True):
        row[:prompt] = NO_TARGET
    return targets


def read_reference(base: Path) -> Reference:
    """Return the reference of a base with a tokenizer. The first call computes it and keeps it in `base`."""
    path = Path(base, "reference.pt")
    if not path.exists():
        tokens = torch.tensor(AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"][:68]).view(4, 17)
        values = one_process(base, tokens[:, :-1], mask_prompts(tokens))._asdict()
        del values["base"]
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(values, partial)
        os.rename(partial, path)
    return Reference(Path(base), **torch.load(path, weights_only=True))


def main() -> None:
    proof, *loader = sys.argv[1:]
    worker = distributed.join(timeout_s=60)
    if "raise NotImplementedError" in Path(proof).read_text():
        worker.log("first_fault is not written yet")
    else:
        port = LESSON_3_6._replace(load=runpy.run_path(loader[0])["load_gemma"]) if loader else LESSON_3_6
        verdict = runpy.run_path(proof)["first_fault"](port, read_reference(Path("data/tiny-gemma")), worker)
        worker.log(f"first_fault returns {verdict!r}")
    distributed.leave()


if __name__ == "__main__":
    main()
