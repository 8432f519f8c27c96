# SPDX-License-Identifier: Apache-2.0
"""A bar on the standard error: bytes, their rate, and the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]


@contextmanager
def bar(what: str, total: int, shown: bool | None = None) -> Iterator[Advance]:
    """Gives a function to call with the number of bytes that are done, from any thread. shown: True draws the bar
    wherever the output goes, False never, None where it goes to a terminal. Without rich nothing is drawn."""
    if shown is None:
        shown = sys.stderr is not None and sys.stderr.isatty()
    if not shown:
        yield lambda count: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed
    except ImportError:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task(what.replace("[", r"\["), total=total)
        yield lambda count: drawn.advance(task, count)
