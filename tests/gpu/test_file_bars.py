# SPDX-License-Identifier: Apache-2.0
"""What the project promises of files and GPU memory, held to by the commands that print it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support import FAKE
from ugds._report import Record
from ugds.bench import bars
from ugds.bench._cufile_process import find_theirs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(FAKE, reason="speed needs a GPU")]
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio makes the baseline")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def held(wanted: set[str], *command: str | Path) -> None:
    """Each of its figures of which something is promised, of which there are the `wanted`."""
    done = subprocess.run(
        [sys.executable, "-m", "ugds", "bench", *map(str, command), "--json"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found = bars.held(Record.parse(line) for line in done.stdout.splitlines())
    assert wanted <= {one.figure for one in found}, done.stderr
    missed = [f"{one.figure} ({one.of}) is {one.value:.3g}, and not {one.bar}" for one in found if not one.holds]
    assert not missed, "; ".join(missed)


@needs_fio
def test_reads_of_a_file_reach_what_the_system_does(tmp_path: Path) -> None:
    held({"share_of_threads"}, "files", tmp_path, "--gpu", "0", "--sizes", "16MiB", "--rounds", "3")


@needs_fio
@pytest.mark.skipif(find_theirs(None) is None, reason="NVIDIA's libcufile is not installed")
def test_our_libcufile_beside_nvidias(tmp_path: Path) -> None:
    held({"driver_open_ratio_to_theirs"}, "cufile", "--file", tmp_path, "--sizes", "64KiB", "--rounds", "3")


@needs_torch
def test_weights_are_loaded_as_fast_as_can_be(tmp_path: Path) -> None:
    options = ("--gpu", "0", "--size", "1GiB", "--rounds", "3", "--only", "load", "--folder", tmp_path)
    held({"ratio_to_safetensors", "beyond_tensors_mib"}, "safetensors", *options)


@needs_torch
def test_checkpoints_are_saved_as_fast_as_by_pytorch(tmp_path: Path) -> None:
    options = ("--gpu", "0", "--size", "1GiB", "--rounds", "3", "--folder", tmp_path)
    held({"save_ratio_to_torch"}, "checkpoint", *options)
