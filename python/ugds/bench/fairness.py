# SPDX-License-Identifier: Apache-2.0
"""Small reads beside large ones: what they wait for, under this library's scheduling and under the uGDS paper's.

In a simulation (`ugds.bench.simulation`): 4 KiB synchronous reads on a device that is idle otherwise, beside a batch of
1 MiB reads that takes all the device has, and beside neighbours' synchronous reads of 16 MiB.
"""

from __future__ import annotations

from ugds import sizes
from ugds._report import CommandError, Record
from ugds.bench.simulation import CONTROL_MODE, QUEUES, Load, Outcome, run

_KIB, _MIB = 1 << 10, 1 << 20

#: An SSD of today by latency and bandwidth; a faster one; one that takes commands of 1 MiB; and one that looks at few
#: commands at a time, and fetches few of one queue before it turns to the next.
DEVICES = (
    "emulated:256MiB?latency=80us&bandwidth=6.5GiB/s&mdts=5",
    "emulated:256MiB?latency=20us&bandwidth=6.5GiB/s&mdts=5",
    "emulated:256MiB?latency=80us&bandwidth=6.5GiB/s&mdts=8",
    "emulated:256MiB?latency=80us&bandwidth=6.5GiB/s&mdts=5&slots=64&burst=8",
)
MODE = "latency"
SMALL = Load("read", 4 * _KIB, 4, pause_ns=20_000)
LARGE = {"batch": Load("read", 1 * _MIB, depth=128), "sync": Load("read", 16 * _MIB, 4)}
WARM_UP = 0.25
_PERCENTILES = (("p50", 50.0), ("p99", 99.0), ("p999", 99.9), ("max", 100.0))


def measure(uri: str | None, seconds: float) -> list[Record]:
    """Two records a device: of this library's scheduling, and of the paper's."""
    return [record for device in ([uri] if uri else DEVICES) for record in _compare(device, seconds)]


def bandwidth_of(uri: str) -> float:
    """Bytes a second that the emulated device moves at most."""
    for part in uri.partition("?")[2].split("&"):
        name, _, value = part.partition("=")
        if name == "bandwidth":
            return float(sizes.parse(value.removesuffix("/s")))
    raise CommandError(f"{uri} states no bandwidth, of which shares could be told: add bandwidth=6.5GiB/s", 2)


def _compare(uri: str, seconds: float) -> list[Record]:
    bandwidth = bandwidth_of(uri)
    unloaded = run(uri, MODE, {"small": SMALL}, seconds, WARM_UP)["small"]
    ours = {name: run(uri, MODE, {"small": SMALL, "large": load}, seconds, WARM_UP) for name, load in LARGE.items()}
    control = {
        name: run(uri, CONTROL_MODE, {"small": SMALL.held(), "large": load.held()}, seconds, WARM_UP)
        for name, load in LARGE.items()
    }
    found = _figures("", unloaded, ours, bandwidth) | _latencies("small_unloaded", unloaded)
    others = _figures("control_", unloaded, control, bandwidth)
    params = {"size": SMALL.size, "callers": SMALL.count, "queues": QUEUES, "virtual_seconds": seconds}
    return [
        Record("fairness", {**params, "policy": policy}, uri, "host", "direct", figures)
        for policy, figures in (("ugds", found), ("paper", others))
    ]


def _figures(
    prefix: str, unloaded: Outcome, beside: dict[str, dict[str, Outcome]], bandwidth: float
) -> dict[str, tuple[float, str]]:
    figures: dict[str, tuple[float, str]] = {}
    shares = {name: both["large"].bytes_per_s / bandwidth for name, both in beside.items()}
    for name, both in beside.items():
        ratio = both["small"].latency_us(99) / unloaded.latency_us(99)
        figures[f"{prefix}small_p99_ratio_{name}"] = (ratio, "1")
    figures[f"{prefix}large_throughput_share"] = (min(shares.values()), "1")
    for name, both in beside.items():
        figures[f"{prefix}large_throughput_share_{name}"] = (shares[name], "1")
        figures |= _latencies(f"{prefix}small_{name}", both["small"])
        figures[f"{prefix}small_{name}_requests"] = (float(len(both["small"].latencies_ns)), "1")
    return figures


def _latencies(name: str, outcome: Outcome) -> dict[str, tuple[float, str]]:
    return {f"{name}_{word}_us": (outcome.latency_us(percent), "us") for word, percent in _PERCENTILES}
