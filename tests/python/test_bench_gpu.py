# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of GPU memory, as far as they go without a GPU: presets, refusals, what figures are made of, tables;
and the driver that they use, on one made of host memory where that was built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from ugds import _plain, _report
from ugds._report import Record
from ugds.bench import _gpu, cuda, figures, gpu_sync, overlap, ptx, register, stream
from ugds.bench.bars import BARS, bar_of

NOWHERE = "/nowhere/libcuda.so.1"
ROOT = Path(__file__).resolve().parents[2]


# --- Without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["stream"],
        ["stream", "--figure", "12"],
        ["stream", "--figure", "16", "--json"],
        ["overlap", "--route", "staged"],
        ["register"],
        ["sync", "--gpu", "0"],
        ["sync", "--route", "staged"],
    ],
)
def test_without_a_gpu_a_benchmark_says_so_and_what_to_do(command: list[str]) -> None:
    done = run("bench", *command, status=1, UGDS_CUDA_LIBRARY=NOWHERE)
    assert done.stdout == ""
    cause, remedy = done.stderr.splitlines()
    assert "GPU" in cause
    assert NOWHERE in cause
    assert remedy.startswith("  what to do: ") and "UGDS_CUDA_LIBRARY" in remedy


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["stream", "--figure", "13"], "--figure"),
        (["stream", "--figure", "16", "--sizes", "4KiB"], "--sizes"),
        (["stream", "--sizes", "32MiB"], "--sizes"),
        (["stream", "--sizes", "5"], "--sizes"),
        (["overlap", "--figure", "12"], "--figure"),
        (["register", "--sizes", "4KiB"], "--sizes"),
        (["register", "--sizes", "8GiB"], "--sizes"),
        (["stream", "--route", "buffered"], "--route"),
        (["stream", "--gpu", "-1"], "--gpu"),
        (["sync", "--gpu", "0", "--threads", "4"], "--threads"),
        (["sync", "--gpu", "0", "--mode", "mixed"], "--mode"),
        (["sync", "--gpu", "0", "--figure", "4"], "--figure"),
        (["sync", "--gpu", "0", "--baseline", "posix:/nowhere/file"], "--baseline"),
    ],
)
def test_what_is_not_measured_is_wrong_usage(command: list[str], named: str) -> None:
    assert named in run("bench", *command, status=2, UGDS_CUDA_LIBRARY=NOWHERE).stderr


def test_a_missing_driver_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGDS_CUDA_LIBRARY", NOWHERE)
    with pytest.raises(OSError, match="no CUDA driver") as raised:
        cuda.Driver()
    assert (raised.value.errno, raised.value.operation) == (19, "finding a GPU")  # type: ignore[attr-defined]
    assert "UGDS_CUDA_LIBRARY" in raised.value.hint  # type: ignore[attr-defined]


# --- What is measured -------------------------------------------------------------------------------------------------


def test_the_presets_are_the_papers() -> None:
    assert figures.STREAM[12] == tuple(4096 << power for power in range(9))
    assert figures.STREAM[12][-1] == 1 << 20
    assert (figures.STREAM[16], figures.STREAMS) == ((16 << 20,), 16)
    assert (figures.OVERLAP, figures.OVERLAP_PAIRS, overlap.SIZE, overlap.STAGES) == (13, 16, 1 << 20, 17)
    assert (stream.DEPTH, stream.LARGE) == (64, 16 << 20)
    assert "latency=10us" in _gpu.DEVICE
    assert "bandwidth=5.5GiB/s" in _gpu.DEVICE
    assert register.SIZES[0] == 64 << 10
    assert register.SIZES[-1] == 4 << 30


def test_ways_are_measured_forwards_and_backwards_after_a_round_that_does_not_count() -> None:
    seen: list[str] = []

    def way(name: str) -> Any:
        def once() -> float:
            seen.append(name)
            return float(len(seen))

        return once

    found = _gpu.in_turn(2, {"a": way("a"), "b": way("b"), "c": way("c")})
    assert seen == ["a", "b", "c", "a", "b", "c", "c", "b", "a"]
    assert found == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}


def test_ratios_and_gaps_are_of_the_same_round() -> None:
    assert _gpu.median_ratio([10, 1, 8], [10, 2, 2]) == 1
    assert _gpu.median_gap([10, 1, 8], [10, 2, 2]) == 0


