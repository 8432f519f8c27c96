# SPDX-License-Identifier: Apache-2.0
"""Traces: their records against what was done, and their files against the rules of the Trace Event Format."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core, trace

MIB = 1 << 20


def made(rows: list[dict[str, int]], **more: Any) -> trace.Trace:
    """A trace of made-up records; what a row leaves out is 0."""
    records = np.zeros(len(rows), trace.RECORD)
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return trace.Trace(**({"device": "emulated:1GiB", "transport": "emulated"} | more), records=records)


def life(staged: int, **more: int) -> dict[str, int]:
    times = {"submitted": staged - 40, "staged": staged, "rung": staged + 100, "completed": staged + 1000}
    return {**times, "queue": 1, "opcode": 2, "bytes": 4096, **more}


ORIGIN = 5 * 10**15  # more than a float of microseconds keeps to the nanosecond
FULL = made(
    [
        life(ORIGIN + 40, cid=0x4001, offset=4096),
        life(ORIGIN + 50, cid=0x1234, rung=ORIGIN + 140, opcode=1, offset=1 << 50, flags=trace.DURABLE),
        life(ORIGIN + 300, cid=7, queue=2, submitted=0, status=0x281, bytes=131072, offset=3),
        life(ORIGIN + 301, cid=8, queue=2, rung=0, completed=ORIGIN + 400, status=0x371, opcode=9, bytes=2**32 - 1),
        life(ORIGIN + 999, cid=9, opcode=0, bytes=0, completed=ORIGIN + 123456789),
    ],
    dropped=17,
)


# --- Records ------------------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_library() -> None:
    fields, size = _core.trace_layout()
    assert trace.RECORD.itemsize == size
    described = {name: trace.RECORD.fields[name] for name in trace.RECORD.names or ()}
    assert [(name, offset, dtype.itemsize) for name, (dtype, offset) in described.items()] == fields


@pytest.mark.device("emulated:16MiB?mdts=5&pump=caller", queues=1)
def test_records_are_of_every_command_in_the_order_of_staging(ssd: ugds.Device) -> None:
    with ugds.empty("1MiB") as buffer:
        ssd.write(buffer, size=4096)
        with ssd.trace() as traced:
            ssd.write(buffer, MIB)
            ssd.read(buffer, 8192, 4096)
            ssd.flush()
            ssd.discard(65536, 16384)
            ssd.write(buffer, 0, 4096, durable=True)
        ssd.read(buffer)
    records = traced.records
    piece = 128 << 10
    assert records["opcode"].tolist() == [1] * 8 + [2, 0, 9, 1]
    assert records["offset"].tolist() == [MIB + piece * i for i in range(8)] + [8192, 0, 65536, 0]
    assert records["bytes"].tolist() == [piece] * 8 + [4096, 0, 16384, 4096]
    assert records["flags"].tolist() == [0] + [trace.CONTINUED] * 7 + [0, 0, 0, trace.DURABLE]
    assert set(records["queue"].tolist()) == {1}
    assert not records["status"].any()
    assert len(np.unique(records["submitted"])) == 5
    assert len(np.unique(records["rung"])) == 5
    for earlier, later in (("submitted", "staged"), ("staged", "rung"), ("rung", "completed")):
        assert (records[earlier] <= records[later]).all()
    assert (np.diff(records["staged"].astype(np.int64)) >= 0).all()
    assert (traced.device, traced.transport, traced.memory, traced.route) == (ssd.uri, "emulated", "host", "direct")
    assert traced.dropped == 0


@pytest.mark.device("emulated:16MiB?latency=2ms&queues=1")
def test_times_are_nanoseconds(ssd: ugds.Device) -> None:
    with ugds.empty(4096) as buffer, ssd.trace() as traced:
        ssd.read(buffer)
    (record,) = traced.records
    assert 2_000_000 <= int(record["completed"]) - int(record["rung"]) < 1_000_000_000


def test_a_trace_changes_no_byte_and_counts_the_same(open_ssd: Any) -> None:
    ssd = open_ssd("emulated:16MiB?lba=512&mdts=1&pump=caller", queues=1)
    data = np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8)
    back = np.zeros_like(data)
    with ugds.register(data) as source, ugds.register(back) as target:
        before = ssd.stats()
        ssd.write(source, 512)
        plain = ssd.stats() - before
        with ssd.trace() as traced:
            before = ssd.stats()
            ssd.write(source, 512)
            during = ssd.stats() - before
            ssd.read(target, 512)
    assert np.array_equal(data, back)
    names = ("requests", "commands", "doorbells", "write_bytes", "in_flight")
    assert [getattr(plain, name) for name in names] == [getattr(during, name) for name in names]
    assert len(traced.records) == 2 * during.commands


def test_a_failed_command_has_its_status(ssd: ugds.Device) -> None:
    emulator = ugds.testing.emulator(ssd)
    emulator.inject("status", opcode=2, status=0x281)
    with ugds.empty(4096) as buffer, ssd.trace() as traced:
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        ssd.read(buffer)
    assert traced.records["status"].tolist() == [0x281, 0]
    assert "unrecovered read error" in trace.status_words(0x281)


@pytest.mark.device("emulated:16MiB", deadline=0.05)
def test_a_command_that_a_reset_ends_is_recorded(ssd: ugds.Device) -> None:
    ugds.testing.emulator(ssd).inject("hang", opcode=2, abortable=False)
    with ugds.empty(4096) as buffer, ssd.trace() as traced:
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        ssd.read(buffer)
    hung, after = traced.records
    assert hung["status"] != 0
    assert hung["completed"] - hung["rung"] >= 50_000_000
    assert after["status"] == 0


def test_the_short_way_is_left_only_while_a_device_is_traced(open_ssd: Any) -> None:
    ssd = open_ssd("emulated:1MiB?pump=caller", queues=1)
    with ugds.empty(4096) as buffer:
        with ssd.trace() as traced:
            with pytest.raises(ugds.Error, match="in use"):  # it takes the short way alone
                _core.time_reads(ssd, buffer, 1)
            ssd.read(buffer)
        assert _core.time_reads(ssd, buffer, 3) > 0
    assert len(traced.records) == 1


@pytest.mark.device("emulated:1MiB?pump=caller", queues=1)
def test_what_finds_no_room_is_counted_and_works_all_the_same(ssd: ugds.Device) -> None:
    with ugds.empty(4096) as buffer, ssd.trace(capacity=5) as traced:
        for _ in range(12):
            ssd.read(buffer)
    assert (len(traced.records), traced.dropped) == (5, 7)


def test_records_can_be_taken_on_the_way(open_ssd: Any) -> None:
    ssd = open_ssd("emulated:1MiB?pump=caller", queues=1)
    with ugds.empty(4096) as buffer:
        ssd.trace_start(4)
        for _ in range(3):
            ssd.read(buffer, size=4096)
            ssd.write(buffer, size=4096)
            assert trace.from_bytes(ssd.trace_take())["opcode"].tolist() == [2, 1]
        assert ssd.trace_stop() == 0


def test_a_device_is_traced_once_at_a_time(ssd: ugds.Device) -> None:
    with ssd.trace(), pytest.raises(ugds.Error, match="being traced already"), ssd.trace():
        pass
    with ssd.trace():
        pass


@pytest.mark.parametrize("capacity", [0, 1 << 40])
def test_room_for_nothing_or_for_too_much_is_refused(ssd: ugds.Device, capacity: int) -> None:
    with pytest.raises(ugds.Error, match="room for"), ssd.trace(capacity):
        pass


def test_a_closed_device_is_not_traced() -> None:
    ssd = ugds.open("emulated:1MiB")
    ssd.close()
    with pytest.raises(ugds.Error) as raised, ssd.trace():
        pass
    assert (raised.value.operation, raised.value.device) == ("trace", ssd.uri)


def test_a_device_may_be_closed_while_it_is_traced() -> None:
    ssd = ugds.open("emulated:1MiB")
    with ugds.empty(4096) as buffer:
        ssd.trace_start(16)
        ssd.read(buffer)
        ssd.close()
    with pytest.raises(ugds.Error):
        ssd.trace_take()


@pytest.mark.device("emulated:8MiB?order=random", queues=2)
def test_every_thread_is_recorded_on_its_queue(ssd: ugds.Device) -> None:
    def work(number: int) -> None:
        with ugds.empty(4096) as buffer:
            for step in range(200):
                ssd.read(buffer, (number * 200 + step) * 4096)

    with ssd.trace() as traced:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(traced.records["offset"].tolist()) == [4096 * i for i in range(800)]
    for queue, count in Counter(traced.records["queue"].tolist()).items():
        (row,) = (row for row in ssd.stats().queues if row["queue"] == queue)
        assert row["commands"] == count


# --- Requests -----------------------------------------------------------------------------------------------------


def test_commands_become_requests_again(open_ssd: Any) -> None:
    ssd = open_ssd("emulated:16MiB?mdts=1&pump=caller", queues=1)
    with ugds.empty("1MiB") as buffer, ssd.trace() as traced:
        ssd.write(buffer, 4096, durable=True)
        ssd.read(buffer, 0, 4096)
        ssd.read(buffer, 4096, 4096)  # beside it, and another request
    made = trace.requests(traced.records)
    assert made["offset"].tolist() == [4096, 0, 4096]
    assert made["size"].tolist() == [MIB, 4096, 4096]
    assert made["commands"].tolist() == [128, 1, 1]
    assert made["durable"].tolist() == [True, False, False]
    assert made["end"][0] == traced.records["completed"][:128].max()


def test_requests_that_were_submitted_at_once_and_interleaved_stay_apart() -> None:
    both = {"submitted": 900}
    rows = [
        life(1000, **both, offset=0),
        life(1001, **both, offset=1 << 20, status=5),
        life(1002, **both, offset=4096, flags=trace.CONTINUED, status=0x281),
        life(1003, **both, offset=(1 << 20) + 4096, flags=trace.CONTINUED, status=6),
        life(1004, **both, offset=8192),  # beside the first, and not of it
        life(1005, **both, offset=4096, queue=2, flags=trace.CONTINUED),  # whose first is not there
    ]
    found = trace.requests(made(rows).records)
    assert found["size"].tolist() == [8192, 8192, 4096, 4096]
    assert found["status"].tolist() == [0x281, 5, 0, 0]
    assert found["end"].tolist() == [2002, 2003, 2004, 2005]


def test_requests_of_unknown_time_are_joined_where_they_continue() -> None:
    rows = [life(1000, submitted=0), life(1010, submitted=0, offset=4096, flags=trace.CONTINUED)]
    rows.append(life(1020, submitted=0, offset=8192))
    found = trace.requests(made(rows).records)
    assert found["size"].tolist() == [8192, 4096]
    assert found["begin"].tolist() == [1000, 1020]


def test_no_records_are_no_requests() -> None:
    assert len(trace.requests(made([]).records)) == 0


# --- Files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_gives_every_record_back(tmp_path: Path, name: str) -> None:
    other = made([life(ORIGIN + 10**9, cid=3)], device="pci:0000:65:00.0?ns=2", transport="vfio")
    empty = made([], device="emulated:1MiB")
    trace.write_chrome(tmp_path / name, FULL, other, empty)
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") is name.endswith(".gz")
    back = trace.read_chrome(tmp_path / name)
    for before, after in zip((FULL, other, empty), back, strict=True):
        assert np.array_equal(before.records, after.records)
        assert before.records.dtype == after.records.dtype
        assert (before.device, before.transport, before.dropped) == (after.device, after.transport, after.dropped)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"otherData": {"format": 2}, "traceEvents": []}',
        '{"otherData": {"format": 1, "origin_ns": 0, "devices": [{}]}, "traceEvents": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError):
        trace.read_chrome(tmp_path / "file")


#: What the Trace Event Format asks of each phase that is used here, beside "ph", "name" and "pid".
REQUIRED = {
    "M": {"tid", "args"},
    "X": {"tid", "ts", "dur", "cat"},
    "b": {"tid", "ts", "id", "cat"},
    "e": {"tid", "ts", "id", "cat"},
    "C": {"ts", "args"},
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_format(path: Path) -> list[dict[str, Any]]:
    """Holds a file to the format's rules, nesting and order among them."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        content = json.load(file)
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = content["traceEvents"]
    stacks: dict[tuple[str, str], list[str]] = defaultdict(list)
    last: dict[tuple[str, str], float] = {}
    used = set()
    busy: dict[tuple[int, int], float] = {}
    for event in events:
        assert set(event) >= REQUIRED[event["ph"]] | {"name", "pid"}
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("ts", 0.0), float | int)
        assert event.get("ts", 0) >= 0
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind)
        elif event["ph"] == "X":  # of one thread, these may nest and not overlap
            assert event["dur"] >= 0
            track = event["pid"], event["tid"]
            assert event["ts"] >= busy.get(track, 0)
            busy[track] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        else:
            # Nested by category and identifier; viewers sort by time and keep the order of the file for equal times.
            key = event["cat"], event["id"]
            assert event["ts"] >= last.get(key, 0)
            last[key] = event["ts"]
            if event["ph"] == "b":
                assert stacks[key] or key not in used, "an identifier is used twice"
                used.add(key)
                stacks[key].append(event["name"])
            else:
                assert stacks[key].pop() == event["name"]
    assert not any(stacks.values())
    return events


