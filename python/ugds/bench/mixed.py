# SPDX-License-Identifier: Apache-2.0
"""Reads and writes together, from several threads, each kind's figures apart."""

from __future__ import annotations

from collections.abc import Sequence

from ugds._report import CommandError, Record
from ugds.bench.load import Load, Result
from ugds.bench.targets import Target
from ugds.bench.targets import measure as measure_loads


def measure(
    targets: Sequence[Target],
    read_percent: int,
    sizes: Sequence[int],
    threads: Sequence[int],
    seconds: float,
    processes: int | None = None,
) -> list[Record]:
    """A record for each size, number of threads and target, the measured device's first."""
    loads = [Load(read_percent, size, count, seconds) for size in sizes for count in threads]
    found = measure_loads(targets, loads, processes)
    return [
        _record(target, load, result, processes)
        for load, results in zip(loads, found, strict=True)
        for target, result in zip(targets, results, strict=True)
    ]


def _record(target: Target, load: Load, result: Result, processes: int | None) -> Record:
    reads, writes = result.reads, result.writes
    if reads is None or writes is None:
        raise CommandError(f"{target.uri}: no {'write' if reads else 'read'} was made; give it more --seconds")
    figures = {
        "read_gib_per_s": (reads.gib_per_s, "GiB/s"),
        "write_gib_per_s": (writes.gib_per_s, "GiB/s"),
        "read_p50_us": (reads.p50_us, "us"),
        "read_p99_us": (reads.p99_us, "us"),
        "write_p50_us": (writes.p50_us, "us"),
        "write_p99_us": (writes.p99_us, "us"),
    }
    params = {
        "read_percent": load.read_percent,
        "size": load.size,
        "threads": load.threads,
        **({} if processes is None else {"processes": processes}),
        **({} if target.kind is None else {"baseline": target.kind}),
    }
    return Record("mixed", params, target.uri, result.memory, result.route, figures)
