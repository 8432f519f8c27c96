# SPDX-License-Identifier: Apache-2.0
"""Kernels and copies touch no memory that is not theirs, as NVIDIA's checker finds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gpu_support import FAKE, run_alone

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(FAKE, reason="there is no GPU to check")
@pytest.mark.parametrize("binding", ["fixed", "late"])
def test_memcheck_finds_nothing(binding: str) -> None:
    checker = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))
    if checker is None:
        pytest.skip("compute-sanitizer is not on the PATH, nor with the CUDA toolkit")
    prefix = [checker, "--tool", "memcheck", "--error-exitcode", "9"]
    # Everything takes longer under it.
    bounded = {"UGDS_TEST_BOUND": "110"}
    output = run_alone(HERE / "hazard.py", "kernels", binding, "4", bound=120, prefix=prefix, **bounded)
    assert "ERROR SUMMARY: 0 errors" in output
