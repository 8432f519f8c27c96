# SPDX-License-Identifier: Apache-2.0
"""The engine with every patch of tests/mutations applied, in a build of its own; and which cells must notice which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "mutations"
FOLDER = ROOT / "build" / "mutated"

Cell = tuple[str, str, str]  # group, row, way

CHOSEN: dict[str, list[Cell]] = {
    "believe-all-ones": [("removal", "removed at the third command", "sync")],
    "believe-any-completion": [("completions", "twice, and the next request is late", "sync")],
    "drop-partial-failure": [("status", "0x281 unrecovered read error, third command", "sync")],
    "forget-in-flight": [("resets", "nothing stops it", "batch")],
    "ignore-phase": [("completions", "with the phase of the round before, last command", "sync")],
    "orphan-releases": [("resets", "nothing stops it", "sync")],
    "release-early": [("resets", "nothing stops it, of a write", "sync")],
    "reuse-identifiers": [("completions", "twice, and the next request is late", "sync")],
    "skip-drain": [("completions", "late, while the device is closed", "batch")],
    "stale-ring": [("hangs", "hangs, and no abort ends it", "sync")],
    "trust-abort": [("aborts", "Abort says it has, and data is written on", "sync")],
    "unmap-wedged": [("dropped", "nothing stops it, and the device is dropped", "sync")],
}


class BuildError(Exception):
    pass


def names() -> list[str]:
    return sorted(path.stem for path in PATCHES.glob("*.patch") if path.stem != "base")


def run(what: str, command: list[str], folder: Path) -> None:
    # `git apply` would look for the files in the repository that it is in.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(f"{what}:\n{(done.stdout + done.stderr)[-4000:]}")


def put(fresh: Path, old: Path) -> None:
    """Makes `old` what `fresh` is; files that are the same stay as they are, for the build to see."""
    kept = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in [path for path in old.rglob("*") if path.is_file() and path.relative_to(old) not in kept]:
        path.unlink()
    for name in kept:
        if not (old / name).exists() or (old / name).read_bytes() != (fresh / name).read_bytes():
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fresh / name, old / name)


def patch(fresh: Path) -> None:
    """Puts the engine into an empty folder, with every patch applied. Raises BuildError for one that does not apply."""
    for name in ("core", "include", "python", "drv"):
        shutil.copytree(ROOT / name, fresh / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.o", "*.ko"))
    shutil.copyfile(ROOT / "CMakeLists.txt", fresh / "CMakeLists.txt")
    for name in ["base", *names()]:
        run(f"{name}.patch does not apply any more", ["git", "apply", str(PATCHES / f"{name}.patch")], fresh)


def build() -> Path:
    """The folder of the package. Raises BuildError: a patch that does not apply, or the compiler's words."""
    fresh, source, package = FOLDER / "fresh", FOLDER / "source", FOLDER / "package"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    patch(fresh)
    put(fresh, source)
    shutil.rmtree(fresh)
    made = FOLDER / "build"
    configure = ["cmake", "-S", str(source), "-B", str(made), "-G", "Ninja", "-DUGDS_PYTHON=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    run("configuring the mutated engine", configure, ROOT)
    run("building the mutated engine", ["nice", "cmake", "--build", str(made)], ROOT)
    shutil.rmtree(package, ignore_errors=True)
    run("installing the mutated engine", ["cmake", "--install", str(made), "--prefix", str(package)], ROOT)
    shutil.copytree(source / "python" / "ugds", package / "ugds", dirs_exist_ok=True)
    return package
