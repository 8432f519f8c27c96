# SPDX-License-Identifier: Apache-2.0
"""`./test --gpu` on a machine that has no GPU, or not what it takes to build: it fails, says why, and counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stage(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, str(ROOT / "tools" / "run_tests.py"), "--gpu"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_without_a_gpu_it_fails_and_says_so() -> None:
    done = stage(UGDS_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    assert done.returncode == 1
    assert "needs a GPU" in done.stdout
    assert "/nowhere/libcuda.so.1" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_what_is_missing_for_building_is_named() -> None:
    done = stage("-S", "-E", UGDS_CUDA_LIBRARY="/nowhere/libcuda.so.1")  # without site-packages
    assert done.returncode == 1
    assert "lacks numpy, pytest, nanobind" in done.stdout
    assert "PYTHON=" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_the_stage_is_run_by_the_python_that_there_is() -> None:
    """Before anything is set up: the machine may have no network."""
    environment = {**os.environ, "PYTHON": sys.executable, "UGDS_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}
    done = subprocess.run([str(ROOT / "test"), "--gpu"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    assert "Installing" not in done.stdout + done.stderr
