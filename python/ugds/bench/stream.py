# SPDX-License-Identifier: Apache-2.0
"""Reads in the order of a GPU's stream, against synchronous ones of the same device into the same memory.

What is compared is measured in turn, in one run; figures are medians of rounds.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ugds._report import Record
from ugds.bench import _c_stream, cuda
from ugds.bench._gpu import GIB, KIB, MIB, Bench, Figures, in_turn, median_gap, median_ratio, ready, seconds
from ugds.bench.figures import STREAM, STREAMS

SMALL, MIDDLE, LARGE = 4 * KIB, MIB, 16 * MIB
#: Requests of a round, by their size: some milliseconds of a device of a few GiB/s.
COUNTS = {SMALL: 200, MIDDLE: 64, LARGE: 8}
DEPTH = 64
SUBMISSIONS = 4096
#: Of `submission_share_16mib`: requests in all, of which DEPTH are in flight.
SUPPLIED = 192
BUFFER = STREAMS * LARGE


def measure(
    uri: str | None,
    ordinal: int,
    route: str | None,
    figure: int | None,
    sizes: Sequence[int] | None,
    rounds: int,
    overwrite: bool = False,
) -> list[Record]:
    """The records of a figure of the paper, or those with the figures that the project promises."""
    with ready(uri, ordinal, route, BUFFER, overwrite) as bench:
        if figure == 12 or (figure is None and sizes):
            return [_serialized(bench, size, rounds) for size in sizes or STREAM[12]]
        if figure == 16:
            return _streams(bench, rounds)
        return [
            _extra(bench, rounds),
            _middle(bench, rounds),
            _large(bench, rounds),
            _submission(bench, rounds),
            _share(bench, max(1, rounds // 3)),
        ]


# --- Ways to read, each with its time in seconds ------------------------------------------------------------------


def synchronous(bench: Bench, size: int, count: int) -> Callable[[], float]:
    device, buffer, span = bench.device, bench.buffer, bench.span

    def once() -> None:
        for turn in range(count):
            device.read(buffer, turn * size % span, size)

    return lambda: seconds(once)


def serialized(bench: Bench, stream: cuda.Stream, size: int, count: int) -> Callable[[], float]:
    """Each read is followed by a synchronisation of the stream."""
    device, buffer, span, handle, wait = bench.device, bench.buffer, bench.span, stream.handle, stream.synchronize

    def once() -> None:
        for turn in range(count):
            device.read_async(buffer, turn * size % span, size, stream=handle)
            wait()

    def timed() -> float:
        taken = seconds(once)
        bench.drain(stream)
        return taken

    return timed


def supplied(bench: Bench, streams: Sequence[cuda.Stream], size: int, count: int) -> Callable[[], float]:
    """`count` reads on each stream, whose memory is its own, and one synchronisation at the end."""

    def once() -> None:
        for turn in range(count):
            for lane, stream in enumerate(streams):
                bench.read_async(size, turn * len(streams) + lane, stream, lane)
        for stream in streams:
            stream.synchronize()

    def timed() -> float:
        taken = seconds(once)
        bench.drain(*streams)
        return taken

    return timed


# --- What the project promises ------------------------------------------------------------------------------------


def _extra(bench: Bench, rounds: int) -> Record:
    """One 4 KiB read on a stream and its synchronisation, less a synchronous call; and the same through the C
    interface, without what Python adds."""
    count = COUNTS[SMALL]
    with bench.gpu.stream() as stream:
        ways = {
            "sync": synchronous(bench, SMALL, count),
            "stream": serialized(bench, stream, SMALL, count),
        }
        found = in_turn(rounds, ways)
    us = {name: [taken * 1e6 / count for taken in times] for name, times in found.items()}
    figures: Figures = {
        "stream_sync_extra_us": (median_gap(us["stream"], us["sync"]), "us"),
        "sync_us": (statistics.median(us["sync"]), "us"),
        "stream_us": (statistics.median(us["stream"]), "us"),
    }
    if (without := _c_stream.extra_us(bench.gpu, bench.device.uri, bench.buffer.route, rounds, count)) is not None:
        figures["stream_sync_extra_c_us"] = (without, "us")
    return bench.record("stream", {"size": SMALL, "rounds": rounds}, figures)


def _middle(bench: Bench, rounds: int) -> Record:
    count = COUNTS[MIDDLE]
    with bench.gpu.stream() as stream:
        ways = {
            "sync": synchronous(bench, MIDDLE, count),
            "stream": supplied(bench, [stream], MIDDLE, count),
        }
        found = in_turn(rounds, ways)
    gib = {name: [MIDDLE * count / GIB / taken for taken in times] for name, times in found.items()}
    figures: Figures = {
        "stream_share_of_sync_1mib": (median_ratio(gib["stream"], gib["sync"]), "1"),
        "sync_gib_per_s": (statistics.median(gib["sync"]), "GiB/s"),
        "stream_gib_per_s": (statistics.median(gib["stream"]), "GiB/s"),
    }
    return bench.record("stream", {"size": MIDDLE, "rounds": rounds, "requests": count}, figures)


def _bandwidths(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Of 16 MiB reads, in GiB/s by rounds: synchronous, on one stream, and on many."""
    count = COUNTS[LARGE]
    with ExitStack() as stack:
        streams = [stack.enter_context(bench.gpu.stream()) for _ in range(STREAMS)]
        each = max(1, count * 2 // STREAMS)
        ways = {
            "sync": synchronous(bench, LARGE, count),
            "stream": supplied(bench, streams[:1], LARGE, count),
            "streams": supplied(bench, streams, LARGE, each),
        }
        moved = {"sync": count, "stream": count, "streams": each * STREAMS}
        found = in_turn(rounds, ways)
    return {name: [LARGE * moved[name] / GIB / taken for taken in times] for name, times in found.items()}


def _large(bench: Bench, rounds: int) -> Record:
    gib = _bandwidths(bench, rounds)
    figures: Figures = {
        "stream_share_of_sync_16mib": (median_ratio(gib["stream"], gib["sync"]), "1"),
        "streams_share_of_sync_16mib": (median_ratio(gib["streams"], gib["sync"]), "1"),
        "sync_gib_per_s": (statistics.median(gib["sync"]), "GiB/s"),
        "stream_gib_per_s": (statistics.median(gib["stream"]), "GiB/s"),
        "streams_gib_per_s": (statistics.median(gib["streams"]), "GiB/s"),
    }
    return bench.record("stream", {"size": LARGE, "rounds": rounds, "streams": STREAMS}, figures)


def _submission(bench: Bench, rounds: int) -> Record:
    """How long the call takes that enqueues a 4 KiB read, with at most DEPTH of them on the stream."""
    read, buffer, clock = bench.device.read_async, bench.buffer, time.perf_counter_ns
    taken: list[int] = []
    with bench.gpu.stream() as stream:
        handle = stream.handle
        for turn in range(rounds + 1):
            if turn == 1:  # the first round does not count
                taken.clear()
            for _ in range(-(-SUBMISSIONS // rounds // DEPTH)):
                for place in range(DEPTH):
                    before = clock()
                    read(buffer, place * SMALL, SMALL, place * SMALL, stream=handle)
                    taken.append(clock() - before)
                stream.synchronize()
                bench.drain(stream)
    p50, p99 = (float(value) / 1000 for value in np.percentile(taken, [50, 99]))
    figures: Figures = {"submission_p50_us": (p50, "us"), "submission_p99_us": (p99, "us")}
    return bench.record("stream", {"size": SMALL, "depth": DEPTH, "submissions": len(taken)}, figures)


def _share(bench: Bench, rounds: int) -> Record:
    """The part of the time that the caller spends inside of submitting calls, while it keeps DEPTH reads of 16 MiB on
    one stream: before each it waits for the one that was enqueued DEPTH before."""
    clock = time.perf_counter_ns
    shares, gib = [], []
    with bench.gpu.stream() as stream:
        for _ in range(rounds):
            flying: deque[Any] = deque()
            inside, start = 0, clock()
            for turn in range(SUPPLIED):
                if len(flying) == DEPTH:
                    flying.popleft().result()
                before = clock()
                flying.append(bench.read_async(LARGE, turn, stream, turn % (BUFFER // LARGE)))
                inside += clock() - before
            stream.synchronize()
            elapsed = clock() - start
            bench.drain(stream)
            shares.append(inside / elapsed)
            gib.append(SUPPLIED * LARGE / GIB / elapsed * 1e9)
    figures: Figures = {
        "submission_share_16mib": (statistics.median(shares), "1"),
        "supplied_gib_per_s": (statistics.median(gib), "GiB/s"),
    }
    params = {"size": LARGE, "depth": DEPTH, "rounds": rounds, "requests": SUPPLIED}
    return bench.record("stream", params, figures)


# --- The paper's figures ------------------------------------------------------------------------------------------


def _serialized(bench: Bench, size: int, rounds: int) -> Record:
    """Figure 12 at one size: each read followed by a synchronisation of its stream."""
    count = max(4, min(COUNTS[SMALL], 64 * MIB // size))
    with bench.gpu.stream() as stream:
        ways = {"sync": synchronous(bench, size, count), "stream": serialized(bench, stream, size, count)}
        found = in_turn(rounds, ways)
    us = {name: [taken * 1e6 / count for taken in times] for name, times in found.items()}
    mean = {name: statistics.median(times) for name, times in us.items()}
    figures: Figures = {
        "stream_gib_per_s": (size / GIB / mean["stream"] * 1e6, "GiB/s"),
        "stream_mean_us": (mean["stream"], "us"),
        "sync_gib_per_s": (size / GIB / mean["sync"] * 1e6, "GiB/s"),
        "sync_mean_us": (mean["sync"], "us"),
        "extra_us": (median_gap(us["stream"], us["sync"]), "us"),
    }
    return bench.record("stream", {"figure": 12, "rounds": rounds, "size": size}, figures)


def _streams(bench: Bench, rounds: int) -> list[Record]:
    """Figure 16: a record for each way of reading 16 MiB at a time, and how much of the time submitting takes."""
    gib = _bandwidths(bench, rounds)
    made = []
    for way, streams in (("sync", 0), ("stream", 1), ("streams", STREAMS)):
        params = {"figure": 16, "size": LARGE, "rounds": rounds, "way": way, "streams": streams}
        figures: Figures = {
            "gib_per_s": (statistics.median(gib[way]), "GiB/s"),
            "share_of_sync": (median_ratio(gib[way], gib["sync"]), "1"),
        }
        made.append(bench.record("stream", params, figures))
    return [*made, _share(bench, max(1, rounds // 3))]
