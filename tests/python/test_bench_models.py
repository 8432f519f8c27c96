# SPDX-License-Identifier: Apache-2.0
"""`ugds bench safetensors` and `checkpoint` by their output; what they measure is not judged here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import records, run


def value(record: dict[str, Any], name: str) -> float:
    return float(record["figures"][name]["value"])


def test_bench_safetensors_as_json(tmp_path: Path) -> None:
    options = ["--size", "3MiB", "--rounds", "1", "--folder", tmp_path, "--json"]
    cached, *cold, saved, durable = records(run("bench", "safetensors", *options))
    assert {record["name"] for record in (cached, *cold, saved, durable)} == {"safetensors"}
    assert cached["device"] == f"file:{tmp_path}"
    assert cached["params"]["from"] == "page cache"
    assert cached["params"]["size"] > 3 << 20
    assert list(cached["figures"]) == ["ugds_gib_per_s", "safetensors_gib_per_s", "ratio_to_safetensors"]
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
def test_without_pytorch_a_benchmark_says_what_to_install(tmp_path: Path) -> None:
    assert "what to do: pip install torch" in run("bench", "checkpoint", "--folder", tmp_path, status=1).stderr


@pytest.mark.parametrize("benchmark", ["safetensors", "checkpoint"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "1000"], "--size"),
        (["--size", "lots"], "--size"),
        (["--gpu", "x"], "--gpu"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused(benchmark: str, options: list[str], said: str) -> None:
    assert said in run("bench", benchmark, *options, status=2).stderr


def test_a_folder_that_is_not_there_or_too_small_is_named(tmp_path: Path) -> None:
    assert "nowhere" in run("bench", "safetensors", "--folder", tmp_path / "nowhere", status=2).stderr
    done = run("bench", "safetensors", "--folder", tmp_path, "--size", "1000TiB", status=1)
    assert "bytes free" in done.stderr and "--folder" in done.stderr
    assert os.listdir(tmp_path) == []
