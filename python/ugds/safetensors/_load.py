# SPDX-License-Identifier: Apache-2.0
"""Loading: what of which file goes where, and tensors of what was read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ugds._load.errors import InvalidFile
from ugds._load.files import Path, Source
from ugds._load.layout import Item
from ugds._load.loading import Wanted, load
from ugds.safetensors import _header
from ugds.safetensors._header import Entry, Header
from ugds.safetensors._types import Framework, align, framework

#: Of more files each is closed when its header was read, and opened again when its turn has come.
_MOST_OPEN = 16


def load_all(paths: Sequence[Path], devices: Sequence[Any], kind: str, progress: bool | None) -> dict[str, Any]:
    made = framework(kind)
    with ExitStack() as stack:
        opened: list[Source] = []
        entries: dict[str, tuple[Source, Header, Entry, Any]] = {}
        for path, device in zip(paths, devices, strict=True):
            source = stack.enter_context(Source(path))
            opened.append(source)
            header = _header.read(source)
            if len(paths) > _MOST_OPEN:
                source.rest()
            fixed = None if callable(device) else made.device(device)
            for entry in header.entries:
                where = fixed
                if callable(device):
                    if (named := device(entry.name)) is None:
                        continue
                    where = made.device(named)
                made.check(entry)
                if entry.name in entries:
                    first = entries[entry.name][0].path
                    raise InvalidFile(f'{source.path} has a tensor "{entry.name}", and so has {first}')
                entries[entry.name] = source, header, entry, where
        wanted = {
            name: wanted_of(source, header, entry, where) for name, (source, header, entry, where) in entries.items()
        }
        what = os.path.basename(opened[0].path) if len(opened) == 1 else f"{len(opened)} files"
        return finished(made, wanted, {name: found[2] for name, found in entries.items()}, what, progress)


def wanted_of(source: Source, header: Header, entry: Entry, device: Any) -> Wanted:
    return Wanted(source, Item(header.data + entry.start, entry.size, align(entry, str(device) == "cpu")), device)


def finished(
    made: Framework, wanted: dict[str, Wanted], entries: dict[str, Entry], what: str, progress: bool | None
) -> dict[str, Any]:
    found = load(wanted, made.arena, f"loading {what}", progress)
    return {name: made.tensor(entry, found.get(name), wanted[name].device) for name, entry in entries.items()}
