# SPDX-License-Identifier: Apache-2.0
"""`python _python_reads.py URI COUNT`: 4 KiB reads from Python, under callgrind.

After warming up, three marks (see `callgrind.MARK`) enclose a loop of reads, and the same loop with an empty body.
"""

import gc
import os
import sys

import ugds

SIZE = 4096


def reads(ssd: ugds.Device, buf: ugds.Registration, times: int) -> None:
    for _ in range(times):
        ssd.read(buf, offset=0, size=4096)


def nothing(times: int) -> None:
    for _ in range(times):
        pass


def main() -> None:
    uri, count = sys.argv[1], int(sys.argv[2])
    with ugds.open(uri) as ssd, ugds.empty(SIZE) as buf:
        gc.disable()
        reads(ssd, buf, 100)  # the interpreter specialises what runs often
        nothing(100)
        os.getppid()
        reads(ssd, buf, count)
        os.getppid()
        nothing(count)
        os.getppid()


main()
