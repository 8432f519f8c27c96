# SPDX-License-Identifier: Apache-2.0
"""What each mode does for loads that it is for, and for those that it is not for.

How a mode schedules is simulated (`ugds.bench.simulation`); how it waits, and what that costs, is measured in real
time, the modes in turn so that all meet the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack

import ugds
from ugds import _core
from ugds._report import Record
from ugds.bench import completion, fairness
from ugds.bench.simulation import CONTROL_MODE, Load, run

_KIB, _MIB = 1 << 10, 1 << 20
Figures = dict[str, tuple[float, str]]

#: Writes that nobody waits for, and reads: few that wait for the device's latency, and as many as it can serve.
WRITES = Load("write", 1 * _MIB, depth=64)
READS = {"few": Load("read", 16 * _KIB, 4), "many": Load("read", 128 * _KIB, 16)}
DEVICES = fairness.DEVICES[:2]
#: Of virtual time, for each load.
SECONDS = 0.5
#: Reads before a mode is measured in real time, for one that learns from what it sees: twice what the mode `adaptive`
#: takes until it seldom tries the other way. And the longest that this may last.
WARM_UP_READS, WARM_UP_S = 8000, 3.0
LEARN_NOTHING = ("latency", "throughput", "priority")
ROUNDS = 27


def measure(uri: str | None, seconds: float, only: str | None = None) -> list[Record]:
    """Records of each mode and simulated device, of mode `priority` and of mode `adaptive`; or `only` those of
    "scheduling" or of "waiting"."""
    modes = [mode for mode in _core.modes() if mode != CONTROL_MODE]
    records: list[Record] = []
    if only != "waiting":
        records += [record for device in ([uri] if uri else DEVICES) for record in _simulate(device, modes)]
    if only != "scheduling":
        records += _adaptive(_wait(modes, seconds))
    return records


# --- Scheduling, simulated -------------------------------------------------------------------------------------------


def _simulate(uri: str, modes: list[str]) -> list[Record]:
    beside = {mode: _beside_writes(uri, mode) for mode in modes}
    shares = beside["priority"]
    published = Record(
        "modes",
        {"mode": "priority"},
        uri,
        "host",
        "direct",
        {
            "priority_read_share": (min(shares[f"read_share_{name}"] for name in READS), "1"),
            "priority_write_share": (min(shares[f"write_share_{name}"] for name in READS), "1"),
        },
    )
    table = [
        Record(
            "modes",
            {"measured": "scheduling", "mode": mode},
            uri,
            "host",
            "direct",
            {**{name: (value, "1") for name, value in beside[mode].items()}, **_beside_large(uri, mode)},
        )
        for mode in modes
    ]
    return [published, *table]


def _beside_writes(uri: str, mode: str) -> dict[str, float]:
    """Throughput of reads and of writes together, each over what it is alone in the same mode."""
    span = {"seconds": SECONDS, "warm_up": fairness.WARM_UP}
    writes = run(uri, mode, {"writes": WRITES}, **span)["writes"].bytes_per_s
    shares: dict[str, float] = {}
    for name, load in READS.items():
        reads = run(uri, mode, {"reads": load}, **span)["reads"].bytes_per_s
        both = run(uri, mode, {"reads": load, "writes": WRITES}, **span)
        shares[f"read_share_{name}"] = both["reads"].bytes_per_s / reads
        shares[f"write_share_{name}"] = both["writes"].bytes_per_s / writes
    return shares


def _beside_large(uri: str, mode: str) -> Figures:
    span = {"seconds": SECONDS, "warm_up": fairness.WARM_UP}
    alone = run(uri, mode, {"small": fairness.SMALL}, **span)["small"].latency_us(99)
    both = run(uri, mode, {"small": fairness.SMALL, "large": fairness.LARGE["batch"]}, **span)
    return {
        "small_p99_times": (both["small"].latency_us(99) / alone, "1"),
        "large_gib_per_s": (both["large"].bytes_per_s / (1 << 30), "GiB/s"),
    }


# --- Waiting, in real time -------------------------------------------------------------------------------------------


def _wait(modes: list[str], seconds: float) -> dict[str, tuple[str, dict[str, list[completion.Point]]]]:
    """By what is read: the device's address, and what each mode made of it in each round."""
    return {
        "4k": (completion.SMALL, _in_turn(completion.SMALL, modes, 4 * _KIB, seconds)),
        "1m": (completion.LARGE, _in_turn(completion.LARGE, modes, 1 * _MIB, seconds)),
    }


def _in_turn(uri: str, modes: list[str], size: int, seconds: float) -> dict[str, list[completion.Point]]:
    with ExitStack() as stack:
        devices = {mode: stack.enter_context(ugds.open(f"{uri}&mode={mode}", queues=1)) for mode in modes}
        buffer = stack.enter_context(ugds.empty(size))
        found: dict[str, list[completion.Point]] = {mode: [] for mode in modes}
        for mode, device in devices.items():
            expected_s = completion.once(device, buffer, size, 0.05).request_us / 1e6
            if mode not in LEARN_NOTHING:
                completion.once(device, buffer, size, min(WARM_UP_S, WARM_UP_READS * expected_s))
        for _ in range(ROUNDS):
            for mode, device in devices.items():
                found[mode].append(completion.once(device, buffer, size, seconds / ROUNDS))
        return found


def _adaptive(found: Mapping[str, tuple[str, dict[str, list[completion.Point]]]]) -> list[Record]:
    records = []
    for name, (uri, rounds) in found.items():
        params = {"size": 4 * _KIB if name == "4k" else 1 * _MIB, "rounds": ROUNDS}
        if name == "4k":
            ratio, extremes = _ratios({mode: [point.request_us for point in rounds[mode]] for mode in WAYS})
            figures: Figures = {"adaptive_latency_ratio": (ratio, "1"), "latency_extremes_ratio": (extremes, "1")}
        else:
            ratio, extremes = _ratios({mode: [point.cpu_us for point in rounds[mode]] for mode in WAYS})
            figures = {"adaptive_cpu_ratio": (ratio, "1"), "cpu_extremes_ratio": (extremes, "1")}
        records.append(Record("modes", {**params, "mode": "adaptive"}, uri, "host", "direct", figures))
        for mode, points in rounds.items():
            point = completion.median(points)
            read: Figures = {
                f"read_{name}_us": (point.request_us, "us"),
                f"read_{name}_cpu_us": (point.cpu_us, "us"),
                f"read_{name}_cpu_percent": (point.cpu_percent, "%"),
                f"read_{name}_mib_per_s": (params["size"] / _MIB / (point.request_us / 1e6), "MiB/s"),
            }
            records.append(
                Record("modes", {**params, "measured": "waiting", "mode": mode}, uri, "host", "direct", read)
            )
    return records


#: The way of waiting that adapts, and the two extremes: polling always, and sleeping always.
WAYS = ("adaptive", "latency", "throughput")


def _ratios(rounds: Mapping[str, list[float]]) -> tuple[float, float]:
    """The adaptive way over the better of the extremes, round by round, since other work of the machine comes and goes;
    and the worse of these over the better."""
    better, worse = sorted(WAYS[1:], key=lambda mode: statistics.median(rounds[mode]))
    pairs = zip(rounds["adaptive"], rounds[better], strict=True)
    extremes = zip(rounds[worse], rounds[better], strict=True)
    return statistics.median(a / b for a, b in pairs), statistics.median(a / b for a, b in extremes)
