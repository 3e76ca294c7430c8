"""Let the learner's first_fault judge ports whose faults are known, for exercise 3.8a.

torchrun --nproc-per-node 2 hidden_ports.py FOLDER FILE

FILE defines first_fault(port, reference, worker). The ranks try the PORTS in order, up to the first verdict that is
wrong on a rank. Each rank writes to FOLDER/RANK.json the name of each port that it has tried, with what first_fault
returned or raised. A rank whose verdict the other one does not follow within WAIT_S seconds ends: "alone".
"""

import json
import logging
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig
from transformers.utils import ModelOutput

sys.path.append(str(Path(__file__).parents[2] / "03-fsdp-deepspeed"))
import sharded_port
from sharded_port import NO_TARGET, Port, Reference
from shared import distributed
from shared.distributed import Worker

WAIT_S = 15
LAYERS = 10
HIDDEN_SIZE = 64
EMBED_SCALE = HIDDEN_SIZE**0.5  # a number that Gemma computes from its config, and that no file holds


def make_reference(folder: Path, intermediate_size: int) -> Reference:
    """Write a small Gemma with random weights to `folder`, and return what one process computes with it."""
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=HIDDEN_SIZE, intermediate_size=intermediate_size, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=4,
        layer_types=["sliding_attention"] * (LAYERS - 2) + ["full_attention"] * 2,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(intermediate_size)
    tokens = torch.randint(2, 96, (4, 17))
    if not folder.exists():
        folder.mkdir()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:  # so that wrong positions change the logits
                nn.init.normal_(parameter, std=0.3)
        save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
    return sharded_port.one_process(folder, tokens[:, :-1], sharded_port.mask_prompts(tokens))


# --- Loading ---------------------------------------------------------------------------------------------------------


def read(model: nn.Module, base: Path, embed_scale: float) -> nn.Module:
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.model.embed_tokens.embed_scale.fill_(embed_scale)
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(base)))
    return model


def build(base: Path, groups: Callable[[nn.Module], tuple] = lambda model: (*model.model.layers, model)) -> nn.Module:
    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for part in groups(model):
        fully_shard(part)
    return model.to_empty(device="cpu")


def load(base: Path, worker: Worker) -> nn.Module:
    return read(build(base), base, EMBED_SCALE)


def load_without_scale_on_rank_1(base: Path, worker: Worker) -> nn.Module:
    return read(build(base), base, EMBED_SCALE if worker.rank == 0 else 1)


def load_nan_on_rank_1(base: Path, worker: Worker) -> nn.Module:
    return read(build(base), base, EMBED_SCALE if worker.rank == 0 else float("nan"))


def load_with_a_wrong_row(base: Path, worker: Worker) -> nn.Module:
    """Load a model whose logits are wrong on rank 1 alone, in a row that this rank does not train on."""
    model = load(base, worker)

    def change(model: nn.Module, inputs: tuple, output: ModelOutput) -> None:
        if worker.rank == 1 and len(output.logits) == 4:
            output.logits[0] += 1

    model.register_forward_hook(change)
    return model


def load_root_only(base: Path, worker: Worker) -> nn.Module:
    return read(build(base, lambda model: (model,)), base, EMBED_SCALE)


def load_without_meta(base: Path, worker: Worker) -> nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float64)
    for part in (*model.model.layers, model):
        fully_shard(part)
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(base)))
    return model


def load_with_one_full_rank(base: Path, worker: Worker) -> nn.Module:
    """Load as it should be, after rank 0 has built the whole model, as if to compare."""
    if worker.rank == 0:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float64)
    return load(base, worker)


# --- The step --------------------------------------------------------------------------------------------------------


def step(model: nn.Module, loss: torch.Tensor) -> None:
    model.zero_grad()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=sharded_port.LEARNING_RATE).step()


def mean_of_means(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, worker: Worker) -> float:
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET)
    step(model, loss)
    return distributed.global_sum(loss).item() / worker.world_size


def without_world_size(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, worker: Worker) -> float:
    answer_tokens = distributed.global_sum((targets != NO_TARGET).sum())
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum") / answer_tokens
    step(model, loss)
    return distributed.global_sum(loss).item()


def wrong_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, worker: Worker) -> float:
    loss = sharded_port.train_step(model, tokens, targets, worker)
    return loss if worker.rank == 0 else 1.0001 * loss


def wrong_slice(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, worker: Worker) -> float:
    loss = sharded_port.train_step(model, tokens, targets, worker)
    if worker.rank == 1:
        model.model.layers[2].mlp.down_proj.weight.grad.to_local().mul_(2)
    return loss