def test_a_file_follows_the_rules_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_chrome(path, FULL, FULL)
    events = check_format(path)
    named = {(event["pid"], event["name"], event["args"].get("name")) for event in events if event["ph"] == "M"}
    assert {(1, "process_name", "emulated:1GiB"), (2, "thread_name", "queue 1"), (2, "thread_name", "queue 2")} <= named
    content = json.loads(path.read_text())
    assert content["otherData"]["program"] == f"ugds {ugds.__version__}"
    (first, _) = content["otherData"]["devices"]
    assert first == {
        "pid": 1,
        "device": "emulated:1GiB",
        "transport": "emulated",
        "memory": "host",
        "route": "direct",
        "records": 5,
        "dropped": 17,
    }


def test_events_tell_a_commands_life_in_microseconds_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_chrome(path, FULL)
    events = [event for event in check_format(path) if event.get("id") == "0x2"]
    assert [(event["ph"], event["name"], event["ts"]) for event in events] == [
        ("b", "write", 0.01),
        ("b", "submit", 0.01),
        ("e", "submit", 0.05),
        ("b", "doorbell", 0.05),
        ("e", "doorbell", 0.14),
        ("b", "complete", 0.14),
        ("e", "complete", 1.05),
        ("e", "write", 1.05),
    ]
    args = events[0]["args"]
    assert (args["cid"], args["offset"], args["bytes"], args["memory"]) == (0x1234, 1 << 50, 4096, "host")
    assert args["status"] == trace.status_words(0)
    third = next(event for event in check_format(path) if event.get("id") == "0x3")
    assert "unrecovered read error" in third["args"]["status"]


