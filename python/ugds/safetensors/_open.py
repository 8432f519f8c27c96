# SPDX-License-Identifier: Apache-2.0
"""A file of which tensors, or rows of them, are read as they are asked for."""

from __future__ import annotations

import math
from typing import Any

from ugds._load.files import Path, Source
from ugds.safetensors import _header
from ugds.safetensors._header import Entry
from ugds.safetensors._load import finished, wanted_of
from ugds.safetensors._types import framework as framework_of


class safe_open:
    """A safetensors file, to be used by `with`. Nothing but its header is read before it is asked for.

    with safe_open("model.safetensors", device="cuda") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)

    device: as for `load_file`, but no function. Raises what `load_file` does. Thread-safe."""

    def __init__(self, path: Path, framework: str = "pt", device: Any = "cpu") -> None:
        self._framework = framework_of(framework)
        self._device = self._framework.device(device)
        self._source = Source(path, keeps_device=True)
        try:
            self._header = _header.read(self._source)
        except BaseException:
            self._source.close()
            raise
        self._entries = {entry.name: entry for entry in self._header.entries}

    def keys(self) -> list[str]:
        """Names of the tensors, in alphabetical order."""
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The same in the order of the file."""
        return list(self._entries)

    def metadata(self) -> dict[str, str] | None:
        return None if self._header.metadata is None else dict(self._header.metadata)

    def get_tensor(self, name: str) -> Any:
        """Raises KeyError for a name that the file has not."""
        return self._read(self._entry(name))

    def get_tensors(self) -> dict[str, Any]:
        """All of them."""
        for entry in self._entries.values():
            self._framework.check(entry)
        wanted = {
            name: wanted_of(self._source, self._header, entry, self._device) for name, entry in self._entries.items()
        }
        return finished(self._framework, wanted, self._entries, "tensors", False)

    def get_slice(self, name: str) -> Slice:
        """A tensor of which `slice[10:20]`, or any other index, gives a part. Of the file those rows are read that the
        first index takes."""
        return Slice(self, self._entry(name))

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f'{self._source.path} has no tensor "{name}"') from None

    def _read(self, entry: Entry) -> Any:
        self._framework.check(entry)
        wanted = {entry.name: wanted_of(self._source, self._header, entry, self._device)}
        return finished(self._framework, wanted, {entry.name: entry}, entry.name, False)[entry.name]

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Slice:
    """A tensor in a file, of which parts are read."""

    def __init__(self, file: safe_open, entry: Entry) -> None:
        self._file, self._of = file, entry

    def get_shape(self) -> list[int]:
        return list(self._of.shape)

    def get_dtype(self) -> str:
        """As the format names it, such as "BF16"."""
        return self._of.dtype

    def __getitem__(self, index: Any) -> Any:
        """What the tensor gives for this index; for an int, or a slice with a step of 1, no other rows are read."""
        given = index if isinstance(index, tuple) else (index,)
        shape, bits = self._of.shape, _header.BITS[self._of.dtype]
        row = math.prod(shape[1:]) * bits
        if not shape or not given or row % 8 or not isinstance(given[0], (int, slice)) or isinstance(given[0], bool):
            return self._file._read(self._of)[index]
        first, rest = given[0], given[1:]
        if isinstance(first, int):
            if not -shape[0] <= first < shape[0]:
                raise IndexError(f'index {first} is out of range for "{self._of.name}" with {shape[0]} rows')
            start, stop, first = first % shape[0], first % shape[0] + 1, 0
        else:
            start, stop, step = first.indices(shape[0])
            if step != 1:
                return self._file._read(self._of)[index]
            stop, first = max(start, stop), slice(None)
        size = (stop - start) * row // 8
        part = Entry(self._of.name, self._of.dtype, (stop - start, *shape[1:]), self._of.start + start * row // 8, size)
        return self._file._read(part)[(first, *rest)]
