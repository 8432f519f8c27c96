# SPDX-License-Identifier: Apache-2.0
"""What the command line needs of rich, where rich is not installed: text and tables, plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

RenderableType = Any


def escape(text: str) -> str:
    return text


@dataclass
class Column:
    header: str
    justify: str = "left"
    overflow: str = ""


class Table:
    def __init__(self, title: str | None = None, **_style: Any) -> None:
        self.title = title
        self.columns: list[Column] = []
        self._rows: list[tuple[str, ...]] = []

    def add_column(self, header: str, justify: str = "left", **_style: Any) -> None:
        self.columns.append(Column(header, justify))

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def __str__(self) -> str:
        lines = [tuple(column.header for column in self.columns), *self._rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        padded = [
            "  ".join(
                cell.rjust(width) if column.justify == "right" else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join(([self.title] if self.title else []) + padded)


class Console:
    def __init__(self, file: TextIO, **_style: Any) -> None:
        self.file = file

    @property
    def is_terminal(self) -> bool:
        return self.file.isatty()

    def print(self, what: object, **_style: Any) -> None:
        print(what, file=self.file)
