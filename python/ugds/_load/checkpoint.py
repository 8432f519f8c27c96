# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the files of `torch.save`, of which the storages are read and written here, and nothing else.

PyTorch writes the archive around holes (`torch.serialization.skip_data`), which are filled here. It reads the pickle,
as `weights_only`, and is given storages that were read before.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

from ugds._load import archive, transfer
from ugds._load.archive import Archive, Skeleton, Stored
from ugds._load.errors import InvalidFile
from ugds._load.files import Path, Source, replacing
from ugds._load.loading import Wanted
from ugds._load.loading import load as load_bytes
from ugds._load.memory import Bytes, TorchArena, torch_device, torch_module
from ugds._load.progress import bar
from ugds._load.transfer import Content


def save(obj: Any, path: Path, durable: bool, progress: bool | None) -> None:
    contents, size = contents_of(obj)
    with replacing(path, size, durable) as device, bar("saving", size, progress) as advance:
        transfer.write(device, contents, size, transfer.TO_DISK if durable else transfer.TO_CACHE, advance)


def contents_of(obj: Any) -> tuple[list[Content], int]:
    """All parts of the file that holds `obj`, in order, and its size. Raises what `torch.save` does."""
    torch = torch_module()
    skeleton, module = Skeleton(), _RecordingPickle()
    with torch.serialization.skip_data():
        torch.save(obj, skeleton, pickle_module=module)
    records = archive.read(skeleton, "the new file").records
    contents = [Content(start, Bytes(data)) for start, data in skeleton.parts]
    contents += [
        Content(records[key].start, Bytes(bytes_of(storage)))
        for key, storage in module.storages.items()
        if records[key].size
    ]
    contents.sort(key=lambda content: content.start)
    end = 0
    for content in contents:
        if content.start != end:
            raise RuntimeError(f"this PyTorch ({torch.__version__}) writes checkpoints in a way that is not known here")
        end = content.end
    return contents, end


def bytes_of(storage: Any) -> Any:
    """All of a storage as a tensor of bytes, which shares its memory. Raises ValueError where that is not the host's or
    a GPU's."""
    torch = torch_module()
    untyped = untyped_of(storage)
    if untyped.device.type not in ("cpu", "cuda"):
        raise ValueError(f"a storage is on {untyped.device}; what to do: move it to the CPU or a GPU first")
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def untyped_of(storage: Any) -> Any:
    """The storage that a typed one is made of: asking those for anything else warns that they are of the past. Raises
    TypeError for a tensor."""
    if isinstance(storage, torch_module().Tensor):
        raise TypeError("storages are moved, and this is a tensor; what to do: pass tensor.untyped_storage()")
    return getattr(storage, "_untyped_storage", storage)


class _RecordingPickle:
    """In the place of the module `pickle`: `torch.save` makes its pickler of this one, which takes down which storage
    has which key."""

    __name__ = "pickle"

    def __init__(self) -> None:
        self.storages: dict[str, Any] = {}
        storages = self.storages

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                ask = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    found = ask(self, obj)
                    if found is not None:
                        storages.setdefault(found[2], obj)
                    return found

                setattr(cls, "persistent_id", persistent_id)  # noqa: B010 -- to mypy it is a method

        self.Pickler = Pickler


def load(path: Path, device: Any, progress: bool | None) -> Any:
    torch = torch_module()
    with Source(path) as source, os.fdopen(os.dup(source.fd), "rb") as file:
        found = archive.read(file, source.path)
        stored = archive.scan(found.pickle, source.path)
        storages = _storages(source, found, stored, device, progress)
        give = _Giver(source.path, found, stored, storages)
        file.seek(0)
        # It makes storages without bytes, and asks where each is to be: then it is given one that has them.
        with torch.serialization.skip_data():
            return torch.load(file, map_location=give, weights_only=True, mmap=False)


def _storages(
    source: Source, found: Archive, stored: list[Stored], device: Any, progress: bool | None
) -> dict[str, Any]:
    torch = torch_module()
    fixed = None if device is None else torch_device(device)
    wanted: dict[str, Wanted] = {}
    for key, location in stored:
        if key not in found.records:
            raise InvalidFile(f"{source.path} is no checkpoint that can be read: it lacks the record data/{key}")
        where = fixed or torch_device(location)
        if wanted.setdefault(key, Wanted(source, found.records[key], where)).device != where:
            raise InvalidFile(f"{source.path} has the storage {key} on two devices")
    what = f"loading {os.path.basename(source.path)}"
    memory = load_bytes(wanted, TorchArena, what, progress)
    return {
        key: memory[key].untyped_storage() if item.size else torch.UntypedStorage(0, device=where)
        for key, (_, item, where) in wanted.items()
    }


class _Giver:
    """The `map_location` of `torch.load`: called once for each storage, in the order of the pickle, and again for those
    that are empty."""

    def __init__(self, path: str, found: Archive, stored: list[Stored], storages: dict[str, Any]) -> None:
        self._path, self._sizes, self._storages = path, found.records, storages
        self._next = self._in_order(stored)

    def _in_order(self, stored: list[Stored]) -> Iterator[Stored]:
        seen: set[str] = set()
        for each in stored:
            if each.key not in seen or not self._sizes[each.key].size:
                seen.add(each.key)
                yield each

    def __call__(self, empty: Any, location: str) -> Any:
        expected = next(self._next, None)
        if expected is None or expected.location != location:
            raise RuntimeError("this PyTorch reads a checkpoint's storages in an order that is not known here")
        size = self._sizes[expected.key].size
        if empty.nbytes() != size:
            raise InvalidFile(
                f"{self._path} is no checkpoint that can be read: its pickle says that the storage {expected.key} has "
                f"{empty.nbytes()} bytes, and the record has {size}"
            )
        return self._storages[expected.key]
