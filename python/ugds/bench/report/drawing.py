# SPDX-License-Identifier: Apache-2.0
"""What all figures share: colours, panels, bars and lines. Every axis of values starts at zero."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ugds import _report
from ugds._report import Record
from ugds.bench.report.data import caption

# Okabe and Ito's colours, which those with any of the common colour blindnesses tell apart; hatches and markers say the
# same without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":", "-", "--")
BAR_COLOUR = "#000000"
DPI = 150
UNITS = {"1": "ratio", "us": "µs", "%": "percent"}


@dataclass(frozen=True)
class Chart:
    """One figure: what it is called, of what data it is, and how it is drawn."""

    name: str  #: of its file
    title: str
    note: str  #: what it shows and how to read it
    records: Sequence[Record]
    size: tuple[float, float]  #: in inches, without its caption
    draw: Callable[[Figure], None]

    @property
    def caption(self) -> str:
        return " ".join([self.note, *caption(self.records)])

    def png(self, captioned: bool) -> bytes:
        """With its caption, where it is to stand alone."""
        width, height = self.size
        lines = textwrap.wrap(self.caption, int(width * 15.5), break_on_hyphens=False) if captioned else []
        figure = Figure((width, height + 0.16 * len(lines)), dpi=DPI, layout="constrained")
        figure.suptitle(self.title, fontsize=12, fontweight="bold")
        self.draw(figure)
        if captioned:
            figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8, color="#333333", linespacing=1.35)
        out = BytesIO()
        # No date and no version, so that the same data give the same file.
        figure.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()


def panels(figure: Figure, count: int, columns: int, share: bool) -> list[Axes]:
    """As many, in rows; with one scale for all, or each with its own."""
    columns = min(columns, count)
    rows = -(-count // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share)
    axes = [axis for row in grid for axis in row]
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis in axes[:count]:
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9, labelleft=True)
    return axes[:count]


def bars(axis: Axes, categories: Sequence[str], groups: Sequence[Sequence[float | None]], told: bool = False) -> None:
    """For each category a bar of each group, side by side; `told` writes its value above each."""
    width = 0.8 / max(1, len(groups))
    for index, values in enumerate(groups):
        places = [c + (index - (len(groups) - 1) / 2) * width for c in range(len(categories))]
        there = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        axis.bar([p for p, _ in there], [v for _, v in there], width, **style(index))
        for place, value in there if told else ():
            axis.annotate(
                _report.number(value), (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        for place in (p for p, v in zip(places, values, strict=True) if v is None):
            axis.annotate("no data", (place, 0), ha="center", va="bottom", rotation=90, fontsize=7, color="#777777")
    axis.set_xticks(range(len(categories)), categories)
    axis.set_xlim(-0.6, len(categories) - 0.4)
    from_zero(axis)


def lines(axis: Axes, categories: Sequence[str], groups: Sequence[Sequence[float | None]]) -> None:
    for index, values in enumerate(groups):
        there = [(place, value) for place, value in enumerate(values) if value is not None]
        axis.plot(
            [p for p, _ in there],
            [v for _, v in there],
            **line_style(index),
        )
    axis.set_xticks(range(len(categories)), categories)
    axis.set_xlim(-0.3, len(categories) - 0.7)
    from_zero(axis)


def style(index: int) -> dict[str, Any]:
    return {
        "facecolor": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def line_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
        "markersize": 5,
    }


def from_zero(axis: Axes, room: float = 1.12) -> None:
    """Room for what is written above the highest value. Panels that share their scale take the largest."""
    shared = list(axis.get_shared_y_axes().get_siblings(axis))
    highest = max((one.dataLim.y1 for one in shared if one.has_data()), default=1.0)
    axis.set_ylim(0, highest * room if highest > 0 else 1.0)


def legend(figure: Figure, labels: Sequence[str], as_lines: bool = False) -> None:
    """Above the panels, in one line where that is not too long."""
    handles: list[Line2D | Patch] = []
    for index, label in enumerate(labels):
        handles.append(
            Line2D([], [], label=label, **line_style(index)) if as_lines else Patch(label=label, **style(index))
        )
    one_line = sum(map(len, labels)) + 8 * len(labels) < figure.get_figwidth() * 11
    columns = len(labels) if one_line else 1
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, fontsize=9, frameon=False)
