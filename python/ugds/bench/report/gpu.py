# SPDX-License-Identifier: Apache-2.0
"""Figures of GPU memory and streams: a colour for each route, where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ugds import sizes as units
from ugds._report import Record
from ugds.bench.figures import OVERLAP, STREAM
from ugds.bench.report import drawing
from ugds.bench.report.data import values_of
from ugds.bench.report.drawing import Chart

Records = Sequence[Record]
OWN_SCALE = "Each panel has its own scale."


def _value(records: Records, route: str, figure: str, **params: object) -> float | None:
    for record in reversed(records):
        if record.route == route and all(record.params.get(name) == value for name, value in params.items()):
            return record.figures[figure][0] if figure in record.figures else None
    return None


def _routes(records: Records) -> list[str]:
    return list(dict.fromkeys(record.route for record in records))


def serialized(records: Records) -> list[Chart]:
    found = [
        record
        for record in records
        if record.name == "stream"
        and {"stream_gib_per_s", "extra_us"} <= set(record.figures)
        and isinstance(record.params.get("size"), int)
    ]
    if not found:
        return []
    sizes, routes = values_of(found, "size"), _routes(found)
    legend = [f"{way}, {route}" for route in routes for way in ("on a stream", "synchronous")]

    def draw(figure: Figure) -> None:
        axes = drawing.panels(figure, 2, 2, share=False)
        for axis, (kind, unit, title) in zip(
            axes, (("gib_per_s", "GiB/s", "throughput"), ("mean_us", "µs", "mean time")), strict=True
        ):
            groups = [
                [_value(found, route, f"{way}_{kind}", size=size) for size in sizes]
                for route in routes
                for way in ("stream", "sync")
            ]
            drawing.lines(axis, list(map(units.format, sizes)), groups)
            axis.set_title(title, fontsize=10)
            axis.set_ylabel(unit, fontsize=9)
            axis.tick_params(axis="x", labelsize=8, labelrotation=30)

    whole = set(STREAM[12]) <= set(sizes)
    note = (
        f"Stands for figure 12 of the uGDS paper{'' if whole else ', with other parameters'}. "
        f"Each read is followed by a synchronisation of its stream. {OWN_SCALE}"
    )
    title = "Reads on a stream, each waited for, against synchronous ones"
    return [Chart("figure-12-stream", title, note, found, (9.0, 3.2), draw, legend, as_lines=True)]


def overlap(records: Records) -> list[Chart]:
    names = ("sequential_ms", "overlap_ms", "pipelined_ms", "ideal_ms")
    found = [record for record in records if record.name == "overlap" and set(names) <= set(record.figures)]
    if not found:
        return []
    routes = _routes(found)
    words = ("one after another", "a write beside\nthe next kernel", "all enqueued", "17 stages")

    def draw(figure: Figure) -> None:
        (axis,) = drawing.panels(figure, 1, 1, share=False)
        drawing.bars(axis, words, [[_value(found, route, name) for name in names] for route in routes], told=True)
        axis.set_ylabel("ms", fontsize=9)

    note = f"Stands for figure {OVERLAP} of the uGDS paper. 17 stages are the least that this can take."
    title = "Sixteen 1 MiB writes, and a kernel before each that takes as long"
    return [Chart(f"figure-{OVERLAP}-overlap", title, note, found, (7.0, 3.2), draw, routes)]


def streams(records: Records) -> list[Chart]:
    found = [record for record in records if record.name == "stream" and "share_of_sync" in record.figures]
    if not found:
        return []
    routes = _routes(found)
    words = {"sync": "synchronous", "stream": "one stream", "streams": "16 streams"}

    def draw(figure: Figure) -> None:
        (axis,) = drawing.panels(figure, 1, 1, share=False)
        values = [[_value(found, route, "gib_per_s", way=way) for way in words] for route in routes]
        drawing.bars(axis, list(words.values()), values, told=True)
        axis.set_ylabel("GiB/s", fontsize=9)

    note = "Stands for the right of figure 16 of the uGDS paper."
    return [Chart("figure-16-streams", "Reads of 16 MiB", note, found, (6.5, 3.2), draw, routes)]
