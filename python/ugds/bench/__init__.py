# SPDX-License-Identifier: Apache-2.0
"""The benchmarks behind `ugds bench`. Each gives records (see `ugds._report.Record`); none prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ugds import _demo
from ugds._report import CommandError, Record
from ugds.bench._devices import opened, traced

__all__ = ["BENCHMARKS", "opened", "traced", "was_crowded"]


def _writable(arguments: argparse.Namespace) -> str:
    """The device that a benchmark may write to. Raises CommandError where it could lose data."""
    uri: str = arguments.device
    if not _demo.in_memory(uri) and not arguments.overwrite:
        raise CommandError(
            f"this benchmark writes to {uri}, which may hold data\n  what to do: add --overwrite if that data can go",
            status=2,
        )
    return uri


def _sync(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import sync

    sizes = sync.parse_sizes(arguments.sizes)
    threads = sync.parse_threads(arguments.threads)
    return sync.measure(_writable(arguments), sizes, threads, arguments.mode, arguments.seconds)


def _setup(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import setup

    return setup.measure(arguments.device, arguments.processes, arguments.repetitions)


def _overhead(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import overhead

    return overhead.measure(arguments.device, arguments.calls)


def _completion(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import completion

    return completion.measure(arguments.device, arguments.seconds)


def _replay(arguments: argparse.Namespace) -> list[Record]:
    from ugds.bench import replay

    a = arguments
    return replay.measure(a.file, a.device, a.speed, a.threads, a.overwrite, a.process)


def was_crowded(records: list[Record]) -> bool:
    """Whether a thread that polled, and so wanted all of a processor, did not get it."""
    return any(record.figures.get("polling_cpu_percent", (100.0, "%"))[0] < 90 for record in records)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], list[Record]]] = {
    "sync": _sync,
    "setup": _setup,
    "overhead": _overhead,
    "completion": _completion,
    "replay": _replay,
}
