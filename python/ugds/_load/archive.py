# SPDX-License-Identifier: Apache-2.0
"""The archive that `torch.save` writes: where its storages are in the file, and which of them its pickle asks for.

It is a ZIP archive without compression: `data.pkl`, a pickle of the object, and each storage as a record, `data/0` and
so on, all of them in one folder. Nothing in the pickle is called here.
"""

from __future__ import annotations

import bisect
import io
import itertools
import pickle
import pickletools
import struct
import zipfile
from typing import IO, Any, NamedTuple, cast

from ugds._load.errors import CUT, InvalidFile, taken_for
from ugds._load.layout import Item

_PICKLE = "data.pkl"
#: Of a record's own header: its first 30 bytes, of which the last four are the lengths of its name and of what is
#: behind.
_LOCAL = 30
_ALIGN = 64
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_SAFETENSORS = 100_000_000  #: bytes of the header of such a file, at most
_OTHERWISE = "what to do: torch.load() reads the files of other times, and torch.jit.load() those of TorchScript"


class Archive(NamedTuple):
    pickle: bytes
    records: dict[str, Item]  #: of the storages, by key: where they are in the file


class Stored(NamedTuple):
    """A storage, as the pickle asks for it."""

    key: str
    location: str  #: where it was: "cpu", "cuda:0"


def read(file: IO[bytes] | Skeleton, path: str) -> Archive:
    """Raises InvalidFile."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            return _read(archive, file, path)
    except InvalidFile:
        raise
    except zipfile.BadZipFile as error:
        raise _invalid(path, _why(file, error)) from None
    # What zipfile raises where it meets what no archive has: it checks few of the numbers and names that it reads.
    except (struct.error, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _invalid(path, f"{error}; {_OTHERWISE}") from None


def _why(file: IO[bytes] | Skeleton, error: zipfile.BadZipFile) -> str:
    """What the file is that is no archive, as its beginning says."""
    file.seek(0)
    head = file.read(512)
    if not head:
        return "it is empty; what to do: copy or download it again"
    if head.startswith(b"PK\3\4"):
        return f"it begins as a checkpoint does, and its end is missing or damaged ({error}): {CUT}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _SAFETENSORS:
        return "it looks like a safetensors file; what to do: ugds.safetensors.load_file()"
    return taken_for(head) or f"{error}; {_OTHERWISE}"


def _read(archive: zipfile.ZipFile, file: IO[bytes] | Skeleton, path: str) -> Archive:
    found = {info.filename: info for info in archive.infolist()}
    if len(found) != len(archive.infolist()):
        raise _invalid(path, "a record of the archive comes twice")
    pickles = [name for name in found if name.count("/") == 1 and name.endswith(f"/{_PICKLE}")]
    if len(pickles) != 1:
        raise _invalid(path, f"the archive has {len(pickles)} records {_PICKLE}, and should have one; {_OTHERWISE}")
    folder = pickles[0].removesuffix(_PICKLE)
    if f"{folder}constants.pkl" in found:
        raise _invalid(path, f"it is TorchScript; {_OTHERWISE}")
    end = file.seek(0, io.SEEK_END)
    records, spans = {}, []
    for name, info in found.items():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise _invalid(path, f"the record {name} is compressed or encrypted, which torch.save does not do")
        if info.compress_size != info.file_size or not 0 <= info.header_offset <= end - _LOCAL:
            raise _invalid(path, f"the record {name} has sizes or a place that cannot be")
        start = _start(file, info, path)
        if start + info.file_size > end:
            raise _invalid(path, f"the file ends within the record {name}")
        spans.append((info.header_offset, start + info.file_size, name))
        if name.startswith(f"{folder}data/"):
            records[name.removeprefix(f"{folder}data/")] = Item(start, info.file_size, _ALIGN)
    spans.sort()
    for (_, stop, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < stop:
            raise _invalid(path, f"the records {first} and {second} overlap")
    order = found.get(f"{folder}byteorder")
    if order is not None and archive.read(order) != b"little":
        raise _invalid(path, f"its bytes are in another order than this machine's; {_OTHERWISE}")
    return Archive(archive.read(pickles[0]), records)


def _start(file: IO[bytes] | Skeleton, info: zipfile.ZipInfo, path: str) -> int:
    file.seek(info.header_offset)
    local = file.read(_LOCAL)
    if len(local) < _LOCAL or local[:4] != b"PK\3\4":
        raise _invalid(path, f"the record {info.filename} is not where the archive's directory says")
    name, extra = struct.unpack("<HH", local[-4:])
    return int(info.header_offset + _LOCAL + name + extra)


class Inert:
    """What every name in a pickle stands for while it is scanned. It takes whatever a pickle does to objects, and does
    nothing."""

    def __new__(cls, *_args: Any, **_options: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def _nothing(self, *_args: Any, **_options: Any) -> Any:
        return Inert()

    __call__ = __setitem__ = __setstate__ = add = append = extend = _nothing


class _Scanner(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.stored: list[Stored] = []

    def find_class(self, module: str, name: str) -> Any:
        return Inert

    def persistent_load(self, asked: Any) -> Any:
        _, _, key, location, _ = asked
        if not isinstance(key, str) or not isinstance(location, str):
            raise pickle.UnpicklingError(f"a storage has the key {key!r} and the location {location!r}")
        self.stored.append(Stored(key, location))
        return Inert()


def scan(data: bytes, path: str) -> list[Stored]:
    """The storages in the order in which the pickle asks for them, as often as it does. No name in it is looked up, and
    nothing is called. Raises InvalidFile."""
    scanner = _Scanner(io.BytesIO(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            # What is remembered is numbered in order. The unpickler makes room up to any number that is written there.
            if opcode.name in _PUTS and not 0 <= (argument or 0) <= len(data):
                raise pickle.UnpicklingError(f"it remembers {argument} things in {len(data)} bytes")
        scanner.load()
    except Exception as error:
        raise _invalid(path, f"its pickle cannot be read: {error}") from None
    return scanner.stored


class Skeleton(io.RawIOBase):
    """A file in memory of which only what is written is kept: what was stepped over is a hole, and read as zeros."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []  #: in order, and none of them overlap
        self._at = self._end = 0

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at

    def write(self, data: Any) -> int:
        kept = bytes(data)
        if self._at < self._end:
            raise io.UnsupportedOperation("what was written stays")
        if kept:
            self.parts.append((self._at, kept))
            self._at = self._end = self._at + len(kept)
        return len(kept)

    def read(self, size: int = -1) -> bytes:
        stop = self._end if size < 0 else min(self._end, self._at + size)
        made = bytearray(max(0, stop - self._at))
        first = max(0, bisect.bisect_right(self.parts, self._at, key=lambda part: part[0]) - 1)
        for start, data in self.parts[first:]:
            if start >= stop:
                break
            begin, end = max(start, self._at), min(start + len(data), stop)
            if begin < end:
                made[begin - self._at : end - self._at] = data[begin - start : end - start]
        self._at = max(self._at, stop)
        return bytes(made)


def _invalid(path: str, what: str) -> InvalidFile:
    return InvalidFile(f"{path} is no checkpoint that can be read: {what}")
