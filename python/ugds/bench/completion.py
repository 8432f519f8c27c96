# SPDX-License-Identifier: Apache-2.0
"""Polling against sleeping for interrupts: what a synchronous read costs its thread, and how long it takes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import ugds
from ugds._core import Device, Registration
from ugds._demo import in_memory
from ugds._report import CommandError, Record
from ugds.bench._devices import opened

_KIB, _MIB = 1 << 10, 1 << 20
# A small request of a fast device, and a large one of a device with the bandwidth of one SSD. The large one is one
# command: how a device's own limit cuts requests is not what is measured here.
SMALL, LARGE = "emulated:64MiB?latency=10us", "emulated:64MiB?latency=230us&mdts=8"
ROUNDS = 9


@dataclass(frozen=True)
class Point:
    """One way to wait: medians, so that a thread which lost its processor for a while does not count."""

    request_us: float  #: of requests
    cpu_percent: float  #: of one processor, by the issuing thread; of rounds
    cpu_us: float  #: the same for each request


def measure(uri: str | None, seconds: float) -> list[Record]:
    """A record for 4 KiB and one for 1 MiB. Only reads; on the two emulated devices above unless one is given."""
    return [
        _compare(uri or SMALL, 4 * _KIB, seconds, "polling_speedup"),
        _compare(uri or LARGE, 1 * _MIB, seconds, "interrupt_cpu_percent"),
    ]


def _compare(uri: str, size: int, seconds: float, of_interest: str) -> Record:
    with opened(uri, interrupts=False, queues=1) as polled:
        # Any other is one handle's at a time: it is opened anew for the other way.
        shared = in_memory(uri)
        if shared:
            with opened(uri, interrupts=True, queues=1) as sleeping:
                points = _rounds(polled, sleeping, size, seconds)
        else:
            points = {"polling": _alone(polled, size, seconds)}
        measured = polled.uri
    if not shared:
        with opened(uri, interrupts=True, queues=1) as sleeping:
            _demand_interrupts(sleeping)
            points["interrupt"] = _alone(sleeping, size, seconds)
    polling, interrupt = points["polling"], points["interrupt"]
    figures = {
        "polling_us": (polling.request_us, "us"),
        "interrupt_us": (interrupt.request_us, "us"),
        "polling_cpu_percent": (polling.cpu_percent, "%"),
        "interrupt_cpu_percent": (interrupt.cpu_percent, "%"),
        "polling_speedup": (interrupt.request_us / polling.request_us, "1"),
    }
    # Each figure is published once, for the size at which it is of interest.
    other = {"polling_speedup", "interrupt_cpu_percent"} - {of_interest}
    published = {name: value for name, value in figures.items() if name not in other}
    return Record("completion", {"size": size, "threads": 1, "rounds": ROUNDS}, measured, "host", "direct", published)


def _demand_interrupts(device: Device) -> None:
    if device.info.completion != "interrupt":
        raise CommandError(f"{device.uri} has no interrupts to measure\n  it says: {device.info.completion}")


def _rounds(polled: Device, sleeping: Device, size: int, seconds: float) -> dict[str, Point]:
    """In turn, so that both meet the same machine."""
    _demand_interrupts(sleeping)
    with ugds.empty(size) as buffer:
        found: dict[str, list[Point]] = {"polling": [], "interrupt": []}
        for device in (polled, sleeping):
            once(device, buffer, size, seconds / ROUNDS / 4)
        for _ in range(ROUNDS):
            found["polling"].append(once(polled, buffer, size, seconds / ROUNDS))
            found["interrupt"].append(once(sleeping, buffer, size, seconds / ROUNDS))
    return {name: median(points) for name, points in found.items()}


def _alone(device: Device, size: int, seconds: float) -> Point:
    with ugds.empty(size) as buffer:
        once(device, buffer, size, seconds / ROUNDS / 4)
        return median([once(device, buffer, size, seconds / ROUNDS) for _ in range(ROUNDS)])


def median(points: list[Point]) -> Point:
    return Point(
        statistics.median(point.request_us for point in points),
        statistics.median(point.cpu_percent for point in points),
        statistics.median(point.cpu_us for point in points),
    )


def once(device: Device, buffer: Registration, size: int, seconds: float) -> Point:
    """Reads of `size` bytes, one after another for so long, in this thread."""
    times: list[int] = []
    span = device.capacity // size * size
    start, worked = time.perf_counter_ns(), time.thread_time_ns()
    end = start + int(seconds * 1e9)
    before = start
    while before < end:
        device.read(buffer, len(times) * size % span, size)
        now = time.perf_counter_ns()
        times.append(now - before)
        before = now
    worked = time.thread_time_ns() - worked
    return Point(statistics.median(times) / 1000, 100 * worked / (before - start), worked / len(times) / 1000)