def test_the_counter_follows_the_commands_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_chrome(path, made([life(1000), life(1500), life(2000), life(9000)]))
    counts = [(event["ts"], event["args"]["commands"]) for event in check_format(path) if event["ph"] == "C"]
    # The third is staged as the first completes.
    assert counts == [(0.04, 1), (0.54, 2), (1.04, 2), (1.54, 1), (2.04, 0), (8.04, 1), (9.04, 0)]


@pytest.mark.parametrize("uri", ["emulated:64MiB?mdts=5&order=random", "emulated:64MiB?lba=512&pump=caller"])
def test_a_real_trace_follows_the_rules_too(open_ssd: Any, tmp_path: Path, uri: str) -> None:
    ssd = open_ssd(uri)
    with ugds.empty("2MiB") as buffer, ssd.trace() as traced:
        ssd.write(buffer)
        for step in range(50):
            ssd.read(buffer, step * 4096, 4096)
        ssd.read(buffer)
        ssd.flush()
    path = tmp_path / "trace.json"
    trace.write_chrome(path, traced)
    events = check_format(path)
    (back,) = trace.read_chrome(path)
    assert np.array_equal(back.records, traced.records)
    doorbells = [event["args"]["commands"] for event in events if event["name"] == "doorbell" and event["ph"] == "X"]
    assert sum(doorbells) == len(traced.records)
    assert len(doorbells) == ssd.stats().doorbells
