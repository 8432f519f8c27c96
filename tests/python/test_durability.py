# SPDX-License-Identifier: Apache-2.0
"""What survives a loss of power: what a flush or a durable write was told to be done for, and nothing is promised of
the rest."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import numpy as np
import pytest
import ugds
import ugds.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
LBA = 512
OpenSsd = Callable[..., ugds.Device]


class Disk:
    """For each block the contents that it may have after a loss of power: one, once they were made durable. And whether
    a flush has to say that a loss may have taken something."""

    def __init__(self, blocks: int) -> None:
        self.unflushed = self.in_doubt = False
        self.now = [bytes(LBA)] * blocks
        self.allowed = [{bytes(LBA)} for _ in range(blocks)]

    def write(self, first: int, data: bytes, durable: bool) -> None:
        for index in range(len(data) // LBA):
            block = data[index * LBA : (index + 1) * LBA]
            self.now[first + index] = block
            if durable:
                self.allowed[first + index] = {block}
            else:
                self.allowed[first + index].add(block)
                self.unflushed = True

    def flush(self) -> None:
        self.unflushed = self.in_doubt = False
        self.allowed = [{block} for block in self.now]

    def check_after_loss(self, stored: bytes, survive: float | None = None) -> None:
        self.in_doubt |= self.unflushed
        self.unflushed = False
        for index, allowed in enumerate(self.allowed):
            block = stored[index * LBA : (index + 1) * LBA]
            assert block in allowed, f"block {index} has contents that it never had, or that a later write replaced"
            self.now[index] = block
            self.allowed[index] = {block}


def fill(buffer: ugds.Registration, rng: random.Random, size: int) -> bytes:
    data = rng.randbytes(size)
    np.frombuffer(buffer, "u1")[:size] = np.frombuffer(data, "u1")
    return data


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "durable", "flush", "cut", "unaligned", "durable unaligned"]),
        st.integers(0, 63),
        st.integers(1, 24),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    steps=steps,
    survive=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1 << 20),
    mdts=st.integers(0, 2),
    pump=st.sampled_from(["thread", "caller"]),
)
def test_a_block_has_after_a_loss_of_power_what_it_may_have(
    steps: list[tuple[str, int, int]], survive: float, seed: int, mdts: int, pump: str
) -> None:
    rng, disk = random.Random(seed), Disk(64)
    uri = f"emulated:{64 * LBA}?lba={LBA}&vwc=1&mdts={mdts}&pump={pump}&order=random"
    with ugds.open(uri) as ssd, ugds.empty("32KiB") as buffer:
        emulator = ugds.testing.emulator(ssd)
        for number, (kind, first, count) in enumerate([*steps, ("cut", 0, 0)]):
            count = min(count, 64 - first)
            if kind in ("write", "durable"):
                data = fill(buffer, rng, count * LBA)
                ssd.write(buffer, first * LBA, len(data), durable=kind == "durable")
                disk.write(first, data, kind == "durable")
            elif kind.endswith("unaligned"):
                offset = first * LBA + rng.randrange(LBA)
                data = fill(buffer, rng, min(count * LBA - 7, 64 * LBA - offset))
                durable = kind.startswith("durable")
                ssd.write(buffer, offset, len(data), durable=durable, unaligned=True)
                whole = bytearray(b"".join(disk.now))
                whole[offset : offset + len(data)] = data
                last = -(-(offset + len(data)) // LBA)
                disk.write(first, bytes(whole[first * LBA : last * LBA]), durable)
            elif kind == "flush":
                try:
                    ssd.flush()
                    told = False
                except ugds.Error as error:
                    told = error.errno == errno.EIO and "may be lost" in error.cause
                assert told == disk.in_doubt
                disk.flush()  # which it did, whatever was lost before
            else:
                ugds.testing.power_cut(ssd, survive, seed + number)
                disk.check_after_loss(emulator.peek(0, 64 * LBA))
                revive(ssd, buffer)
        # A host that does not know yet that the power was away may ring a controller that is disabled by now.
        assert [rule for rule, _ in emulator.violations() if rule != "queue-while-disabled"] == []


def revive(ssd: ugds.Device, buffer: ugds.Registration) -> None:
    """The controller was reset by the power: the handle finds that out, and works again."""
    for _ in range(3):
        try:
            ssd.read(buffer, 0, LBA)
            return
        except ugds.Error:
            if ssd.state not in ("ready", "recovering"):
                raise
    raise AssertionError("the device does not come back after a loss of power")


@pytest.mark.parametrize("how", ["flush", "durable"])
@pytest.mark.parametrize("size", [LBA, MIB])
@pytest.mark.device("emulated:4MiB?vwc=1&lba=512&mdts=2")
def test_what_was_made_durable_survives_and_what_was_not_does_not(ssd: ugds.Device, how: str, size: int) -> None:
    kept, lost = np.full(size, 0x4B, "u1"), np.full(size, 0x10, "u1")
    emulator = ugds.testing.emulator(ssd)
    with ugds.register(kept) as first, ugds.register(lost) as second:
        ssd.write(first, 0, durable=how == "durable")
        if how == "flush":
            ssd.flush()
        ssd.write(second, "2MiB")
        assert emulator.peek(2 * MIB, size) == lost.tobytes()
    emulator.power_cut(survive=0)
    assert emulator.peek(0, size) == kept.tobytes()
    assert emulator.peek(2 * MIB, size) == bytes(size)


@pytest.mark.device("emulated:1MiB?vwc=1&lba=512")
def test_a_flush_that_failed_promises_nothing_and_the_next_one_does(ssd: ugds.Device) -> None:
    memory = np.full(LBA, 0x31, "u1")
    emulator = ugds.testing.emulator(ssd)
    with ugds.register(memory) as buffer:
        ssd.write(buffer)
        emulator.inject("status", opcode=0, status=0x006)
        with pytest.raises(ugds.Error) as caught:
            ssd.flush()
        assert caught.value.status == 0x006
        ssd.flush()
    emulator.power_cut(survive=0)
    assert emulator.peek(0, LBA) == memory.tobytes()


@pytest.mark.device("emulated:1MiB?vwc=1&lba=512")
def test_what_was_written_is_durable_after_a_close(open_ssd: OpenSsd) -> None:
    """A shutdown of the controller writes its cache back."""
    uri = "emulated:1MiB?vwc=1&lba=512&name=durable-after-close"
    memory = np.full(4096, 0x77, "u1")
    with ugds.open(uri) as ssd, ugds.register(memory) as buffer:
        ssd.write(buffer)
    with ugds.open(uri) as ssd:
        ugds.testing.power_cut(ssd, survive=0)
        assert ugds.testing.emulator(ssd).peek(0, 4096) == memory.tobytes()
    assert ugds.testing.forget_subsystem("durable-after-close")


def test_a_device_without_a_write_cache_loses_nothing(open_ssd: OpenSsd) -> None:
    ssd = open_ssd("emulated:1MiB?vwc=0&lba=512")
    assert not ssd.info.volatile_write_cache
    memory = np.full(4096, 0x66, "u1")
    with ugds.register(memory) as buffer:
        ssd.write(buffer)
        ssd.flush()
    ugds.testing.power_cut(ssd, survive=0)
    assert ugds.testing.emulator(ssd).peek(0, 4096) == memory.tobytes()


def test_a_request_in_flight_when_the_power_goes_says_so(open_ssd: OpenSsd) -> None:
    """Nothing is reported as durable that was not, and nothing waits for its deadline of minutes."""
    import threading
    import time

    ssd = open_ssd("emulated:1MiB?vwc=1&lba=512&latency=2s", deadline=60)
    outcome: list[object] = []

    def write() -> None:
        with ugds.empty("4KiB") as buffer:
            np.frombuffer(buffer, "u1")[:] = 0x99
            try:
                outcome.append(ssd.write(buffer, durable=True))
            except ugds.Error as error:
                outcome.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    while ssd.stats().in_flight == 0:
        time.sleep(0.001)
    ugds.testing.power_cut(ssd, survive=0)
    start = time.monotonic()
    thread.join(timeout=20)
    assert not thread.is_alive(), "the write never came back"
    assert time.monotonic() - start < 20
    stored = ugds.testing.emulator(ssd).peek(0, 4096)
    if isinstance(outcome[0], ugds.Error):
        assert outcome[0].completed == 0
    else:
        assert stored == b"\x99" * 4096
