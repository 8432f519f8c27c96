# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmarks that have a few figures a device, and of those that this release does not know."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ugds import _report
from ugds import sizes as units
from ugds._report import Record
from ugds.bench import was_crowded
from ugds.bench.bars import Bar, bar_of
from ugds.bench.figures import SETUP_PROCESSES
from ugds.bench.report import drawing
from ugds.bench.report.data import series, shortened, values_of
from ugds.bench.report.drawing import BAR_COLOUR, COLOURS, Chart

Records = Sequence[Record]
#: What has figures of its own in `charts` or here; all else is drawn by `others`.
KNOWN = ("sync", "mixed", "batch", "setup", "completion")
MOST_ROWS = 40


def setup(records: Records) -> list[Chart]:
    found = [record for record in records if record.name == "setup"]
    if not found:
        return []
    stages = {"open_ms": "open", "register_ms": "register a buffer", "first_read_ms": "first read"}
    by = series(found)

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, len(by), 1, share=False)
        for axis, one in zip(axes, by, strict=True):
            rows: list[tuple[str, float, tuple[float, float] | None, Bar | None]] = []
            for name, word in stages.items():
                if (value := one.value(name)) is not None:
                    rows.append((word, value, None, None))
            for name, word in (
                ("open_to_first_read", "nothing to first byte"),
                ("reopen_to_first_read", "again, in one process"),
            ):
                if (value := one.value(f"{name}_ms")) is not None:
                    low, high = one.value(f"{name}_min_ms"), one.value(f"{name}_max_ms")
                    spread = (value if low is None else low, value if high is None else high)
                    rows.append((word, value, spread, bar_of(f"{name}_ms", one.device)))
            _rows(axis, rows, "ms")
            axis.set_title(one.label, fontsize=10)

    processes = values_of(found, "processes")
    note = (
        f"Stands for figure 3 of the uGDS paper{'' if SETUP_PROCESSES in processes else ', with other parameters'}. "
        "Bars are medians, each stage's its own; whiskers go from the fastest to the slowest."
    )
    title = "From nothing to the first byte"
    return [Chart("figure-03-setup", title, note, found, (8.5, 2.4 * len(by)), draw)]


def completion(records: Records) -> list[Chart]:
    found = [
        record
        for record in records
        if record.name == "completion"
        and {"polling_us", "interrupt_us"} <= set(record.figures)
        and isinstance(record.params.get("size"), int)
    ]
    if not found:
        return []

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, len(found) + 1, len(found) + 1, share=False)
        for axis, record in zip(axes, found, strict=False):
            taken: list[list[float | None]] = [[record.figures[f"{way}_us"][0]] for way in ("polling", "interrupt")]
            drawing.bars(axis, [""], taken, told=True)
            axis.set_xticks([])
            axis.set_title(f"latency, {units.format(record.params['size'])} reads", fontsize=10)
            axis.set_ylabel("µs, median", fontsize=9)
        cpu = [
            [record.figures.get(f"{way}_cpu_percent", (None, ""))[0] for record in found]
            for way in ("polling", "interrupt")
        ]
        drawing.bars(axes[-1], [units.format(record.params["size"]) for record in found], cpu, told=True)
        axes[-1].set_title("CPU of the reading thread", fontsize=10)
        axes[-1].set_ylabel("percent of one processor", fontsize=9)

    note = "Stands for figure 14 of the uGDS paper. Each panel has its own scale."
    if was_crowded(found):
        note += " The polling thread did not have its processor for itself, and what other programs cost is in it."
    title = "Polling against sleeping for interrupts"
    width = 3.4 * (len(found) + 1)
    return [
        Chart("figure-14-completion", title, note, found, (width, 3.2), draw, ["polling", "sleeping for interrupts"])
    ]


