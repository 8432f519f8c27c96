# SPDX-License-Identifier: Apache-2.0
"""Clients of a device that are killed: they write, make durable, and keep a journal of what they were told, until then.

One is the C program tests/c/journal.c; the other is here, with durable writes, and forked off a process that has
imported everything, so that a kill costs milliseconds. `Journal` reads what either wrote, and says which write each
part of the device may hold. Run as a program it is that process: for each line "URI JOURNAL SEED FIRST" it forks a
client, prints its process ID, and prints "ended" once it has.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import ugds

#: The device's beginning is so many slots; each sector of one begins with its slot's number and which write it was.
SLOTS, SLOT, SECTOR = 16, 8192, 512


class Journal:
    """What is known of each slot: the first and the last write that may be there, and the last that is durable. A write
    that was not acknowledged may be there in part, block by block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.durable = [0] * SLOTS
        self.told = [0] * SLOTS
        self.begun = [0] * SLOTS
        #: What clients did, over all of them.
        self.opened = self.writes = self.flushes = self.durable_writes = 0

    def take(self) -> None:
        """Reads what a client left, now that it is dead, and forgets the file."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            what, *numbers = line.split()
            slot, number = (int(word) for word in numbers) if numbers else (0, 0)
            if what == "o":
                self.opened += 1
            elif what == "i":
                self.begun[slot] = number
            elif what == "w":
                self.told[slot] = number
                self.writes += 1
            elif what == "d":
                self.told[slot] = self.durable[slot] = number
                self.durable_writes += 1
            elif what == "f":
                self.durable = list(self.told)
                self.flushes += 1
        self.path.unlink(missing_ok=True)

    def has_opened(self) -> bool:
        """Whether the client that runs now has opened the device."""
        return self.path.exists() and self.path.stat().st_size > 0

    @property
    def next(self) -> int:
        return max(self.begun) + 1

    def check(self, data: bytes, *, lost_power: bool) -> None:
        """Compares what the device holds: no write before the last that was acknowledged, or where it lost its power
        before the last that was durable; and none that was not made. What is there is what there is from then on, and
        it is durable: who looked has closed the device."""
        assert len(data) == SLOTS * SLOT
        for slot in range(SLOTS):
            least = self.durable[slot] if lost_power else self.told[slot]
            found = []
            for at in range(slot * SLOT, (slot + 1) * SLOT, SECTOR):
                number, write = struct.unpack_from("<II", data, at)
                assert write == 0 or number == slot, f"byte {at} holds slot {number} instead of {slot}"
                assert least <= write <= self.begun[slot], (
                    f"slot {slot} holds write {write} at byte {at}; acknowledged were {self.told[slot]}, as durable "
                    f"{self.durable[slot]}, and begun {self.begun[slot]}{', and the power was cut' * lost_power}"
                )
                found.append(write)
            # A block that was not torn may differ from its neighbour, if the client died in between.
            self.durable[slot] = self.told[slot] = min(found)


def compile_client(folder: Path) -> Path:
    """The C program, against the library of the package that is imported here."""
    root, package = Path(__file__).resolve().parents[2], Path(ugds.__file__).parent
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    made = folder / "journal"
    command = [compiler, "-O1", "-D_GNU_SOURCE", f"-I{root / 'include'}", str(root / "tests" / "c" / "journal.c")]
    command += ["-o", str(made), f"-L{package}", "-lugds", f"-Wl,-rpath,{package}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def write_on(uri: str, path: str, seed: int, number: int) -> None:
    """The client, until it is killed."""
    rng, journal = random.Random(seed), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with ugds.open(uri, queues=2) as ssd, ugds.empty(SLOT) as buffer:
        memory = memoryview(buffer)
        os.write(journal, b"o\n")
        while True:
            slot, durable = rng.randrange(SLOTS), rng.random() < 0.4
            for at in range(0, SLOT, SECTOR):
                struct.pack_into("<II", memory, at, slot, number)
            os.write(journal, b"i %d %d\n" % (slot, number))
            ssd.write(buffer, slot * SLOT, durable=durable)
            os.write(journal, b"%c %d %d\n" % (b"d" if durable else b"w", slot, number))
            number += 1
            if rng.random() < 0.1:
                ssd.flush()
                os.write(journal, b"f\n")


def main() -> None:
    for line in sys.stdin:
        uri, path, seed, number = line.split()
        child = os.fork()
        if child == 0:
            try:
                write_on(uri, path, int(seed), int(number))
            except BaseException as error:
                print(error, file=sys.stderr)
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("ended" if os.WIFSIGNALED(status) else "failed", flush=True)


if __name__ == "__main__":
    main()
