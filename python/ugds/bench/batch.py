# SPDX-License-Identifier: Apache-2.0
"""Batches against synchronous requests, on an emulated device that says what it allows: so many commands a second, each
after a latency. Loops without Python, in turn on one device.
"""

from __future__ import annotations

import os
import statistics

import ugds
from ugds import _core, testing
from ugds._core import Device, Registration
from ugds._demo import in_memory
from ugds._report import Record
from ugds.bench._devices import opened

SIZE, DEPTH = 4096, 128
LATENCY_US, COMMANDS_PER_S = 20, 300_000
DEVICE = f"emulated:64MiB?latency={LATENCY_US}us&iops={COMMANDS_PER_S}"
ROUNDS = 9
# The first batch against the following ones: of a device just opened, a batch just set up.
OPENINGS, FOLLOWING = 15, 12


def measure(uri: str | None, seconds: float) -> list[Record]:
    """A record of throughput, and one of the first batch. Only reads."""
    with opened(uri or DEVICE) as device, ugds.empty(SIZE * DEPTH) as buffer:
        fill(device, buffer)
        figures = throughput(device, buffer, seconds, modelled=uri is None)
        where = device.uri, buffer.memory, buffer.route
    params = {"size": SIZE, "depth": DEPTH, "rounds": ROUNDS}
    first = {"size": SIZE, "depth": DEPTH, "openings": OPENINGS}
    return [Record("batch", params, *where, figures), Record("batch", first, *where, first_batch(uri or DEVICE))]


def fill(device: Device, buffer: Registration) -> None:
    """What is read was written once: no page of an emulated device is a hole."""
    if in_memory(device.uri):
        device.write(buffer, 0)
        device.flush()


def throughput(device: Device, buffer: Registration, seconds: float, modelled: bool) -> dict[str, tuple[float, str]]:
    processors = len(os.sched_getaffinity(0))
    counts = sorted({1, max(1, processors - 1), processors})
    batches: list[float] = []
    sync: dict[int, list[float]] = {threads: [] for threads in counts}
    span = seconds / ROUNDS / (1 + len(counts))
    _core.time_batches(device, buffer, DEPTH, SIZE, 50)
    batch_ns = statistics.median(_core.time_batches(device, buffer, DEPTH, SIZE, 50))
    wanted = max(20, int(span * 1e9 / batch_ns))
    for _ in range(ROUNDS):
        batches.append(DEPTH * 1e9 / statistics.median(_core.time_batches(device, buffer, DEPTH, SIZE, wanted)))
        for threads in counts:
            done, taken = _core.time_threads(device, buffer, threads, SIZE, span)
            sync[threads].append(done * 1e9 / taken)
    fewer = max(1, processors - 1)
    figures = {
        "requests_per_s": (statistics.median(batches), "1/s"),
        "sync_requests_per_s": (statistics.median(sync[fewer]), "1/s"),
        "sync_threads": (fewer, "1"),
        "sync_all_processors_requests_per_s": (statistics.median(sync[processors]), "1/s"),
        "requests_ratio_to_sync": (
            statistics.median(b / s for b, s in zip(batches, sync[fewer], strict=True)),
            "1",
        ),
    }
    if modelled:
        figures["batch_share_of_model"] = (statistics.median(batches) / COMMANDS_PER_S, "1")
    if device.transport == "emulated":
        figures["doorbells_per_submission"] = (doorbells(device, buffer), "1")
    return figures


def doorbells(device: Device, buffer: Registration) -> float:
    """As the device counts them, a submission of DEPTH requests at a time: changes of submission doorbells."""
    emulator, submissions = testing.emulator(device), 100
    before = emulator.counters()["doorbells"]
    _core.time_batches(device, buffer, DEPTH, SIZE, submissions)
    return (emulator.counters()["doorbells"] - before) / submissions


def first_batch(uri: str) -> dict[str, tuple[float, str]]:
    """Medians over devices just opened, in this process."""
    firsts, followings = [], []
    for _ in range(OPENINGS):
        with opened(uri) as device, ugds.empty(SIZE * DEPTH) as buffer:
            fill(device, buffer)
            first, *following = _core.time_batches(device, buffer, DEPTH, SIZE, 1 + FOLLOWING)
        firsts.append(first / 1000)
        followings.append(statistics.median(following) / 1000)
    ratio = statistics.median(one / other for one, other in zip(firsts, followings, strict=True))
    return {
        "first_batch_ratio": (ratio, "1"),
        "first_batch_us": (statistics.median(firsts), "us"),
        "following_batch_us": (statistics.median(followings), "us"),
    }