def others(records: Records) -> list[Chart]:
    """Every figure of what has no form of its own, against the bar that the project promises, where there is one."""
    memcpy = [record for record in records if "ratio_to_memcpy" in record.figures]
    made = [_generic("sync-memcpy", "Reads of 1 MiB against memcpy", memcpy)] if memcpy else []
    gpu = [record for record in records if record.name == "sync" and "gpu_gib_per_s" in record.figures]
    if gpu:
        made.append(_generic("sync-gpu", "Reads and writes of GPU memory, against what they are made of", gpu))
    # What stands for a figure of the paper has been drawn as that.
    rest = [record for record in records if record.name not in KNOWN and "figure" not in record.params]
    for name in dict.fromkeys(record.name for record in rest):
        found = [record for record in rest if record.name == name]
        made.append(_generic(_safe(name), f"Figures of ugds bench {name}", found))
    return made


def _safe(name: str) -> str:
    """As a file's name: records come from anywhere."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:60] or "unnamed"


def _generic(name: str, title: str, records: Records) -> Chart:
    by_unit: dict[str, list[tuple[str, float, None, Bar | None]]] = {}
    varied = [key for key in dict.fromkeys(k for r in records for k in r.params) if _varies(records, key)]
    devices = _report.short_names(records)
    places = {(record.memory, record.route) for record in records if record.baseline is None}
    for record in records:
        said = [record.memory, record.route] if len(places) > 1 else []
        said += [f"{key} {_word(key, record.params[key])}" for key in varied if key in record.params]
        said += [devices[record.device, record.baseline]] if len(devices) > 1 else []
        for figure, (value, unit) in record.figures.items():
            label = figure + (f"\n{shortened(', '.join(said), 48)}" if said else "")
            by_unit.setdefault(unit, []).append((label, value, None, bar_of(figure, record.device, record.memory)))
    shown = {
        unit: sorted(rows, key=lambda row: row[0].partition("\n")[0])[:MOST_ROWS] for unit, rows in by_unit.items()
    }
    left_out = sum(map(len, by_unit.values())) - sum(map(len, shown.values()))
    heights = [len(rows) for rows in shown.values()]

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for (unit, rows), (axis,) in zip(shown.items(), grid, strict=True):
            axis.spines[["top", "right"]].set_visible(False)
            _rows(axis, rows, drawing.UNITS.get(unit, unit))

    note = "A vertical mark is the bar that the project promises to keep." if _has_bar(shown) else "By unit."
    note += f" {left_out} more figures are in the table only." if left_out else ""
    size = (9.0, 0.55 * len(shown) + 0.42 * sum(heights))
    return Chart(name, title, note, records, size, draw)


def _varies(records: Records, key: str) -> bool:
    return key != "baseline" and len({repr(record.params.get(key)) for record in records}) > 1


def _word(key: str, value: object) -> str:
    return units.format(value) if key == "size" and isinstance(value, int) else str(value)


def _has_bar(shown: dict[str, list[tuple[str, float, None, Bar | None]]]) -> bool:
    return any(bar is not None for rows in shown.values() for *_, bar in rows)


def _rows(axis: Axes, rows: Sequence[tuple[str, float, tuple[float, float] | None, Bar | None]], unit: str) -> None:
    """A horizontal bar each, from the top: its label, value, from where to where it was spread, and its bar."""
    for place, (_, value, spread, bar) in enumerate(rows):
        axis.barh(place, value, 0.62, color=COLOURS[0])
        end, text = max(value, 0.0), _report.number(value)
        if spread is not None:
            text += f"   ({_report.number(spread[0])} to {_report.number(spread[1])})"
            axis.plot(spread, (place, place), color=BAR_COLOUR, linewidth=1.2, marker="|", markersize=8)
            end = max(end, spread[1])
        if bar is not None:
            axis.plot((bar.limit, bar.limit), (place - 0.4, place + 0.4), color=COLOURS[5], linewidth=2.5)
            text += f"   (promised: {bar})"
            end = max(end, bar.limit)
        axis.annotate(
            text,
            (end, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axis.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_xlabel(unit, fontsize=9)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    axis.grid(visible=False, axis="y")
    axis.set_axisbelow(True)
    low, high = min(0.0, axis.dataLim.x0), max(0.0, axis.dataLim.x1)
    axis.set_xlim(low * 1.1, high * 1.35 if high > 0 else 1.0)
