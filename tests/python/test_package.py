# SPDX-License-Identifier: Apache-2.0
"""The package's own Python: sizes, statistics, the testing front, and reading callgrind's output."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ugds
import ugds.testing
from ugds import sizes
from ugds._report import describe
from ugds.bench import callgrind

# --- Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("4 kib", 4096),
        ("1TiB", 1 << 40),
        ("0.5KiB", 512),
    ],
)
def test_sizes_are_read(text: int | str, count: int) -> None:
    assert sizes.parse(text) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.3", "0.3KiB", "4 potatoes", "1e3", "9223372036854775808", "8388608TiB", -1]
)
def test_what_is_no_size_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (513, "513 B"), (4096, "4 KiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1024 TiB"), (100 << 20, "100 MiB")],
)
def test_sizes_are_written(count: int, text: str) -> None:
    assert sizes.format(count) == text


# --- What a device says -------------------------------------------------------------------------------------------


def test_info_is_typed_and_readable(ssd: ugds.Device) -> None:
    info = ssd.info
    assert isinstance(info, ugds.DeviceInfo)
    assert info.capacity == ssd.capacity == 64 << 20
    assert info.transport == "emulated"
    assert json.loads(json.dumps(info.as_dict())) == info.as_dict()
    assert "64 MiB" in str(info)


def test_stats_count_what_was_asked_for(ssd: ugds.Device) -> None:
    with ugds.empty("1MiB") as buffer:
        before = ssd.stats()
        ssd.write(buffer)
        for _ in range(10):
            ssd.read(buffer, 0, 4096)
        after = ssd.stats()
    made = after - before
    assert made.requests == 11
    assert made.read_bytes == 10 * 4096
    assert made.write_bytes == 1 << 20
    assert made.commands >= 11
    assert made.errors == 0
    assert made.in_flight == 0
    assert made.route == "direct"
    assert sum(made.histogram) > 0
    p50, p99 = made.p50_us, made.p99_us
    assert p50 is not None
    assert p99 is not None
    assert 0 < p50 <= p99
    assert "11 requests" in str(made)
    assert json.loads(json.dumps(made.as_dict()))["requests"] == 11


def queue(histogram: dict[int, int], **counts: Any) -> dict[str, Any]:
    names = ("requests", "read_bytes", "write_bytes", "commands", "doorbells", "errors", "protocol_errors")
    names += ("retries", "in_flight")
    buckets = [histogram.get(i, 0) for i in range(160)]
    return {
        "queue": 1,
        "depth": 2,
        "latency_ns_histogram": buckets,
        **dict.fromkeys(names, 0),
        **counts,
    }


def test_percentiles_are_the_middle_of_their_bucket() -> None:
    stats = ugds.Stats._sum("emulated:1MiB", "emulated", [queue({40: 98, 60: 2})], 0, 0, {}, {})
    assert stats.percentile_ns(50) == pytest.approx(2**10.125)
    assert stats.percentile_ns(98) == pytest.approx(2**10.125)
    assert stats.percentile_ns(99) == pytest.approx(2**15.125)
    assert stats.percentile_ns(100) == pytest.approx(2**15.125)
    assert ugds.Stats._sum("emulated:1MiB", "emulated", [queue({})], 0, 0, {}, {}).p50_us is None
    with pytest.raises(ValueError, match="percentile"):
        stats.percentile_ns(0)


def test_stats_sum_over_queues_and_tell_mixed_routes() -> None:
    rows = [queue({8: 1}, requests=1, read_bytes=4096), queue({8: 2}, queue=2, requests=2, write_bytes=8192)]

    def counted(staged: int, buffered: int = 0) -> ugds.Stats:
        return ugds.Stats._sum("emulated:1MiB", "emulated", rows, staged, buffered, {}, {})

    stats = counted(4096)
    assert stats.requests == 3
    assert stats.histogram[8] == 3
    assert [counted(staged).route for staged in (0, 4096, 12288)] == ["direct", "mixed", "staged"]
    assert [counted(12288, buffered).route for buffered in (4096, 12288)] == ["mixed", "buffered"]
    assert (counted(12288) - counted(4096)).staged_bytes == 8192
    assert (counted(0, 12288) - counted(0, 4096)).buffered_bytes == 8192


# --- Errors -------------------------------------------------------------------------------------------------------


def test_an_error_is_described_with_everything_that_is_known(ssd: ugds.Device) -> None:
    with ugds.empty(4096) as buffer:
        ssd.write(buffer)
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281, count=100)
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
    text = describe(caught.value)
    assert text.startswith(f"read on {ssd.uri}, bytes 0 to 4096 failed: ")
    assert "unrecovered read error (0x281)" in text
    assert "what to do: " in text


# --- The testing front --------------------------------------------------------------------------------------------


def test_every_fault_has_its_name_in_the_emulator(ssd: ugds.Device) -> None:
    emulator = ugds.testing.emulator(ssd)
    for kind in ugds.testing.FAULTS:
        emulator.inject(kind, opcode=0x7F)  # no such command is sent
    emulator.clear_faults()
    with pytest.raises((ugds.Error, ValueError)):
        emulator.inject("gremlin")


def test_strict_reports_every_violation() -> None:
    class Broken:
        uri = "emulated:broken"

    class Controller:
        def violations(self) -> list[tuple[str, str]]:
            return [("unmapped-access", "0x1000, 4096 bytes"), ("phase", "twice")]

    original = ugds.testing._core.emulator
    ugds.testing._core.emulator = lambda device: Controller()
    try:
        with (
            pytest.raises(AssertionError, match=r"2 violation[\s\S]*unmapped-access: 0x1000[\s\S]*phase: twice"),
            ugds.testing.strict(Broken()),
        ):
            pass
        with pytest.raises(KeyError), ugds.testing.strict(Broken()):
            raise KeyError
    finally:
        ugds.testing._core.emulator = original


def test_what_was_not_flushed_is_lost_with_the_power(ssd: ugds.Device) -> None:
    emulator = ugds.testing.emulator(ssd)
    with ugds.register(bytearray(b"k" * 4096)) as kept, ugds.register(bytearray(b"l" * 4096)) as lost:
        ssd.write(kept, 0)
        ssd.flush()
        ssd.write(lost, 4096)
        ugds.testing.power_cut(ssd)
    assert emulator.peek(0, 4096) == b"k" * 4096
    assert emulator.peek(4096, 4096) == bytes(4096)


def test_a_failing_step_fails_the_opening_and_leaves_nothing_behind() -> None:
    with ugds.testing.setup_steps() as names:
        ugds.open("emulated:16MiB").close()
    assert names
    with ugds.testing.failing_step(len(names) // 2) as reached, pytest.raises(ugds.Error):
        ugds.open("emulated:16MiB")
    assert reached == [True]
    ugds.open("emulated:16MiB").close()


def test_parameters_are_documented() -> None:
    names = [parameter.name for parameter in ugds.testing.parameters()]
    assert {"lba", "mdts", "queues", "pump", "latency"} <= set(names)
    assert len(names) == len(set(names))
    assert all(parameter.values and parameter.meaning for parameter in ugds.testing.parameters())


# --- Callgrind ----------------------------------------------------------------------------------------------------

PROFILE = """\
# callgrind format
version: 1
positions: line
events: Ir

ob=(1) /somewhere/libugds.so
fl=(1) ???
fn=(1) uGDSRead@@UGDS_1.0
0 100
cfn=(2) ugds::engine::read(ugds::Handle*)
calls=10 0
0 700
fn=(2)
0 200
cob=(1)
cfn=(3) ugds::emulator::Controller::turn(void*)
calls=20 0
0 500

fn=(3)
0 400
cfn=(4) memcpy@@GLIBC_2.14
calls=20 0
0 100
fn=(4)
0 100

totals: 800
"""


def test_callgrind_output_is_read() -> None:
    profile = callgrind.parse(PROFILE)
    assert profile.total == 800
    assert profile.called("ugds::emulator::Controller::turn") == (20, 500)
    assert profile.called("memcpy") == (20, 100)
    assert profile.called("nothing") == (0, 0)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("ugds::emulator::Controller::turn(void*)", "ugds::emulator::Controller::turn"),
        ("uGDSRead@@UGDS_1.0", "uGDSRead"),
        ("uGDSRead", "uGDSRead"),
        ("spin'2", "spin"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert callgrind.plain(name) == plain
