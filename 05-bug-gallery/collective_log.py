"""Log the all-reduces of a rank, those that DDP starts included, and draw the logs of two ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class CollectiveLog:
    """The all-reduces of this rank in order, each as {"what", "sent", "result"}.

    what: "gradient" for an all-reduce that DDP has started, "loss" for any other. sent, result: the first number of the
    tensor, before and after. The result is None as long as the rank waits for it.
    """

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._all_reduce = dist.all_reduce

    def _add(self, what: str, tensor: torch.Tensor) -> dict:
        event = {"what": what, "sent": tensor.flatten()[0].item(), "result": None}
        self.events.append(event)
        return event

    def _logged(self, tensor: torch.Tensor, *args, **kwargs) -> None:
        event = self._add("loss", tensor)
        self._all_reduce(tensor, *args, **kwargs)
        event["result"] = tensor.flatten()[0].item()

    def _average(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does: divide, then add up."""
        gradient = bucket.buffer().div_(dist.get_world_size())
        event = self._add("gradient", gradient)

        def finish(future: torch.futures.Future) -> torch.Tensor:
            event["result"] = future.value()[0][0].item()
            return future.value()[0]

        return self._all_reduce(gradient, async_op=True).get_future().then(finish)

    def _wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        ddp_model = DistributedDataParallel(module)
        ddp_model.register_comm_hook(None, self._average)
        return ddp_model

    @contextmanager
    def installed(self, gallery) -> Iterator[None]:
        """Log what the module `gallery` does inside the block."""
        with (
            mock.patch.object(dist, "all_reduce", self._logged),
            mock.patch.object(gallery, "DistributedDataParallel", self._wrap),
        ):
            yield


def draw(runs: Mapping[str, Sequence[Sequence[Mapping]]]) -> None:
    """Draw a panel for each run, by title: its ranks as rows, their all-reduces in order.

    A line joins those with the same place in the order and the same result, which have met.
    """
    import matplotlib.pyplot as plt  # here, because the ranks that log do not draw

    from shared import plots

    longest = max(len(events) for ranks in runs.values() for events in ranks)
    size = (max(7, longest), 1.75 * len(runs))
    _, panels = plt.subplots(len(runs), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axes, (title, ranks) in zip(panels[:, 0], runs.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        for row, events in enumerate(ranks):
            steps = 0
            for place, event in enumerate(events, start=1):
                is_gradient = event["what"] == "gradient"
                steps += is_gradient
                axes.text(
                    place, row, f"gradient {steps}" if is_gradient else event["what"], ha="center", va="center",
                    fontsize=9, color="white", bbox={"boxstyle": "round", "facecolor": plots.COLORS[not is_gradient]},
                )  # fmt: skip
        for place, met in enumerate(zip(*ranks, strict=False), start=1):
            if len({event["result"] for event in met}) == 1:  # to the last bit
                axes.plot([place, place], [0.25, len(ranks) - 1.25], color="gray", linewidth=1)
        axes.set(xlim=(0.4, max(map(len, ranks)) + 0.6), ylim=(len(ranks) - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
