"""The timeline as a picture: ranks as rows, ops as boxes, fit for a paper and for the report."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeplan.plan.ops import OpKind
from pipeplan.simulate import TimedOp, Timeline
from pipeplan.units import NS_PER_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any of the common colour blindnesses can tell apart.
COLOUR_BY_KIND: Mapping[OpKind, str] = {
    OpKind.F: "#56B4E9",
    OpKind.B: "#E69F00",
    OpKind.I: "#D55E00",
    OpKind.W: "#009E73",
}
LABEL_BY_KIND: Mapping[OpKind, str] = {
    OpKind.F: "F  forward",
    OpKind.B: "B  backward",
    OpKind.I: "I  input gradient",
    OpKind.W: "W  weight gradient",
}

_WIDTH_INCHES = 7.16  # both columns of a two-column paper
_ROW_INCHES = 0.26
_MARGIN_INCHES = 0.85  # axis below, legend above
_FONT_POINTS = 7.0
_NUMBER_POINTS = 5.5
_CHARACTER_INCHES = 0.058  # of a digit at _NUMBER_POINTS, with a little air
_EDGE_POINTS = 0.3
_NARROW_INCHES = 0.03
_PALEST = 0.55  # share of white in the last stage of a rank
_SHORT_MS = 0.1  # below this the axis counts microseconds
_BITMAP_DPI = 300
_MAX_VECTOR_OPS = 6_000  # above this the boxes become a bitmap, so that the file stays small


def timeline_svg(*panels: tuple[str | None, Timeline]) -> str:
    """Return timelines below each other at one scale, as an SVG document; the same timelines give the same bytes.

    Args:
        panels: Title, if any, and timeline.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    # Text stays text (small, searchable, editable); the salt keeps identifiers the same from run to run.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipeplan"}):
        figure = draw_timelines(*panels)
        stream = io.StringIO()
        # Without date and version the file changes only when the picture does.
        FigureCanvasSVG(figure).print_figure(
            stream, format="svg", dpi=_BITMAP_DPI, metadata={"Date": None, "Creator": None}
        )
    return stream.getvalue()


def draw_timelines(*panels: tuple[str | None, Timeline]) -> Figure:
    """Return a matplotlib figure of timelines below each other; later stages of a rank are paler."""
    from matplotlib.figure import Figure

    heights = [_MARGIN_INCHES + _ROW_INCHES * timeline.num_ranks for _, timeline in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    end_ms = max(max(timeline.makespan_ns for _, timeline in panels), 1) / NS_PER_MS
    for (title, timeline), axes in zip(panels, grid[:, 0], strict=True):
        _draw_timeline(axes, timeline, title, end_ms)
    return figure


def _draw_timeline(axes: Axes, timeline: Timeline, title: str | None, end_ms: float) -> None:
    from matplotlib.patches import Patch

    inches_per_ms = (_WIDTH_INCHES - 0.6) / end_ms
    is_bitmap = sum(len(ops) for ops in timeline.ops_by_rank) > _MAX_VECTOR_OPS
    for rank, ops in enumerate(timeline.ops_by_rank):
        _draw_rank(axes, rank, ops, inches_per_ms, is_bitmap=is_bitmap)
    axes.set_xlim(0, end_ms)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(labelsize=_FONT_POINTS)
    axes.tick_params(axis="y", length=0)
    is_short = end_ms < _SHORT_MS
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms * 1e3 if is_short else ms:,.10g}")
    axes.set_xlabel("time (µs)" if is_short else "time (ms)", fontsize=_FONT_POINTS)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if timeline.makespan_ns / NS_PER_MS < end_ms:
        axes.axvline(timeline.makespan_ns / NS_PER_MS, color="black", linewidth=0.6, linestyle=":")
    kinds = sorted({timed.op.kind for ops in timeline.ops_by_rank for timed in ops})
    axes.legend(
        handles=[Patch(facecolor=COLOUR_BY_KIND[kind], label=LABEL_BY_KIND[kind]) for kind in kinds],
        loc="lower right" if title else "lower left",
        bbox_to_anchor=(1.0 if title else 0.0, 1.0),
        ncols=len(kinds),
        fontsize=_FONT_POINTS,
        frameon=False,
        handlelength=1.0,
        borderaxespad=0.1,
    )
    if title:
        axes.set_title(title, loc="left", fontsize=_FONT_POINTS)


def _draw_rank(axes: Axes, rank: int, ops: Sequence[TimedOp], inches_per_ms: float, *, is_bitmap: bool) -> None:
    stages = sorted({timed.op.stage for timed in ops})
    boxes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for timed in ops:
        start_ms, width_ms = timed.start_ns / NS_PER_MS, (timed.end_ns - timed.start_ns) / NS_PER_MS
        colour = shade(COLOUR_BY_KIND[timed.op.kind], stages.index(timed.op.stage), len(stages))
        boxes[colour].append((start_ms, width_ms))
        number = str(timed.op.micro_batch)
        if not is_bitmap and width_ms * inches_per_ms > _CHARACTER_INCHES * len(number):
            axes.text(start_ms + width_ms / 2, rank, number, ha="center", va="center_baseline", fontsize=_NUMBER_POINTS)
    for colour, spans in boxes.items():
        # White edges separate boxes; on the narrowest ones they would hide the colour.
        edges = [_EDGE_POINTS if width_ms * inches_per_ms > _NARROW_INCHES else 0.0 for _, width_ms in spans]
        axes.broken_barh(
            spans, (rank - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=edges, rasterized=is_bitmap
        )


def shade(colour: str, position: int, count: int) -> str:
    """Return ``colour`` (``#RRGGBB``) mixed with white: not at all for position 0, most for ``count - 1``."""
    white = 0.0 if count < 2 else _PALEST * position / (count - 1)
    channels = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02X}" for channel in channels)
