# SPDX-License-Identifier: Apache-2.0
"""`ugds bench files` and `cufile`: options and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MakeCommand = Callable[..., argparse.ArgumentParser]


def add_commands(
    command: MakeCommand,
    run: Callable[[argparse.Namespace], int],
    positive: Callable[[str], int],
    whole: Callable[[str], int],
) -> None:
    files = command(
        "files",
        run,
        "reads of a file from one thread, against pread, io_uring (fio) and eight threads of pread",
        "examples:\n  ugds bench files /var/tmp\n  ugds bench files /data/model.bin --sizes 1MiB --json\n"
        "  ugds bench files /dev/shm --gpu 0\n\n"
        "share_of_pread is the throughput over that of the same preads, share_of_io_uring over fio's io_uring at the "
        "same size\nand 16 requests in flight, share_of_threads, of a file in the page cache, over eight threads of "
        "pread (which copy on\nto the GPU from pinned memory, with --gpu). Each is measured past the page cache, where "
        "the file system has that,\nand from it. The file is only read.",
    )
    files.add_argument(
        "file", metavar="FILE", help="of 256 MiB at least; or a folder, in which one is made and removed"
    )
    files.add_argument("--gpu", type=whole, default=None, metavar="N", help="into that GPU's memory")
    cufile = command(
        "cufile",
        run,
        "our libcufile.so.0 against NVIDIA's, call by call on the same file and GPU (needs a GPU)",
        "examples:\n  ugds bench cufile --file /var/tmp\n"
        "  ugds bench cufile --library /usr/local/cuda/lib64/libcufile.so.0 --json\n\n"
        "Each library is driven by a process of its own, and both work in turn: opening the driver, synchronous reads "
        "and\nwrites, reads on one stream, batches. Bytes are compared. NVIDIA's is looked for in Python's packages "
        "and in\n/usr/local/cuda*; it registers a file only where udev knows the disk's file system, so that entry is "
        "made where it\nis missing and this is root, and removed at the end. Writes go to a file beside, which is "
        "removed too.",
    )
    cufile.add_argument(
        "--file", metavar="PATH", help="of 256 MiB at least; or a folder, in which one is made and removed (TMPDIR)"
    )
    cufile.add_argument("--gpu", type=whole, default=0, metavar="N", help="into that GPU's memory (0)")
    cufile.add_argument("--library", metavar="PATH", help="a libcufile.so.0 to compare with, instead of NVIDIA's")
    for made, largest in ((files, "64MiB"), (cufile, "16MiB")):
        made.add_argument("--sizes", metavar="SIZE,…", help=f"4KiB to {largest} (4KiB,64KiB,1MiB,16MiB)")
        made.add_argument("--rounds", type=positive, default=5, help="figures are medians of so many (%(default)s)")
        made.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
        made.set_defaults(device=None)
