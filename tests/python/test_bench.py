# SPDX-License-Identifier: Apache-2.0
"""`ugds bench` by its output: records, tables, presets and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import records, run


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
        assert list(point["figures"]) == ["gib_per_s", "requests_per_s", "p50_us", "p99_us"]
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
    assert again["figures"]["reopen_to_first_read_ms"]["value"] > 0


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
