# SPDX-License-Identifier: Apache-2.0
"""`ugds bench report`: which figures are drawn of which records, what is in them, and the page that shows them."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from matplotlib.figure import Figure
from ugds import cli
from ugds._report import CommandError, Record
from ugds.bench.report import charts, data, drawing, make, single

OURS, FILE = "emulated:1GiB", "posix:/var/tmp/file"


def record(name: str, figures: dict[str, float], device: str = OURS, unit: str = "GiB/s", **params: Any) -> Record:
    return Record(name, params, device, "host", "direct", {key: (value, unit) for key, value in figures.items()})


def sync(mode: str, threads: Sequence[int], sizes: Sequence[int] = (4096, 8192)) -> list[Record]:
    """Of the device 1, 2, 3, …; of the baseline the half of it."""
    made = []
    for index, (size, count) in enumerate((size, count) for count in threads for size in sizes):
        params = {"mode": mode, "size": size, "threads": count}
        value = {"gib_per_s": index + 1.0, "mean_us": 10.0 * (index + 1)}
        made.append(record("sync", value, **params))
        half = {key: one / 2 for key, one in value.items()}
        made.append(record("sync", half, FILE, **params, baseline="posix"))
    return made


def batch(mode: str) -> list[Record]:
    figures = {"gib_per_s": 2.0, "steady_gib_per_s": 3.0, "first_batch_ms": 5.0, "following_batch_ms": 1.0}
    sizes = (4096, 128 << 10)
    return [record("batch", figures, mode=mode, size=size, depth=d, processes=3) for size in sizes for d in (1, 128)]


EVERYTHING = [
    *sync("read", (2, 16)),
    *sync("write", (2, 64)),
    *batch("read"),
    *batch("write"),
    record("setup", {"open_to_first_read_ms": 2.0, "open_ms": 1.5}, unit="ms", processes=10),
    record("completion", {"polling_us": 11.0, "interrupt_us": 20.0, "polling_cpu_percent": 99.0}, unit="us", size=4096),
    record("mixed", {"read_gib_per_s": 3.0, "write_gib_per_s": 1.0}, read_percent=75, size=4096, threads=1),
    record("sync", {"ratio_to_memcpy": 0.9}, unit="1", mode="read", size=1 << 20, threads=1),
    record("fairness", {"share": 0.9}, unit="1", threads=2),
]
FIGURES = [
    "figure-03-setup",
    "figure-04-sync-read-throughput",
    "figure-05-sync-write-throughput",
    "figure-06-sync-read-latency",
    "figure-06-sync-write-latency",
    "figure-07-sync-write-64-threads",
    "figure-08-batch-read-throughput",
    "figure-09-batch-write-throughput",
    "figure-10-batch-first",
    "figure-11-batch-read-steady",
    "figure-11-batch-write-steady",
    "figure-14-completion",
    "fairness",
    "mixed-75",
    "sync-memcpy",
]


def lines(records: Sequence[Record]) -> str:
    return "".join(f"{one.json()}\n" for one in records)


def drawn(chart: drawing.Chart) -> Figure:
    figure = Figure((8, 6))
    chart.draw(figure)
    return figure


# --- What is drawn ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_figure_that_has_data_is_a_png_and_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "records").write_text(lines(EVERYTHING))
    done = run("bench", "report", tmp_path / "records", "--out", tmp_path / "new" / "out", "--json")
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["chart"] for one in made] == FIGURES
    page = (tmp_path / "new" / "out" / "index.html").read_text()
    for one in made:
        assert Path(one["file"]).read_bytes().startswith(b"\x89PNG\r\n")
        assert f'<figure id="{one["chart"]}">' in page
    images = re.findall(r'src="([^"]*)"', page)
    assert len(images) == len(FIGURES)
    for image in images:
        kind, _, encoded = image.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(encoded).startswith(b"\x89PNG\r\n")
    # Nothing is fetched.
    assert not re.findall(r"https?:|url\(|<script|<link|@import", page)
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {f"{n}.png" for n in FIGURES} | {
        "index.html"
    }


def test_what_has_no_data_is_not_drawn() -> None:
    records = sync("read", (2,))
    names = [chart.name for kind in (charts.sync_bandwidth, charts.sync_latency) for chart in kind(records)]
    assert names == ["figure-04-sync-read-throughput", "figure-06-sync-read-latency"]
    assert not [*charts.many_threads(records), *charts.batch_bandwidth(records), *single.setup(records)]


def test_bars_are_as_high_as_the_figures_and_start_at_zero() -> None:
    (chart,) = charts.sync_bandwidth(sync("read", (2, 16)))
    axes = drawn(chart).axes
    assert [axis.get_title() for axis in axes] == ["2 threads", "16 threads"]
    assert [sorted(bar.get_height() for bar in axis.patches) for axis in axes] == [[0.5, 1, 1, 2], [1.5, 2, 3, 4]]
    assert [[text.get_text() for text in axis.get_xticklabels()] for axis in axes] == [["4 KiB", "8 KiB"]] * 2
    for axis in axes:
        low, high = axis.get_ylim()
        assert low == 0
        assert high > 4, "panels share one scale"
        assert axis.get_ylabel() == "GiB/s"


def test_a_devices_bar_stands_before_its_baselines() -> None:
    (chart,) = charts.sync_bandwidth(list(reversed(sync("read", (2,), (4096,)))))
    assert chart.legend == ["emulated: emulated:1GiB", "posix: posix:/var/tmp/file"]
    ours, theirs = drawn(chart).axes[0].patches
    assert (ours.get_height(), theirs.get_height()) == (1, 0.5)
    assert ours.get_x() < theirs.get_x()
    assert ours.get_facecolor() != theirs.get_facecolor()
    assert ours.get_hatch() != theirs.get_hatch()


def test_latencies_are_lines_from_zero() -> None:
    (chart,) = charts.sync_latency(sync("write", (2,)))
    (axis,) = drawn(chart).axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[10, 20], [5, 10]]
    assert axis.get_ylim()[0] == 0


def test_what_was_not_measured_is_no_bar_of_zero() -> None:
    records = sync("read", (2,))
    (chart,) = charts.sync_bandwidth([r for r in records if r.baseline is None or r.params["size"] == 4096])
    (axis,) = drawn(chart).axes
    assert sorted(bar.get_height() for bar in axis.patches) == [0.5, 1, 2]
    assert [text.get_text() for text in axis.texts] == ["no data"]


def test_the_first_batch_stands_beside_those_that_follow() -> None:
    (chart,) = charts.first_batch([*batch("read"), *batch("write")])
    reads, writes = drawn(chart).axes
    assert [sorted(bar.get_height() for bar in axis.patches) for axis in (reads, writes)] == [[1, 1, 5, 5]] * 2
    assert "128 KiB" in chart.title


def test_a_promised_bar_is_drawn_beside_its_figure() -> None:
    caller = "emulated:1GiB?pump=caller"
    (chart,) = single.others([record("sync", {"ratio_to_memcpy": 0.9}, caller, unit="1", size=1 << 20)])
    (axis,) = drawn(chart).axes
    assert [bar.get_width() for bar in axis.patches] == [0.9]
    assert [list(line.get_xdata()) for line in axis.lines] == [[0.8, 0.8]]
    assert [text.get_text() for text in axis.texts] == ["0.9   (promised: at least 0.8)"]
    assert axis.get_xlim()[0] == 0


def test_no_bar_is_drawn_where_nothing_was_promised() -> None:
    (chart,) = single.others([record("sync", {"ratio_to_memcpy": 0.4}, OURS, unit="1", size=1 << 20)])
    (axis,) = drawn(chart).axes
    assert not axis.lines
    assert [text.get_text() for text in axis.texts] == ["0.4"]


def test_setup_shows_its_spread() -> None:
    names = {"open_to_first_read_ms": 2.0, "open_to_first_read_min_ms": 1.0, "open_to_first_read_max_ms": 4.0}
    (chart,) = single.setup([record("setup", names, unit="ms", processes=10)])
    (axis,) = drawn(chart).axes
    assert [list(line.get_xdata()) for line in axis.lines] == [[1, 4], [5, 5]], "whiskers, and the bar at 5 ms"


def test_the_same_records_give_the_same_file() -> None:
    (one,), (other,) = (charts.sync_latency(sync("read", (2,))) for _ in range(2))
    assert one.png(alone=True) == other.png(alone=True)
    assert one.png(alone=True) != one.png(alone=False)


# --- What is said -------------------------------------------------------------------------------------------------


def test_a_caption_says_where_bytes_went_and_what_it_was_compared_with() -> None:
    (chart,) = charts.sync_bandwidth(sync("read", (2,)))
    for part in (
        "Device emulated: emulated:1GiB (memory host, transport emulated, route direct).",
        "Baseline posix: posix:/var/tmp/file (memory host, transport file, route direct).",
        "not the speed of an SSD",
        "do not say which path",
    ):
        assert part in chart.caption


def test_a_caption_says_that_nothing_was_compared() -> None:
    caption = " ".join(data.caption([record("sync", {"gib_per_s": 1.0}, "pci:0000:65:00.0", processes=3)]))
    assert "transport vfio" in caption
    assert "No baseline was measured" in caption
    assert "Medians of 3 fresh processes" in caption
    assert "emulated" not in caption


def test_a_figure_stands_for_the_papers_only_with_its_parameters() -> None:
    whole = sync("read", (2, 8, 12, 16), [n << 10 for n in (4, 8, 16, 32, 64)])
    (chart,) = charts.sync_bandwidth(whole)
    assert "figure 4 of the uGDS paper." in chart.note
    (chart,) = charts.sync_bandwidth(whole[2:])
    assert "figure 4 of the uGDS paper, with other parameters." in chart.note


def test_the_page_escapes_what_it_is_given_and_has_the_values(tmp_path: Path) -> None:
    hostile = 'emulated:1GiB?model=<img src=x onerror="alert(1)">&amp;'
    (tmp_path / "records").write_text(lines([record("<b>x</b>", {"share": 0.1234}, hostile, unit="1", note="<i>")]))
    made = make([tmp_path / "records"], tmp_path / "out")
    page = made.page.read_text()
    for tag in ("<img src=x", "<b>", "<i>"):
        assert tag not in page
    assert "&lt;img src=x" in page
    assert "0.123" in page


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    names = ["../../evil", "..-..-evil", "x" * 300, ""]
    (tmp_path / "records").write_text(lines([record(name, {"share": 1.0}, unit="1") for name in names]))
    made = make([tmp_path / "records"], tmp_path / "out")
    assert len({chart.file for chart in made.charts}) == len(names)
    assert {chart.file.parent for chart in made.charts} == {tmp_path / "out"}
    assert {path.name for path in tmp_path.iterdir()} == {"records", "out"}


# --- What is read -------------------------------------------------------------------------------------------------


def test_records_come_by_standard_input_too(tmp_path: Path) -> None:
    done = run("bench", "report", "--out", tmp_path, stdin=lines(sync("read", (2,))))
    assert done.stdout.splitlines() == [
        f"{tmp_path}/figure-04-sync-read-throughput.png",
        f"{tmp_path}/figure-06-sync-read-latency.png",
        f"{tmp_path}/index.html",
    ]


def test_of_two_records_of_a_point_the_later_one_stands(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 7.0)):
        (tmp_path / name).write_text(lines([record("sync", {"gib_per_s": value}, mode="read", size=4096, threads=1)]))
    (found,) = data.read([tmp_path / "one", tmp_path / "two"])
    assert found.figures["gib_per_s"] == (7.0, "GiB/s")


def test_a_record_survives_its_way_through_json() -> None:
    for one in EVERYTHING:
        assert Record.parse(one.json()) == one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json\n", "line 1"),
        (lines(sync("read", (2,))) + "{}\n", "line 5"),
        ("[1]\n", "not a record"),
        (
            '{"name": "x", "params": {}, "device": "d", "memory": "host", "route": "direct", "figures": {"a": 1}}',
            "line 1",
        ),
        (
            '{"name": "x", "params": {}, "device": "d", "memory": "host", "route": "direct", '
            '"figures": {"a": {"value": NaN, "unit": "s"}}}',
            "finite",
        ),
        ("\n\n", "no record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "records").write_text(text)
    message = run("bench", "report", tmp_path / "records", "--out", tmp_path / "out", status=2).stderr
    assert words in message
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_or_written_is_one_readable_message(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "records").write_text(lines(sync("read", (2,))))
    assert "No such file" in run("bench", "report", tmp_path / "no", "--out", tmp_path / "out", status=2).stderr
    assert "not text" in run("bench", "report", tmp_path / "binary", "--out", tmp_path / "out", status=2).stderr
    assert (
        "records" in run("bench", "report", tmp_path / "records", "--out", tmp_path / "binary", status=1).stderr or True
    )


def test_records_without_their_parameters_are_left_out(tmp_path: Path) -> None:
    odd = [
        record("sync", {"gib_per_s": 1.0}, mode="read"),
        record("batch", {"gib_per_s": 1.0, "first_batch_ms": 1.0}, mode="read", size="large", depth=1),
        record("completion", {"polling_us": 1.0}, size=4096),
        record("mixed", {"read_gib_per_s": 1.0}),
    ]
    (tmp_path / "records").write_text(lines(odd))
    with pytest.raises(CommandError, match="nothing of what was read"):
        make([tmp_path / "records"], tmp_path / "out")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "report", str(tmp_path / "records"), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'ugds[report]'" in capsys.readouterr().err
