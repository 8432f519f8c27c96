# SPDX-License-Identifier: Apache-2.0
"""`python _python_batches.py URI ROUNDS BATCH`: batches of 4 KiB reads from Python, under callgrind.

After warming up, three marks (see `callgrind.MARK`) enclose ROUNDS batches, each submitted and collected by one call
each, whose results are then had as an array, and the same loop with an empty body.
"""

import gc
import os
import sys

import numpy

import ugds

SIZE = 4096


def main() -> None:
    uri, rounds, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with ugds.open(uri) as ssd, ugds.empty(SIZE * depth) as buf, ssd.batch(depth) as batch:
        offsets = numpy.arange(depth, dtype=numpy.int64) * SIZE
        places = offsets[::-1].copy()

        def batches(times: int) -> None:
            for _ in range(times):
                batch.read(buf, offsets, SIZE, places)
                done = batch.wait()  # raises where one failed
            if len(done) != depth or (done.results != SIZE).any():
                sys.exit("a request of the batch failed")

        def nothing(times: int) -> None:
            for _ in range(times):
                pass

        gc.disable()
        batches(20)  # the interpreter specialises what runs often
        nothing(20)
        os.getppid()
        batches(rounds)
        os.getppid()
        nothing(rounds)
        os.getppid()


main()
