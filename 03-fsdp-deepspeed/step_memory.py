"""Record the memory of one training step, operation by operation, and draw it: the tools of lesson 3.1.

`record_step` runs a step on the CPU and returns its peak and a `Recorder`; `draw_step` draws what the recorder saw.
"""

from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from shared import measure, plots
from shared.models import GPT

CPU = torch.device("cpu")
# What the figure calls each kind of tensor, and its name in torch's MemTracker; in the order of the bands.
KINDS = {"parameters": "PARAM", "moments": "OPT", "gradients": "GRAD", "activations": "ACT", "short-lived": "TEMP"}
TOP = 160  # of the figure's MB axis: the same for each step, to compare them
BAND_COLORS = [plots.COLORS[number] for number in (0, 2, 3, 1, 5)]


class Recorder(TorchDispatchMode):
    """Note after each operation in the `with` block how many bytes each kind of tensor has.

    This is a dispatch mode: every operation passes through `__torch_dispatch__`, even those of the backward pass.

    rows: {kind: bytes} after each operation.
    begins: (number of the operation, name) for each phase and block.
    """

    def __init__(self, tracker: MemTracker) -> None:
        super().__init__()
        self.tracker, self.rows, self.begins = tracker, [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        snapshot = self.tracker.get_tracker_snapshot()[CPU]
        self.rows.append({getattr(kind, "name", kind): size for kind, size in snapshot.items()})
        return result

    def begin(self, name: str, *_) -> None:
        """Note that the phase or block called `name` begins with the next operation."""
        self.begins.append((len(self.rows), name))

    def totals(self) -> list[int]:
        """Return the bytes of all tensors after each operation."""
        return [row["Total"] for row in self.rows]

    def start_of(self, phase: str) -> int:
        """Return the number of the operation with which a phase begins."""
        return next(number for number, name in self.begins if name == phase)


def record_step(model: GPT, tokens: torch.Tensor, targets: torch.Tensor, **adamw_options: bool) -> tuple[int, Recorder]:
    """Take two steps with AdamW and record the second, so that the moments exist from the start.

    The gradients are zeroed instead of freed. So they exist throughout the step, as they do when you accumulate
    gradients over several batches.

    adamw_options: for torch.optim.AdamW.

    Returns the peak of the recorded step in bytes, and its Recorder.
    """

    def compute_loss():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options)
    compute_loss().backward()
    optimizer.step()
    memory = measure.PeakMemory(CPU)
    memory.start(model, optimizer)
    with Recorder(memory.tracker) as recorder:
        hooks = [
            block.register_forward_pre_hook(partial(recorder.begin, str(number)))
            for number, block in enumerate(model.blocks, start=1)
        ]
        recorder.begin("zero_grad")
        optimizer.zero_grad(set_to_none=False)
        recorder.begin("forward")
        loss = compute_loss()
        recorder.begin("backward")
        loss.backward()
        recorder.begin("optimizer")
        optimizer.step()
    for hook in hooks:
        hook.remove()
    return memory.stop(), recorder


def draw_step(title: str, recorder: Recorder) -> Axes:
    """Draw one band per kind of tensor, with a line where a phase begins and a dotted line where a block begins."""
    axes = plots.new_axes(title, "operation", "MB", size=(5.6, 3.9))
    heights = [[row[kind] / 1e6 for row in recorder.rows] for kind in KINDS.values()]
    numbers = range(len(recorder.rows))
    axes.stackplot(numbers, heights, labels=KINDS, colors=BAND_COLORS, step="post", linewidth=0)
    axes.set(xlim=(0, len(recorder.rows)), ylim=(0, TOP))
    phases = 0
    for number, name in recorder.begins:
        is_block = name.isdigit()
        style = ":" if is_block else "-"
        # The names are in three rows, because side by side they could overlap. A line ends at its own phase's name, so
        # that it crosses no other.
        row = TOP - 12 * (phases % 3 + 1)
        # A phase's line is drawn behind the bands, because on top it would hide the peak.
        height, layer = (TOP - 45, 2) if is_block else (row + 10, 0)
        axes.axvline(number, ymax=height / TOP, color="black", linewidth=0.7, linestyle=style, zorder=layer)
        if not is_block:
            axes.text(number + 5, row, name, fontsize=11)
            phases += 1
    axes.legend(frameon=False, ncols=3, fontsize=11, loc="upper center", bbox_to_anchor=(0.45, -0.19))
    return axes
