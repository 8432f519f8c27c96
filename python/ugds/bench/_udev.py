# SPDX-License-Identifier: Apache-2.0
"""The entry of udev by which NVIDIA's libcufile knows a disk's file system. Where udev does not run there is none, and
that library registers no file; ours does not look."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ugds.bench import fio

DATABASE = Path("/run/udev/data")


@contextlib.contextmanager
def entry(path: Path, database: Path = DATABASE) -> Iterator[str]:
    """The entry of the disk that the file is on, made where it is missing and may be made, and removed at the end.
    Gives what was done, in words."""
    (major, minor), kind = _place(path)
    made = database / f"b{major}:{minor}"
    if made.exists():
        yield f"{made} is there"
        return
    if major == 0 or kind is None:
        yield f"{path} is on no disk of its own ({kind or 'an unknown file system'}), so udev has no entry for it"
        return
    missing = [folder for folder in (database, *database.parents) if not folder.exists()]
    try:
        database.mkdir(parents=True, exist_ok=True)
        made.write_text(f"E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE={kind}\n")
    except OSError as error:
        yield f"{made} is missing, and cannot be made ({error.strerror}); what to do: run this as root"
        return
    try:
        yield f"{made} was made for NVIDIA's library, and is removed at the end"
    finally:
        with contextlib.suppress(OSError):
            made.unlink()
            for folder in missing:
                folder.rmdir()


def _place(path: Path) -> tuple[tuple[int, int], str | None]:
    """The numbers of the disk, and its file system's type."""
    device = os.stat(path).st_dev
    return (os.major(device), os.minor(device)), fio.file_system(path)
