# SPDX-License-Identifier: Apache-2.0
"""Random load with faults, in rounds of some seconds, each on devices of another shape.

    python tests/python/soak.py MINUTES [--seed N] [--round SECONDS] [--threads N]

Eight threads do random reads, writes, durable and unaligned writes, discards, flushes, registrations and re-openings of
a second device. Each thread owns a region of the device and compares it byte for byte with a model; all read a shared
region. One operation in a hundred or so meets an injected status, whose error must be exact; now and then a command
hangs and is aborted. A round fails at the first wrong byte, violation of the protocol, wrong error, leak or hang, and
prints the seed that plays it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

import numpy as np
import ugds
import ugds.testing
from ugds import _core

KIB, MIB = 1 << 10, 1 << 20
REGION = MIB
STATUSES = {0x281: "unrecovered read error", 0x280: "write fault", 0x081: "capacity exceeded", 0x006: "internal error"}
LIMIT = 120.0  #: seconds that a round may take beyond its own time


class Wrong(Exception):
    """What ends the soak."""


def expect(condition: object, *what: object) -> None:
    if not condition:
        raise Wrong(" ".join(map(str, what)))


@dataclass
class Round:
    """What the threads of a round share."""

    seed: int
    threads: int
    device: ugds.Device
    emulator: ugds.testing.Emulator
    shared: bytes
    shared_at: int
    recovers: bool  #: commands may hang, so any request may be ended by a reset
    stop: threading.Event = field(default_factory=threading.Event)
    operations: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def shape(rng: random.Random, threads: int) -> tuple[str, dict[str, int | float], bool]:
    """A device with room for every thread's region and the shared one, and how to open it."""
    lba = 512 << rng.choice([0, 0, 1, 3, 3, 4, 7])
    mpsmin = rng.choice([0, 0, 0, 1, 2])
    mdts = rng.choice([0] + [m for m in range(1, 9) if 4096 << mpsmin << m >= lba])
    recovers = rng.random() < 0.3
    query: dict[str, object] = {
        "lba": lba,
        "mpsmin": mpsmin,
        "mpsmax": rng.randint(mpsmin, 4),
        "mdts": mdts,
        "queues": rng.choice([1, 2, 4, 8]),
        "shadow": rng.randint(0, 1),
        "doorbells": rng.choice(["mapped", "trapped"]),
        "stride": rng.choice([0, 0, 2]),
        "order": rng.choice(["fifo", "reverse", "random"]),
        "seed": rng.randrange(1000),
        "pump": rng.choice(["thread", "caller"]),
        "vwc": rng.randint(0, 1),
        "enabled": rng.randint(0, 1),
        "idle": rng.choice(["0us", "20us", "1ms"]),
    }
    if rng.random() < 0.3:
        query["latency"] = rng.choice(["10us", "200us"])
    options: dict[str, int | float] = {"depth": rng.choice([2, 3, 8, 64, 300]), "queues": rng.choice([1, 2, 8])}
    if recovers:
        options["deadline"] = 2.0
    uri = f"emulated:{(threads + 1) * REGION}?" + "&".join(f"{name}={value}" for name, value in query.items())
    return uri, options, recovers


