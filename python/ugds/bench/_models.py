# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of whole files share: a model that is made up, its files, the page cache, and the disk's
limit."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

import ugds
from ugds._load import layout, transfer
from ugds._load.files import Source, cached
from ugds._load.memory import torch_module
from ugds._report import CommandError
from ugds.bench._gpu import GIB, MIB, Figures, median_ratio, seconds

MATRIX, NORM = 16 * MIB, 8 << 10
_BLOCK = 4096


@contextmanager
def folder(where: str | None, size: int) -> Iterator[Path]:
    """A new folder in that one, with room for three files of `size`; it is removed with all that is in it. Raises
    CommandError."""
    try:
        made = tempfile.mkdtemp(prefix="ugds-bench-", dir=where)
    except OSError as error:
        asked = where or tempfile.gettempdir()
        raise CommandError(f"no folder can be made in {asked}: {error.strerror}", status=2) from None
    try:
        if (free := shutil.disk_usage(made).free) < 3 * size:
            raise CommandError(f"{made} has {free} bytes free, and this needs {3 * size}; name another by --folder")
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def model(size: int, gpu: int | None) -> dict[str, Any]:
    """Tensors of that many bytes together: matrices of 16 MiB, and beside each a small one; PyTorch's on a GPU, or
    NumPy's."""
    made: dict[str, Any] = {}
    generator = numpy.random.default_rng(1)
    for index in range(max(1, size // MATRIX)):
        for name, count in (("weight", min(MATRIX, size)), ("norm", NORM)):
            made[f"model.layers.{index}.{name}"] = generator.integers(0, 1 << 15, count // 2, "u2")
    if gpu is not None:
        torch = torch_module()
        if not torch.cuda.is_available() or gpu >= torch.cuda.device_count():
            raise CommandError(f"PyTorch finds no GPU {gpu} here; what to do: leave out --gpu, or see torch.cuda")
        made = {
            name: torch.from_numpy(array.view("i2")).view(torch.bfloat16).to(f"cuda:{gpu}")
            for name, array in made.items()
        }
    return made


def needed(name: str) -> None:
    """Raises CommandError where a package that is compared with is not there."""
    try:
        __import__(name)
    except ImportError as error:
        raise CommandError(f"this compares with {name} ({error})\n  what to do: pip install {name}") from None


def forget(path: Path) -> bool:
    """Puts the file out of the page cache. Gives whether it is."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return not cached(file.fileno(), os.fstat(file.fileno()).st_size)


def remember(path: Path) -> None:
    """Puts it there."""
    with open(path, "rb", buffering=0) as file:
        while file.read(MIB):
            pass


def read_direct(path: Path) -> None:
    """Reads the file by plain pread with O_DIRECT, as the library divides it. Raises OSError where that is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fd).st_size

    def lane() -> Callable[[layout.Run], None]:
        memory = memoryview(mmap.mmap(-1, layout.PIECE))

        def one(piece: layout.Run) -> None:
            got = os.preadv(fd, [memory[: -(-piece.size // _BLOCK) * _BLOCK]], piece.start)
            if got != piece.size:
                raise OSError(errno.EIO, f"{got} bytes in place of {piece.size}")

        return one

    try:
        transfer.work(layout.pieces([layout.Run(0, size, 0)]), lane, transfer.READERS)
    finally:
        os.close(fd)


def route(path: Path, gpu: int | None) -> str:
    """The route by which the file is read into memory of the GPU, or of the host."""
    memory: Any = numpy.empty(_BLOCK, "u1")
    if gpu is not None:
        torch = torch_module()
        memory = torch.empty(_BLOCK, dtype=torch.uint8, device=f"cuda:{gpu}")
    with Source(path) as source, ugds.register(memory, devices=[source.device()]) as buffer:
        return str(buffer.route)


def rates(found: Mapping[str, list[float]], size: int) -> Figures:
    return {f"{name}_gib_per_s": (size / GIB / statistics.median(taken), "GiB/s") for name, taken in found.items()}


def ratios(found: Mapping[str, list[float]], ours: str, word: str = "ratio_to") -> Figures:
    """How many times as fast ours was as each of the others, in the same round."""
    return {f"{word}_{name}": (median_ratio(taken, found[ours]), "1") for name, taken in found.items() if name != ours}


def timed(
    work: Callable[[], object], gpu: int | None, before: Callable[[], object] | None = None
) -> Callable[[], float]:
    """A way to measure: the time of `work`, with what it enqueued on the GPU, after `before`."""

    def way() -> float:
        if before is not None:
            before()
        return seconds(lambda: (work(), gpu is not None and torch_module().cuda.synchronize(gpu)))

    return way


def tell(text: str) -> None:
    print(text, file=sys.stderr)


def sync(path: Path) -> None:
    """Puts a file and its name on the disk."""
    for each in (path, path.parent):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
