# SPDX-License-Identifier: Apache-2.0
"""Statistics in Prometheus' text exposition format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ugds._device import Stats

#: Histogram buckets of `Stats`, four a doubling from 1 ns, after each of which there is a `le`: every doubling from 512
#: ns to 8.6 s. Always the same, as a histogram's buckets must be to be added up and compared over time.
_EDGES = range(4 * 9, 4 * 33 + 1, 4)

#: (metric, type, field of a queue's row, help), in the order of the text.
_METRICS = (
    ("ugds_requests_total", "counter", "requests", "Requests that have finished."),
    ("ugds_commands_total", "counter", "commands", "Commands that have finished, failed ones too."),
    ("ugds_read_bytes_total", "counter", "read_bytes", "Bytes read by commands that succeeded."),
    ("ugds_written_bytes_total", "counter", "write_bytes", "Bytes written by commands that succeeded."),
    ("ugds_errors_total", "counter", "errors", "Commands that failed."),
    ("ugds_doorbells_total", "counter", "doorbells", "Submission doorbell stores."),
    (
        "ugds_protocol_errors_total",
        "counter",
        "protocol_errors",
        "Completions that the controller posted and no command was waiting for.",
    ),
    ("ugds_retries_total", "counter", "retries", "Requests that were submitted again after a reset, each time."),
    ("ugds_in_flight", "gauge", "in_flight", "Commands in flight."),
    ("ugds_queue_depth", "gauge", "depth", "Entries of the submission queue."),
)
#: The same of a device as a whole.
_OF_DEVICE = (
    ("ugds_resets_total", "counter", "resets", "Times that a recovery has stopped the controller."),
    ("ugds_aborts_total", "counter", "aborts", "Overdue commands that the controller was asked to abort."),
)
_STATES = ("ready", "recovering", "wedged", "failed", "lost")
_STATE_HELP = "1 for the state that the device is in, 0 for the others."
_LATENCY = "ugds_command_latency_seconds"
_LATENCY_HELP = (
    "Time from a command's staging to its retirement. Counted in buckets of a quarter of a doubling: edges are met to "
    "within 12%, and the sum is estimated from the buckets, to within 20%."
)


def text(stats: Sequence[Stats]) -> str:
    """All metrics of all devices. Raises ValueError where two have one URI: their series could not be told apart."""
    uris = [each.device for each in stats]
    if len(set(uris)) != len(uris):
        raise ValueError("two of the devices have the same URI, and their series the same labels")
    rows = [(_labels(each, queue), queue) for each in stats for queue in each.queues]
    lines = []
    for name, kind, field, about in _METRICS:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}}} {queue[field]}" for labels, queue in rows]
    of_devices = [(f'device="{_escaped(each.device)}",transport="{_escaped(each.transport)}"', each) for each in stats]
    for name, kind, field, about in _OF_DEVICE:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}}} {getattr(each, field)}" for labels, each in of_devices]
    lines += [f"# HELP ugds_state {_STATE_HELP}", "# TYPE ugds_state gauge"]
    lines += [
        f'ugds_state{{{labels},state="{state}"}} {int(each.state == state)}'
        for labels, each in of_devices
        for state in _STATES
    ]
    lines += [f"# HELP {_LATENCY} {_LATENCY_HELP}", f"# TYPE {_LATENCY} histogram"]
    lines += [line for labels, queue in rows for line in _histogram(labels, queue["latency_ns_histogram"])]
    return "\n".join(lines) + "\n"


def _labels(stats: Stats, queue: dict[str, Any]) -> str:
    values = {
        "device": stats.device,
        "queue": str(queue["queue"]),
        "route": stats.route,
        "transport": stats.transport,
    }
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram(labels: str, counts: Sequence[int]) -> Iterator[str]:
    total = sum(counts)
    seconds = sum(count * 2.0 ** ((bucket + 0.5) / 4) for bucket, count in enumerate(counts)) * 1e-9
    for edge in _EDGES:
        yield f'{_LATENCY}_bucket{{{labels},le="{2 ** (edge // 4) / 1e9!r}"}} {sum(counts[:edge])}'
    yield f'{_LATENCY}_bucket{{{labels},le="+Inf"}} {total}'
    yield f"{_LATENCY}_sum{{{labels}}} {seconds!r}"
    yield f"{_LATENCY}_count{{{labels}}} {total}"
