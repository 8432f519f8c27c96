# SPDX-License-Identifier: Apache-2.0
"""How the command line speaks: records of measurements for programs, tables for people, and errors for both."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from ugds._core import Error

EMULATED_NOTE = "The device is emulated: these figures are the software's, and not the speed of an SSD."


class CommandError(Exception):
    """What stops a command; its text is for people. `status` is the exit status: 2 where the command line is at
    fault."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Record:
    """One measurement. Figure names are a contract: once published, they stay."""

    name: str
    params: Mapping[str, Any]
    device: str
    memory: str
    route: str
    figures: Mapping[str, tuple[float, str]] = field(default_factory=dict)  #: name: (value, unit)

    def json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "params": dict(self.params),
                "device": self.device,
                "memory": self.memory,
                "route": self.route,
                "figures": {name: {"value": value, "unit": unit} for name, (value, unit) in self.figures.items()},
            }
        )


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables to 80 columns where the output is a pipe or a file."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 110
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def number(value: float) -> str:
    """Three significant digits at least, no more than are of use."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value)}"
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3g}"


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> Table:
    """A table whose first `left` columns hold words, and the rest figures."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", no_wrap=index == 0 or index >= left)
    for row in rows:
        made.add_row(*row)
    return made


def records_tables(records: list[Record]) -> list[RenderableType]:
    """Records of one benchmark for people: what they have in common in a line, and below it a table. Neighbours with
    the same figures are its rows; a record that stands alone has a row for each of its figures."""
    made: list[RenderableType] = []
    kinds = itertools.groupby(records, lambda r: (tuple(r.figures), tuple(r.params), r.memory, r.route))
    for (figures, params, memory, route), group in kinds:
        rows = list(group)
        common = [name for name in params if all(row.params[name] == rows[0].params[name] for row in rows)]
        said = [f"{name} {rows[0].params[name]}" for name in common]
        scheme = rows[0].device.partition(":")[0]
        transport = {"pci": "vfio"}.get(scheme, scheme)
        # Whose it is, where a benchmark has several devices.
        whose = [rows[0].device] if len({record.device for record in records}) > 1 else []
        heading = ", ".join([*whose, *said, f"memory {memory}", f"transport {transport}", f"route {route}"])
        if len(rows) > 1:
            varied = [name for name in params if name not in common]
            lines = [
                [*(str(row.params[name]) for name in varied), *(number(value) for value, _ in row.figures.values())]
                for row in rows
            ]
            made += [heading, table("", (*varied, *figures), lines)]
        else:
            values = [(name, number(v), "" if unit == "1" else unit) for name, (v, unit) in rows[0].figures.items()]
            single = table("", ("figure", "value", "unit"), values)
            single.columns[2].justify = "left"
            made += [heading, single]
    return made


def describe(error: Error) -> str:
    """A ugds.Error in lines: what failed, where, why, and what to do."""
    where = f" on {error.device}" if error.device else ""
    span = ""
    if error.length:
        span = f", bytes {error.offset} to {error.offset + error.length}"
    lines = [f"{error.operation}{where}{span} failed: {error.cause}"]
    if error.status_text:
        lines.append(f"  the device said: {error.status_text}")
    if error.completed:
        lines.append(f"  the first {error.completed} bytes are right")
    if error.hint:
        lines.append(f"  what to do: {error.hint}")
    return "\n".join(lines)
