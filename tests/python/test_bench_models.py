# SPDX-License-Identifier: Apache-2.0
"""`ugds bench safetensors` and `checkpoint` by their output; what they measure is not judged here."""

from __future__ import annotations

import importlib.util
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import records, run
from ugds.bench import _beyond


def value(record: dict[str, Any], name: str) -> float:
    return float(record["figures"][name]["value"])


def test_bench_safetensors_as_json(tmp_path: Path) -> None:
    options = ["--size", "3MiB", "--rounds", "1", "--folder", tmp_path, "--json"]
    cached, beyond, *cold, saved, durable = records(run("bench", "safetensors", *options))
    assert {record["name"] for record in (cached, beyond, *cold, saved, durable)} == {"safetensors"}
    assert cached["device"] == f"file:{tmp_path}"
    assert cached["params"]["from"] == "page cache"
    assert cached["params"]["size"] > 3 << 20
    assert list(cached["figures"]) == ["ugds_gib_per_s", "safetensors_gib_per_s", "ratio_to_safetensors"]
    assert list(beyond["figures"]) == ["beyond_tensors_mib", "safetensors_beyond_tensors_mib"]
    assert value(beyond, "beyond_tensors_mib") < 256
    for record in cold:  # where the folder is on a disk
        assert list(record["figures"]) == [
            "ugds_gib_per_s",
            "disk_gib_per_s",
            "safetensors_gib_per_s",
            "share_of_disk",
            "cold_ratio_to_safetensors",
        ]
    assert value(saved, "save_ratio_to_safetensors") > 0
    assert value(durable, "durable_save_ratio_to_safetensors") > 0
    rates = [value(cached, f"{who}_gib_per_s") for who in ("ugds", "safetensors")]
    assert value(cached, "ratio_to_safetensors") == pytest.approx(rates[0] / rates[1])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("only", "there"), [("load", "from"), ("save", "to")])
def test_a_part_of_it_can_be_had_alone(tmp_path: Path, only: str, there: str) -> None:
    options = ["--size", "3MiB", "--rounds", "1", "--folder", tmp_path, "--only", only, "--json"]
    assert all(there in record["params"] for record in records(run("bench", "safetensors", *options)))


def test_memory_beyond_tensors_is_what_is_used_at_the_most() -> None:
    """Also of what is given back before the end."""
    used = [100]

    def load() -> dict[str, int]:
        used[0] = 900
        assert looked.wait(20)
        used[0] = 500
        return {"tensor": 1}

    looked = threading.Event()

    def use() -> int:
        if used[0] == 900:
            looked.set()
        return used[0]

    assert _beyond.most(load, use) == (800, {"tensor": 1})


def test_memory_beyond_tensors_is_anonymous_memory_and_not_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (64 << 12))
    before = _beyond._host_bytes()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0  # every page is there
        assert _beyond._host_bytes() - before < 32 << 20
    memory = bytearray(b"x" * (64 << 20))
    assert _beyond._host_bytes() - before > 60 << 20
    assert len(memory) == 64 << 20


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_bench_checkpoint_as_json(tmp_path: Path) -> None:
    options = ["--size", "3MiB", "--rounds", "1", "--folder", tmp_path]
    found = records(run("bench", "checkpoint", *options, "--json"))
    for record, word in zip(found, ("save", "durable_save", "load"), strict=True):
        assert list(record["figures"]) == [
            f"{word}_ugds_gib_per_s",
            f"{word}_torch_gib_per_s",
            f"{word}_ratio_to_torch",
        ]
    assert os.listdir(tmp_path) == []
    assert "load_ratio_to_torch" in run("bench", "checkpoint", *options).stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
@pytest.mark.parametrize("command", [["checkpoint"], ["safetensors", "--gpu", "0"]])
def test_without_pytorch_a_benchmark_says_what_to_install(tmp_path: Path, command: list[str]) -> None:
    assert "what to do: pip install torch" in run("bench", *command, "--folder", tmp_path, status=1).stderr


@pytest.mark.parametrize("benchmark", ["safetensors", "checkpoint"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "1000"], "--size"),
        (["--size", "lots"], "--size"),
        (["--gpu", "x"], "--gpu"),
        (["--rounds", "0"], "--rounds"),
        (["--only", "all"], "--only"),
    ],
)
def test_what_cannot_be_measured_is_refused(benchmark: str, options: list[str], said: str) -> None:
    assert said in run("bench", benchmark, *options, status=2).stderr


def test_a_folder_that_is_not_there_or_too_small_is_named(tmp_path: Path) -> None:
    assert "nowhere" in run("bench", "safetensors", "--folder", tmp_path / "nowhere", status=2).stderr
    done = run("bench", "safetensors", "--folder", tmp_path, "--size", "1000TiB", status=1)
    assert "bytes free" in done.stderr and "--folder" in done.stderr
    assert os.listdir(tmp_path) == []
