# SPDX-License-Identifier: Apache-2.0
"""cuFile's calls by ctypes, of whichever library: ours, or NVIDIA's."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_long, c_size_t, c_ssize_t, c_uint, c_void_p
from typing import Any

READ, WRITE = 0, 1
BATCH, COMPLETE = 1, 0x10
OPAQUE_FD = 1
#: Of a stream: all that is given by pointers is final when it is submitted, and aligned to pages.
FIXED = 0xF


class CuError(Structure):
    _fields_ = (("err", c_int), ("cu_err", c_int))


class Descr(Structure):
    _fields_ = (("type", c_int), ("_pad", c_int), ("fd", c_int), ("_rest", c_int), ("fs_ops", c_void_p))


class IOParams(Structure):
    _fields_ = (
        ("mode", c_int),
        ("base", c_void_p),
        ("file_offset", c_long),
        ("buffer_offset", c_long),
        ("size", c_size_t),
        ("fh", c_void_p),
        ("opcode", c_int),
        ("cookie", c_void_p),
    )


class IOEvents(Structure):
    _fields_ = (("cookie", c_void_p), ("status", c_int), ("ret", c_ssize_t))


class Timespec(Structure):
    _fields_ = (("sec", c_long), ("nsec", c_long))


_transfer = (c_void_p, c_void_p, c_size_t, c_long, c_long)
_async = (c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_long), POINTER(c_long), POINTER(c_ssize_t), c_void_p)
#: Name: what is given back, what is given.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cuFileDriverOpen": (CuError, ()),
    "cuFileHandleRegister": (CuError, (POINTER(c_void_p), POINTER(Descr))),
    "cuFileHandleDeregister": (None, (c_void_p,)),
    "cuFileBufRegister": (CuError, (c_void_p, c_size_t, c_int)),
    "cuFileRead": (c_ssize_t, _transfer),
    "cuFileWrite": (c_ssize_t, _transfer),
    "cuFileBatchIOSetUp": (CuError, (POINTER(c_void_p), c_uint)),
    "cuFileBatchIOSubmit": (CuError, (c_void_p, c_uint, POINTER(IOParams), c_uint)),
    "cuFileBatchIOGetStatus": (CuError, (c_void_p, c_uint, POINTER(c_uint), POINTER(IOEvents), POINTER(Timespec))),
    "cuFileBatchIODestroy": (None, (c_void_p,)),
    "cuFileReadAsync": (CuError, _async),
    "cuFileStreamRegister": (CuError, (c_void_p, c_uint)),
    "cuFileStreamDeregister": (CuError, (c_void_p,)),
    "cuFileGetVersion": (CuError, (POINTER(c_int),)),
}


class Refused(Exception):
    """A call that gave an error; `code` is cuFile's, or an errno."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} gave {code}")
        self.call, self.code = call, code


class CuFile:
    """A loaded library, by its path. Raises OSError where that is none, and AttributeError where a call is missing."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, use_errno=True)
        for name, (gives, takes) in _FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = gives, takes

    def call(self, name: str, *arguments: Any) -> None:
        """One that gives an error struct. Raises Refused."""
        found = getattr(self.library, name)(*arguments)
        if found.err:
            raise Refused(name, found.err)
