# SPDX-License-Identifier: Apache-2.0
"""`ugds bench replay`, and `--trace` of the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import trace
from ugds._report import CommandError
from ugds.bench import replay

MIB = 1 << 20
URI = "emulated:16MiB?mdts=5"


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ugds", "bench", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def record(path: Path, work: Callable[[ugds.Device, ugds.Registration], None], uri: str = URI) -> trace.Trace:
    with ugds.open(uri) as ssd, ugds.empty("1MiB") as buffer:
        with ssd.trace() as traced:
            work(ssd, buffer)
        trace.write_chrome(path, traced)
    return traced


def everything(ssd: ugds.Device, buffer: ugds.Registration) -> None:
    ssd.write(buffer, 4096, durable=True)
    for step in range(30):
        ssd.read(buffer, step * 8192, 4096)
    ssd.flush()
    ssd.discard(8 * MIB, 65536)
    ssd.read(buffer, 15 * MIB)


def reads(ssd: ugds.Device, buffer: ugds.Registration) -> None:
    for step in range(10):
        ssd.read(buffer, step * 4096, 4096)


def done_again(path: Path, *arguments: str | Path) -> tuple[dict[str, float], trace.Trace]:
    """Replays with a trace of its own. Gives the figures and that trace."""
    out = path.with_name("again.json")
    record = json.loads(run("replay", path, "--json", "--trace", out, *arguments).stdout)
    assert record["name"] == "replay"
    (again,) = trace.read_chrome(out)
    return {name: figure["value"] for name, figure in record["figures"].items()}, again


@pytest.mark.parametrize("arguments", [["--speed", "0"], ["--speed", "0", "--threads", "3"], []], ids=" ".join)
def test_the_same_requests_are_made(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "trace.json"
    original = trace.requests(record(path, everything).records)
    figures, again = done_again(path, *arguments)
    made = trace.requests(again.records)
    names = ["opcode", "offset", "size", "durable", "commands"]
    if "--threads" in arguments:  # which one of several threads is first is open
        assert sorted(made[names].tolist()) == sorted(original[names].tolist())
    else:
        assert made[names].tolist() == original[names].tolist()
    assert (figures["requests"], figures["left_out"]) == (34, 0)
    assert figures["original_errors"] == figures["replayed_errors"] == figures["unrecorded"] == 0
    taken = (original["end"] - original["begin"]) / 1000
    assert figures["original_p50_us"] == pytest.approx(np.percentile(taken, 50))
    assert figures["original_max_us"] == pytest.approx(taken.max())
    assert 0 < figures["replayed_p50_us"] <= figures["replayed_p99_us"] <= figures["replayed_max_us"]


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_requests_come_at_their_times(tmp_path: Path, speed: float) -> None:
    path = tmp_path / "trace.json"
    records = np.zeros(9, trace.RECORD)
    records["submitted"] = records["staged"] = 1000 + 50_000_000 * np.arange(9, dtype=np.uint64)
    records["completed"] = records["staged"] + 1000
    records["bytes"], records["opcode"], records["queue"] = 4096, 2, 1
    trace.write_chrome(path, trace.Trace(URI, "emulated", records))
    figures, again = done_again(path, "--speed", str(speed))
    begins = trace.requests(again.records)["begin"].astype(np.int64) / 1e6
    assert figures["original_seconds"] == pytest.approx(0.4, rel=0.01)
    assert 0.4 / speed <= figures["replayed_seconds"] < 0.4 / speed + 0.3
    late = begins - begins[0] - 50 / speed * np.arange(9)
    assert np.median(np.abs(late)) < 10  # milliseconds: the machine may be busy, and not for long


def test_requests_that_overlapped_do_so_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    records = np.zeros(8, trace.RECORD)
    records["submitted"] = records["staged"] = 1000 + np.arange(8)
    records["completed"] = 9000
    records["bytes"], records["opcode"], records["queue"] = 4096, 2, 1
    records["offset"] = 4096 * np.arange(8)
    trace.write_chrome(path, trace.Trace("emulated:1MiB?latency=100ms", "emulated", records))
    figures, again = done_again(path)
    made = trace.requests(again.records)
    assert made["begin"].max() < made["end"].min()
    assert figures["replayed_seconds"] < 0.7


def test_errors_are_counted_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def work(ssd: ugds.Device, buffer: ugds.Registration) -> None:
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281, count=2)
        for _ in range(2):
            with pytest.raises(ugds.Error):
                ssd.read(buffer, 0, 4096)
        reads(ssd, buffer)

    source = record(path, work)
    with ugds.open(URI) as ssd:
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281, skip=1, count=3)
        plan = replay.make_plan(source, URI, 0.0, 1, False)
        again, run = replay.play(ssd, plan)
    assert np.count_nonzero(trace.requests(source.records)["status"]) == 2
    assert run.errors == np.count_nonzero(again.records["status"]) == 3


def test_a_device_that_is_lost_ends_the_replay(tmp_path: Path) -> None:
    source = record(tmp_path / "trace.json", reads)
    with ugds.open(URI) as ssd:
        ugds.testing.emulator(ssd).remove()
        with pytest.raises(ugds.Error, match="has gone"):
            replay.play(ssd, replay.make_plan(source, URI, 0.0, 2, False))


def test_replay_does_not_write_to_a_kept_device_unasked(tmp_path: Path) -> None:
    path, image = tmp_path / "trace.json", tmp_path / "image"
    record(path, everything)
    image.write_bytes(b"precious" * (2 * MIB))
    device = f"emulated:{image}?mdts=5"
    assert "--overwrite" in run("replay", path, "--device", device, status=2).stderr
    assert image.read_bytes() == b"precious" * (2 * MIB)
    run("replay", path, "--device", device, "--overwrite", "--speed", "0")
    assert image.read_bytes() != b"precious" * (2 * MIB)


def test_replay_reads_a_kept_device_unasked(tmp_path: Path) -> None:
    path, image = tmp_path / "trace.json", tmp_path / "image"
    record(path, reads)
    image.write_bytes(b"precious" * (2 * MIB))
    run("replay", path, "--device", f"emulated:{image}", "--speed", "0")
    assert image.read_bytes() == b"precious" * (2 * MIB)


def refuse(path: Path, *arguments: str, status: int = 2) -> str:
    return run("replay", path, *arguments, status=status).stderr


def test_what_does_not_fit_the_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    record(path, everything)
    assert "reaches byte 16777216" in refuse(path, "--device", "emulated:1MiB", status=1)
    record(path, lambda ssd, buffer: ssd.read(buffer, 512, 512) and None, "emulated:1MiB?lba=512")
    assert "whole blocks" in refuse(path, "--device", "emulated:1MiB?lba=4096", status=1)
    assert "--threads" in refuse(path, "--threads", "1000000")


def test_a_trace_of_a_real_device_needs_a_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    source = record(path, reads)
    source.device, source.transport = "pci:0000:65:00.0", "vfio"
    trace.write_chrome(path, source)
    assert "--device" in refuse(path)
    run("replay", path, "--device", URI, "--speed", "0")


def test_a_trace_of_several_devices_needs_a_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, other = record(path, reads), record(path, everything)
    trace.write_chrome(path, one, trace.Trace("emulated:1MiB", "emulated"), other)
    message = refuse(path)
    assert "--process 1" in message
    assert "--process 2" not in message
    assert "--process 3" in message
    assert "numbered from 1" in refuse(path, "--process", "4")
    assert "no commands" in refuse(path, "--process", "2")
    figures, _ = done_again(path, "--process", "3", "--speed", "0")
    assert figures["requests"] == 34


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", None])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    message = refuse(path)
    assert str(path) in message
    assert ("No such file" if content is None else "no trace") in message


def test_what_cannot_be_replayed_is_left_out_and_counted() -> None:
    records = np.zeros(3, trace.RECORD)
    records["staged"], records["completed"], records["opcode"] = [1, 2, 3], 10, [2, 9, 0x7F]
    records["bytes"] = [4096, 2**32 - 1, 4096]
    plan = replay.make_plan(trace.Trace(URI, "emulated", records), None, 1.0, None, False)
    assert (plan.requests["opcode"].tolist(), plan.left_out, plan.threads) == ([2], 2, 1)
    with pytest.raises(CommandError, match="no request that can be replayed"):
        replay.make_plan(trace.Trace(URI, "emulated", records[1:]), None, 1.0, None, False)


def test_replay_prints_both_sides_for_people(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    record(path, reads)
    text = run("replay", path, "--speed", "0").stdout
    assert "original" in text
    for row in ("p50", "p99", "max", "seconds", "errors"):
        assert f"\n{row} " in text
    assert "The device is emulated" in text


# --- --trace ------------------------------------------------------------------------------------------------------

BENCHMARKS: list[tuple[list[str], int]] = [
    (["sync", "--sizes", "4KiB", "--threads", "1,2", "--seconds", "0.01", "--device", "emulated:64MiB"], 1),
    (["setup", "--processes", "1", "--repetitions", "2"], 3),
    (["completion", "--seconds", "0.05"], 4),
    (["mixed", "--sizes", "4KiB", "--threads", "1", "--seconds", "0.01", "--baseline", "emulated:64MiB"], 2),
]
if hasattr(ugds.Device, "batch"):
    BENCHMARKS.append((["batch", "--sizes", "4KiB,64KiB", "--depths", "4", "--mode", "read", "--total", "1MiB"], 2))


@pytest.mark.parametrize(
    ("arguments", "devices"), BENCHMARKS, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_every_device_that_a_benchmark_opens_is_traced(tmp_path: Path, arguments: Any, devices: int) -> None:
    path = tmp_path / "trace.json"
    done = run(*arguments, "--json", "--trace", path)
    assert str(path) in done.stderr
    found = trace.read_chrome(path)
    assert len(found) == devices
    for each in found:
        assert len(each.records) > 0
        assert each.device.startswith("emulated:")


@pytest.mark.parametrize("benchmark", [["sync"], ["mixed"], ["batch", "--figure", "10"]], ids=lambda parts: parts[0])
def test_fresh_processes_are_not_traced(tmp_path: Path, benchmark: list[str]) -> None:
    done = run(*benchmark, "--processes", "2", "--trace", tmp_path / "trace.json", status=2)
    assert "leave out --processes" in done.stderr


def test_a_figures_parameters_are_traced_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    where = ("--sizes", "4KiB", "--threads", "2", "--seconds", "0.01", "--device", "emulated:64MiB")
    done = run("sync", "--figure", "4", *where, "--json", "--trace", path)
    assert "processes" not in json.loads(done.stdout.splitlines()[0])["params"]
    (found,) = trace.read_chrome(path)
    assert trace.requests(found.records)["size"].tolist().count(4096) > 2


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    message = run("sync", "--trace", tmp_path / "nowhere" / "trace.json", status=2).stderr
    assert "cannot write" in message


def test_a_full_trace_says_what_is_missing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from ugds.bench import _devices

    monkeypatch.setattr(trace, "CAPACITY", 100)
    path = str(tmp_path / "trace.json")
    with _devices.traced(path), _devices.opened("emulated:1MiB?pump=caller") as ssd, ugds.empty(4096) as buffer:
        for _ in range(103):
            ssd.read(buffer)
    assert "3 further commands found no room: each queue pair keeps 100" in capsys.readouterr().err
