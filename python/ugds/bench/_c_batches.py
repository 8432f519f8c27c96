# SPDX-License-Identifier: Apache-2.0
"""`python _c_batches.py LIBRARY URI ROUNDS BATCH`: batches of 4 KiB reads through the C API, by ctypes, in callgrind.

After warming up, three marks (see `callgrind.MARK`) enclose ROUNDS batches, each submitted and collected by one call
each, and as many pairs of calls to a function of the C library that does next to nothing. Imports neither ugds nor
anything that could load the library before this does.
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


class Parameters(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("file_offset", ctypes.c_int64),
        ("buf_offset", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class Event(ctypes.Structure):
    _fields_ = (("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("ret", ctypes.c_ssize_t))


USER_SPACE = 3  # the descriptor's handle is a URI
SIZE = 4096


def main() -> None:
    path, uri, rounds, batch = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
    library = ctypes.CDLL(path)
    names = ("DriverOpen", "HandleRegister", "BufRegister", "BatchIOSetUp", "BatchIOSubmit", "BatchIOGetStatus")
    for name in names:
        getattr(library, f"uGDS{name}").restype = Result
    library.uGDSBufRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def check(what: str, result: Result) -> None:
        if result.err != 0:
            sys.exit(f"{what} failed with error {result.err}")

    memory = mmap.mmap(-1, SIZE * batch)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    handle, made = ctypes.c_void_p(), ctypes.c_void_p()
    descriptor = Descriptor(USER_SPACE, uri)
    check("uGDSDriverOpen", library.uGDSDriverOpen())
    check("uGDSHandleRegister", library.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor)))
    check("uGDSBufRegister", library.uGDSBufRegister(address, SIZE * batch, 0))
    check("uGDSBatchIOSetUp", library.uGDSBatchIOSetUp(ctypes.byref(made), handle, batch))
    parameters = (Parameters * batch)(*(Parameters(address, i * SIZE, i * SIZE, SIZE, 0, i) for i in range(batch)))
    events = (Event * batch)()
    count = ctypes.c_uint()
    nothing = ctypes.CDLL(None).labs

    def loop(submit: Callable[..., object], collect: Callable[..., object], times: int) -> None:
        for _ in range(times):
            submit(made, batch, parameters, 0)
            count.value = batch
            collect(made, batch, ctypes.byref(count), events, None)
            if count.value != batch:
                sys.exit(f"uGDSBatchIOGetStatus gave {count.value} events")

    gc.disable()
    submit, collect = library.uGDSBatchIOSubmit, library.uGDSBatchIOGetStatus
    # Its two words come in one register. A structure made of them would be counted.
    submit.restype = collect.restype = nothing.restype = ctypes.c_int64
    loop(submit, collect, 10)
    loop(nothing, nothing, 10)
    os.getppid()
    loop(submit, collect, rounds)
    os.getppid()
    loop(nothing, nothing, rounds)
    os.getppid()
    if any(event.status != 0x10 or event.ret != SIZE for event in events):
        sys.exit("a request of the batch failed")


main()
