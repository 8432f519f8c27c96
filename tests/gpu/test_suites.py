# SPDX-License-Identifier: Apache-2.0
"""Other people's tests of cuFile, over NVIDIA's library and over ours (side_by_side.py; docs/cufile.md says where they
come from), and that NVIDIA's library cannot get in beside ours unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import side_by_side

SUITES = os.environ.get("UGDS_SUITES")
LIMIT_S = 150


def suites() -> list[str]:
    if not SUITES or not Path(SUITES).is_dir():
        return []
    return sorted(folder.name for folder in Path(SUITES).iterdir() if any(folder.rglob("test_*.py")))


@pytest.fixture
def theirs() -> Path:
    library = side_by_side.nvidias()
    if library is None:
        pytest.skip("NVIDIA's libcufile.so.0 is not here: install nvidia-cufile")
    return library


@pytest.mark.parametrize("suite", suites() or [None])
def test_what_passes_over_nvidias_library_passes_over_ours(suite: str | None, theirs: Path, tmp_path: Path) -> None:
    if suite is None:
        pytest.skip("there are no suites: set UGDS_SUITES to a folder with some (docs/cufile.md)")
    command = [sys.executable, side_by_side.__file__, "--folder", str(SUITES), "--suite", suite]
    command += ["--library", str(theirs), "--logs", str(tmp_path), "--jobs", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run([*command, "--limit", str(LIMIT_S)], capture_output=True, text=True, timeout=LIMIT_S + 120)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_a_program_that_opens_nvidias_library_by_its_path_gets_ours(theirs: Path) -> None:
    program = (
        f"import ctypes; ctypes.CDLL({str(theirs)!r}); print([l for l in open('/proc/self/maps') if 'libcufile' in l])"
    )
    command = [sys.executable, "-m", "ugds", "run", "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "compat/libcufile.so.0" in done.stdout
    assert str(theirs) not in done.stdout


def test_nvidias_library_beside_ours_is_an_error(theirs: Path) -> None:
    """As a program would that loads it in a way that is not seen: the loader gives it both."""
    load = f"ctypes.CDLL(None).dlmopen(0, {os.fsencode(theirs)!r}, os.RTLD_NOW)"
    program = f"import ctypes, os, time; {load}; time.sleep(60)"
    command = [sys.executable, "-m", "ugds", "run", "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another libcufile" in done.stderr
    assert str(theirs) in done.stderr
