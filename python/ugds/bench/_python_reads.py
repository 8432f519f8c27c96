# SPDX-License-Identifier: Apache-2.0
"""`python _python_reads.py URI COUNT read|nothing`: a loop of 4 KiB reads, or the same loop with an empty body."""

import gc
import sys

import ugds

SIZE = 4096


def main() -> None:
    uri, count, body = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with ugds.open(uri) as ssd, ugds.empty(SIZE) as buf:
        for _ in range(100):  # the interpreter specialises what runs often
            ssd.read(buf, offset=0, size=4096)
        gc.disable()
        if body == "read":
            for _ in range(count):
                ssd.read(buf, offset=0, size=4096)
        else:
            for _ in range(count):
                pass


main()
