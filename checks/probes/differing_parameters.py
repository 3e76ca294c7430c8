"""Change a model's weights on some ranks and ask the learner's function which ones differ, for exercise 2.2b.

torchrun differing_parameters.py FOLDER FILE CASES

FILE defines differing_parameters(model). CASES is JSON: for each case a list of changes [rank, parameter, change], each
a number to add, or "flip" to reverse the rows. Each rank writes to FOLDER/RANK.json, for each case, what the function
returns and which parameters it has changed.
"""

import json
import runpy
import sys
from pathlib import Path

import torch

from shared import distributed

folder, path, cases = sys.argv[1:]
worker = distributed.join(timeout_s=30)
differing_parameters, reports = runpy.run_path(path)["differing_parameters"], []
for changes in json.loads(cases):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double()
    for rank, name, change in changes:
        if rank == worker.rank:
            weights = model.get_parameter(name).data
            weights.copy_(weights.flip(0) if change == "flip" else weights + change)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    answer = differing_parameters(model)
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # Compare bits, because NaN is not equal to itself.
    changed = [name for name in after if not after[name].view(torch.int64).equal(before[name].view(torch.int64))]
    answer = list(answer) if isinstance(answer, (list, tuple, set)) else repr(answer)
    reports.append({"answer": answer, "changed": changed})
Path(folder, f"{worker.rank}.json").write_text(json.dumps(reports))
distributed.leave()
