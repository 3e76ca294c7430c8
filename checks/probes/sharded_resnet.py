"""Shard a ResNet-18 with the learner's function and take a step, next to one process, for exercise 3.2b.

torchrun --nproc-per-node 2 sharded_resnet.py FOLDER FILE

FILE defines shard(model). Each rank writes to FOLDER/RANK.json the names of the parameters that are not sharded. If
there are none it adds the share of the weights in the root and in the largest group, the number of groups and of
all-gathers, how far the gradients are from those of one process, and the bytes of state per parameter.
"""

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shared import datasets, distributed, measure, models

folder, path = sys.argv[1:]
shard = runpy.run_path(path)["shard"]
worker = distributed.join()
images, labels = datasets.digits().train[:8]
own = slice(worker.rank, None, worker.world_size)
torch.manual_seed(0)
plain, model = models.resnet18().double(), models.resnet18().double()
model.load_state_dict(plain.state_dict())
shard(model)
sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
report = {"unsharded": [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]}
if not report["unsharded"]:
    units = {name: module._get_fsdp_state() for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    shares = Counter()  # by group: modules that were sharded in one call have the same state
    for name, size in sizes.items():  # a parameter belongs to the innermost module that was sharded
        unit = max((unit for unit in units if not unit or name.startswith(unit + ".")), key=len)
        shares[id(units[unit])] += size / sum(sizes.values())
    report["root"] = shares.pop(id(units.get("")), 0.0)
    report["groups"], report["largest"] = len(shares), max(shares.values(), default=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    with measure.Traffic() as traffic:
        F.cross_entropy(model(images[own].double()), labels[own]).backward()
    report["gathers"] = traffic.calls["allgather"]
    F.cross_entropy(plain(images.double()), labels).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    report["apart"] = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    optimizer.step()  # from here on there are moments
    report["state"] = measure.state_bytes(model, optimizer) / sum(sizes.values())
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
