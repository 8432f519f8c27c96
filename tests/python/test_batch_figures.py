# SPDX-License-Identifier: Apache-2.0
"""The harness of `ugds bench batch`: how batches are cut, timed and summed up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ugds
from ugds.bench import batch_figures, fio, targets
from ugds.bench.fio import FileTarget
from ugds.bench.targets import DeviceTarget


class OneByOne:
    """A device whose batches are synchronous requests in the order given, with a first that is slow."""

    def __init__(self, device: ugds.Device, first: float = 0.0) -> None:
        self.device = device
        self.first = first
        self.depths: list[int] = []
        self.offsets: list[list[int]] = []

    def batch(self, depth: int) -> OneByOne:
        self.depths.append(depth)
        return self

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _each(self, move: Callable[..., int], buffer: Any, offsets: Any, sizes: int, buffer_offsets: Any) -> None:
        self.offsets.append(offsets.tolist())
        for offset, place in zip(offsets.tolist(), buffer_offsets.tolist(), strict=True):
            move(buffer, offset, sizes, place)

    def read(self, buffer: Any, **where: Any) -> None:
        self._each(self.device.read, buffer, **where)

    def write(self, buffer: Any, **where: Any) -> None:
        self._each(self.device.write, buffer, **where)

    def wait(self) -> None:
        time.sleep(self.first)
        self.first = 0.0


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_transfer_is_cut_into_batches_that_cover_it_once(ssd: ugds.Device, mode: str) -> None:
    device = OneByOne(ssd)
    seconds = batch_figures.run_batch(device, mode, 8192, 16, 1 << 20)
    assert len(seconds) == 8
    assert device.depths == [16]
    assert sorted(itertools.chain(*device.offsets)) == list(range(0, 1 << 20, 8192))
    moved = ssd.stats()
    assert (moved.read_bytes, moved.write_bytes) == ((1 << 20, 0) if mode == "read" else (0, 1 << 20))


def test_the_first_batch_is_timed_by_itself(ssd: ugds.Device) -> None:
    seconds = batch_figures.run_batch(OneByOne(ssd, first=0.2), "read", 4096, 4, 1 << 20)
    assert seconds[0] >= 0.2
    assert np.median(seconds[1:]) < 0.1


def test_there_is_a_batch_after_the_first_however_little_is_to_be_moved(ssd: ugds.Device) -> None:
    assert len(batch_figures.run_batch(OneByOne(ssd), "read", 4096, 128, 4096)) == 2


def test_figures_are_medians_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[0.004, 0.003, 0.001, 0.001], [0.010, 0.002, 0.002, 0.002], [0.002, 0.001, 0.001, 0.001]])
    monkeypatch.setattr(batch_figures, "in_fresh_process", lambda *point: (next(runs), "host", "direct"))
    (record,) = batch_figures.measure([DeviceTarget("emulated:64MiB")], ["read"], [4096], [256], 4 << 20, 3)
    assert record.name == "batch"
    assert record.params == {"mode": "read", "size": 4096, "depth": 256, "total": 4 << 20, "processes": 3}
    got = {name: value for name, (value, _) in record.figures.items()}
    assert got == {
        "gib_per_s": pytest.approx(4 / 1024 / 0.009),
        "steady_gib_per_s": pytest.approx(3 / 1024 / 0.005),
        "first_batch_ms": pytest.approx(4),
        "following_batch_ms": pytest.approx(1),
        "following_batch_max_ms": pytest.approx(2),
        "first_batch_ratio": pytest.approx(4),
    }


def test_a_device_that_is_too_small_is_refused() -> None:
    with pytest.raises(batch_figures.CommandError, match="holds less than 64 MiB"):
        batch_figures.once("emulated:16MiB", "write", 4096, 1, 64 << 20)


@pytest.mark.parametrize("kind", ["posix", "io_uring"])
@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_baselines_batches_are_counted_and_timed(kind: str, mode: str, tmp_path: Path) -> None:
    if fio.shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    with targets.parse(f"{kind}:{tmp_path}/file?size=64MiB", overwrite=False) as target:
        assert isinstance(target, FileTarget)
        seconds, memory, route = batch_figures.baseline_batch(target, mode, 16384, 8, 4 << 20)
        assert (memory, route) == (target.memory, target.route)
    assert len(seconds) == 32
    assert all(0 < batch < 10 for batch in seconds)


@pytest.mark.parametrize(("kind", "wanted"), [("posix", [0.004, 0.007]), ("io_uring", [0.003, 0.005])])
def test_a_baselines_batch_takes_what_its_requests_take(
    kind: str, wanted: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(options: Sequence[str], what: str, seconds: float) -> dict[str, Any]:
        (prefix,) = (option.partition("=")[2] for option in options if option.startswith("--write_lat_log="))
        latencies = (1, 3, 2, 5)
        Path(f"{prefix}_lat.1.log").write_text("".join(f"0, {ms}000000, 0, 4096, 0\n" for ms in latencies))
        return {}

    monkeypatch.setattr(fio, "run", log)
    target = FileTarget(f"{kind}:{tmp_path}/file", kind, tmp_path / "file")
    # One after another they add up; submitted together they are as slow as the slowest.
    assert target.batches("read", 4096, 2, 16384) == pytest.approx(wanted)
