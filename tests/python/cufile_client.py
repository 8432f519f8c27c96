# SPDX-License-Identifier: Apache-2.0
"""cuFile's calls by ctypes, as a program sees them that finds `libcufile.so.0` by its name or path."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char, c_int, c_long, c_size_t, c_ssize_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import ugds._core
from ugds.bench._cufile_calls import COMPLETE as COMPLETE  # for those who use this module
from ugds.bench._cufile_calls import READ as READ
from ugds.bench._cufile_calls import WRITE as WRITE
from ugds.bench._cufile_calls import CuError, Descr, IOEvents, IOParams, Timespec

OURS = Path(ugds._core.library_path()).resolve().parent / "compat" / "libcufile.so.0"
CANCELED, FAILED = 0x08, 0x40


class IOVec(ctypes.Structure):
    _fields_ = (("base", c_void_p), ("len", c_size_t))


assert (ctypes.sizeof(Descr), ctypes.sizeof(IOParams), ctypes.sizeof(IOEvents)) == (24, 64, 24)

_transfer = (c_void_p, c_void_p, c_size_t, c_long, c_long)
_vector = (c_void_p, POINTER(IOVec), c_size_t, c_long, c_uint)
_async = (c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_long), POINTER(c_long), POINTER(c_ssize_t), c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuFileDriverOpen": (),
    "cuFileDriverClose": (),
    "cuFileHandleRegister": (POINTER(c_void_p), POINTER(Descr)),
    "cuFileBufRegister": (c_void_p, c_size_t, c_int),
    "cuFileBufDeregister": (c_void_p,),
    "cuFileBatchIOSetUp": (POINTER(c_void_p), c_uint),
    "cuFileBatchIOSubmit": (c_void_p, c_uint, POINTER(IOParams), c_uint),
    "cuFileBatchIOGetStatus": (c_void_p, c_uint, POINTER(c_uint), POINTER(IOEvents), POINTER(Timespec)),
    "cuFileReadAsync": _async,
    "cuFileWriteAsync": _async,
    "cuFileStreamRegister": (c_void_p, c_uint),
    "cuFileStreamDeregister": (c_void_p,),
    "cuFileGetVersion": (POINTER(c_int),),
    "cuFileGetBARSizeInKB": (c_int, POINTER(c_size_t)),
}


class CuFile:
    """A loaded library. Functions that give an error struct raise where it is none of success."""

    def __init__(self, name: str | Path = OURS) -> None:
        self.library = library = ctypes.CDLL(str(name), use_errno=True)
        for function, arguments in _FUNCTIONS.items():
            symbol = getattr(library, function)
            symbol.argtypes, symbol.restype = arguments, CuError
        for function in ("cuFileRead", "cuFileWrite", "cuFileReadv", "cuFileWritev"):
            symbol = getattr(library, function)
            symbol.argtypes, symbol.restype = _vector if function.endswith("v") else _transfer, c_ssize_t
        for function in ("cuFileHandleDeregister", "cuFileBatchIODestroy"):
            getattr(library, function).argtypes, getattr(library, function).restype = (c_void_p,), None
        library.cuFileUseCount.restype = c_long
        library.uGDSGetLastError = ctypes.CDLL(str(OURS.parent.parent / "libugds.so")).uGDSGetLastError
        library.uGDSGetLastError.argtypes, library.uGDSGetLastError.restype = (POINTER(c_char), c_size_t), c_size_t

    def code(self, function: str, *arguments: Any) -> int:
        return int(getattr(self.library, function)(*arguments).err)

    def call(self, function: str, *arguments: Any) -> None:
        code = self.code(function, *arguments)
        assert code == 0, f"{function}: {code}: {self.words()}"

    def words(self) -> str:
        text = ctypes.create_string_buffer(600)
        self.library.uGDSGetLastError(text, 600)
        return text.value.decode()

    def register(self, fd: int) -> int:
        handle = c_void_p()
        self.call("cuFileHandleRegister", byref(handle), byref(Descr(type=1, fd=fd)))
        assert handle.value
        return handle.value

    def deregister(self, handle: int) -> None:
        self.library.cuFileHandleDeregister(handle)

    def read(self, handle: int, base: int, size: int, offset: int, buffer_offset: int = 0) -> int:
        return self._moved(self.library.cuFileRead(handle, base, size, offset, buffer_offset))

    def write(self, handle: int, base: int, size: int, offset: int, buffer_offset: int = 0) -> int:
        return self._moved(self.library.cuFileWrite(handle, base, size, offset, buffer_offset))

    def _moved(self, moved: int) -> int:
        """Bytes, or minus an errno or a code."""
        return -ctypes.get_errno() if moved == -1 else int(moved)

    def batch(self, requests: list[IOParams]) -> list[tuple[int, int, int]]:
        """Cookie, status and result of each, in the order in which they ended."""
        batch, count = c_void_p(), len(requests)
        self.call("cuFileBatchIOSetUp", byref(batch), count)
        self.call("cuFileBatchIOSubmit", batch, count, (IOParams * count)(*requests), 0)
        events, nr = (IOEvents * count)(), c_uint(count)
        self.call("cuFileBatchIOGetStatus", batch, count, byref(nr), events, byref(Timespec(60, 0)))
        self.library.cuFileBatchIODestroy(batch)
        return [(event.cookie or 0, event.status, event.ret) for event in events[: nr.value]]


def open_file(path: Path, size: int) -> int:
    """A file of so many random bytes, open for both."""
    path.write_bytes(os.urandom(size))
    return os.open(path, os.O_RDWR)
