# SPDX-License-Identifier: Apache-2.0
"""Statistics as Prometheus reads them, by the parser of its own client library; and the examples of their document."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ugds
import ugds.testing

parser = pytest.importorskip("prometheus_client.parser")

COUNTERS = {
    "ugds_requests": "requests",
    "ugds_commands": "commands",
    "ugds_read_bytes": "read_bytes",
    "ugds_written_bytes": "write_bytes",
    "ugds_errors": "errors",
    "ugds_doorbells": "doorbells",
    "ugds_protocol_errors": "protocol_errors",
    "ugds_retries": "retries",
}
GAUGES = {"ugds_in_flight": "in_flight", "ugds_queue_depth": "depth"}
LATENCY = "ugds_command_latency_seconds"
OF_DEVICE = {"ugds_resets", "ugds_aborts", "ugds_state"}


def families(text: str) -> dict[str, Any]:
    found = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


@pytest.fixture
def used(ssd: ugds.Device) -> ugds.Device:
    """A device with something of everything in its counts."""
    with ugds.empty("1MiB") as buffer:
        ssd.write(buffer)
        for _ in range(20):
            ssd.read(buffer, size=4096)
        ugds.testing.emulator(ssd).inject("status", opcode=2, status=0x281)
        with pytest.raises(ugds.Error):
            ssd.read(buffer, size=4096)
    return ssd


@pytest.mark.device("emulated:16MiB?mdts=5&queues=2&pump=caller")
def test_counters_and_gauges_are_those_of_every_queue(used: ugds.Device) -> None:
    stats = used.stats()
    assert stats.errors == 1
    found = families(stats.prometheus())
    assert set(found) == {*COUNTERS, *GAUGES, *OF_DEVICE, LATENCY}
    for names, kind, suffix in ((COUNTERS, "counter", "_total"), (GAUGES, "gauge", "")):
        for metric, field in names.items():
            assert found[metric].type == kind
            assert found[metric].documentation
            values = {sample.labels["queue"]: sample.value for sample in found[metric].samples}
            assert values == {str(queue["queue"]): queue[field] for queue in stats.queues}
            assert {sample.name for sample in found[metric].samples} == {metric + suffix}
    assert sum(sample.value for sample in found["ugds_written_bytes"].samples) == 1 << 20


@pytest.mark.device("emulated:16MiB?pump=caller", queues=1)
def test_the_histogram_is_cumulative_and_in_seconds(used: ugds.Device) -> None:
    stats = used.stats()
    family = families(stats.prometheus())[LATENCY]
    assert family.type == "histogram"
    assert "estimated" in family.documentation
    buckets = [sample for sample in family.samples if sample.name == LATENCY + "_bucket"]
    edges = [float(sample.labels["le"]) for sample in buckets]
    counts = [sample.value for sample in buckets]
    assert edges == sorted(edges)
    assert (edges[0], edges[1], edges[-1]) == (512e-9, 1024e-9, float("inf"))
    assert counts == sorted(counts)
    others = {sample.name: sample.value for sample in family.samples if "le" not in sample.labels}
    assert counts[-1] == others[LATENCY + "_count"] == stats.commands
    for edge, count in zip(edges[:-1], counts, strict=False):
        assert count == sum(n for i, n in enumerate(stats.histogram) if 2 ** ((i + 1) / 4) <= edge * 1e9 * 1.01)
    assert others[LATENCY + "_sum"] > 0


def test_the_sum_is_estimated_to_within_a_bucket(ssd: ugds.Device) -> None:
    stats = ssd.stats()
    histogram = [0] * len(stats.histogram)
    histogram[40], histogram[80] = 1000, 3  # 2^10 ns to 19% above, and 2^20 ns
    row = {**stats.queues[0], "latency_ns_histogram": histogram}
    text = dataclasses.replace(stats, queues=(row,)).prometheus()
    (total,) = (s.value for s in families(text)[LATENCY].samples if s.name == LATENCY + "_sum")
    assert total == pytest.approx((1000 * 2**10 + 3 * 2**20) * 1e-9 * 2**0.125)


def test_labels_name_device_queue_route_and_transport(ssd: ugds.Device) -> None:
    sample = families(ssd.stats().prometheus())["ugds_requests"].samples[0]
    assert sample.labels == {"device": ssd.uri, "queue": "1", "route": "direct", "transport": "emulated"}


def test_state_resets_and_aborts_are_of_the_device() -> None:
    with ugds.open("emulated:1MiB?timeout=1", deadline=0.2, queues=1) as ssd, ugds.empty("4KiB") as buffer:
        before = ssd.stats()
        emulator = ugds.testing.emulator(ssd)
        emulator.inject("hang", opcode=2, abortable=False)
        with pytest.raises(ugds.Error):
            ssd.read(buffer)
        now = ssd.stats() - before
        assert (now.resets, now.aborts, now.state) == (1, 1, "ready")
        found = families(ssd.stats().prometheus())
        labels = {"device": ssd.uri, "transport": "emulated"}
        for name in ("ugds_resets", "ugds_aborts"):
            assert [(sample.labels, sample.value) for sample in found[name].samples] == [(labels, 1)]
        states = {sample.labels["state"]: sample.value for sample in found["ugds_state"].samples}
        assert states == {"ready": 1, "recovering": 0, "wedged": 0, "failed": 0, "lost": 0}
        # A device without I/O is asked for.
        assert ssd.check() == "ready"
        emulator.remove()
        assert ssd.state == "ready"
        assert ssd.check() == ssd.state == "lost"
        (lost,) = (s for s in families(ssd.stats().prometheus())["ugds_state"].samples if s.value == 1)
        assert lost.labels["state"] == "lost"
    assert ssd.check() == "closed"


def test_labels_survive_what_a_uri_may_hold() -> None:
    name = 'a "b" \\ c\nd'
    try:
        with ugds.open(f"emulated:1MiB?name={name}") as ssd:
            sample = families(ssd.stats().prometheus())["ugds_requests"].samples[0]
            assert sample.labels["device"] == ssd.uri == f"emulated:1MiB?name={name}"
    finally:
        ugds.testing.forget_subsystem(name)


def test_several_devices_are_one_text(open_ssd: Any) -> None:
    one, other = open_ssd("emulated:1MiB"), open_ssd("emulated:2MiB")
    found = families(one.stats().prometheus(other.stats()))
    assert {sample.labels["device"] for sample in found["ugds_commands"].samples} == {one.uri, other.uri}
    with pytest.raises(ValueError, match="same URI"):
        one.stats().prometheus(one.stats())


def test_differences_keep_whose_they_are(ssd: ugds.Device) -> None:
    made = ssd.stats() - ssd.stats()
    assert (made.device, made.transport, made.commands, made.protocol_errors) == (ssd.uri, "emulated", 0, 0)


# --- docs/statistics.md -------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "statistics.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", blocks("python"), ids=["counters", "prometheus", "traces"])
def test_the_documents_python_runs(tmp_path: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_documents_commands_run(tmp_path: Path) -> None:
    (commands,) = blocks("sh")
    script = f'set -eu\nugds() {{ "{sys.executable}" -m ugds "$@"; }}\n{commands}'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"name": "replay"' in done.stdout
    assert (tmp_path / "sync.json").is_file()


def test_the_document_names_every_metric_and_field(ssd: ugds.Device) -> None:
    text = DOCUMENT.read_text()
    metrics = re.findall(r"^# TYPE (\w+)", ssd.stats().prometheus(), re.MULTILINE)
    missing = [name for name in metrics if f"`{name}`" not in text]
    missing += [f.name for f in dataclasses.fields(ugds.Stats) if f"`{f.name}`" not in text]
    assert missing == []
