# SPDX-License-Identifier: Apache-2.0
"""What all figures share: colours, panels, bars and lines. Every axis of values starts at zero."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
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
TITLE, LEGEND_LINE, CAPTION_LINE = 0.42, 0.21, 0.16  # heights in inches
UNITS = {"1": "without a unit", "us": "µs", "%": "percent"}


@dataclass(frozen=True)
class Chart:
    """One figure: what it is called, of what data it is, and how it is drawn."""

    name: str  #: of its file
    title: str
    note: str  #: what it shows and how to read it
    records: Sequence[Record]
    size: tuple[float, float]  #: of its panels, in inches
    draw: Callable[[Figure], None]
    legend: Sequence[str] = ()  #: what each style stands for, in their order, or in that of `looks`
    looks: Sequence[Mapping[str, Any]] = ()
    as_lines: bool = False

    @property
    def caption(self) -> str:
        return " ".join([self.note, *caption(self.records)])

    def png(self, alone: bool) -> bytes:
        """With its title and its caption, where it is to stand alone."""
        width, height = self.size
        columns = self._legend_columns()
        title = TITLE if alone else 0.1
        above = title + LEGEND_LINE * -(-len(self.legend) // columns)
        lines = textwrap.wrap(self.caption, int(width * 16), break_on_hyphens=False) if alone else []
        below = CAPTION_LINE * len(lines) + (0.1 if lines else 0)
        total = above + height + below
        figure = Figure((width, total), dpi=DPI)
        figure.set_layout_engine("constrained", rect=(0, below / total, 1, height / total))
        if alone:
            figure.text(0.5, 1 - 0.09 / total, self.title, ha="center", va="top", fontsize=12, fontweight="bold")
        if self.legend:
            above_panels = figure.legend(
                handles=self._handles(),
                loc="upper center",
                bbox_to_anchor=(0.5, 1 - (title - 0.05) / total),
                ncols=columns,
                fontsize=9,
                frameon=False,
            )
            above_panels.set_in_layout(False)  # room is kept for it already
        self.draw(figure)
        figure.text(
            0.06 / width, 0.06 / total, "\n".join(lines), fontsize=8, color="#333333", linespacing=1.35, va="bottom"
        )
        out = BytesIO()
        # No date and no version, so that the same data give the same file.
        figure.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def _legend_columns(self) -> int:
        """As many as fit beside each other."""
        longest = max(map(len, self.legend), default=0) * 0.072 + 0.55
        return max(1, min(len(self.legend), int(self.size[0] / longest)))

    def _handles(self) -> list[Line2D | Patch]:
        if self.as_lines:
            return [Line2D([], [], label=label, **line_style(index)) for index, label in enumerate(self.legend)]
        looks = self.looks or [style(index) for index in range(len(self.legend))]
        return [Patch(label=label, **look) for label, look in zip(self.legend, looks, strict=True)]


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


def bars(
    axis: Axes,
    categories: Sequence[str],
    groups: Sequence[Sequence[float | None]],
    looks: Sequence[Mapping[str, Any]] = (),
    told: bool = False,
) -> None:
    """For each category a bar of each group, side by side; `told` writes its value above each."""
    width = 0.8 / max(1, len(groups))
    for index, values in enumerate(groups):
        look = looks[index] if looks else style(index)
        for category, value in enumerate(values):
            place = category + (index - (len(groups) - 1) / 2) * width
            if value is None:
                axis.annotate(
                    "no data",
                    (place, 0),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=90,
                    fontsize=7,
                    color="#777777",
                )
                continue
            axis.bar(place, value, width, **look)
            if told:
                axis.annotate(
                    _report.number(value), (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=8
                )
    axis.set_xticks(range(len(categories)), categories)
    _centre(axis, len(categories), 0.1)
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
    _centre(axis, len(categories), -0.2)
    from_zero(axis)


def _centre(axis: Axes, places: int, margin: float) -> None:
    """No less room than two places take, so that a single bar does not fill the panel."""
    middle, half = (places - 1) / 2, max(places, 2) / 2 + margin
    axis.set_xlim(middle - half, middle + half)


def style(colour: int, hatch: int | None = None) -> dict[str, Any]:
    """Of a bar; each colour has its own hatch, unless another is asked for."""
    return {
        "facecolor": COLOURS[colour % len(COLOURS)],
        "hatch": HATCHES[(colour if hatch is None else hatch) % len(HATCHES)],
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
