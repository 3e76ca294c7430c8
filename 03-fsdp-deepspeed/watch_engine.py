"""Watch a DeepSpeed engine: measure its buckets and gradients, and draw what a rank keeps."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from shared import measure, plots

KIND_COLORS = {"weights": "#3465a4", "gradients": "#d9730d", "master copy": "#8e4b9e", "moments": "#2e7d5b"}


def watch_buckets(engine: object) -> list[int]:
    """Return a list to which each backward pass adds the bytes of the engine's gradient buckets.

    In stages 1 and 2 the buckets exist only during the backward pass, so a hook measures them when the gradient reaches
    the model's first block. `ipg_buckets` is DeepSpeed's own name for them, and not a public interface.
    """
    sizes = []

    def measure_buckets(*_):
        buffers = [bucket.buffer for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values()]
        lists = [buffer if isinstance(buffer, list) else [buffer] for buffer in buffers]  # one or two per bucket
        sizes.append(measure.storage_bytes([buffer for buffers in lists for buffer in buffers]))

    engine.module.blocks[0].register_full_backward_hook(measure_buckets)
    return sizes


def watch_gradients(engine: object) -> list[int]:
    """Return a list to which each new gradient adds the bytes of all gradients that this rank has at that moment.

    These are the storages behind `.grad`: autograd's own, or DeepSpeed's bucket once it has copied a gradient there.
    """
    sizes, parameters = [], list(engine.module.parameters())

    def measure_gradients(_):
        sizes.append(measure.storage_bytes([each.grad for each in parameters if each.grad is not None]))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(measure_gradients)
    return sizes


def draw_state(kept: Mapping[str, Mapping[str, float]], paper: Mapping[str, float], title: str) -> Axes:
    """Draw one stacked bar per entry of `kept`, with a triangle where the paper's formula is.

    kept: bytes per parameter by kind, for each bar. paper: the total in bytes per parameter, for each bar.
    """
    axes = plots.new_axes(title, size=(6.4, 4.2))
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_ylabel("bytes per parameter", fontsize=12)
    axes.tick_params(labelsize=12)
    bottoms = dict.fromkeys(kept, 0.0)
    for kind, color in KIND_COLORS.items():
        sizes = [kinds.get(kind, 0.0) for kinds in kept.values()]
        drawn = axes.bar(list(kept), sizes, 0.62, list(bottoms.values()), color=color, label=kind)
        labels = [f"{size:.0f}" if size > 0.5 else "" for size in sizes]
        axes.bar_label(drawn, labels, label_type="center", color="white", fontsize=12)
        bottoms = {name: bottoms[name] + size for name, size in zip(kept, sizes, strict=True)}
    for position, total in enumerate(bottoms.values()):
        axes.text(position, total + 0.3, f"{total:.1f}", ha="center", fontsize=12, fontweight="bold")
    positions = [position + 0.4 for position in range(len(kept))]
    axes.plot(positions, [paper[name] for name in kept], "<", color="black", markersize=11, label="the paper's rule")
    axes.set_axisbelow(True)
    axes.set_yticks(range(0, 17, 4))
    axes.set_ylim(0, 1.12 * max(*bottoms.values(), *paper.values()))
    axes.legend(frameon=False, fontsize=12, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return axes
