# SPDX-License-Identifier: Apache-2.0
"""PyTorch's storages to and from files: `torch.cuda.gds` by another name, and checkpoints.

    from ugds.torch import GdsFile, load, save

    save(model.state_dict(), "checkpoint.pt")  # a file of torch.save
    model.load_state_dict(load("checkpoint.pt", device="cuda"))  # and of what torch.save wrote as well

    file = GdsFile("storages", os.O_CREAT | os.O_RDWR)
    file.save_storage(tensor.untyped_storage(), offset=0)

Storages are in the host's memory or a GPU's. Needs PyTorch 2.7 or newer. docs/pytorch.md says more.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack
from typing import Any

import ugds
from ugds._core import Device, Registration
from ugds._load import checkpoint
from ugds._load.errors import InvalidFile, failure
from ugds._load.files import Path
from ugds._load.memory import torch_module

__all__ = ["GdsFile", "InvalidFile", "gds_deregister_buffer", "gds_register_buffer", "load", "save"]

_torch = torch_module()
if not hasattr(_torch.serialization, "skip_data"):
    raise ImportError(f"ugds.torch needs PyTorch 2.7, not {_torch.__version__}; what to do: pip install -U torch")
_lock = threading.Lock()
_buffers: dict[tuple[str, int], Registration] = {}  #: what is registered, by device and address


def save(obj: Any, path: Path, *, durable: bool = True, progress: bool | None = None) -> None:
    """Writes whatever `torch.save` can, to a file that replaces `path` when it is complete: whoever opens the name
    finds the old checkpoint or the new one, whole. It is laid out as `torch.save` lays it out, and `torch.load` reads
    it; but for the storages' check sums, which are left out (as PyTorch's own `skip_data` does).

    durable: it is on the disk when this returns, and written by O_DIRECT where the file system has it; otherwise it is
    in the page cache, as with `torch.save`. progress: as in `ugds.safetensors`. Beside the object 32 MiB of memory are
    used, on the host. What is enqueued on the current streams of GPUs is waited for; storages are not to be changed
    meanwhile.

    Raises OSError, `ugds.Error`, ValueError for storages elsewhere, and what pickle does. Thread-safe."""
    checkpoint.save(obj, path, durable, progress)


def load(path: Path, device: Any = None, *, progress: bool | None = None) -> Any:
    """Reads what `save` or `torch.save` wrote, straight into the storages that it becomes.

    device: where all of them are to be: "cpu", "cuda", "cuda:1", a torch.device; None for where they were. The object
    is made by `torch.load` with `weights_only=True`: nothing in the file is run, and types that it does not know are
    named by `torch.serialization.add_safe_globals`. The storages on one device share an allocation, which is free with
    the last of them; so they cannot be resized.

    Raises InvalidFile, a ValueError, for what is no such file or a broken one; OSError, `ugds.Error`, ValueError for
    devices that are not there, pickle.UnpicklingError for types that are not allowed. Thread-safe."""
    return checkpoint.load(path, device, progress)


def gds_register_buffer(s: Any) -> None:
    """Registers a storage for all files, now and later: its requests then find it prepared. It is kept alive until
    `gds_deregister_buffer(s)`. Requests of storages that are not registered register them for the while.

    Raises `ugds.Error`: EEXIST (registered already), ENOMEM and others. Thread-safe."""
    registration = ugds.register(_registrable(s))
    with _lock:
        _buffers[_name(s)] = registration


def gds_deregister_buffer(s: Any) -> None:
    """Ends what `gds_register_buffer(s)` began. Raises `ugds.Error`: EINVAL (not registered), EBUSY (a request is under
    way, and nothing has changed). Thread-safe."""
    with _lock:
        registration = _buffers.pop(_name(s), None)
    if registration is None:
        raise failure(
            errno.EINVAL, "deregister", "a storage", "it is not registered", "call gds_register_buffer() before"
        )
    try:
        registration.close()
    except BaseException:
        with _lock:
            _buffers[_name(s)] = registration
        raise


class GdsFile:
    """A file, opened by `os.open(filename, flags)`, to and from which storages are moved. It has the methods of
    `torch.cuda.gds.GdsFile`, and is closed when it is dropped, by `close()`, or by `with`.

    By O_DIRECT where the file system has it, at any offset and of any size. Calls return when all is done, and wait for
    the current stream of the storage's GPU before. Thread-safe."""

    def __init__(self, filename: Path, flags: int) -> None:
        """Raises OSError, and `ugds.Error`."""
        self.handle: Device | None = None
        self.fd = -1
        self.filename = filename
        self.flags = flags
        self.fd = os.open(filename, flags & ~os.O_DIRECT | os.O_CLOEXEC, 0o777)
        self.register_handle()

    def register_handle(self) -> None:
        """The constructor has done it."""
        if self.handle is not None:
            raise AssertionError("Cannot register a handle that is already registered.")
        self.handle = ugds.open(f"file:?fd={self.fd}")

    def deregister_handle(self) -> None:
        """No storage is moved until `register_handle()`."""
        if self.handle is None:
            raise AssertionError("Cannot deregister a handle that is not registered.")
        handle, self.handle = self.handle, None
        handle.close()

    def load_storage(self, storage: Any, offset: int = 0) -> None:
        """Reads all of a storage's bytes, from byte `offset` of the file. Raises `ugds.Error`: EIO and others; ENODATA
        where the file ends before, with `completed`."""
        if self.handle is None:
            raise AssertionError("Cannot load data from a file that is not registered.")
        storage = checkpoint.untyped_of(storage)
        size = storage.nbytes()
        with ExitStack() as stack:
            got = self.handle.read(self._buffer(storage, stack), offset, size) if size else 0
        if got != size:
            cause, hint = f"the file ends {size - got} bytes before the storage is full", "is the offset right?"
            raise failure(errno.ENODATA, "load_storage", os.fspath(self.filename), cause, hint, offset, size, got)

    def save_storage(self, storage: Any, offset: int = 0) -> None:
        """Writes all of a storage's bytes, to byte `offset` of the file, which grows as it must. They are on the disk
        after `flush()`. Raises `ugds.Error`: ENOSPC, EIO and others."""
        if self.handle is None:
            raise AssertionError("Cannot save data to a file that is not registered.")
        storage = checkpoint.untyped_of(storage)
        size = storage.nbytes()
        with ExitStack() as stack:
            done = self.handle.write(self._buffer(storage, stack), offset, size, unaligned=True) if size else 0
        if done != size:
            cause, hint = f"it took {done} bytes", "look at its disk"
            raise failure(errno.EIO, "save_storage", os.fspath(self.filename), cause, hint, offset, size, done)

    def flush(self) -> None:
        """What was written is on the disk when this returns. Raises `ugds.Error`."""
        if self.handle is None:
            raise AssertionError("Cannot flush a file that is not registered.")
        self.handle.flush()

    def close(self) -> None:
        """May be called again."""
        if self.handle is not None:
            self.deregister_handle()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> GdsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _buffer(self, storage: Any, stack: ExitStack) -> Any:
        if storage.device.type == "cuda":
            _torch.cuda.current_stream(storage.device).synchronize()
        with _lock:
            known = _buffers.get(_name(storage))
        if known is not None:
            return known
        assert self.handle is not None
        try:
            return stack.enter_context(ugds.register(_registrable(storage), devices=[self.handle]))
        except ugds.Error as error:
            if error.errno != errno.EEXIST:
                raise
            return _registrable(storage)  # the library knows what it lies in


def _name(storage: Any) -> tuple[str, int]:
    untyped = checkpoint.untyped_of(storage)
    return str(untyped.device), int(untyped.data_ptr())


def _registrable(storage: Any) -> Any:
    memory = checkpoint.bytes_of(storage)
    return memory if memory.is_cuda else memory.numpy()