def test_a_pipeline_is_held_against_seventeen_stages() -> None:
    found = {
        "sequential": [32.0, 64.0, 32.0],
        "overlap": [18.0, 36.0, 18.0],
        "pipelined": [18.7, 37.4, 17.0],
        "write": [16.0, 32.0, 8.0],
        "kernel": [8.0, 16.0, 16.0],
    }
    got = {name: value for name, (value, _) in overlap.figures_of(found).items()}
    assert (got["sequential_ms"], got["overlap_ms"], got["pipelined_ms"]) == (32000, 18000, 18700)
    assert got["ideal_ms"] == pytest.approx(17000)  # each round's longer stage
    assert got["pipelined_ratio_to_ideal"] == pytest.approx(1.1)
    assert (got["write_ms"], got["kernel_ms"]) == (1000, 1000)


def test_a_share_is_of_the_smaller_of_device_and_copies() -> None:
    gib = {"gpu": [4.0, 4.0, 1.0], "host": [5.0, 8.0, 1.0], "copy": [50.0, 5.0, 9.0]}
    assert gpu_sync.figures_of(gib, "staged")["staged_share"] == (0.8, "1")
    assert set(gpu_sync.figures_of(gib, "direct")) - set(gpu_sync.figures_of(gib, "staged")) == {"direct_share"}


def test_the_bars_of_gpu_memory_are_of_a_device_with_a_bandwidth() -> None:
    names = ("stream_sync_extra_us", "stream_share_of_sync_1mib", "stream_share_of_sync_16mib", "submission_p50_us")
    for name in (*names, "submission_p99_us", "submission_share_16mib", "pipelined_ratio_to_ideal", "staged_share"):
        assert bar_of(name, _gpu.DEVICE) is BARS[name]
        assert bar_of(name, "emulated:1GiB") is None
    assert BARS["staged_share"].holds(0.86)
    assert not BARS["staged_share"].holds(0.84)


def test_memory_to_spare_is_what_the_machine_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemAvailable:       12345 kB\nSwapFree: 1 kB\n")
    assert register.spare_memory(tmp_path) == 12345 << 10


def test_a_part_of_gpu_memory_begins_at_a_page_and_fits() -> None:
    class Memory:
        address, nbytes = (1 << 32) + 512, (1 << 20) + (64 << 10)

    part = register.Part(Memory(), 1 << 20)  # type: ignore[arg-type]
    assert part.address % (64 << 10) == 0
    assert Memory.address <= part.address
    assert part.address + part.nbytes <= Memory.address + Memory.nbytes
    interface = part.__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((1 << 20,), (part.address, False))


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_records_whose_bytes_went_elsewhere_are_in_tables_of_their_own() -> None:
    def record(memory: str, route: str, size: int) -> Record:
        return Record("register", {"size": size}, "emulated:1GiB", memory, route, {"register_ms": (1.0, "ms")})

    rows = [("host", "direct", 1), ("host", "direct", 2), ("cuda", "direct", 1), ("cuda", "staged", 1)]
    said = [part for part in _report.records_tables([record(*row) for row in rows]) if isinstance(part, str)]
    assert [text.partition("memory ")[2] for text in said] == [
        "host, transport emulated, route direct",
        "cuda, transport emulated, route direct",
        "cuda, transport emulated, route staged",
    ]


def test_tables_without_rich_have_the_same_words() -> None:
    table = _plain.Table(title="figures")
    table.add_column("figure", justify="left")
    table.add_column("value", justify="right")
    table.add_row("ideal_ms", "3")
    table.add_row("x", "1234")
    assert str(table) == "figures\nfigure    value\nideal_ms      3\nx          1234"


def test_the_command_line_works_without_rich() -> None:
    names = ["rich", *(f"rich.{name}" for name in ("console", "table", "markup", "progress"))]
    without = f"import sys; sys.modules.update(dict.fromkeys({names}))"
    program = f"{without}; from ugds.cli import main; sys.exit(main(sys.argv[1:]))"
    for command, wanted in (
        (["info", "emulated:1GiB"], "1 GiB"),
        (["bench", "setup", "--processes", "1", "--repetitions", "1"], "open_to_first_read_ms"),
        (["demo", str(ROOT / "README.md")], "0 differ"),
    ):
        done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout


