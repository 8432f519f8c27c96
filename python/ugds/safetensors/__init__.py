# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read straight into the tensors that they become, and written whole or not at all.

    from ugds.safetensors import load_file, load_files, safe_open, save_file

    weights = load_file("model.safetensors", device="cuda")
    weights = load_files(["a.safetensors", "b.safetensors"], device=lambda name: "cuda:1" if "layers.4" in name else 0)
    save_file(weights, "copy.safetensors", metadata={"format": "pt"})

The names, and what they give, are those of the safetensors package, which is not needed. Tensors are PyTorch's, or
NumPy's with `framework="np"`. A file's tensors on one device are one allocation, which is free when the last of them
is; each has a storage of its own. Beside them some 32 MiB of memory are used, and on the way to a GPU up to 256 MiB
that are kept for the next time (`UGDS_STAGING`). Where most of a file is in the page cache it is read from there; else
past it, where its file system can (O_DIRECT).

progress: True draws a bar on the standard error, False none, and None where that is a terminal.

Raises `InvalidFile`, a ValueError, for a file that is not as the format says; ValueError for what cannot be asked;
OSError where a file cannot be opened, and `ugds.Error`, which is one, where it cannot be read or written. Thread-safe,
but tensors are not to be changed while they are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ugds._load import transfer
from ugds._load.errors import InvalidFile
from ugds._load.files import Path, replacing
from ugds._load.memory import Bytes
from ugds._load.progress import bar
from ugds._load.transfer import Content
from ugds.safetensors import _header
from ugds.safetensors._load import load_all
from ugds.safetensors._open import safe_open
from ugds.safetensors._types import to_save

__all__ = ["InvalidFile", "load_file", "load_files", "safe_open", "save_file"]

#: A device of PyTorch ("cuda", "cuda:1", 1, torch.device), or a function of a tensor's name that gives one, or None for
#: a tensor that is left out.
Device = Any


def load_file(
    path: Path, device: Device | Callable[[str], Device] = "cpu", *, framework: str = "pt", progress: bool | None = None
) -> dict[str, Any]:
    """All tensors of a file by name, in the order of the file.

    device: where they are to be: "cpu", "cuda", "cuda:1", 1, a torch.device; or a function that says it for each name,
    and None for what is left out. Raises InvalidFile, ValueError, OSError, `ugds.Error` and torch.OutOfMemoryError."""
    return load_all([path], [device], framework, progress)


def load_files(
    paths: Sequence[Path],
    device: Device | Callable[[str], Device] | Sequence[Device] = "cpu",
    *,
    framework: str = "pt",
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tensors of several files, all of which are read at once, onto as many GPUs as are named.

    device: as for `load_file`, or a list with one for each file. Raises what `load_file` does, and InvalidFile where
    two files have a tensor of one name."""
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
        raise ValueError(f"paths are a list of files, not {type(paths).__name__}; for one there is load_file()")
    devices = list(device) if isinstance(device, (list, tuple)) else [device] * len(paths)
    if len(devices) != len(paths):
        raise ValueError(f"{len(paths)} files and {len(devices)} devices: name one for all, or one for each")
    return load_all(paths, devices, framework, progress)


def save_file(
    tensors: Mapping[str, Any],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
    align: int = 8,
    progress: bool | None = None,
) -> None:
    """Writes tensors, of PyTorch on the host or GPUs, or of NumPy, to a file that replaces `path` when it is complete.

    The file is byte for byte what the safetensors package writes (several metadata are in their order; it keeps none).
    durable: it is on the disk when this returns; otherwise in the page cache, as the package leaves it. align: the
    first tensor begins at a multiple of so many bytes, a power of two from 8 to 4096. Raises ValueError for what the
    format cannot have, such as tensors that share memory or are not in one piece; OSError and `ugds.Error`."""
    if align not in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"align is a power of two from 8 to 4096, not {align}")
    if metadata is not None:
        for name, value in metadata.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"metadata are strings by name, and {name!r} is {value!r}")
    given = to_save(tensors)
    described = ((name, saved.dtype, saved.shape, saved.data.size) for name, saved in given.items())
    head, entries = _header.build(described, metadata, align, str(path))
    contents = [Content(0, Bytes(head))]
    contents += [Content(len(head) + e.start, given[e.name].data) for e in entries if e.size]
    size = contents[-1].end
    with replacing(path, size, durable) as device, bar("saving", size, progress) as advance:
        transfer.write(device, contents, size, transfer.TO_DISK if durable else transfer.TO_CACHE, advance)
