# SPDX-License-Identifier: Apache-2.0
"""The bars: what the project promises of its figures. Tests hold it to them, and reports draw them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ugds._report import Record


class Bar(NamedTuple):
    limit: float
    at_most: bool = True  #: or at least
    on: str = "emulated:"  #: what the URI of a device has in it for which this is promised
    memory: str = ""  #: the memory of which it is; of any where empty

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"


#: By the name of the figure, in its unit.
BARS: dict[str, Bar] = {
    "sync_read_4k_instructions": Bar(400),
    "batch_read_4k_instructions": Bar(150),
    "batch_read_4k_python_instructions": Bar(250),
    "python_extra_instructions": Bar(1500),
    "python_extra_us": Bar(1.5),
    "open_to_first_read_ms": Bar(5),
    "ratio_to_memcpy": Bar(0.8, at_most=False, on="pump=caller"),
    "interrupt_cpu_percent": Bar(10),
    "batch_share_of_model": Bar(0.9, at_most=False),
    "requests_ratio_to_sync": Bar(5, at_most=False, on="latency=20us"),
    "doorbells_per_submission": Bar(1),
    "first_batch_ratio": Bar(1.5),
    "small_p99_ratio_batch": Bar(3),
    "small_p99_ratio_sync": Bar(3),
    "large_throughput_share": Bar(0.8, at_most=False),
    "priority_read_share": Bar(0.8, at_most=False),
    "priority_write_share": Bar(0.1, at_most=False),
    "adaptive_latency_ratio": Bar(1.1),
    "adaptive_cpu_ratio": Bar(1.1),
    # On a machine with a GPU, of a device with a bandwidth.
    "stream_sync_extra_us": Bar(12, on="bandwidth="),
    "stream_share_of_sync_1mib": Bar(0.97, at_most=False, on="bandwidth="),
    "stream_share_of_sync_16mib": Bar(0.97, at_most=False, on="bandwidth="),
    "submission_p50_us": Bar(5, on="bandwidth="),
    "submission_p99_us": Bar(20, on="bandwidth="),
    "submission_share_16mib": Bar(0.01, on="bandwidth="),
    "pipelined_ratio_to_ideal": Bar(1.1, on="bandwidth="),
    "staged_share": Bar(0.85, at_most=False, on="bandwidth="),
    # There, of files: NVIDIA's libcufile beside ours. A disk at its limit gives both the same, give or take its noise.
    "driver_open_ratio_to_theirs": Bar(20, at_most=False, on="file:"),
    "sync_ratio_to_theirs": Bar(0.97, at_most=False, on="file:"),
    "stream_ratio_to_theirs_64kib": Bar(3, at_most=False, on="file:"),
    "late_stream_ratio_to_theirs_64kib": Bar(3, at_most=False, on="file:"),
    "stream_share_of_io_uring_64kib": Bar(0.95, at_most=False, on="file:"),
    "late_stream_share_of_io_uring_64kib": Bar(0.95, at_most=False, on="file:"),
    "batch_128x64kib_done": Bar(128, at_most=False, on="file:"),
    # Reads of files into a GPU's memory, and whole files of tensors.
    "stream_share_of_io_uring": Bar(0.95, at_most=False, on="file:", memory="cuda"),
    "share_of_threads": Bar(0.8, at_most=False, on="file:", memory="cuda"),
    "ratio_to_fastsafetensors": Bar(1, at_most=False, on="file:", memory="cuda"),
    "ratio_to_safetensors": Bar(2, at_most=False, on="file:", memory="cuda"),
    "share_of_disk": Bar(0.95, at_most=False, on="file:", memory="cuda"),
    "beyond_tensors_mib": Bar(256, on="file:", memory="cuda"),
    "save_ratio_to_torch": Bar(1, at_most=False, on="file:", memory="cuda"),
}


def bar_of(figure: str, device: str, memory: str = "") -> Bar | None:
    """What is promised of a figure of that device and memory, if anything."""
    bar = BARS.get(figure)
    return bar if bar is not None and bar.on in device and bar.memory in ("", memory) else None


class Held(NamedTuple):
    """A figure beside its bar; `of` tells it from others of its name, where that has a size."""

    figure: str
    of: str
    value: float
    bar: Bar

    @property
    def holds(self) -> bool:
        return self.bar.holds(self.value)


def held(records: Iterable[Record]) -> list[Held]:
    """The figures of which something is promised, in the order of the records. A baseline's are nobody's promise."""
    return [
        Held(figure, _of(record), value, bar)
        for record in records
        if record.baseline is None
        for figure, (value, _) in record.figures.items()
        if (bar := bar_of(figure, record.device, record.memory)) is not None
    ]


def _of(record: Record) -> str:
    return ", ".join(str(record.params[name]) for name in ("way", "size") if name in record.params)
