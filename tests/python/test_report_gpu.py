# SPDX-License-Identifier: Apache-2.0
"""`ugds bench report` of GPU memory: a colour for each route, and no record lost to one of the other route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from ugds._report import Record
from ugds.bench.report import data, gpu, make, single
from ugds.bench.report.drawing import Chart

DEVICE = "emulated:1GiB?latency=10us&bandwidth=5.5GiB/s"


def record(name: str, route: str, figures: dict[str, float], **params: Any) -> Record:
    return Record(name, params, DEVICE, "cuda", route, {key: (value, "1") for key, value in figures.items()})


def serialized(route: str, scale: float) -> list[Record]:
    names = ("stream_gib_per_s", "stream_mean_us", "sync_gib_per_s", "sync_mean_us", "extra_us")
    return [
        record("stream", route, {name: scale * (1 + i) for i, name in enumerate(names)}, figure=12, size=size)
        for size in (4096, 8192)
    ]


def overlap(route: str, scale: float) -> Record:
    names = ("sequential_ms", "overlap_ms", "pipelined_ms", "ideal_ms")
    return record("overlap", route, {name: scale * (4 - i) for i, name in enumerate(names)})


def streams(route: str, scale: float) -> list[Record]:
    return [
        record("stream", route, {"gib_per_s": scale * i, "share_of_sync": 1.0}, figure=16, way=way)
        for i, way in enumerate(("sync", "stream", "streams"), 1)
    ]


def drawn(chart: Chart) -> Figure:
    figure = Figure((8, 6))
    chart.draw(figure)
    return figure


def test_serialized_reads_are_a_line_for_each_way_and_route() -> None:
    (chart,) = gpu.serialized(serialized("direct", 1) + serialized("staged", 10))
    throughput, time = drawn(chart).axes
    assert [list(line.get_ydata()) for line in throughput.lines] == [[1, 1], [3, 3], [10, 10], [30, 30]]
    assert [list(line.get_ydata()) for line in time.lines] == [[2, 2], [4, 4], [20, 20], [40, 40]]
    ways = ("on a stream", "synchronous")
    assert list(chart.legend) == [f"{way}, {route}" for route in ("direct", "staged") for way in ways]
    assert "with other parameters" in chart.note


def test_schedules_stand_beside_their_least_time() -> None:
    (chart,) = gpu.overlap([overlap("direct", 1), overlap("staged", 2)])
    (axis,) = drawn(chart).axes
    assert [patch.get_height() for patch in axis.patches] == [4, 3, 2, 1, 8, 6, 4, 2]


def test_one_stream_and_many_stand_beside_synchronous_reads() -> None:
    (chart,) = gpu.streams(streams("staged", 2))
    (axis,) = drawn(chart).axes
    assert [patch.get_height() for patch in axis.patches] == [2, 4, 6]


def test_records_of_other_benchmarks_are_none_of_these() -> None:
    other = [record("stream", "direct", {"submission_p50_us": 1.0}), record("sync", "staged", {"staged_share": 0.9})]
    assert gpu.serialized(other) + gpu.overlap(other) + gpu.streams(other) == []


def test_both_routes_of_one_point_are_kept(tmp_path: Path) -> None:
    both = [record("register", route, {"register_ms": 1.0}, size=4096) for route in ("direct", "staged")]
    file = tmp_path / "records"
    file.write_text("".join(f"{one.json()}\n" for one in [*both, both[0]]))
    assert [one.route for one in data.read([file])] == ["direct", "staged"]
    (chart,) = single.others(both)
    labels = [label.get_text() for label in drawn(chart).axes[0].get_yticklabels()]
    assert [label.partition("\n")[2] for label in labels] == ["cuda, direct", "cuda, staged"]


def test_shares_of_gpu_memory_are_drawn_with_what_is_promised(tmp_path: Path) -> None:
    figures = {"staged_share": 0.9, "gpu_gib_per_s": 4.0}
    (chart,) = single.others([record("sync", "staged", figures, mode="read", size=1 << 20)])
    assert chart.name == "sync-gpu"
    told = [text.get_text() for axis in drawn(chart).axes for text in axis.texts]
    assert any("promised: at least 0.85" in text for text in told)


@pytest.mark.slow
def test_each_is_a_file_under_the_papers_number(tmp_path: Path) -> None:
    records = [*serialized("direct", 1), overlap("direct", 1), *streams("direct", 1)]
    (tmp_path / "records").write_text("".join(f"{one.json()}\n" for one in records))
    made = make([tmp_path / "records"], tmp_path / "out")
    assert [chart.name for chart in made.charts] == [
        "figure-12-stream",
        "figure-13-overlap",
        "figure-16-streams",
        "overlap",
    ]