# --- The driver -------------------------------------------------------------------------------------------------------


def test_every_kernel_is_in_the_text_with_64_bit_parameters() -> None:
    for name in ptx.KERNELS:
        head = ptx.PTX.split(f".visible .entry {name}(")[1].partition(")")[0]
        assert set(head.replace(",", "").split()) >= {".param", ".u64"}
        assert ".u32" not in head
    assert ptx.PTX.count("{") == ptx.PTX.count("}")


def test_a_pattern_can_be_computed_from_anywhere() -> None:
    whole = cuda.pattern(1 << 17, 5 << 16)
    assert [int(value) for value in whole[:3]] == [(5 << 16) + i * 2654435761 >> 16 & 0xFF for i in range(3)]
    assert (cuda.pattern(1000, (5 << 16) + 70_000 * 2654435761) == whole[70_000:71_000]).all()
    assert (cuda.pattern(1 << 17, 6 << 16) == whole + np.uint8(1)).all()


@pytest.fixture(scope="module")
def fake() -> str:
    """A CUDA driver made of host memory, of a build with tests."""
    if named := os.environ.get("FAKE_CUDA_LIBRARY"):
        return named
    found = sorted(ROOT.glob("build/*/tests/libfake_cuda.so"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("no driver made of host memory is built: ./test builds it")
    return str(found[-1])


DRIVER = """
import json, os, numpy as np, ugds
from ugds.bench import cuda
gpu, told = cuda.gpu(0), {}
with gpu.memory(1 << 20) as m, gpu.stream() as s, gpu.pinned(1 << 20) as p, gpu.event() as a, gpu.event() as b:
    gpu.fill(m.address, m.nbytes, 7 << 16, s)
    told["wrong"] = [gpu.wrong_bytes(m.address, m.nbytes, seed << 16, s) for seed in (7, 8)]
    told["filled"] = bool((gpu.read(m.address, m.nbytes) == cuda.pattern(m.nbytes, 7 << 16)).all())
    p.array[:] = 3
    gpu.copy_to_device(m.address, p.address, 4096, s)
    s.synchronize()
    gpu.write(m.address, np.full(10, 9, np.uint8))
    gpu.copy_from_device(p.address + 8192, m.address, 12, s)
    s.synchronize()
    told["copied"] = p.array[8192 : 8192 + 13].tolist()
    a.record(s)
    gpu.spin(20_000_000, s)
    b.record(s)
    told["early"] = s.done()
    b.synchronize()
    told["spun_ms"] = b.milliseconds_since(a)
    told["interface"] = m.__cuda_array_interface__["shape"]
    s.begin_capture()
    gpu.clear(m.address, m.nbytes, s)
    s.end_capture()
    s.synchronize()
    told["captured"] = gpu.read(m.address, 10).tolist()
    s.begin_capture()
    for wrong in (s.synchronize, s.end_capture):
        try:
            wrong()
        except ugds.Error as error:
            told.setdefault("refused", []).append(str(error))
for wrong in (lambda: cuda.gpu(99), lambda: gpu.memory(1 << 50)):
    try:
        wrong()
    except ugds.Error as error:
        told.setdefault("errors", []).append(error.errno)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(fake: str) -> Iterator[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "UGDS_CUDA_LIBRARY": fake},
    )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)


def test_kernels_fill_check_and_spin(told: dict[str, Any]) -> None:
    assert told["wrong"] == [0, 1 << 20]
    assert told["filled"] is True
    assert told["early"] is False
    assert told["spun_ms"] >= 19


def test_bytes_are_copied_both_ways(told: dict[str, Any]) -> None:
    assert told["copied"] == [9] * 10 + [3, 3, 3]


def test_a_capture_records_instead_of_running(told: dict[str, Any]) -> None:
    assert told["captured"] == [9] * 10
    assert ["(900)" in words for words in told["refused"]] == [True, False]
    assert "(901)" in told["refused"][1]


def test_no_such_gpu_and_no_memory_are_told_apart(told: dict[str, Any]) -> None:
    assert told["errors"] == [19, 12]
