# SPDX-License-Identifier: Apache-2.0
"""Files as a whole: one that is read, and one that takes another's place when all of it is there."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

import ugds
from ugds._core import Device
from ugds._load.errors import failure

Path = str | os.PathLike[str]
_SAMPLES, _SAMPLE = 64, 4096
#: Sources whose devices are kept for the next time.
MOST_KEPT = 8


class Source:
    """A file that is open for reading. What it is read by is opened when it is asked for. Closed by `with`."""

    def __init__(self, path: Path, keeps_device: bool = False) -> None:
        """keeps_device: it will be read again and again, and stays open as a device where few others do.
        Raises OSError (FileNotFoundError, IsADirectoryError and so on)."""
        self.path = os.fspath(path)
        self.keeps_device = keeps_device
        self._lock = threading.RLock()
        self._device: Device | None = None
        self._users = 0
        self._is_closed = False
        # Without O_NONBLOCK opening a FIFO waits for who writes to it.
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._found = os.fstat(self.fd)
            refuse_other_kinds(self._found.st_mode, self.path)
            os.set_blocking(self.fd, True)
            self.size = self._found.st_size
        except BaseException:
            self.close()
            raise

    def head(self, size: int, offset: int = 0) -> bytes:
        """So many bytes, or fewer at the end of the file, through the page cache."""
        parts: list[bytes] = []
        while size > 0 and (part := os.pread(self.fd, size, offset)):
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
        return b"".join(parts)

    def device(self) -> Device:
        """The file as a device, until as many `leave()` are called. What most of is in the page cache is read from
        there, everything else by O_DIRECT where the file system has it. Raises OSError, and `ugds.Error`."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{self.path} is closed")
            if self.fd < 0:
                self._open_again()
            if self._device is None:
                direct = "off" if cached(self.fd, self.size) else "auto"
                self._device = opened(self.fd, direct, self.path)
            self._users += 1
            return self._device

    def leave(self) -> None:
        """What `device()` gave is not used any more. It is closed then, at once or when others are kept."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self.keeps_device:
                self.rest()
        if self.keeps_device:
            _keep(self)

    def rest(self, keeps_file: bool = False) -> None:
        """Gives its descriptors back where nobody uses it, until `device()` opens it again."""
        with self._lock:
            if self._users == 0:
                self._drop(keeps_file)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop(self, keeps_file: bool = False) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.close()
        if keeps_file:
            return
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_again(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        now, before = os.fstat(fd), self._found
        if (now.st_dev, now.st_ino, now.st_size) != (before.st_dev, before.st_ino, before.st_size):
            os.close(fd)
            cause = "another file has its name now, or its size has changed, since its header was read"
            raise failure(errno.ESTALE, "read", self.path, cause, "load it again when nobody replaces it")
        os.set_blocking(fd, True)
        self.fd = fd

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Sources that keep their devices, the one that was used last at the end.
_kept: list[weakref.ref[Source]] = []
_kept_lock = threading.Lock()


def _keep(source: Source) -> None:
    """Those that were not used for longest are closed until they are asked for again: a device costs eight
    descriptors, and a process has few of them."""
    with _kept_lock:
        alive = [one for one in _kept if one() is not None and one() is not source]
        _kept[:] = [*alive, weakref.ref(source)]
        oldest = [_kept.pop(0)() for _ in range(len(_kept) - MOST_KEPT)]
    for one in oldest:
        if one is not None:
            one.rest(keeps_file=True)


def opened(fd: int, direct: str, path: str) -> Device:
    """A file as a device. Requests are large and many, and whoever waits for one sleeps: the processors are for those
    who copy. path: for people."""
    try:
        return ugds.open(f"file:?fd={fd}&direct={direct}", interrupts=True)
    except ugds.Error as error:
        raise failure(error.errno or errno.EIO, "open", path, error.cause, error.hint) from None


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
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # The name is ours: what is missing, or may not be written to, is the folder.
        words = f"{os.strerror(error.errno or 0)} (a new file in {folder})"
        raise OSError(error.errno, words, os.fspath(path)) from None
    try:
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            if replaced is not None:
                keep_owner(fd, replaced)
            # Its size first: writes that make a file longer wait for each other.
            os.ftruncate(fd, size)
            with opened(fd, "auto" if durable else "off", target) as device:
                yield device
                if durable:
                    device.flush()
            if os.fstat(fd).st_size != size:
                cause = f"it has {os.fstat(fd).st_size} bytes in place of {size}"
                raise failure(errno.EIO, "save", target, cause, "let nothing else write to it")
            if durable:
                os.fsync(fd)  # the size as well, which fdatasync may leave out
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, ugds.Error) and temporary in getattr(error, "device", ""):
            hint = "; ".join([*([error.hint] if error.hint else []), "what had the name before is as it was"])
            range_ = error.offset, error.length, error.completed
            raise failure(error.errno or errno.EIO, error.operation, target, error.cause, hint, *range_) from None
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
