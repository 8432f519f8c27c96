# SPDX-License-Identifier: Apache-2.0
"""Files as a whole: one that is read, and one that takes another's place when all of it is there."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

import ugds
from ugds._core import Device
from ugds._load.errors import failure

Path = str | os.PathLike[str]
_SAMPLES, _SAMPLE = 64, 4096


class Source:
    """A file that is open for reading. What it is read by is opened when it is asked for. Closed by `with`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError (FileNotFoundError, IsADirectoryError and so on)."""
        self.path = os.fspath(path)
        # Without O_NONBLOCK opening a FIFO waits for who writes to it.
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._stack.callback(os.close, self.fd)
        self._device: Device | None = None
        try:
            found = os.fstat(self.fd)
            refuse_other_kinds(found.st_mode, self.path)
            os.set_blocking(self.fd, True)
            self.size = found.st_size
        except BaseException:
            self._stack.close()
            raise

    def head(self, size: int, offset: int = 0) -> bytes:
        """So many bytes, or fewer at the end of the file, through the page cache."""
        parts: list[bytes] = []
        while size > 0 and (part := os.pread(self.fd, size, offset)):
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
        return b"".join(parts)

    def device(self) -> Device:
        """The file as a device. What most of is in the page cache is read from there, everything else by O_DIRECT where
        the file system has it."""
        with self._lock:
            if self.fd < 0:
                raise ValueError(f"{self.path} is closed")
            if self._device is None:
                direct = "off" if cached(self.fd, self.size) else "auto"
                self._device = self._stack.enter_context(opened(self.fd, direct))
            return self._device

    def close(self) -> None:
        with self._lock:
            self._device, self.fd = None, -1
        self._stack.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def opened(fd: int, direct: str) -> Device:
    """A file as a device. Requests are large and many, and whoever waits for one sleeps: the processors are for those
    who copy."""
    return ugds.open(f"file:?fd={fd}&direct={direct}", interrupts=True)


def cached(fd: int, size: int) -> bool:
    """Whether at least half of the file is in the page cache, as samples of it say. False where the kernel does not
    tell, and then O_DIRECT costs a file that is there the disk's time, no more."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None or size == 0:
        return False
    memory, found = bytearray(1), 0
    step = max(_SAMPLE, size // _SAMPLES)
    offsets = range(0, size, step)
    for offset in offsets:
        try:
            found += os.preadv(fd, [memory], offset, nowait)
        except BlockingIOError:
            continue
        except OSError:
            return False
    return 2 * found >= len(offsets)


@contextmanager
def replacing(path: Path, size: int, durable: bool) -> Iterator[Device]:
    """A device of `size` bytes that becomes the file when the block ends without an exception, and leaves nothing
    behind when it does not: whoever opens the name finds the old file or the new one, whole.

    durable: it and its name are on the disk then, and it is written by O_DIRECT where the file system has it. Otherwise
    it is written to the page cache. Raises OSError, and `ugds.Error` (ENOSPC, EIO and others)."""
    target = os.path.realpath(path)  # a link stays, and what it points to is replaced
    if not os.path.basename(path):
        raise IsADirectoryError(errno.EISDIR, "it names a directory, and no file in it", os.fspath(path))
    replaced = found_at(target)
    folder = os.path.dirname(target)
    shortened = os.fsencode(os.path.basename(target))[:200].decode(errors="ignore")  # 255 bytes are the most
    temporary = os.path.join(folder, f".{shortened}.{secrets.token_hex(6)}.part")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            if replaced is not None:
                keep_owner(fd, replaced)
            # Its size first: writes that make a file longer wait for each other.
            os.ftruncate(fd, size)
            with opened(fd, "auto" if durable else "off") as device:
                yield device
                if durable:
                    device.flush()
            if os.fstat(fd).st_size != size:
                cause = f"it has {os.fstat(fd).st_size} bytes in place of {size}"
                raise failure(errno.EIO, "save", target, cause, "let nothing else write to it")
            if durable:
                os.fsync(fd)  # the size as well, which fdatasync may leave out
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        sync_folder(folder)


def refuse_other_kinds(mode: int, path: str) -> None:
    """Raises OSError for what is no regular file, by its mode."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, and has to be a regular file", path)


def found_at(target: str) -> os.stat_result | None:
    """The file that is to be replaced, if there is one. Raises OSError for what is none: a device, say, would be gone
    with all that others write to it."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    refuse_other_kinds(found.st_mode, target)
    return found


def keep_owner(fd: int, replaced: os.stat_result) -> None:
    """The new file may be read and written by whom the old one was, and by nobody else: what its group was allowed is
    not for another group, where the owner may not be given away."""
    mode = replaced.st_mode & 0o777
    os.fchmod(fd, 0o600)  # until it has its owner
    for uid, gid in ((-1, replaced.st_gid), (replaced.st_uid, -1)):
        with suppress(PermissionError):
            os.fchown(fd, uid, gid)
    if os.fstat(fd).st_gid != replaced.st_gid:
        mode &= ~0o070 | (mode & 0o007) << 3
    os.fchmod(fd, mode)


def sync_folder(folder: str) -> None:
    """A name is on the disk when its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot, such as some of FUSE
            raise
    finally:
        os.close(fd)
