# SPDX-License-Identifier: Apache-2.0
"""`ugds bench` by its output: records, tables, presets and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import records, run
from ugds.bench import figures
from ugds.bench.load import Load, Result, Summary, median


@pytest.mark.parametrize("mode", ["read", "write", "mixed"])
def test_bench_sync_as_json(mode: str) -> None:
    options = ["--sizes", "4KiB,64KiB", "--threads", "1,2", "--seconds", "0.02", "--mode", mode]
    *points, ratio = records(run("bench", "sync", "--device", "emulated:64MiB", *options, "--json"))
    assert [(p["params"]["size"], p["params"]["threads"]) for p in points] == [
        (4096, 1),
        (4096, 2),
        (65536, 1),
        (65536, 2),
    ]
    for point in points:
        assert point["name"] == "sync"
        assert point["params"]["mode"] == mode
        assert list(point["figures"]) == ["gib_per_s", "requests_per_s", "p50_us", "p99_us", "mean_us"]
    assert ratio["params"]["size"] == 1 << 20
    assert ratio["figures"]["ratio_to_memcpy"]["unit"] == "1"
    assert 0 < ratio["figures"]["ratio_to_memcpy"]["value"] < 10


@pytest.mark.parametrize(
    ("option", "value"),
    [("--sizes", "5"), ("--sizes", "128MiB"), ("--threads", "0"), ("--threads", "65"), ("--sizes", "x")],
)
def test_bench_sync_refuses_what_it_does_not_measure(option: str, value: str) -> None:
    assert option in run("bench", "sync", option, value, status=2).stderr


def test_bench_sync_does_not_overwrite_a_kept_device_unasked(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(64 << 20))
    assert "--overwrite" in run("bench", "sync", "--device", f"emulated:{image}", status=2).stderr


def test_bench_setup_as_json() -> None:
    fresh, again = records(run("bench", "setup", "--processes", "2", "--repetitions", "3", "--json"))
    assert fresh["figures"]["open_to_first_read_ms"]["unit"] == "ms"
    assert fresh["figures"]["open_to_first_read_ms"]["value"] > 0
    stages = [fresh["figures"][name]["value"] for name in ("open_ms", "register_ms", "first_read_ms")]
    assert min(stages) > 0
    assert max(stages) <= fresh["figures"]["open_to_first_read_max_ms"]["value"]
    assert again["figures"]["reopen_to_first_read_ms"]["value"] > 0


def test_the_presets_of_sync_are_the_papers() -> None:
    sizes = tuple(n << 10 for n in (4, 8, 16, 32, 64))
    assert {number: (f.modes, f.threads, f.sizes, f.processes) for number, f in figures.SYNC.items()} == {
        4: (("read",), (2, 8, 12, 16), sizes, 3),
        5: (("write",), (2, 8, 12, 16), sizes, 3),
        6: (("read", "write"), (2, 8, 12, 16), sizes, 3),
        7: (("write",), (64,), sizes, 3),
    }
    ten = figures.BATCH[10]
    assert (ten.modes, ten.sizes, ten.total, ten.processes) == (("read", "write"), (128 << 10,), 64 << 20, 3)


def test_a_preset_measures_each_of_its_points_in_fresh_processes() -> None:
    options = ["--figure", "5", "--seconds", "0.001", "--processes", "1", "--device", "emulated:64MiB"]
    found = records(run("bench", "sync", *options, "--json"))
    wanted = [(4096 << power, threads) for power in range(5) for threads in (2, 8, 12, 16)]
    assert [(r["params"]["size"], r["params"]["threads"]) for r in found] == wanted
    assert {(r["name"], r["params"]["mode"], r["params"]["processes"]) for r in found} == {("sync", "write", 1)}


def test_options_beside_a_preset_narrow_it() -> None:
    options = ["--figure", "6", "--threads", "2", "--sizes", "8KiB", "--seconds", "0.001", "--processes", "2"]
    found = records(run("bench", "sync", *options, "--device", "emulated:64MiB", "--json"))
    assert [(r["params"]["mode"], r["params"]["size"], r["params"]["threads"]) for r in found] == [
        ("read", 8192, 2),
        ("write", 8192, 2),
    ]


@pytest.mark.parametrize("command", [["sync", "--figure", "3"], ["batch", "--figure", "4"], ["setup", "--figure", "4"]])
def test_a_preset_of_another_benchmark_is_wrong_usage(command: list[str]) -> None:
    assert "--figure" in run("bench", *command, status=2).stderr


@pytest.mark.parametrize("percent", range(1, 100))
def test_reads_and_writes_are_spread_evenly(percent: int) -> None:
    pattern = Load(percent, 4096, 1, 1.0).pattern
    assert pattern.count(False) * 100 == percent * len(pattern)
    # No stretch has more writes than its share, but for the one that begins it.
    for start in range(len(pattern)):
        share = (100 - percent) * 10 / 100
        assert abs(sum((pattern * 11)[start : start + 10]) - share) < 1


def test_bench_mixed_as_json() -> None:
    options = ["--sizes", "4KiB,64KiB", "--threads", "1,2", "--seconds", "0.05", "--read-percent", "75"]
    found = records(run("bench", "mixed", "--device", "emulated:64MiB", *options, "--json"))
    assert [r["params"] for r in found] == [
        {"read_percent": 75, "size": size, "threads": threads} for size in (4096, 65536) for threads in (1, 2)
    ]
    for record in found:
        got = {name: figure["value"] for name, figure in record["figures"].items()}
        assert list(got) == [
            "read_gib_per_s",
            "write_gib_per_s",
            "read_p50_us",
            "read_p99_us",
            "write_p50_us",
            "write_p99_us",
        ]
        assert got["read_gib_per_s"] / got["write_gib_per_s"] == pytest.approx(3, rel=0.25)
        assert 0 < got["read_p50_us"] <= got["read_p99_us"]
        assert 0 < got["write_p50_us"] <= got["write_p99_us"]


@pytest.mark.parametrize("percent", ["0", "100", "x", "7.5"])
def test_bench_mixed_needs_both_kinds(percent: str) -> None:
    assert "1 to 99" in run("bench", "mixed", "--read-percent", percent, status=2).stderr


def test_bench_mixed_does_not_overwrite_a_kept_device_unasked(tmp_path: Path) -> None:
    assert "--overwrite" in run("bench", "mixed", "--device", f"emulated:{tmp_path}/image", status=2).stderr


def test_a_median_is_taken_figure_by_figure() -> None:
    def result(scale: float) -> Result:
        side = Summary(scale, 10 - scale, scale, scale, scale)
        return Result(side, side, None, "host", "direct")

    got = median([result(1), result(5), result(2)])
    assert got.every == Summary(2, 8, 2, 2, 2)
    assert got.reads == got.every
    assert got.writes is None


def test_bench_prints_a_table_for_people() -> None:
    text = run("bench", "setup", "--processes", "1", "--repetitions", "1").stdout
    assert "open_to_first_read_ms" in text
    assert "The device is emulated" in text


def test_bench_overhead_without_valgrind_says_what_to_install(tmp_path: Path) -> None:
    message = run("bench", "overhead", status=1, PATH=str(tmp_path)).stderr
    assert "apt-get install valgrind" in message


def test_bench_overhead_needs_a_device_in_the_callers_thread() -> None:
    assert "pump=caller" in run("bench", "overhead", "--device", "emulated:64MiB", status=2).stderr


@pytest.mark.slow
def test_bench_overhead_counts_exactly_and_repeatably() -> None:
    first, second = (records(run("bench", "overhead", "--calls", "500", "--json")) for _ in range(2))
    figures = [{k: v["value"] for record in r for k, v in record["figures"].items()} for r in (first, second)]
    names = ("sync_read_4k_instructions", "sync_read_4k_total_instructions", "emulator_turn_instructions")
    for name in names:
        assert figures[0][name] == figures[1][name]
    library, total, turn = (figures[0][name] for name in names)
    assert library == total - turn
    assert library > 0
    assert turn > 0
    one, other = (f["python_extra_instructions"] for f in figures)
    assert one > 0
    assert one == pytest.approx(other, rel=0.02, abs=10)
    assert figures[0]["python_extra_us"] > 0
