# SPDX-License-Identifier: Apache-2.0
"""The figures that there can be. Each function takes all records and gives those charts that it has data for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from ugds import sizes as units
from ugds._report import Record
from ugds.bench.report import drawing
from ugds.bench.report.data import Series, series, values_of
from ugds.bench.report.drawing import Chart

Records = Sequence[Record]


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


def _sizes(values: Sequence[int]) -> list[str]:
    return [units.format(value) for value in values]


def _grid(
    records: Records,
    figure_name: str,
    panel: tuple[str, Callable[[Any], str]],
    category: tuple[str, Callable[[Any], str], str],
    unit: str,
    as_lines: bool = False,
    **fixed: Any,
) -> tuple[tuple[float, float], Callable[[Figure], None]]:
    """A panel for each value of one parameter, in it a place for each value of another, and there what each series
    has: size and drawing. Bars share one scale; lines have one a panel."""
    panel_name, panel_title = panel
    category_name, category_label, axis_label = category
    panel_values, values = values_of(records, panel_name), values_of(records, category_name)
    columns = 2 if len(panel_values) in (2, 4) else min(3, len(panel_values))

    def draw(figure: Figure) -> None:
        found = series(records)
        axes = drawing.panels(figure, len(panel_values), columns, share=not as_lines)
        put = drawing.lines if as_lines else drawing.bars
        for axis, value in zip(axes, panel_values, strict=True):
            points = [{**fixed, panel_name: value, category_name: one} for one in values]
            put(
                axis,
                [category_label(one) for one in values],
                [[one.value(figure_name, **point) for point in points] for one in found],
            )
            axis.set_title(panel_title(value), fontsize=10)
            axis.set_xlabel(axis_label, fontsize=9)
            axis.set_ylabel(unit, fontsize=9)
        for axis in axes:
            drawing.from_zero(axis)
        drawing.legend(figure, [one.label for one in found], as_lines)

    return (max(6.5, 4.2 * columns), 1.2 + 2.7 * -(-len(panel_values) // columns)), draw


def _threads(value: int) -> str:
    return f"{value} thread{'' if value == 1 else 's'}"


def sync_bandwidth(records: Records) -> list[Chart]:
    made = []
    for mode, number in (("read", 4), ("write", 5), ("mixed", None)):
        found = [
            record
            for record in _named(records, "sync", "gib_per_s", mode=mode)
            if not (mode == "write" and record.params.get("threads") == 64)  # figure 7's
        ]
        if found:
            size, draw = _grid(
                found, "gib_per_s", ("threads", _threads), ("size", units.format, "request size"), "GiB/s"
            )
            what = {"read": "reads", "write": "writes", "mixed": "reads and writes in turn"}[mode]
            title = f"Throughput of synchronous {what}, by threads and request size"
            note = _stands_for(number, "Each thread has one request in flight.")
            made.append(Chart(_file(number, f"sync-{mode}-throughput"), title, note, found, size, draw))
    return made


def sync_latency(records: Records) -> list[Chart]:
    made = []
    for mode in ("read", "write"):
        # Older records have no mean.
        means = _named(records, "sync", "mean_us", mode=mode)
        figure_name, word = ("mean_us", "Mean") if means else ("p50_us", "Median")
        found = means or _named(records, "sync", "p50_us", mode=mode)
        if not found:
            continue
        size, draw = _grid(
            found, figure_name, ("threads", _threads), ("size", units.format, "request size"), "µs", as_lines=True
        )
        title = f"{word} latency of synchronous {mode}s, by threads and request size"
        note = _stands_for(6, "Each thread has one request in flight. Each panel has its own scale.")
        made.append(Chart(_file(6, f"sync-{mode}-latency"), title, note, found, size, draw))
    return made


def many_threads(records: Records) -> list[Chart]:
    found = _named(records, "sync", "gib_per_s", mode="write", threads=64)
    if not found:
        return []
    values = values_of(found, "size")

    def draw(figure: Figure) -> None:
        by = series(found)
        axes = drawing.panels(figure, 2, 2, share=False)
        latency = "mean_us" if all("mean_us" in record.figures for record in found) else "p50_us"
        for axis, name, unit, title in (
            (axes[0], "gib_per_s", "GiB/s", "throughput"),
            (axes[1], latency, "µs", f"{'mean' if latency == 'mean_us' else 'median'} latency"),
        ):
            drawing.bars(axis, _sizes(values), [[one.value(name, size=size) for size in values] for one in by])
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("request size", fontsize=9)
            axis.set_ylabel(unit, fontsize=9)
        drawing.legend(figure, [one.label for one in by])

    note = _stands_for(7, "Each thread has one request in flight.")
    return [Chart(_file(7, "sync-write-64-threads"), "Synchronous writes of 64 threads", note, found, (9.0, 4.0), draw)]


def mixed(records: Records) -> list[Chart]:
    made = []
    every = _named(records, "mixed", "read_gib_per_s")
    for percent in values_of(every, "read_percent"):
        found = [record for record in every if record.params["read_percent"] == percent]
        points = sorted({(record.params["size"], record.params["threads"]) for record in found})

        def draw(figure: Figure, found: list[Record] = found, points: list[tuple[int, int]] = points) -> None:
            by = series(found)
            axes = drawing.panels(figure, 4, 2, share=False)
            labels = [f"{units.format(size)}\n{_threads(threads)}" for size, threads in points]
            for axis, name, unit, title in zip(
                axes,
                ("read_gib_per_s", "write_gib_per_s", "read_p99_us", "write_p99_us"),
                ("GiB/s", "GiB/s", "µs", "µs"),
                ("reads: throughput", "writes: throughput", "reads: 99th percentile", "writes: 99th percentile"),
                strict=True,
            ):
                groups = [[one.value(name, size=s, threads=t) for s, t in points] for one in by]
                drawing.bars(axis, labels, groups)
                axis.set_title(title, fontsize=10)
                axis.set_ylabel(unit, fontsize=9)
                axis.tick_params(axis="x", labelsize=8)
            drawing.legend(figure, [one.label for one in by])

        title = f"Reads and writes together: {percent} in a hundred requests are reads"
        note = "Each thread has one request in flight. Each panel has its own scale."
        width = max(9.0, 1.6 * len(points))
        made.append(Chart(f"mixed-{percent}", title, note, found, (width, 6.6), draw))
    return made


def batch_bandwidth(records: Records) -> list[Chart]:
    made = []
    kinds = (
        ("gib_per_s", "read", 8, "Throughput of batched reads", "The first batch of each process is in it."),
        ("gib_per_s", "write", 9, "Throughput of batched writes", "The first batch of each process is in it."),
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
        found = _named(records, "batch", figure_name, mode=mode)
        if not found:
            continue
        size, draw = _grid(
            found,
            figure_name,
            ("size", lambda value: f"requests of {units.format(value)}"),
            ("depth", str, "requests a batch"),
            "GiB/s",
        )
        name = f"batch-{mode}-{'throughput' if figure_name == 'gib_per_s' else 'steady'}"
        made.append(Chart(_file(number, name), title, _stands_for(number, note), found, size, draw))
    return made


def first_batch(records: Records) -> list[Chart]:
    every = [r for mode in ("read", "write") for r in _named(records, "batch", "first_batch_ms", mode=mode)]
    sizes = values_of(every, "size")
    if not sizes:
        return []
    shown = 128 << 10 if 128 << 10 in sizes else sizes[-1]
    found = [record for record in every if record.params["size"] == shown]
    modes, depths = values_of(found, "mode"), values_of(found, "depth")

    def draw(figure: Figure) -> None:
        by = series(found)
        axes = drawing.panels(figure, len(modes), 2, share=False)
        labels = [f"{one.name}, {what}" for one in by for what in ("first batch", "following batches (median)")]
        for axis, mode in zip(axes, modes, strict=True):
            drawing.bars(axis, [str(depth) for depth in depths], _first_and_following(by, mode, depths))
            axis.set_title(f"{mode}s", fontsize=10)
            axis.set_xlabel("requests a batch", fontsize=9)
            axis.set_ylabel("ms", fontsize=9)
        drawing.legend(figure, labels)

    note = _stands_for(10, "Each panel has its own scale.")
    title = f"The first batch of a process against those that follow, requests of {units.format(shown)}"
    return [Chart(_file(10, "batch-first"), title, note, found, (max(6.5, 4.8 * len(modes)), 4.2), draw)]


def _first_and_following(by: Sequence[Series], mode: str, depths: Sequence[int]) -> list[list[float | None]]:
    return [
        [one.value(name, mode=mode, depth=depth) for depth in depths]
        for one in by
        for name in ("first_batch_ms", "following_batch_ms")
    ]


def _file(number: int | None, name: str) -> str:
    return name if number is None else f"figure-{number:02}-{name}"


def _stands_for(number: int | None, note: str) -> str:
    return note if number is None else f"Stands for figure {number} of the uGDS paper. {note}"
