# SPDX-License-Identifier: Apache-2.0
"""How benchmarks open devices: so that `--trace FILE` finds every one of them.

    with opened(uri) as device:  # instead of ugds.open(uri)
        ...

It costs a measurement nothing where no trace is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ugds
from ugds._core import Device
from ugds._report import CommandError

if TYPE_CHECKING:
    from ugds.trace import Trace

_traces: list[Trace] | None = None  # what was recorded so far, inside of `traced`


@contextmanager
def opened(uri: str, **options: Any) -> Iterator[Device]:
    """`ugds.open(uri, **options)`, and a trace of the device from then to its end if one is asked for."""
    with ugds.open(uri, **options) as device:
        if _traces is None:
            yield device
            return
        from ugds import trace

        with trace.record(device, trace.CAPACITY) as recorded:
            yield device
        keep(recorded)


def keep(trace: Trace) -> None:
    """Puts a trace that a benchmark recorded itself into the file, if one is asked for."""
    if _traces is not None:
        _traces.append(trace)


@contextmanager
def traced(path: str | None) -> Iterator[None]:
    """Writes what `opened` devices did inside of the `with` block to the file, when it ends without an exception. None:
    records nothing. Raises CommandError where the file cannot be written, before anything is measured."""
    global _traces
    if path is None:
        yield
        return
    from ugds import trace

    try:
        # Nobody is to wait for a measurement that cannot be kept.
        open(path, "a").close()
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", status=2) from None
    _traces = []
    try:
        yield
        trace.write_chrome(path, *_traces)
        dropped = sum(each.dropped for each in _traces)
        records = sum(len(each.records) for each in _traces)
    finally:
        _traces = None
    print(f"{records} commands are in {path}, for https://ui.perfetto.dev or ugds bench replay", file=sys.stderr)
    if dropped:
        print(f"{dropped} further commands found no room: each queue pair keeps {trace.CAPACITY}", file=sys.stderr)
