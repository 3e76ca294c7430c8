"""Shard a frozen Llama with adapters as the learner's function does, and measure a step, for exercise 3.7a.

torchrun --nproc-per-node 2 sharded_adapters.py FOLDER FILE

FILE defines shard(model). Each rank writes to FOLDER/RANK.json the bytes that it holds when the forward pass ends, the
bytes that it sends in a step, its collectives, and which adapters' gradients are not those of one process.
"""

import json
import runpy
import sys
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared import distributed, measure

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def build() -> peft.PeftModel:
    """Return the model with its values, the same on every rank."""
    torch.manual_seed(0)
    model = peft.get_peft_model(LlamaForCausalLM(CONFIG), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter.data, std=0.1)
    return model


def loss_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def is_off(gradient: torch.Tensor | None, right: torch.Tensor) -> bool:
    if gradient is None:
        return True
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return bool((whole - right).norm() > 1e-3 * right.norm())


folder, path = sys.argv[1:]
worker = distributed.join(timeout_s=120)
rows = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1))
own = rows[worker.rank :: worker.world_size]
plain, model = build(), build()
trained = [name for name, each in plain.named_parameters() if each.requires_grad]
loss_of(plain, rows).backward()
called = runpy.run_path(path)["shard"](model) or model  # DistributedDataParallel returns a new module
parameters = dict(model.named_parameters())
optimizer = torch.optim.AdamW([parameters[name] for name in trained])
loss_of(called, own).backward()
wrong = [name for name in trained if is_off(parameters[name].grad, plain.get_parameter(name).grad)]
optimizer.step()  # from here on there are moments
optimizer.zero_grad()
loss_of(called, own).backward()  # DDP arranges its buckets in the second step
optimizer.step()
optimizer.zero_grad()
traffic, before = measure.Traffic(), measure.state_tensors(model, optimizer)
with traffic:
    loss = loss_of(called, own)
    held = measure.storage_bytes([*before, *model.parameters()])  # gathered weights are then the model's parameters
    loss.backward()
sent = {name: number for name, number in traffic.sent.items() if name != "broadcast"}  # DDP's, of buffers
report = {"held": held, "sent": sum(sent.values()), "calls": traffic.calls, "wrong": wrong, "adapters": len(trained)}
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
