"""Record which rows each rank copies from a DCP checkpoint, draw them, and hold back or interrupt a save."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch.distributed.checkpoint as dcp
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from shared import plots

Piece = Mapping[str, object]  # rows that one file holds: "file", the "first" row in the whole tensor, number of "rows"


class RecordingReader(dcp.FileSystemReader):
    """A reader of DCP checkpoints that records which rows it copies, and from which file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        """Read as the base class does, and record the plan's tensors in `pieces`, by name."""
        self.pieces: dict[str, list[Piece]] = {}
        for item in plan.items:
            if len(item.lengths) > 0:  # numbers such as the learning rate have no rows
                offset = item.storage_index.offset  # where the stored slice begins in the whole tensor
                first = (offset[0] if offset else 0) + item.storage_offsets[0]
                piece = {"file": self.storage_data[item.storage_index].relative_path, "first": first}
                self.pieces.setdefault(item.storage_index.fqn, []).append({**piece, "rows": item.lengths[0]})
        return super().read_data(plan, planner)

    def write_record(self, path: str | Path) -> None:
        """Write the recorded pieces to a JSON file."""
        Path(path).write_text(json.dumps(self.pieces))


class HeldBackWriter(dcp.FileSystemWriter):
    """A writer that writes nothing until `release` is called: storage that is slow for as long as we like."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._released = threading.Event()

    def release(self) -> None:
        """Let the write begin."""
        self._released.set()

    def write_data(self, *arguments: object) -> Future:
        """Wait for `release`, then write this rank's slices."""
        self._released.wait()
        return super().write_data(*arguments)


class KilledWriter(dcp.FileSystemWriter):
    """A writer that kills rank 1's process after rank 0 has written its slices and before rank 1 writes any.

    rank: this process's rank.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        super().__init__(folder)
        self._rank, self._rank_0_wrote = rank, Path(f"{folder}.rank-0-wrote")
        if rank == 1:  # rank 0 writes only after both ranks have made their plans
            self._rank_0_wrote.unlink(missing_ok=True)

    def write_data(self, *arguments: object) -> Future:
        """Write this rank's slices on rank 0; wait for rank 0 and send SIGKILL to this process on rank 1."""
        if self._rank == 1:
            print("[rank 1/2] killed before it writes its slices of step 6\n", end="", flush=True)
            while not self._rank_0_wrote.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(*arguments)
        written.wait()
        self._rank_0_wrote.touch()
        return written


def written_pieces(metadata: Metadata, name: str) -> list[Piece]:
    """Return the stored pieces of the tensor `name`, in the order of their rows."""
    rows = {chunk.offsets: chunk.sizes[0] for chunk in metadata.state_dict_metadata[name].chunks}
    pieces = [
        {"file": stored.relative_path, "first": index.offset[0], "rows": rows[index.offset]}
        for index, stored in metadata.storage_data.items()
        if index.fqn == name
    ]
    return sorted(pieces, key=lambda piece: piece["first"])


def draw(written: Sequence[Piece], copied: Sequence[Sequence[Piece]], title: str) -> Axes:
    """Draw a tensor's rows twice: above by the rank that wrote them, below by the ranks that load them.

    written: the stored pieces.
    copied: for each rank that loads, the pieces that it copied.
    """
    _, axes = plt.subplots(figsize=(5, 3.3), layout="constrained")
    axes.set_title(title, loc="left", fontsize=12)
    colors = {piece["file"]: plots.COLORS[number] for number, piece in enumerate(written)}
    total = sum(piece["rows"] for piece in written)
    text = {"ha": "center", "va": "center", "fontsize": 11}
    for number, piece in enumerate(written):
        first, rows = piece["first"], piece["rows"]
        axes.add_patch(Rectangle((first, 2.2), rows, 0.8, color=colors[piece["file"]]))
        label = f"rank {number} wrote\nrows {first} to {first + rows - 1}"
        axes.text(first + rows / 2, 2.6, label, color="white", **text)
    gap = total / 25
    for rank, pieces in enumerate(copied):
        shift = gap * (rank - (len(copied) - 1) / 2)
        begin = min(piece["first"] for piece in pieces)
        end = max(piece["first"] + piece["rows"] for piece in pieces)
        for piece in pieces:
            color, a, b = colors[piece["file"]], piece["first"], piece["first"] + piece["rows"]
            axes.add_patch(Rectangle((a + shift, 0.4), b - a, 0.8, color=color))
            axes.add_patch(Polygon([(a, 2.2), (b, 2.2), (b + shift, 1.2), (a + shift, 1.2)], color=color, alpha=0.25))
        label = f"rank {rank} loads\n{begin} to {end - 1}"
        axes.text((begin + end) / 2 + shift, 0.8, label, color="white", **text)
    axes.set(xlim=(-1.2 * gap * len(copied) / 2, total + 1.2 * gap * len(copied) / 2), ylim=(0.2, 3.1))
    axes.axis("off")
    return axes
