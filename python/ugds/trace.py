# SPDX-License-Identifier: Apache-2.0
"""Traces: the life of every command of a device, for people (Perfetto, chrome://tracing) and for `ugds bench replay`.

    with ssd.trace() as trace:
        ssd.read(buffer)
    print(trace.records["completed"] - trace.records["submitted"])  # nanoseconds
    ugds.trace.write_chrome("trace.json", trace)

`records` is a structured array of `RECORD`, one element a command, in the order of staging. Times are nanoseconds of
one clock, the processor's counter, which every device of the process shares, and whose origin means nothing:

- `submitted`: the request of which it is a command reached the library; 0 where nobody looked at the clock;
- `staged`: its entry was in the submission ring;
- `rung`: the doorbell store that told the controller of it was over; 0 if there was none, since it failed before;
- `completed`: its completion was taken.

`offset` and `bytes` lie on the device (`bytes` of 2^32 - 1: that many or more, of a discard), `cid` is the command
identifier, `status` the NVMe status (see `status_words`), `opcode` is NVMe's, and `flags` holds whether the command is
a further one of its request (`CONTINUED`) or durable (`DURABLE`), and which memory and route its data had.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ugds import _core
from ugds._core import Device, status_words
from ugds._device import TRACE_CAPACITY as CAPACITY

__all__ = ["CAPACITY", "CONTINUED", "DURABLE", "RECORD", "Trace", "read_chrome", "record", "requests"]
__all__ += ["operation", "status_words", "write_chrome"]

Records: TypeAlias = npt.NDArray[np.void]
Path: TypeAlias = "str | os.PathLike[str]"

#: One command as the library hands it over: the layout of its TraceRecord, whose last four bytes are unused.
RECORD = np.dtype(
    {
        "names": ["submitted", "staged", "rung", "completed", "offset", "bytes"]
        + ["queue", "cid", "status", "opcode", "flags"],
        "formats": ["<u8"] * 5 + ["<u4"] + ["<u2"] * 3 + ["u1"] * 2,
        "offsets": [0, 8, 16, 24, 32, 40, 44, 46, 48, 50, 51],
        "itemsize": 56,
    }
)

_FLAGS = _core.trace_flags()
#: Bits of `flags`.
CONTINUED: int = _FLAGS["continued"]
DURABLE: int = _FLAGS["durable"]
_TIMES = ("submitted", "staged", "rung", "completed")
_OPERATIONS = {0x00: "flush", 0x01: "write", 0x02: "read", 0x08: "write zeroes", 0x09: "discard"}
_WITH_DATA = (0x01, 0x02)
_FORMAT = 1
_AT_ONCE = 64  # events that are encoded at once, and stand in one line


def operation(opcode: int) -> str:
    """What an opcode of the NVM command set is called here: "read", "write", "flush", "discard", or its number."""
    return _OPERATIONS.get(opcode, f"opcode {opcode:#04x}")


@dataclass
class Trace:
    """What was recorded of one device. `records` is filled when the recording ends."""

    device: str  #: its URI
    transport: str
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD))
    dropped: int = 0  #: commands that were not recorded, since a queue pair's buffer was full

    @property
    def memory(self) -> str:
        """The kinds of memory that data went to or came from: "host", or several with commas; "" without data."""
        return self._words("memory")

    @property
    def route(self) -> str:
        """The routes that data took: "direct", or several with commas; "" without data."""
        return self._words("route")

    def _words(self, kind: str) -> str:
        with_data = self.records["flags"][np.isin(self.records["opcode"], _WITH_DATA)]
        return ", ".join(dict.fromkeys(_word(kind, flags) for flags in np.unique(with_data).tolist()))


@functools.cache
def _word(kind: str, flags: int) -> str:
    names: list[str] = _FLAGS[kind]
    number = flags >> _FLAGS[f"{kind}_shift"] & 3
    return names[number] if number < len(names) else "unknown"


@contextmanager
def record(device: Device, capacity: int = CAPACITY) -> Iterator[Trace]:
    """Records every command that is staged inside of the `with` block and completes before its end.

    `capacity` is the number of commands for which each queue pair gets room, of 56 bytes each, when the block is
    entered; further ones are counted in `dropped`. While a device is traced, requests of one command take the general
    way through the library, and cost some more. Raises `ugds.Error`: EBUSY where the device is being traced already,
    ENOMEM, EBADF where it is closed, also at the end. Thread-safe; the requests of every thread are recorded.
    """
    trace = Trace(device.uri, device.transport)
    device.trace_start(capacity)
    try:
        yield trace
    finally:
        # Later ones than these would be lost; what is in flight is.
        trace.records = from_bytes(device.trace_take())
        trace.dropped = device.trace_stop()


def from_bytes(packed: bytes) -> Records:
    """Records as `Device.trace_take` hands them over, in the order of staging."""
    records = np.frombuffer(packed, RECORD)
    return records[np.argsort(records["staged"], kind="stable")]


# --- Requests -----------------------------------------------------------------------------------------------------

#: A request as its commands tell of it. `status` is that of its first command that failed, in the order of staging.
REQUEST = np.dtype(
    [("begin", "<u8"), ("end", "<u8"), ("offset", "<u8"), ("size", "<u8"), ("commands", "<u4"), ("status", "<u2")]
    + [("opcode", "u1"), ("durable", "?")]
)


def requests(records: Records) -> Records:
    """Puts the commands of one request together: those that follow another of the same queue and time of submission,
    where that one ends. Gives an array of `REQUEST`, by `begin`: the submission, or the staging where that is unknown.
    Where the first command of a request is missing, the rest of it is a request of its own."""
    found: list[list[Any]] = []
    open_ends: dict[tuple[int, int, int, int], int] = {}
    columns = [records[name].tolist() for name in ("queue", "submitted", "opcode", "offset", "bytes", "flags")]
    others = [records[name].tolist() for name in ("staged", "completed", "status")]
    for queue, submitted, opcode, offset, size, flags, staged, completed, status in zip(*columns, *others, strict=True):
        at = open_ends.pop((queue, submitted, opcode, offset), None) if flags & CONTINUED else None
        if at is None:
            at = len(found)
            found.append([submitted or staged, completed, offset, size, 1, status, opcode, bool(flags & DURABLE)])
        else:
            request = found[at]
            request[1] = max(request[1], completed)
            request[3] += size
            request[4] += 1
            request[5] = request[5] or status
        open_ends[queue, submitted, opcode, offset + size] = at
    made = np.array([tuple(request) for request in found], REQUEST)
    return made[np.argsort(made["begin"], kind="stable")]


# --- Chrome's trace event format -----------------------------------------------------------------------------------


def write_chrome(path: Path, *traces: Trace) -> None:
    """Writes traces as one file in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open; one
    that is called `….gz` is compressed.

    Each device is a process, each of its queue pairs a thread with the doorbell stores. A command is an asynchronous
    event, in it what it went through: "submit" (until it is in the ring), "doorbell" (until the controller is told) and
    "complete" (until its completion is taken). Times are microseconds from the first of all records. A counter shows
    the commands in flight. Raises OSError.
    """
    begins = [time[time != 0] for trace in traces for time in (trace.records["submitted"], trace.records["staged"])]
    origin = min((int(times.min()) for times in begins if times.size), default=0)
    devices = [
        {"pid": pid, "device": trace.device, "transport": trace.transport, "memory": trace.memory}
        | {"route": trace.route, "records": len(trace.records), "dropped": trace.dropped}
        for pid, trace in enumerate(traces, 1)
    ]
    other = {"program": f"ugds {_core.version()}", "format": _FORMAT, "origin_ns": origin, "devices": devices}
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    with _open(path, "w") as file:
        file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n')
        separator, number = "", 0
        for pid, trace in enumerate(traces, 1):
            events = _events(trace, pid, origin, number)
            while some := list(itertools.islice(events, _AT_ONCE)):
                file.write(separator + encode(some)[1:-1])
                separator = ",\n"
            number += len(trace.records)
        file.write("\n]}\n")


def read_chrome(path: Path) -> list[Trace]:
    """The traces of a file that `write_chrome` wrote, with every record as it was. Raises OSError, and ValueError for
    what is no such file."""
    try:
        with _open(path, "r") as file:
            content = json.load(file)
    except (EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None
    try:
        other = content["otherData"]
        if other["format"] != _FORMAT:
            raise ValueError(f"{os.fspath(path)} has format {other['format']}, and this version reads {_FORMAT}")
        origin, rows = other["origin_ns"], {device["pid"]: list[tuple[int, ...]]() for device in other["devices"]}
        for event in content["traceEvents"]:
            if event["ph"] == "b" and event.get("cat") == "command" and "cid" in event.get("args", ()):
                rows[event["pid"]].append(_row(event["args"], origin))
        return [
            Trace(each["device"], each["transport"], np.array(rows[each["pid"]], RECORD), each["dropped"])
            for each in other["devices"]
        ]
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a trace that ugds wrote: {error!r}") from None


def _open(path: Path, mode: str) -> IO[str]:
    if os.fspath(path).endswith(".gz"):
        return gzip.open(path, mode + "t", encoding="utf-8")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8")


def _row(args: dict[str, Any], origin: int) -> tuple[int, ...]:
    times = (0 if time is None else origin + time for time in args["times_ns"])
    return (*times, *(args[name] for name in ("offset", "bytes", "queue", "cid", "status_code", "opcode", "flags")))


def _events(trace: Trace, pid: int, origin: int, first_id: int) -> Iterator[dict[str, Any]]:
    where = f"transport {trace.transport}, memory {trace.memory or 'none'}, route {trace.route or 'none'}"
    yield _named("process_name", pid, 0, {"name": trace.device})
    yield _named("process_labels", pid, 0, {"labels": where})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    for queue in np.unique(trace.records["queue"]).tolist():
        yield _named("thread_name", pid, queue, {"name": f"queue {queue}"})
        yield _named("thread_sort_index", pid, queue, {"sort_index": queue})
        yield from _doorbells(trace.records[trace.records["queue"] == queue], pid, queue, origin)
    names = RECORD.names or ()
    for number, row in enumerate(trace.records.tolist(), first_id + 1):
        yield from _command(dict(zip(names, row, strict=True)), pid, origin, f"{number:#x}")
    yield from _in_flight(trace.records, pid, origin)


_status_words = functools.cache(status_words)


def _named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _microseconds(time: int, origin: int) -> float:
    return (time - origin) / 1000


def _doorbells(records: Records, pid: int, queue: int, origin: int) -> Iterator[dict[str, Any]]:
    """From the first entry that a doorbell store tells of to its end. They do not overlap: one thread owns the queue
    pair from the one to the other."""
    rung = records[records["rung"] != 0]
    times, starts, counts = np.unique(rung["rung"], return_index=True, return_counts=True)
    for time, start, count in zip(times.tolist(), starts.tolist(), counts.tolist(), strict=True):
        first = int(rung["staged"][start])
        begin = {"name": "doorbell", "cat": "doorbell", "ph": "X", "pid": pid, "tid": queue}
        yield {**begin, "ts": _microseconds(first, origin), "dur": (time - first) / 1000, "args": {"commands": count}}


def _command(values: dict[str, int], pid: int, origin: int, id: str) -> Iterator[dict[str, Any]]:
    submitted, staged, rung, completed = (values[name] for name in _TIMES)
    opcode, flags = values["opcode"], values["flags"]
    args: dict[str, Any] = {name: values[name] for name in ("cid", "offset", "bytes")}
    args["status"] = _status_words(values["status"])
    if opcode in _WITH_DATA:
        args |= {"memory": _word("memory", flags), "route": _word("route", flags)}
    # What follows is for read_chrome().
    args |= {"status_code": values["status"], "opcode": opcode, "flags": flags, "queue": values["queue"]}
    args["times_ns"] = [values[name] - origin if values[name] else None for name in _TIMES]
    common = {"cat": "command", "id": id, "pid": pid, "tid": values["queue"]}

    def event(phase: str, name: str, time: int) -> dict[str, Any]:
        return {"name": name, "ph": phase, **common, "ts": _microseconds(time, origin)}

    name = operation(opcode)
    yield event("b", name, submitted or staged) | {"args": args}
    told = rung or completed
    for phase, begin, end in (("submit", submitted, staged), ("doorbell", staged, told), ("complete", rung, completed)):
        if begin:
            yield event("b", phase, begin)
            yield event("e", phase, end)
    yield event("e", name, completed)


def _in_flight(records: Records, pid: int, origin: int) -> Iterator[dict[str, Any]]:
    times = np.concatenate([records["staged"], records["completed"]])
    changes = np.repeat(np.array([1, -1]), len(records))
    order = np.argsort(times, kind="stable")
    counts, times = np.cumsum(changes[order]), times[order]
    last = np.append(times[1:] != times[:-1], True)[: len(times)]  # of those at one time
    for time, count in zip(times[last].tolist(), counts[last].tolist(), strict=True):
        args = {"commands": count}
        yield {"name": "in flight", "ph": "C", "pid": pid, "tid": 0, "ts": _microseconds(time, origin), "args": args}
