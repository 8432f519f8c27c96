# SPDX-License-Identifier: Apache-2.0
"""How the command line speaks: records of measurements for programs, tables for people, and errors for both."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ugds._core import Error

try:
    from rich.console import Console, RenderableType
    from rich.markup import escape
    from rich.table import Table
except ImportError:  # the same words, without colours and lines
    from ugds._plain import Console, RenderableType, Table, escape  # type: ignore[assignment]

__all__ = ["Console", "RenderableType", "Table", "escape"]  # from here, whichever they are

#: What stands before the colon of a URI, where the transport's name is another.
_TRANSPORTS = {"pci": "vfio", "posix": "file", "io_uring": "file"}
EMULATED_NOTE = "The device is emulated: these figures are the software's, and not the speed of an SSD."
FILE_NOTE = "A baseline's file is not on that device: the two do not say which path to an SSD is the faster."
FIO_NOTE = "uGDS is called from Python here, whose threads share the interpreter's lock; fio, which drives files, is C."


def notes(records: Iterable[Record]) -> list[str]:
    """What has to be said with the figures, for nobody to take them for what they are not."""
    transports = {(record.transport, record.baseline is None) for record in records}
    emulated, files = ("emulated", True) in transports, ("file", False) in transports
    told = ((emulated, EMULATED_NOTE), (emulated and files, FILE_NOTE), (files, FIO_NOTE))
    return [note for applies, note in told if applies]


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

    @property
    def transport(self) -> str:
        """How the device is reached (see docs/routes.md)."""
        scheme = self.device.partition(":")[0]
        return _TRANSPORTS.get(scheme, scheme)

    @property
    def baseline(self) -> str | None:
        """What was measured to compare with: posix, io_uring or ugds; None where it is the device in question."""
        kind = self.params.get("baseline")
        return None if kind is None else str(kind)

    @classmethod
    def parse(cls, line: str) -> Record:
        """One line of what `--json` prints. Raises ValueError for anything else."""
        found = json.loads(line)
        try:
            name, device, memory, route = (str(found[key]) for key in ("name", "device", "memory", "route"))
            params = dict(found["params"])
            figures = {str(name): (float(f["value"]), str(f["unit"])) for name, f in found["figures"].items()}
            if not all(math.isfinite(value) for value, _ in figures.values()):
                raise ValueError("a figure is no finite number")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a benchmark: {error!r}") from None
        return cls(name, params, device, memory, route, figures)

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
    width = None if stream.isatty() else 130
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
    the same figures are its rows, a baseline's beside the device's; a record that stands alone has a row for each of
    its figures."""
    made: list[RenderableType] = []
    several = len({record.device for record in records}) > 1
    compared = any(record.baseline for record in records)
    for _, group in itertools.groupby(records, lambda record: _kind(record, compared)):
        rows = list(group)
        params = [name for name in rows[0].params if name != "baseline"]
        common = [name for name in params if all(row.params[name] == rows[0].params[name] for row in rows)]
        said = [f"{name} {rows[0].params[name]}" for name in common]
        names = short_names(rows)
        if len(names) > 1:  # what the table has by short names is told above it
            made += [", ".join(said)] if said else []
            whose = {names[row.device, row.baseline]: row for row in reversed(rows)}
            made += [f"{name}: {whose[name].device}, {where(whose[name])}" for name in names.values()]
        else:
            made.append(", ".join([*([rows[0].device] if several else []), *said, where(rows[0])]))
        made.append(_body(rows, [name for name in params if name not in common], names))
    return made


def _kind(record: Record, compared: bool) -> tuple[object, ...]:
    """What the rows of one table share: also where their bytes went, which is told once, unless they are `compared`."""
    went = () if compared else (record.memory, record.route)
    return tuple(record.figures), tuple(name for name in record.params if name != "baseline"), went


def _body(rows: list[Record], varied: list[str], names: Mapping[tuple[str, str | None], str]) -> Table:
    if len(rows) == 1:
        values = [(name, number(v), "" if unit == "1" else unit) for name, (v, unit) in rows[0].figures.items()]
        single = table("", ("figure", "value", "unit"), values)
        single.columns[2].justify = "left"
        return single
    compared = len(names) > 1
    lines = [
        [
            *([names[row.device, row.baseline]] if compared else []),
            *(str(row.params[name]) for name in varied),
            *(number(value) for value, _ in row.figures.values()),
        ]
        for row in rows
    ]
    return table("", (*(["device"] if compared else []), *varied, *rows[0].figures), lines)


def where(record: Record) -> str:
    """The three words for where bytes went (see docs/routes.md)."""
    return f"memory {record.memory}, transport {record.transport}, route {record.route}"


def short_names(records: Iterable[Record]) -> dict[tuple[str, str | None], str]:
    """A word for each device and baseline of the records: what it is, with a number where others are the same."""
    names: dict[tuple[str, str | None], str] = {}
    words: list[str] = []
    for record in records:
        if (record.device, record.baseline) not in names:
            word = record.transport if record.baseline in (None, "ugds") else str(record.baseline)
            words.append(word)
            count = words.count(word)
            names[record.device, record.baseline] = word if count == 1 else f"{word} {count}"
    return names


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