# --- The export ------------------------------------------------------------------------------------------------------


def export_untied(model: nn.Module, base: Path, folder: Path, worker: Worker) -> None:
    weights = {name: weight.detach().float() for name, weight in model.named_parameters()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    sharded_port.save_weights(weights, base, folder, worker)


def export_in_float64(model: nn.Module, base: Path, folder: Path, worker: Worker) -> None:
    weights = {name: weight.detach().float().double() for name, weight in model.named_parameters()}
    sharded_port.save_weights(weights, base, folder, worker)


def slow_export(model: nn.Module, base: Path, folder: Path, worker: Worker) -> None:
    """Let the other ranks return before rank 0 has written anything that can be loaded."""
    sharded_port.export(model, base, folder / "partial", worker)
    if worker.rank == 0:
        time.sleep(0.5)
        for path in (folder / "partial").iterdir():
            path.rename(folder / path.name)
        (folder / "partial").rmdir()


# --- The ports, in the order in which they are tried -----------------------------------------------------------------

RIGHT = Port(load, sharded_port.train_step, sharded_port.export)
PORTS: dict[str, tuple[Port, str | None]] = {  # with the right verdict
    "right": (RIGHT, None),
    "uneven": (RIGHT, None),
    "slow export": (RIGHT._replace(export=slow_export), None),
    "whole on rank 0": (RIGHT._replace(load=load_with_one_full_rank), "memory"),
    "no scale on rank 1": (RIGHT._replace(load=load_without_scale_on_rank_1), "load"),
    "nan on rank 1": (RIGHT._replace(load=load_nan_on_rank_1), "load"),
    "no world size": (RIGHT._replace(train_step=without_world_size), "gradient"),
    "untied": (RIGHT._replace(export=export_untied), "export"),
    "mean of means": (RIGHT._replace(train_step=mean_of_means), "loss"),
    "wrong slice": (RIGHT._replace(train_step=wrong_slice), "gradient"),
    "wrong row": (RIGHT._replace(load=load_with_a_wrong_row), "load"),
    "wrong loss": (RIGHT._replace(train_step=wrong_loss), "loss"),
    "float64": (RIGHT._replace(export=export_in_float64), "export"),
    "root only": (RIGHT._replace(load=load_root_only), "memory"),
    "no meta": (RIGHT._replace(load=load_without_meta), "memory"),
}


def refuse_full_tensor(tensor: DTensor, **keywords) -> None:
    raise RuntimeError("full_tensor() gathers the whole tensor on every rank. Compare slices")


def judge(first_fault: Callable, worker: Worker, folder: Path) -> list[dict]:
    """Return, for each port that was tried, what first_fault returned or raised on this rank."""
    scratch = Path(distributed.from_rank_zero(tempfile.mkdtemp(dir=folder)))
    references = []
    for size in (64, 63):  # 63 rows: the slices of two ranks differ
        for _ in range(worker.rank + 1):  # rank 0 writes the base first
            distributed.wait_for_all()
        references.append(make_reference(scratch / f"base-{size}", size))
        for _ in range(worker.world_size - worker.rank):
            distributed.wait_for_all()
    DTensor.full_tensor = refuse_full_tensor
    store, seen = dist.distributed_c10d._get_default_store(), []
    for name, (port, expected) in PORTS.items():
        seen.append({"port": name})
        try:
            verdict = first_fault(port, references[name == "uneven"], worker)
            seen[-1]["returned"] = verdict if verdict is None or isinstance(verdict, str) else repr(verdict)
        except Exception as error:  # the learner's own code may raise anything
            first_line = str(error).strip().partition("\n")[0]
            seen[-1]["raised"] = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        store.set(f"{name}/{worker.rank}", json.dumps(seen[-1]))
        others = [f"{name}/{rank}" for rank in range(worker.world_size) if rank != worker.rank]
        end = time.monotonic() + WAIT_S
        while not store.check(others) and time.monotonic() < end and "raised" not in seen[-1]:
            time.sleep(0.02)
        if not store.check(others):
            seen[-1]["alone"] = True
            return seen
        of_all = [json.loads(store.get(key)) for key in others] + [seen[-1]]
        if any("raised" in each or each["returned"] != expected for each in of_all):
            return seen
    return seen


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    out, path = Path(sys.argv[1]), sys.argv[2]
    worker = distributed.join(timeout_s=3 * WAIT_S)
    seen = judge(runpy.run_path(path)["first_fault"], worker, out)
    (out / f"{worker.rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # at once, in whatever state the group is: the other rank's collective then fails
