# SPDX-License-Identifier: Apache-2.0
"""Whether the exploration finds each of the mutations in tests/mutations: one build of it holds all of them, and the
environment says which one is on. Prints a line for each, and for the unbroken engine.

    python tests/explore/mutants.py FOLDER [NAME ...]

FOLDER is where a broken copy of the tree is made and built; it is kept, so that a second run builds what changed. The
exit status is 0 if every mutation was found, and nothing where there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = ROOT / "tests" / "mutations"
COPIED = ["CMakeLists.txt", "core", "drv", "include", "tests"]
SECONDS = 900


def names() -> list[str]:
    return sorted(p.stem for p in MUTATIONS.glob("*.patch") if p.stem != "base")


def copy(folder: Path) -> Path:
    """The tree with every mutation in it. Files that did not change keep their times."""
    fresh, tree = folder / "fresh", folder / "tree"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, fresh / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, fresh / name)
    for name in ["base", *names()]:
        patch = MUTATIONS / f"{name}.patch"
        command = ["git", "apply", "--unsafe-paths", f"--directory={fresh}", str(patch)]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{patch.name} does not apply: {done.stderr}")
    for path in [p for p in fresh.rglob("*") if p.is_file()]:
        to = tree / path.relative_to(fresh)
        if to.exists() and to.read_bytes() == path.read_bytes():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    for path in [p for p in tree.rglob("*") if p.is_file() and not (fresh / p.relative_to(tree)).exists()]:
        path.unlink()
    shutil.rmtree(fresh)
    return tree


def build(folder: Path) -> Path:
    tree, built = copy(folder), folder / "build"
    configure = ["cmake", "-S", str(tree), "-B", str(built), "-G", "Ninja", "-DUGDS_TESTS=ON", *sys_options()]
    for command in [configure, ["cmake", "--build", str(built), "--target", "explore", "--parallel", "2"]]:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return built / "tests" / "explore"


def sys_options() -> list[str]:
    return ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []


def run(program: Path, mutation: str, deeper: int = 0) -> tuple[bool, str]:
    """Whether a property was violated, and which."""
    start = time.monotonic()
    environment = {**os.environ, "UGDS_MUTATION": mutation, "UGDS_EXPLORE_DEEPER": str(deeper)}
    try:
        done = subprocess.run(
            [str(program)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"not done within {SECONDS} s"
    broken = re.search(r"^VIOLATED: (.*)\n  scenario: (.*)$", done.stdout, re.MULTILINE)
    words = f"{broken[1]} ({broken[2]})" if broken else "" if done.returncode == 0 else done.stdout + done.stderr
    return broken is not None or done.returncode != 0, f"{words} [{time.monotonic() - start:.1f} s]"


def find(program: Path, mutation: str) -> tuple[bool, str]:
    """The same, first without going deep: most are found by that."""
    found, words = run(program, mutation, -2)
    return (found, words) if found else run(program, mutation)


def main() -> int:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    wanted = sys.argv[2:] or names()
    program = build(Path(sys.argv[1]).resolve())
    failed = 0
    for name in wanted:
        found, words = find(program, name)
        print(f"  {'found ' if found else 'MISSED'}  {name}: {words}", flush=True)
        failed += not found
    if not sys.argv[2:]:
        broken, words = run(program, "")
        print(f"  {'FAIL' if broken else 'ok  '}  the unbroken engine {words}", flush=True)
        failed += broken
    print(f"exploration: {len(wanted)} mutations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
