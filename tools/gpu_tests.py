# SPDX-License-Identifier: Apache-2.0
"""./test --gpu: builds the package for the Python that runs this, and runs tests/gpu with it.

Machines with GPUs often have no network, and a Python with the frameworks that the tests are of. So nothing is
installed, into that Python or elsewhere: the package is built into build/gpu/site, by CMake alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import workspace
from workspace import ROOT, SetupError

BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
#: For the tests together; building is not counted.
MINUTES = 8
MODULES = ("numpy", "pytest", "nanobind")
PROGRAMS = ("cmake", "g++")


def search_path() -> str:
    """Programs that came as Python packages lie beside the interpreter."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def missing() -> str | None:
    """What this Python or machine lacks, in words."""
    lacking = [name for name in MODULES if importlib.util.find_spec(name) is None]
    lacking += [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if not lacking:
        return None
    return (
        f"{sys.executable} builds and tests the package, and lacks {', '.join(lacking)}.\n"
        "What to do: install these, or name another Python, such as PYTHON=/opt/conda/bin/python ./test --gpu"
    )


def no_gpu() -> str | None:
    """Why there is no GPU, in words."""
    name = os.environ.get("UGDS_CUDA_LIBRARY") or "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return f"there is no CUDA driver ({error})"
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the CUDA driver does not start (error {code})"
    return None if count.value else "the CUDA driver has no GPU"


def build() -> None:
    """Raises SetupError with the compiler's words."""
    os.environ["PATH"] = search_path()
    configure = ["cmake", "-S", ".", "-B", str(BUILD), "-DUGDS_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja") and not (BUILD / "Makefile").exists():
        configure += ["-G", "Ninja"]
    log = BUILD.with_suffix(".log")
    workspace.run("  configuring gpu", configure, log)
    jobs = str(len(os.sched_getaffinity(0)))
    workspace.run("  building gpu", ["cmake", "--build", str(BUILD), "--parallel", jobs], log)
    shutil.rmtree(SITE, ignore_errors=True)
    workspace.run("  installing into build/gpu/site", ["cmake", "--install", str(BUILD), "--prefix", str(SITE)], log)
    shutil.copytree(
        ROOT / "python" / "ugds",
        SITE / "ugds",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )


def run(report: Path, expression: str | None) -> int | None:
    """pytest's exit status, or None where it took longer than allowed; its counts are in `report`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", "."]
    command += [f"--junitxml={report}", "--durations=10", *(["-k", expression] if expression else []), "tests/gpu"]
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=MINUTES * 60)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def prepare() -> None:
    """Raises SetupError where the tests cannot run, with what to do about it."""
    if why := missing():
        raise SetupError(f"  FAIL  {why}")
    if why := no_gpu():
        raise SetupError(f"  FAIL  NOTHING WAS TESTED: this needs a GPU, and {why}.")
    with workspace.alone():
        build()
