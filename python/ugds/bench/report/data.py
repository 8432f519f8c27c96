# SPDX-License-Identifier: Apache-2.0
"""Records as they are read, and as they are grouped for drawing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugds import _report
from ugds._report import CommandError, Record


def read(files: Sequence[Path]) -> list[Record]:
    """What `--json` printed into the files; without any, or for `-`, into standard input. Of two records of the same
    point the later one stands. Raises CommandError for a line that is none."""
    if not files and sys.stdin.isatty():
        raise CommandError("name files that hold what --json printed, or pipe it in", status=2)
    found: dict[tuple[object, ...], Record] = {}
    for file in files or [Path("-")]:
        for record in _read_one(file):
            went = (record.device, record.memory, record.route)
            found[record.name, went, repr(sorted(record.params.items())), tuple(record.figures)] = record
    if not found:
        raise CommandError("there is no record in what was read; benchmarks print them with --json", status=2)
    return list(found.values())


def _read_one(file: Path) -> list[Record]:
    where = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandError(f"cannot read {where}: {reason}", status=2) from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(Record.parse(line))
        except ValueError as error:
            raise CommandError(f"{where}, line {number}: {error}\n  what to do: give what --json printed", 2) from None
    return records


@dataclass(frozen=True)
class Series:
    """What one device or baseline did: one colour."""

    name: str
    device: str
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        return f"{self.name}: {shortened(self.device)}"

    def value(self, figure: str, **params: Any) -> float | None:
        """Of the record with these parameters, as far as there is one that has the figure."""
        for record in reversed(self.records):
            if figure in record.figures and all(record.params.get(name) == v for name, v in params.items()):
                return record.figures[figure][0]
        return None


def series(records: Iterable[Record]) -> list[Series]:
    """Ours first, then baselines, in the order of their first records."""
    ordered = sorted(records, key=lambda record: record.baseline is not None)
    names = _report.short_names(ordered)
    return [
        Series(name, key[0], tuple(r for r in ordered if (r.device, r.baseline) == key)) for key, name in names.items()
    ]


def values_of(records: Iterable[Record], param: str) -> list[Any]:
    """What a parameter is in them, ascending."""
    return sorted({record.params[param] for record in records if param in record.params})


def shortened(text: str, length: int = 44) -> str:
    """Without its middle, where it is longer."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - length :]}"


def caption(records: Sequence[Record]) -> list[str]:
    """Sentences that say what a figure's data are: device, memory, transport, route, and what it was compared with."""
    ours = [s for s in series(records) if s.records[0].baseline is None]
    theirs = [s for s in series(records) if s.records[0].baseline is not None]
    said = [f"{'Device' if s.records[0].baseline is None else 'Baseline'} {_described(s)}." for s in ours + theirs]
    if not theirs:
        said.append("No baseline was measured beside it.")
    processes = values_of(records, "processes")
    if processes and processes != [1]:
        said.append(f"Medians of {' or '.join(map(str, processes))} fresh processes.")
    return said + _report.notes(records)


def _described(series: Series) -> str:
    places = sorted({_report.where(record) for record in series.records})
    return f"{series.name}: {series.device} ({'; '.join(places)})"
