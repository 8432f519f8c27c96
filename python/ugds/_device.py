# SPDX-License-Identifier: Apache-2.0
"""What a device says of itself and what it has counted, in a form for people and programs.

The native `Device` is public itself, so that a read pays for no Python wrapper. Importing `ugds` gives it `info` and
`stats()`, which are made here from the plain values that it hands out.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ugds import sizes
from ugds._core import Device

if TYPE_CHECKING:
    from ugds.trace import Trace

_COUNTS = ("requests", "read_bytes", "write_bytes", "commands", "doorbells", "errors", "protocol_errors", "retries")
TRACE_CAPACITY = 1 << 16  # commands of each queue pair, where a caller does not say
_STEPS = 4  # histogram buckets a doubling: bucket i counts latencies in [2^(i/4), 2^((i+1)/4)) nanoseconds


@dataclass(frozen=True)
class DeviceInfo:
    """A device as it was opened. Sizes are in bytes. `str()` gives a table of lines."""

    uri: str
    transport: str  #: emulated, vfio-user, vfio, ugds_drv or file
    model: str
    serial: str
    firmware: str
    capacity: int
    block_size: int  #: reads and writes start and end on multiples of it, or are completed through a bounce buffer
    namespace: int
    max_transfer: int  #: of one command; larger requests are split
    queues: int  #: I/O queue pairs in use
    depth: int  #: entries of each
    batch_depth: int  #: entries of the one that batches and awaits use
    batch_memory: str  #: what that one's rings are in: huge pages, or why not
    mode: str  #: what the device is to be good at (see `ugds.modes`)
    volatile_write_cache: bool  #: what was written needs `flush()` or `durable=True` to survive a loss of power
    shadow_doorbells: bool
    retry: int  #: how often a read or write that a reset ended is submitted again
    completion: str  #: "interrupt" or "polling", with the reason where that is not what was asked for
    state: str  #: ready, recovering, wedged, failed, lost or closed
    medium: str = ""  #: of a file: its file system, or "block device"
    io: str = ""  #: of a file: "io_uring", or "threads" and why
    why_buffered: str = ""  #: of a file: why its requests go through the page cache; "" where they do not
    access: str = ""  #: of a file: "reading and writing", or why one of them is not, or is in whole blocks alone

    @classmethod
    def of(cls, device: Device) -> DeviceInfo:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in device.info_fields.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = {
            "device": self.uri,
            "transport": self.transport,
            "state": self.state,
            "model": f"{self.model}, serial {self.serial}, firmware {self.firmware}",
            "capacity": f"{sizes.format(self.capacity)} ({self.capacity} bytes), namespace {self.namespace}",
            "block size": sizes.format(self.block_size),
            "max transfer": f"{sizes.format(self.max_transfer)} a command",
            "queues": f"{self.queues} of depth {self.depth}, for batches {self.batch_depth}",
            "batch queue": self.batch_memory or "the one that there is",
            "mode": self.mode,
            "write cache": "volatile: flush() makes writes durable" if self.volatile_write_cache else "none",
            "doorbells": "shadow" if self.shadow_doorbells else "mapped",
            "completion": self.completion,
            "retry": f"{self.retry} times after a reset" if self.retry else "never",
        }
        if self.transport == "file":
            # What a file has none of, and what only its controller in the library is made of.
            for name in ("namespace", "doorbells", "model", "queues", "batch queue"):
                rows.pop(name, None)
            rows["capacity"] = f"{sizes.format(self.capacity)} ({self.capacity} bytes)"
            rows["medium"] = f"{self.medium}, by {self.io}"
            rows["access"] = self.access
            rows["route"] = f"buffered: {self.why_buffered}" if self.why_buffered else "direct (O_DIRECT)"
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


@dataclass(frozen=True)
class Stats:
    """What a device has counted since it was opened, at the moment of the call. `later - earlier` is what happened
    between two of them. Latencies are of commands, from their staging to their retirement, in a histogram of four
    buckets a doubling: a percentile is right to within 19%. docs/statistics.md says more.
    """

    device: str  #: its URI
    transport: str
    requests: int
    read_bytes: int
    write_bytes: int
    commands: int
    doorbells: int
    errors: int  #: commands that failed
    protocol_errors: int  #: completions that the controller posted and no command was waiting for
    retries: int  #: requests that a reset ended and that were submitted again, each time
    in_flight: int
    route: str  #: direct, staged or buffered; "mixed" where some bytes went the one way and some another
    staged_bytes: int  #: of those read and written, what went through pinned memory of the library's
    buffered_bytes: int  #: of those read and written, what went through the page cache
    histogram: tuple[int, ...]
    queues: tuple[dict[str, Any], ...]  #: the same counts for each queue
    streams: dict[str, int] = dataclasses.field(default_factory=dict)  #: requests in stream order, and how they went
    state: str = ""  #: of the device, as `Device.state`
    resets: int = 0  #: times that a recovery has stopped the controller
    aborts: int = 0  #: commands that were overdue and that the controller was asked to abort
    bounced_bytes: int = 0  #: of a file's that were direct: what went through memory of the library's, for alignment

    @classmethod
    def of(cls, device: Device) -> Stats:
        made = cls._sum(
            device.uri,
            device.transport,
            device.queue_stats(),
            device.staged_bytes(),
            device.buffered_bytes(),
            device.stream_stats(),
            device.recoveries(),
        )
        return dataclasses.replace(made, bounced_bytes=device.bounced_bytes())

    @classmethod
    def _sum(
        cls,
        device: str,
        transport: str,
        queues: list[dict[str, Any]],
        staged_bytes: int,
        buffered_bytes: int,
        streams: dict[str, int],
        recoveries: dict[str, Any],
    ) -> Stats:
        histograms = [queue["latency_ns_histogram"] for queue in queues]
        counts = {name: sum(queue[name] for queue in queues) for name in (*_COUNTS, "in_flight")}
        return cls(
            device=device,
            transport=transport,
            **counts,
            route=_route(staged_bytes, buffered_bytes, counts["read_bytes"] + counts["write_bytes"]),
            staged_bytes=staged_bytes,
            buffered_bytes=buffered_bytes,
            histogram=tuple(map(sum, zip(*histograms, strict=True))),
            queues=tuple(queues),
            streams=streams,
            **recoveries,
        )

    def __sub__(self, earlier: Stats) -> Stats:
        before = {queue["queue"]: queue for queue in earlier.queues}
        rows = [_difference(queue, before.get(queue["queue"])) for queue in self.queues]
        # What is pending is no count.
        streams = {
            name: value if name == "pending" else value - earlier.streams.get(name, 0)
            for name, value in self.streams.items()
        }
        staged = self.staged_bytes - earlier.staged_bytes
        buffered = self.buffered_bytes - earlier.buffered_bytes
        recoveries = {
            "state": self.state,
            "resets": self.resets - earlier.resets,
            "aborts": self.aborts - earlier.aborts,
        }
        made = self._sum(self.device, self.transport, rows, staged, buffered, streams, recoveries)
        return dataclasses.replace(made, bounced_bytes=self.bounced_bytes - earlier.bounced_bytes)

    def prometheus(self, *others: Stats) -> str:
        """The counts of every queue in Prometheus' text exposition format, version 0.0.4, to be served as `text/plain;
        version=0.0.4`; with those of `others`, which are other devices'. docs/statistics.md lists the metrics. Raises
        ValueError where two of the devices have the same URI."""
        from ugds import _prometheus

        return _prometheus.text([self, *others])

    def percentile_ns(self, percent: float) -> float | None:
        """The latency that `percent` of the commands did not exceed, in nanoseconds: the geometric middle of its
        bucket. None where nothing was counted. Raises ValueError unless 0 < percent <= 100."""
        if not 0 < percent <= 100:
            raise ValueError(f"a percentile lies above 0 and up to 100, not at {percent}")
        wanted, seen = sum(self.histogram) * percent / 100, 0
        for bucket, count in enumerate(self.histogram):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** ((bucket + 0.5) / _STEPS))
        return None

    @property
    def p50_us(self) -> float | None:
        """Median latency of a command in microseconds."""
        return _microseconds(self.percentile_ns(50))

    @property
    def p99_us(self) -> float | None:
        """99th percentile of the latency of a command in microseconds."""
        return _microseconds(self.percentile_ns(99))

    def as_dict(self) -> dict[str, Any]:
        """Totals, percentiles and queues by name, ready for JSON."""
        totals = dataclasses.asdict(self)
        totals["histogram"] = list(self.histogram)
        totals["queues"] = list(self.queues)
        return {**totals, "p50_us": self.p50_us, "p99_us": self.p99_us}

    def __str__(self) -> str:
        latency = "no latency yet"
        if (p50 := self.p50_us) is not None and (p99 := self.p99_us) is not None:
            latency = f"p50 {p50:.1f} us, p99 {p99:.1f} us"
        return (
            f"{self.requests} requests ({self.commands} commands, {self.doorbells} doorbells, {self.errors} errors, "
            f"{self.in_flight} in flight), {sizes.format(self.read_bytes)} read, {sizes.format(self.write_bytes)} "
            f"written, {latency}, route {self.route or 'none'}"
        )


def _route(staged_bytes: int, buffered_bytes: int, all_bytes: int) -> str:
    """Counts of what goes on meanwhile are a little apart. What is staged may be buffered too, which is the worse."""
    for name, part in (("buffered", buffered_bytes), ("staged", staged_bytes)):
        if part != 0:
            return name if part >= all_bytes else "mixed"
    return "direct"


def _difference(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """What one queue counted between two moments; what is no count (depth, in flight, route) is as it is now."""
    if before is None:
        return now
    histogram = [a - b for a, b in zip(now["latency_ns_histogram"], before["latency_ns_histogram"], strict=True)]
    return {**now, **{name: now[name] - before[name] for name in _COUNTS}, "latency_ns_histogram": histogram}


def _microseconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1000


def _stats(device: Device) -> Stats:
    """What the device has counted since it was opened (see `Stats`). Thread-safe; counts that other threads are adding
    to may be a few requests apart."""
    return Stats.of(device)


def _trace(device: Device, capacity: int = TRACE_CAPACITY) -> AbstractContextManager[Trace]:
    """Records the life of every command inside of the `with` block: see `ugds.trace.record`."""
    from ugds import trace

    return trace.record(device, capacity)


def attach() -> None:
    """Gives the native class `info`, `stats()` and `trace()`."""
    cls: Any = Device
    cls.info = property(DeviceInfo.of, doc="What the device says of itself (see `DeviceInfo`). Thread-safe.")
    cls.stats = _stats
    cls.trace = _trace
