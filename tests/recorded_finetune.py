"""train_ray_finetune.py, with what a test has to see recorded: recorded_finetune.py FILE OPTIONS...

FILE gets from rank 0 the trainable weights before the first step, and every gradient of each step, all whole, and the
logits of 40 tokens before the export. Each rank writes to FILE.RANK.json the most bytes that tensors took while the
base was read, and while the model was written, beyond those that lived before.
"""

import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FINETUNE = Path(__file__).parents[1] / "03-fsdp-deepspeed/train_ray_finetune.py"


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes of all storages that live at the same time and that operations here have made."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {self.storage(tensor)._cdata for tensor in known}
        self.live: dict[int, int] = {}
        self.peak = 0

    @staticmethod
    def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = self.storage(tensor)
                if storage._cdata not in self.known and storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def measured(function: Callable, name: str, peaks: dict[str, int]) -> Callable:
    """`function`, with its peak noted: its first argument is a model, whose tensors do not count."""

    def call(model: torch.nn.Module, *args: object) -> object:
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            result = function(model, *args)
        peaks[name] = live.peak
        return result

    return call


def main() -> None:
    file, sys.argv = sys.argv[1], [str(FINETUNE), *sys.argv[2:]]
    sys.path.insert(0, str(FINETUNE.parent))
    import pretrained

    recorded, peaks = {"before": None, "gradients": []}, {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().full_tensor().clone()

    def before_step(optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = optimizer.param_groups[0]["params"]
        if recorded["before"] is None:
            recorded["before"] = [whole(parameter) for parameter in parameters]
        recorded["gradients"].append([whole(parameter.grad) for parameter in parameters])

    register_optimizer_step_pre_hook(before_step)
    for name in ("fill", "export"):
        setattr(pretrained, name, measured(getattr(pretrained, name), name, peaks))
    export = pretrained.export

    def logits_then_export(model: torch.nn.Module, *args: object) -> None:
        with torch.no_grad():
            recorded["logits"] = model(input_ids=torch.arange(40)[None], use_cache=False).logits
        export(model, *args)

    pretrained.export = logits_then_export
    runpy.run_path(str(FINETUNE), run_name="__main__")
    rank = int(os.environ.get("RANK", 0))
    Path(f"{file}.{rank}.json").write_text(json.dumps(peaks))
    if rank == 0:
        torch.save(recorded, file)


main()
