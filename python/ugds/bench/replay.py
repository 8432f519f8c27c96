# SPDX-License-Identifier: Apache-2.0
"""Does the requests of a trace again, at their times or as fast as possible, and compares their latencies.

Both sides are measured alike: by traces, from a request's submission to the completion of its last command. What is
replayed is issued by threads of Python, each of which waits for its request to end before it takes the next one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ugds
from ugds import _demo, _report, sizes, trace
from ugds._core import Device, Registration
from ugds._report import CommandError, Record
from ugds.bench import _devices
from ugds.trace import Records, Trace

MOST_THREADS = 64
MOST_MEMORY = 1 << 30  # of the buffers of all threads
TRACE_MEMORY = 256 << 20  # of the records of all queue pairs
PERCENTILES = (50, 90, 99, 99.9)
_FLUSH, _WRITE, _READ, _DISCARD = 0x00, 0x01, 0x02, 0x09
_UNSAID_SIZE = (1 << 32) - 1  # a discard of this size may have been larger
_LEAD = 10_000_000  # ns from starting the threads to the first request


@dataclass(frozen=True)
class Plan:
    """What is to be done, and where."""

    requests: Records  #: of `trace.REQUEST`
    left_out: int
    uri: str
    threads: int
    speed: float  #: 2 is twice as fast as it was; 0: no waiting


def measure(
    path: str, uri: str | None, speed: float, threads: int | None, overwrite: bool, process: int | None = None
) -> list[Record]:
    """One record, with figures of what was recorded and of what was replayed. Raises CommandError where that cannot be
    done or might lose data."""
    source = choose(read(path), path, process)
    plan = make_plan(source, uri, speed, threads, overwrite)
    with ugds.open(plan.uri) as device:
        check(plan.requests, device)
        replayed, run = play(device, plan)
    _devices.keep(replayed)
    original, again = trace.requests(source.records), trace.requests(replayed.records)
    figures = {"requests": (float(len(plan.requests)), "1"), "left_out": (float(plan.left_out), "1")}
    for name, before, after in zip(_NAMES, _latencies(original), _latencies(again), strict=True):
        figures |= {f"original_{name}_us": (before, "us"), f"replayed_{name}_us": (after, "us")}
    figures |= {
        "original_seconds": (float(original["end"].max() - original["begin"].min()) / 1e9, "s"),
        "replayed_seconds": (run.seconds, "s"),
        "original_errors": (float(np.count_nonzero(original["status"])), "1"),
        "replayed_errors": (float(run.errors), "1"),
        "late_p99_us": (float(np.percentile(run.late_us, 99)), "us"),
        "unrecorded": (float(replayed.dropped), "1"),
    }
    params = {"file": path, "recorded_on": source.device, "speed": speed, "threads": plan.threads}
    return [Record("replay", params, plan.uri, run.memory, run.route, figures)]


_NAMES = [*(f"p{percent:g}".replace(".", "_") for percent in PERCENTILES), "max"]


def _latencies(requests: Records) -> list[float]:
    """Percentiles and the maximum, in microseconds; 0 where nothing was recorded."""
    if len(requests) == 0:
        return [0.0] * len(_NAMES)
    taken = (requests["end"] - requests["begin"]).astype(np.float64) / 1000
    return [*np.percentile(taken, PERCENTILES).tolist(), float(taken.max())]


def table(record: Record) -> Any:
    """The record for people: original and replayed side by side."""
    rows = []
    for name, (value, unit) in record.figures.items():
        if name.startswith("original_"):
            other = record.figures["replayed_" + name.removeprefix("original_")][0]
            label = name.removeprefix("original_").removesuffix("_us")
            rows.append((label, _report.number(value), _report.number(other), "" if unit == "1" else unit))
        elif not name.startswith("replayed_"):
            rows.append((name, "", _report.number(value), "" if unit == "1" else unit))
    made = _report.table("", ("", "original", "replayed", "unit"), rows)
    made.columns[3].justify = "left"
    return made


# --- Before anything is done ----------------------------------------------------------------------------------------


def read(path: str) -> list[Trace]:
    try:
        return trace.read_chrome(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}", status=2) from None
    except ValueError as error:
        raise CommandError(
            f"{path} is no trace of ugds: {error}\n"
            "  what to do: record one by ssd.trace(), or ugds bench sync --trace FILE",
            status=2,
        ) from None


def choose(traces: list[Trace], path: str, process: int | None) -> Trace:
    """The device whose requests are replayed: the only one with records, or the one that is named by its number."""
    if process is not None:
        if not 1 <= process <= len(traces):
            raise CommandError(f"--process: {path} holds {len(traces)} devices, numbered from 1", status=2)
        found = [traces[process - 1]]
    else:
        found = [each for each in traces if len(each.records)]
    if not found or not len(found[0].records):
        raise CommandError(f"{path} holds no commands", status=2)
    if len(found) > 1:
        listed = "\n".join(
            f"  --process {number}: {each.device}, {len(each.records)} commands"
            for number, each in enumerate(traces, 1)
            if len(each.records)
        )
        raise CommandError(f"{path} holds the commands of {len(found)} devices; name one:\n{listed}", status=2)
    return found[0]


def make_plan(source: Trace, uri: str | None, speed: float, threads: int | None, overwrite: bool) -> Plan:
    if uri is None and not source.device.startswith("emulated:"):
        raise CommandError(
            f"the trace is of {source.device}, which is not an emulated device\n"
            "  what to do: name the device to replay it on by --device",
            status=2,
        )
    uri = uri or source.device
    wanted = trace.requests(source.records)
    known = np.isin(wanted["opcode"], (_FLUSH, _WRITE, _READ, _DISCARD))
    known &= (wanted["opcode"] != _DISCARD) | (wanted["size"] < _UNSAID_SIZE)
    requests = wanted[known]
    if len(requests) == 0:
        raise CommandError("the trace holds no request that can be replayed", status=2)
    if np.isin(requests["opcode"], (_WRITE, _DISCARD)).any() and not (_demo.in_memory(uri) or overwrite):
        raise CommandError(
            f"the trace writes, and {uri} may hold data\n  what to do: add --overwrite if that data can go", status=2
        )
    largest = _largest(requests)
    fitting = max(1, MOST_MEMORY // largest)
    if threads is None:
        threads = min(_most_at_once(requests), MOST_THREADS, fitting)
    elif threads > fitting:
        raise CommandError(
            f"--threads: {threads} buffers of {sizes.format(largest)} are more than {sizes.format(MOST_MEMORY)}",
            status=2,
        )
    return Plan(requests, len(wanted) - len(requests), uri, threads, speed)


def _most_at_once(requests: Records) -> int:
    times = np.concatenate([requests["begin"], requests["end"]])
    changes = np.repeat(np.array([1, -1]), len(requests))
    # An end before the beginning at the same time.
    return int(np.cumsum(changes[np.lexsort((changes, times))]).max())


def check(requests: Records, device: Device) -> None:
    """Whether every request fits the device. Raises CommandError."""
    ends = requests["offset"] + requests["size"]
    if int(ends.max()) > device.capacity:
        raise CommandError(
            f"the trace reaches byte {int(ends.max())}, and {device.uri} has {device.capacity} bytes\n"
            "  what to do: replay it on a device that is as large"
        )
    odd = (requests["offset"] | requests["size"]) % device.block_size != 0
    if odd.any():
        first = requests[odd][0]
        raise CommandError(
            f"a request of {int(first['size'])} bytes at byte {int(first['offset'])} is not in whole blocks of "
            f"{device.uri}, which are of {device.block_size} bytes\n"
            "  what to do: replay it on a device whose blocks are as small"
        )


# --- Doing it -------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """What all threads share while they replay."""

    device: Device
    speed: float
    rows: list[tuple[int, int, int, bool]]  #: operation, offset, size, whether durable
    due: list[int]  #: of each row, nanoseconds after `start`
    start: int = 0
    following: int = 0  #: the first row that no thread has taken
    errors: int = 0
    seconds: float = 0.0
    memory: str = ""
    route: str = ""
    late_us: list[float] = field(default_factory=list)
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, buffer: Registration) -> None:
        late, errors = [], 0
        try:
            while (number := self._take()) is not None:
                late.append(_wait_until(self.start + self.due[number]) if self.speed else 0)
                errors += self._failed(self.rows[number], buffer)
        except BaseException as failure:  # raised by the thread that waits for this one
            self.failure = failure
        with self.lock:
            self.late_us += [ns / 1000 for ns in late]
            self.errors += errors

    def _take(self) -> int | None:
        with self.lock:
            if self.failure is not None or self.following == len(self.rows):
                return None
            self.following += 1
            return self.following - 1

    def _failed(self, row: tuple[int, int, int, bool], buffer: Registration) -> bool:
        """Does one request. Gives whether it failed; a device that is gone for good ends the replay instead."""
        opcode, offset, size, durable = row
        device = self.device
        try:
            if opcode == _READ:
                device.read(buffer, offset, size)
            elif opcode == _WRITE:
                device.write(buffer, offset, size, durable=durable)
            elif opcode == _FLUSH:
                device.flush()
            else:
                device.discard(offset, size)
        except ugds.Error:
            if device.state not in ("ready", "recovering"):
                raise
            return True
        return False


def _wait_until(due: int) -> int:
    """Sleeps for most of the time, since that is not exact. Gives how late it is then, in nanoseconds."""
    clock = time.perf_counter_ns
    while (left := due - clock()) > 0:
        time.sleep((left - 100_000) / 1e9 if left > 200_000 else 0)
    return -left


def play(device: Device, plan: Plan) -> tuple[Trace, _Run]:
    """Replays, and gives its trace."""
    requests = plan.requests
    columns = (requests[name].tolist() for name in ("opcode", "offset", "size", "durable"))
    after = (requests["begin"] - requests["begin"].min()).astype(np.float64)
    due = (after / plan.speed).astype(np.int64).tolist() if plan.speed else []
    run = _Run(device, plan.speed, list(zip(*columns, strict=True)), due)
    commands = len(requests) + int((requests["size"] // device.max_transfer).sum())
    capacity = min(commands, TRACE_MEMORY // trace.RECORD.itemsize // device.info.queues)
    buffers = [_filled(_largest(requests), number) for number in range(plan.threads)]
    try:
        run.memory, run.route = buffers[0].memory, buffers[0].route
        workers = [threading.Thread(target=run.work, args=(buffer,)) for buffer in buffers]
        with device.trace(capacity) as recorded:
            run.start = time.perf_counter_ns() + (_LEAD if plan.speed else 0)
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            run.seconds = (time.perf_counter_ns() - run.start) / 1e9
        if run.failure is not None:
            raise run.failure
    finally:
        for buffer in buffers:
            buffer.close()
    return recorded, run


def _largest(requests: Records) -> int:
    """Bytes that a thread's buffer needs."""
    return max(4096, int(requests["size"][requests["opcode"] != _DISCARD].max(initial=0)))


def _filled(size: int, seed: int) -> Registration:
    """Random bytes: what is written is not all the same."""
    buffer = ugds.empty(size)
    view = np.frombuffer(memoryview(buffer), np.uint8)
    view[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return buffer
