# SPDX-License-Identifier: Apache-2.0
"""`python _c_reads.py LIBRARY URI COUNT`: 4 KiB reads through the C API, by ctypes, under callgrind.

After warming up, three marks (see `callgrind.MARK`) enclose two loops that differ in nothing but the function they
call: uGDSRead, and a function of the C library that does next to nothing. Imports neither ugds nor anything that could
load the library before this does.
"""

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable


class Result(ctypes.Structure):
    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class Descriptor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("handle", ctypes.c_char_p))


USER_SPACE = 3  # the descriptor's handle is a URI
SIZE = 4096


def main() -> None:
    path, uri, count = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
    library = ctypes.CDLL(path)
    library.uGDSDriverOpen.restype = Result
    library.uGDSHandleRegister.restype = Result
    library.uGDSBufRegister.restype = Result
    library.uGDSBufRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    read, nothing = library.uGDSRead, ctypes.CDLL(None).labs
    for function in (read, nothing):
        function.restype = ctypes.c_ssize_t
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64)

    def check(what: str, result: Result) -> None:
        if result.err != 0:
            sys.exit(f"{what} failed with error {result.err}")

    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    handle = ctypes.c_void_p()
    descriptor = Descriptor(USER_SPACE, uri)
    check("uGDSDriverOpen", library.uGDSDriverOpen())
    check("uGDSHandleRegister", library.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor)))
    check("uGDSBufRegister", library.uGDSBufRegister(address, SIZE, 0))

    def loop(function: Callable[..., int], first: ctypes.c_void_p, times: int) -> None:
        for _ in range(times):
            got = function(first, address, SIZE, 0, 0)
            if got != SIZE:
                sys.exit(f"uGDSRead returned {got}")

    same = ctypes.c_void_p(SIZE)  # labs gives back its argument: both calls return SIZE
    gc.disable()
    loop(read, handle, 100)
    loop(nothing, same, 100)
    os.getppid()
    loop(read, handle, count)
    os.getppid()
    loop(nothing, same, count)
    os.getppid()


main()