class Worker:
    """One thread's operations on its region, and the model of it."""

    def __init__(self, shared: Round, number: int) -> None:
        self.round, self.number = shared, number
        self.rng = random.Random(f"{shared.seed}/{number}")
        self.base = number * REGION
        self.model = bytearray(REGION)
        self.block = shared.device.block_size
        self.done = 0
        self.make_buffers()

    def make_buffers(self) -> None:
        phase = self.rng.choice([0, 0, 4, 512, 60, 1])
        self.memory = np.zeros(256 * KIB + phase, "u1")
        self.registrations = [ugds.register(self.memory[phase:]), ugds.empty(self.rng.randint(64 * KIB, 300 * KIB))]

    def close_buffers(self) -> None:
        """A command of a request that was ended by its deadline never keeps a buffer once the error was raised."""
        while self.registrations:
            self.registrations.pop().close()

    def range(self, room: int) -> tuple[int, int]:
        size = min(self.rng.choice([1, 100, self.block, 4 * self.block, 32 * KIB, 200 * KIB]) + 1, room, REGION)
        size = self.rng.randint(1, size)
        offset = self.rng.randint(0, REGION - size)
        if self.rng.random() < 0.6:
            offset -= offset % self.block
            size = min(-(-size // self.block) * self.block, REGION - offset, room - room % self.block)
        return offset, size

    def step(self) -> None:
        ssd, rng = self.round.device, self.rng
        weights = [40, 35, 10, 3, 4, 3, *([0, 0.1] if self.round.recovers else [1.5, 0])]
        kind = rng.choices(["read", "write", "shared", "flush", "discard", "register", "fault", "hang"], weights)[0]
        buffer = rng.choice(self.registrations)
        view = np.frombuffer(buffer, "u1")
        offset, size = self.range(buffer.nbytes)
        where = rng.randint(0, buffer.nbytes - size)
        if rng.random() < 0.7:
            where &= ~3
        at = self.base + offset
        part = slice(where, where + size)
        if kind == "read":
            view[part] = 0x5A
            before, after = bytes(view[:where]), bytes(view[where + size :])
            expect(ssd.read(buffer, at, size, where) == size, "a short read")
            self.compare(view[part], self.model[offset : offset + size], "read", offset)
            expect(bytes(view[:where]) == before and bytes(view[where + size :]) == after, "a read wrote beside it")
        elif kind == "write":
            view[part] = np.frombuffer(rng.randbytes(size), "u1")
            moved = ssd.write(buffer, at, size, where, durable=rng.random() < 0.1, unaligned=True)
            expect(moved == size, "a short write")
            self.model[offset : offset + size] = view[part].tobytes()
        elif kind == "shared":
            ssd.read(buffer, self.round.shared_at + offset, size, where)
            self.compare(view[part], self.round.shared[offset : offset + size], "shared read", offset)
        elif kind == "flush":
            ssd.flush()
        elif kind == "discard":
            begin = offset - offset % self.block
            end = min(begin + max(self.block, size - size % self.block), REGION)
            ssd.discard(self.base + begin, end - begin)
            self.settle(begin, end, bytes(end - begin))
        elif kind == "register":
            del view
            self.close_buffers()
            self.make_buffers()
        elif kind == "fault":
            self.fault(buffer, view)
        elif self.round.recovers:
            # Whoever's command is next hangs, and is aborted: nobody loses bytes, one request is ended.
            self.round.emulator.inject("hang", lba=(self.base + offset) // self.block, blocks=1)

    def fault(self, buffer: ugds.Registration, view: np.ndarray) -> None:
        """A status on one block of a request: the prefix before it is right, and the error says so."""
        ssd, rng = self.round.device, self.rng
        most = min(buffer.nbytes & ~3, REGION) // self.block
        if most == 0:
            return
        blocks = rng.randint(1, min(most, 64))
        first = rng.randint(0, REGION // self.block - blocks)
        bad = first + rng.randrange(blocks)
        status = rng.choice(list(STATUSES))
        write = rng.random() < 0.5
        offset, size = first * self.block, blocks * self.block
        where = -buffer.address % 4
        if where + size > buffer.nbytes:
            return
        self.round.emulator.inject(
            "status", opcode=1 if write else 2, status=status, lba=self.base // self.block + bad, blocks=1
        )
        view[where : where + size] = np.frombuffer(rng.randbytes(size), "u1")
        sent = view[where : where + size].tobytes()
        try:
            if write:
                ssd.write(buffer, self.base + offset, size, where)
            else:
                ssd.read(buffer, self.base + offset, size, where)
        except ugds.Error as error:
            if error.status is None:
                raise
            piece = ssd.max_transfer
            expect(error.status == status, f"status {error.status:#x} instead of {status:#x}")
            expect(STATUSES[status] in error.status_text, error.status_text)
            exact = (bad * self.block - offset) // piece * piece
            expect(error.completed == exact, f"completed {error.completed} instead of {exact}")
            expect((error.offset, error.length) == (self.base + offset, size), "another range")
            if write:
                self.model[offset : offset + exact] = sent[:exact]
                self.settle(offset + exact, offset + size, sent[exact:])
            else:
                self.compare(view[where : where + exact], self.model[offset : offset + exact], "prefix", offset)
        else:
            raise Wrong(f"status {status:#x} on block {bad} of [{first}, +{blocks}) was not reported")

    def settle(self, begin: int, end: int, new: bytes) -> None:
        """After a request that may have been done in part: each block is the old or the new one."""
        if begin == end:
            return
        now = self.round.emulator.peek(self.base + begin, end - begin)
        for at in range(0, end - begin, self.block):
            block = now[at : at + self.block]
            old = bytes(self.model[begin + at : begin + at + self.block])
            expect(block in (old, new[at : at + self.block]), f"the block at {self.base + begin + at} is neither")
        self.model[begin:end] = now

    def compare(self, got: np.ndarray, expected: bytes | bytearray, what: str, offset: int) -> None:
        wrong = np.flatnonzero(got != np.frombuffer(expected, "u1"))
        if wrong.size:
            at = int(wrong[0])
            raise Wrong(
                f"{what}: {wrong.size} of {got.size} bytes differ, the first at byte {self.base + offset + at} of the "
                f"device: {got[at]:#x} instead of {expected[at]:#x}"
            )

    def ended_by_recovery(self, error: ugds.Error) -> bool:
        """A deadline, or a reset under it. Nothing moves any more, so the region can be looked at."""
        if not self.round.recovers or error.status is not None:
            return False
        return error.errno in (110, 125) or (error.errno == 5 and "may be lost" in error.cause)  # a flush after one

    def run(self) -> None:
        try:
            while not self.round.stop.is_set():
                try:
                    self.step()
                except ugds.Error as error:
                    if not self.ended_by_recovery(error):
                        raise
                    self.model[:] = self.round.emulator.peek(self.base, REGION)
                self.done += 1
        except BaseException:
            self.round.failures.append(f"thread {self.number}: {traceback.format_exc()}")
            self.round.stop.set()
        self.round.operations.append(self.done)


def reopen(shared: Round) -> None:
    """A second device comes and goes while the first works: everything registered is mapped to it as well."""
    rng = random.Random(f"{shared.seed}/second")
    try:
        while not shared.stop.is_set():
            with (
                ugds.open(f"emulated:1MiB?shadow={rng.randint(0, 1)}", queues=1) as second,
                ugds.empty("64KiB") as mine,
                ugds.testing.strict(second),
            ):
                view = np.frombuffer(mine, "u1")
                view[:] = np.frombuffer(rng.randbytes(64 * KIB), "u1")
                sent = view.tobytes()
                second.write(mine, "64KiB")
                view[:] = 0
                second.read(mine, "64KiB")
                expect(view.tobytes() == sent, "the second device gave other bytes")
                del view
            shared.stop.wait(rng.random() * 0.1)
    except BaseException:
        shared.failures.append(f"second device: {traceback.format_exc()}")
        shared.stop.set()


def resources() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "registrations": _core.open_registrations(),  # type: ignore[attr-defined]
    }


def settled(expected: dict[str, int]) -> dict[str, int]:
    """What is in use when it is as expected, or after a while: a joined thread is still listed for a moment."""
    end = time.monotonic() + 10
    while (now := resources()) != expected and time.monotonic() < end:
        time.sleep(0.05)
    return now


def play(seed: int, seconds: float, threads: int) -> tuple[int, str, list[str]]:
    """One round: operations, the device, and what was wrong."""
    rng = random.Random(seed)
    uri, options, recovers = shape(rng, threads)
    print(f"seed {seed}: {uri} {options}", file=sys.stderr) if os.environ.get("SOAK_LOG") else None
    content = rng.randbytes(REGION)
    before = resources()
    with ugds.open(uri, **options) as device:
        emulator = ugds.testing.emulator(device)
        at = threads * REGION
        emulator.poke(at, content)
        shared = Round(seed, threads, device, emulator, content, at, recovers)
        workers = [Worker(shared, n) for n in range(threads)]
        pool = [threading.Thread(target=w.run, daemon=True) for w in workers]
        pool.append(threading.Thread(target=reopen, args=(shared,), daemon=True))
        for thread in pool:
            thread.start()
        shared.stop.wait(seconds)
        shared.stop.set()
        for thread in pool:
            thread.join()
        if not shared.failures:
            try:
                finish(shared, workers)
            except Exception:
                shared.failures.append(traceback.format_exc())
        if shared.failures:
            return sum(shared.operations), uri, shared.failures
        for worker in workers:
            worker.close_buffers()
    del workers, worker, pool, thread
    after = settled(before)
    wrong = [f"{name}: {before[name]} before, {after[name]} after" for name in before if before[name] != after[name]]
    return sum(shared.operations), uri, wrong


def finish(shared: Round, workers: list[Worker]) -> None:
    for worker in workers:
        now = np.frombuffer(shared.emulator.peek(worker.base, REGION), "u1")
        worker.compare(now, worker.model, "at the end", 0)
    expect(shared.emulator.peek(shared.shared_at, REGION) == shared.shared, "the shared region changed")
    expect(shared.emulator.violations() == [], "violations:", shared.emulator.violations())
    stats = shared.device.stats()
    expect(stats.in_flight == 0, stats.in_flight, "commands are in flight at the end")
    expect(shared.device.state == "ready", "the device is", shared.device.state)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random load with faults.")
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the next has the next number")
    parser.add_argument("--round", type=float, default=4.0, metavar="SECONDS", help="length of a round")
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
    end = time.monotonic() + arguments.minutes * 60
    rounds = operations = 0
    play(seed, 0.1, arguments.threads)  # what is made once and kept is not a leak
    while rounds == 0 or time.monotonic() < end:
        # A round that hangs shows every thread's stack and ends the process.
        faulthandler.dump_traceback_later(arguments.round + LIMIT, exit=True)
        print(f"round {rounds + 1}: seed {seed}", end="", flush=True)
        start = time.monotonic()
        done, uri, wrong = play(seed, arguments.round, arguments.threads)
        faulthandler.cancel_dump_traceback_later()
        print(f", {done} operations in {time.monotonic() - start:.1f} s on {uri}", flush=True)
        rounds, operations = rounds + 1, operations + done
        if wrong:
            print("\n".join(wrong))
            print(f"soak: {rounds} rounds, {operations} operations, {len(wrong)} wrong; again by --seed {seed}")
            return 1
        seed += 1
    print(f"soak: {rounds} rounds, {operations} operations, 0 wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
