"""Draw the figures of lesson 3.5: what each strategy keeps and sends."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from shared import plots

FONT = 11  # points, in figures at most six inches wide: readable on a phone


def pairs(predicted: Mapping[str, float], measured: Mapping[str, float], title: str) -> Axes:
    """Draw two bars per name: predicted and measured."""
    axes = plots.new_axes(title, size=(5.6, 0.9 + 0.5 * len(measured)))
    rows = range(len(measured))
    expected = [predicted[name] for name in measured]
    axes.barh([row - 0.2 for row in rows], expected, height=0.36, color="#c9c9c9", label="predicted")
    drawn = axes.barh(
        [row + 0.2 for row in rows], list(measured.values()), height=0.36, color=plots.COLORS[0], label="measured"
    )
    axes.bar_label(drawn, fmt="%.2f", padding=4, fontsize=FONT)
    axes.set_yticks(rows, list(measured), fontsize=FONT)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.margins(x=0.14)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.07), fontsize=FONT)
    return axes


def over_ranks(ranks: Sequence[int], series: Mapping[str, Sequence[float]], title: str) -> Axes:
    """Draw one line per strategy: bytes per parameter against the number of ranks, on a logarithmic axis."""
    axes = plots.new_axes(title, "ranks", "bytes per parameter", size=(5.6, 3.4))
    for name, values in series.items():
        axes.plot(ranks, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    shown = [number for number in ranks if number != 2 and number != 8]
    axes.set_xticks(shown, [f"{number:,}" for number in shown])
    axes.legend(frameon=False, fontsize=FONT)
    return axes


def keeps_and_sends(points: Mapping[str, tuple[float, float]], title: str) -> Axes:
    """Draw each strategy at (bytes of state per parameter, bytes sent in units of (N-1)/N of the gradients).

    Strategies at the same point share one dot.
    """
    groups: list[tuple[float, float, list[str]]] = []
    for name, (keeps, sends) in points.items():
        near = [names for x, y, names in groups if abs(x - keeps) < 0.3 and abs(y - sends) < 0.08]
        if near:
            near[0].append(name)
        else:
            groups.append((keeps, sends, [name]))
    axes = plots.new_axes(title, "keeps: bytes of state per parameter", size=(5.6, 4))
    axes.set_ylabel("sends per step: multiples of (N-1)/N · G")
    colors = {"DDP": plots.COLORS[5], "FSDP2": plots.COLORS[1], "ZeRO": plots.COLORS[0]}
    for x, y, names in groups:
        (color,) = (color for family, color in colors.items() if names[0].startswith(family))
        axes.scatter(x, y, s=150, color=color, zorder=3)
        crowded = any(0 < abs(x - other) < 3 and 0 < other_y - y < 0.2 for other, other_y, _ in groups)
        offset, side = ((0, -11), "top") if crowded else ((0, 10), "bottom")
        style = {"color": color, "fontsize": FONT, "fontweight": "bold"}
        axes.annotate("\n".join(names), (x, y), offset, textcoords="offset points", ha="center", va=side, **style)
    axes.text(6.1, 1.66, "better: less of both", fontsize=FONT, style="italic", color=plots.COLORS[2])
    axes.set(xlim=(6, 18), ylim=(1.6, 3.4), yticks=(2, 2.5, 3), xticks=(8, 10, 12, 14, 16))
    for label in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontsize(FONT)
    return axes
