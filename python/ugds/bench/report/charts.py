# SPDX-License-Identifier: Apache-2.0
"""The figures that there can be. Each function takes all records and gives those charts that it has data for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ugds import sizes as units
from ugds._report import Record
from ugds.bench.figures import BATCH, SYNC
from ugds.bench.report import drawing
from ugds.bench.report.data import Series, series, values_of
from ugds.bench.report.drawing import Chart

Records = Sequence[Record]
ONE_EACH = "Each thread has one request in flight."
MANY = SYNC[7].threads[0]
OWN_SCALE = "Each panel has its own scale."


#: Whole numbers that the records of a benchmark have to have for being drawn.
_NUMBERS = {"sync": ("size", "threads"), "mixed": ("read_percent", "size", "threads"), "batch": ("size", "depth")}


def _named(records: Records, name: str, figure: str, **params: Any) -> list[Record]:
    """Those of a benchmark that have a figure, and these parameters."""
    return [
        record
        for record in records
        if record.name == name
        and figure in record.figures
        and all(isinstance(record.params.get(key), int) for key in _NUMBERS[name])
        and all(record.params.get(key) == value for key, value in params.items())
    ]


@dataclass(frozen=True)
class _Param:
    """A parameter that panels or places in them stand for."""

    name: str
    word: Callable[[Any], str]
    axis: str = ""


_THREADS = _Param("threads", lambda value: f"{value} thread{'' if value == 1 else 's'}")
_SIZE = _Param("size", units.format, "request size")


def _grid(records: Records, figure_name: str, panel: _Param, place: _Param, unit: str, as_lines: bool) -> _Drawing:
    """A panel for each value of one parameter, in it a place for each value of another that it has data for, and there
    what each series has. Bars share one scale; lines have one a panel."""
    panel_values = values_of(records, panel.name)
    columns = 2 if len(panel_values) in (2, 4) else min(3, len(panel_values))
    by = series(records)

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, len(panel_values), columns, share=not as_lines)
        put = drawing.lines if as_lines else drawing.bars
        for axis, value in zip(axes, panel_values, strict=True):
            places = values_of([record for record in records if record.params[panel.name] == value], place.name)
            points = [{panel.name: value, place.name: one} for one in places]
            put(axis, list(map(place.word, places)), [[one.value(figure_name, **p) for p in points] for one in by])
            _name_axis(axis, panel.word(value), unit, place.axis)
        for axis in axes:
            drawing.from_zero(axis)

    size = (max(6.5, 4.2 * columns), 2.7 * -(-len(panel_values) // columns))
    return _Drawing(size, draw, [one.label for one in by], as_lines)


@dataclass(frozen=True)
class _Drawing:
    size: tuple[float, float]
    draw: Callable[[Figure], None]
    legend: list[str]
    as_lines: bool = False

    def chart(self, name: str, title: str, note: str, records: Records) -> Chart:
        return Chart(name, title, note, records, self.size, self.draw, self.legend, as_lines=self.as_lines)


def _name_axis(axis: Axes, title: str, unit: str, below: str = "") -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(below, fontsize=9)
    axis.set_ylabel(unit, fontsize=9)


def _but_figure_7(records: Records) -> list[Record]:
    return [r for r in records if (r.params["mode"], r.params["threads"]) != ("write", MANY)]


def sync_bandwidth(records: Records) -> list[Chart]:
    made = []
    for mode, number in (("read", 4), ("write", 5), ("mixed", None)):
        found = _but_figure_7(_named(records, "sync", "gib_per_s", mode=mode))
        if found:
            what = {"read": "reads", "write": "writes", "mixed": "reads and writes in turn"}[mode]
            title = f"Throughput of synchronous {what}, by threads and request size"
            note = f"{_stands_for(number, found)}{ONE_EACH}"
            drawn = _grid(found, "gib_per_s", _THREADS, _SIZE, "GiB/s", as_lines=False)
            made.append(drawn.chart(_file(number, f"sync-{mode}-throughput"), title, note, found))
    return made


def sync_latency(records: Records) -> list[Chart]:
    made = []
    for mode in ("read", "write"):
        # Older records have no mean.
        means = _named(records, "sync", "mean_us", mode=mode)
        figure_name, word = ("mean_us", "Mean") if means else ("p50_us", "Median")
        found = _but_figure_7(means or _named(records, "sync", "p50_us", mode=mode))
        if found:
            title = f"{word} latency of synchronous {mode}s, by threads and request size"
            note = f"{_stands_for(6, found)}{ONE_EACH} {OWN_SCALE}"
            drawn = _grid(found, figure_name, _THREADS, _SIZE, "µs", as_lines=True)
            made.append(drawn.chart(_file(6, f"sync-{mode}-latency"), title, note, found))
    return made


def many_threads(records: Records) -> list[Chart]:
    found = _named(records, "sync", "gib_per_s", mode="write", threads=MANY)
    if not found:
        return []
    values, by = values_of(found, "size"), series(found)
    latency = "mean_us" if all("mean_us" in record.figures for record in found) else "p50_us"
    word = "mean" if latency == "mean_us" else "median"

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, 2, 2, share=False)
        kinds = (("gib_per_s", "GiB/s", "throughput"), (latency, "µs", f"{word} latency"))
        for axis, (name, unit, title) in zip(axes, kinds, strict=True):
            groups = [[one.value(name, size=size) for size in values] for one in by]
            drawing.bars(axis, [units.format(value) for value in values], groups)
            _name_axis(axis, title, unit, "request size")

    drawn = _Drawing((9.0, 3.0), draw, [one.label for one in by])
    note = f"{_stands_for(7, found)}{ONE_EACH} {OWN_SCALE}"
    return [drawn.chart(_file(7, "sync-write-64-threads"), "Synchronous writes of 64 threads", note, found)]


_MIXED = (
    ("read_gib_per_s", "GiB/s", "reads: throughput"),
    ("write_gib_per_s", "GiB/s", "writes: throughput"),
    ("read_p99_us", "µs", "reads: 99th percentile"),
    ("write_p99_us", "µs", "writes: 99th percentile"),
)


def mixed(records: Records) -> list[Chart]:
    every = _named(records, "mixed", "read_gib_per_s")
    return [
        _mixed([record for record in every if record.params["read_percent"] == percent], percent)
        for percent in values_of(every, "read_percent")
    ]


def _mixed(found: Records, percent: int) -> Chart:
    points = sorted({(record.params["size"], record.params["threads"]) for record in found})
    by = series(found)

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, len(_MIXED), 2, share=False)
        labels = [f"{units.format(size)}\n{_THREADS.word(threads)}" for size, threads in points]
        for axis, (name, unit, title) in zip(axes, _MIXED, strict=True):
            groups = [[one.value(name, size=size, threads=threads) for size, threads in points] for one in by]
            drawing.bars(axis, labels, groups)
            _name_axis(axis, title, unit)
            axis.tick_params(axis="x", labelsize=8)

    drawn = _Drawing((max(9.0, 1.6 * len(points)), 5.8), draw, [one.label for one in by])
    title = f"Reads and writes together: {percent} in a hundred requests are reads"
    return drawn.chart(f"mixed-{percent}", title, f"{ONE_EACH} {OWN_SCALE}", found)


def batch_bandwidth(records: Records) -> list[Chart]:
    made = []
    with_first = "The first batch of each process is in it."
    kinds = (
        ("gib_per_s", "read", 8, "Throughput of batched reads", with_first),
        ("gib_per_s", "write", 9, "Throughput of batched writes", with_first),
        ("steady_gib_per_s", "read", 11, "Throughput of batched reads after the first batch", "The first is left out."),
        (
            "steady_gib_per_s",
            "write",
            11,
            "Throughput of batched writes after the first batch",
            "The first is left out.",
        ),
    )
    for figure_name, mode, number, title, note in kinds:
        if found := _named(records, "batch", figure_name, mode=mode):
            panel = _Param("size", lambda value: f"requests of {units.format(value)}")
            drawn = _grid(found, figure_name, panel, _Param("depth", str, "requests a batch"), "GiB/s", as_lines=False)
            name = f"batch-{mode}-{'throughput' if figure_name == 'gib_per_s' else 'steady'}"
            made.append(drawn.chart(_file(number, name), title, f"{_stands_for(number, found)}{note}", found))
    return made


def first_batch(records: Records) -> list[Chart]:
    every = [r for mode in ("read", "write") for r in _named(records, "batch", "first_batch_ms", mode=mode)]
    sizes = values_of(every, "size")
    if not sizes:
        return []
    shown = 128 << 10 if 128 << 10 in sizes else sizes[-1]
    found = [record for record in every if record.params["size"] == shown]
    modes, depths, by = values_of(found, "mode"), values_of(found, "depth"), series(found)
    # A colour a device; its first batch is plain, what follows is hatched.
    looks = [drawing.style(index, hatch) for index in range(len(by)) for hatch in (0, 1)]
    legend = [f"{one.name}, {what}" for one in by for what in ("first batch", "following batches (median)")]

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, len(modes), 2, share=False)
        for axis, mode in zip(axes, modes, strict=True):
            drawing.bars(axis, list(map(str, depths)), _first_and_following(by, mode, depths), looks)
            _name_axis(axis, f"{mode}s", "ms", "requests a batch")

    title = f"The first batch of a process against those that follow, requests of {units.format(shown)}"
    note = f"{_stands_for(10, found)}{OWN_SCALE}"
    size = (max(7.5, 5.2 * len(modes)), 3.2)
    return [Chart(_file(10, "batch-first"), title, note, found, size, draw, legend, looks)]


def _first_and_following(by: Sequence[Series], mode: str, depths: Sequence[int]) -> list[list[float | None]]:
    return [
        [one.value(name, mode=mode, depth=depth) for depth in depths]
        for one in by
        for name in ("first_batch_ms", "following_batch_ms")
    ]


def _file(number: int | None, name: str) -> str:
    return name if number is None else f"figure-{number:02}-{name}"


def _stands_for(number: int | None, records: Records) -> str:
    """Which figure of the paper it stands for, and whether with all of its parameters."""
    if number is None:
        return ""
    if number in SYNC:
        second, wanted = "threads", set(itertools.product(SYNC[number].sizes, SYNC[number].threads))
    else:
        second, wanted = "depth", set(itertools.product(BATCH[number].sizes, BATCH[number].depths))
    there = {(record.params["size"], record.params[second]) for record in records if record.baseline is None}
    return f"Stands for figure {number} of the uGDS paper{'' if wanted <= there else ', with other parameters'}. "
