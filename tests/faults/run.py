# SPDX-License-Identifier: Apache-2.0
"""The fault matrix, and the mutations that fail it: what stands behind `./test --faults`.

Each row of the table is a fault, each column a way in; a cell is run in a worker process, two at once, and a worker
that crashes or hangs is that cell's failure and no other's. Then the engine is broken, once for each mutation in
tests/mutations, and a few cells that were green must fail. The last line is
`faults: N cells, N failed, N of N mutations caught`.

Needs the package on the path, and FAKE_CUDA_LIBRARY, a CUDA driver without a GPU (tests/fakes/cuda), for streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import mutations
from rows import OPEN, WAYS, Row
from table import table

HERE = Path(__file__).parent
#: Seconds that a worker has for a cell beyond its bound: what comes before and after the request.
SLACK = 60.0
NAME, COLUMN = 56, 10


@dataclass
class Result:
    ms: int
    wrong: str  #: "" where all is as the table says


Cell = tuple[str, str, str]  # group, row, way


class Worker:
    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if self.line(SLACK) != "ready\n":
            self.end()
            raise RuntimeError("the process did not start")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def line(self, seconds: float) -> str | None:
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def run(self, cell: Cell, seconds: float) -> Result:
        start = time.monotonic()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\t".join(cell) + "\n")
            self.process.stdin.flush()
        except OSError:
            return Result(0, "the process has ended")
        line = self.line(seconds)
        spent = round((time.monotonic() - start) * 1000)
        if line is None:
            return Result(spent, f"did not end within {seconds:.0f} s")
        if not line:
            return Result(spent, f"the process ended by itself, with status {self.process.wait()}")
        return Result(**json.loads(line))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written any more
                    pipe.close()


def run_group(cells: list[Cell], bounds: dict[Cell, float], environment: dict[str, str]) -> dict[Cell, Result]:
    """Their results, in one process as long as that lives."""
    results: dict[Cell, Result] = {}
    worker: Worker | None = None
    for cell in cells:
        try:
            worker = worker or Worker(environment)
            results[cell] = worker.run(cell, bounds[cell])
        except RuntimeError as error:
            return {**results, **{missed: Result(0, str(error)) for missed in cells if missed not in results}}
        if worker is not None and results[cell].wrong:  # what it left behind is not the next cell's
            worker.end()
            worker = None
    if worker is not None:
        worker.end()
    return results


def run_all(
    groups: dict[str, list[Cell]], bounds: dict[Cell, float], environment: dict[str, str]
) -> dict[Cell, Result]:
    """Groups side by side, two at once."""
    results: dict[Cell, Result] = {}
    todo = list(groups.values())
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                cells = todo.pop(0)
            done = run_group(cells, bounds, environment)
            with lock:
                results.update(done)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- What is printed ------------------------------------------------------------------------------------------------


def mark(result: Result | None, plain: bool) -> str:
    if result is None:
        return "-".rjust(COLUMN)
    sign = ("FAIL" if plain else "✗") if result.wrong else ("+" if plain else "✓")
    text = f"{sign} {result.ms}".rjust(COLUMN)
    return text if plain else f"\033[{31 if result.wrong else 32}m{text}\033[0m"


def show(rows: dict[str, list[Row]], results: dict[Cell, Result], plain: bool) -> None:
    right, not_right = ("+", "FAIL") if plain else ("✓", "✗")
    print(
        f"Each row is a fault, each column a way in: {right} where what came of it is what the table says,\n"
        f"{not_right} where it is not, - where it means nothing. The number is how long the cell took, in\n"
        "milliseconds, with its device's opening, recovery and closing."
    )
    for group, members in rows.items():
        ways = (OPEN,) if OPEN in members[0].results else WAYS
        print(f"\n{group.ljust(NAME)}{''.join(way.rjust(COLUMN) for way in ways)}")
        for row in members:
            cells = "".join(mark(results.get((group, row.name, way)), plain) for way in ways)
            print(f"{row.name[: NAME - 1].ljust(NAME)}{cells}")
    wrong = {cell: result for cell, result in results.items() if result.wrong}
    if wrong:
        print("\nWhat is wrong:")
    for (group, name, way), result in wrong.items():
        print(f"  {group}: {name}, {way}: {result.wrong}")


class Build(threading.Thread):
    """Builds the broken engine while the matrix is run, which waits for deadlines more than it works."""

    def __init__(self, wanted: bool) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0
        self.package: Path | mutations.BuildError = mutations.BuildError("it was not asked for")
        if wanted:
            self.start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            self.package = mutations.build()
        except mutations.BuildError as error:
            self.package = error
        except OSError as error:
            self.package = mutations.BuildError(str(error))
        self.seconds = time.monotonic() - start

    def result(self) -> Path | mutations.BuildError:
        self.join()
        return self.package


def plan(rows: dict[str, list[Row]]) -> tuple[dict[str, list[Cell]], dict[Cell, float]]:
    groups: dict[str, list[Cell]] = {}
    bounds: dict[Cell, float] = {}
    for group, members in rows.items():
        for row in members:
            for way, result in row.results.items():
                if result is None:
                    continue
                cell = (group, row.name, way)
                groups.setdefault(group, []).append(cell)
                bounds[cell] = row.bound + SLACK
    # The long ones in parts, and first.
    parts = {f"{group} {at}": cells[at : at + 32] for group, cells in groups.items() for at in range(0, len(cells), 32)}
    return dict(sorted(parts.items(), key=lambda part: part[0].split()[0] != "lack")), bounds


def broken(made: Build, environment: dict[str, str], rows: dict[str, list[Row]]) -> tuple[int, int, list[str]]:
    """How many mutations the matrix notices, of how many; and what is wrong."""
    chosen = mutations.CHOSEN
    there = mutations.names()
    wrong = [f"{name}: no cells are named for it" for name in there if name not in chosen]
    wrong += [f"{name}: there is no such patch" for name in chosen if name not in there]
    package = made.result()
    if isinstance(package, mutations.BuildError):
        return 0, len(there), [*wrong, str(package)]
    environment = {**environment, "PYTHONPATH": str(package)}
    _, bounds = plan(rows)
    every = sorted({cell for cells in chosen.values() for cell in cells})
    for cell in every:
        if cell not in bounds:
            return 0, len(there), [*wrong, f"there is no cell {cell}"]
    # Where no mutation is on, the same build is as good as the other.
    half = {"a": every[::2], "b": every[1::2]}
    for cell, result in run_all(half, bounds, environment).items():
        if result.wrong:
            wrong.append(f"without a mutation {cell} fails: {result.wrong}")
    caught = 0
    jobs = {name: chosen[name] for name in there if name in chosen}
    lock = threading.Lock()
    todo = list(jobs.items())

    def work() -> None:
        nonlocal caught
        while True:
            with lock:
                if not todo:
                    return
                name, cells = todo.pop(0)
            results = run_group(list(cells), dict.fromkeys(cells, 25.0), {**environment, "UGDS_MUTATION": name})
            failed = [(cell, result) for cell, result in results.items() if result.wrong]
            with lock:
                if failed:
                    caught += 1
                    cell, result = failed[0]
                    print(f"  {name.ljust(24)} caught by {cell[1]}, {cell[2]}:\n    {result.wrong[:160]}", flush=True)
                else:
                    wrong.append(f"{name}: not noticed by {[cell[1:] for cell in cells]}")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return caught, len(there), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="TEXT", default="", help="only rows whose group or name has it; no mutations")
    parser.add_argument("--way", choices=[*WAYS, OPEN], help="only this way in; no mutations")
    parser.add_argument("--mutations", action="store_true", help="only the mutations")
    arguments = parser.parse_args()
    rows = table()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["UGDS_CUDA_LIBRARY"] = environment.get("FAKE_CUDA_LIBRARY", "")
    chosen = {g: [r for r in members if arguments.k in f"{g}: {r.name}"] for g, members in rows.items()}
    chosen = {g: members for g, members in chosen.items() if members}
    results: dict[Cell, Result] = {}
    build = Build(wanted=not arguments.k and not arguments.way)
    if not arguments.mutations:
        start = time.monotonic()
        groups, bounds = plan(chosen)
        if arguments.way:
            groups = {name: [cell for cell in cells if cell[2] == arguments.way] for name, cells in groups.items()}
        results = run_all(groups, bounds, environment)
        show(chosen, results, plain=not sys.stdout.isatty())
        print(f"\n{len(results)} cells in {time.monotonic() - start:.0f} s", flush=True)
    failed = sum(bool(result.wrong) for result in results.values())
    caught = total = 0
    wrong: list[str] = []
    if not arguments.k and not arguments.way:
        start = time.monotonic()
        print("\nThe engine broken on purpose, once for each patch in tests/mutations:", flush=True)
        caught, total, wrong = broken(build, environment, rows)
        for line in wrong:
            print(f"  FAIL  {line}")
        print(f"{total} mutations in {time.monotonic() - start:.0f} s, and {build.seconds:.0f} s of building meanwhile")
    print(f"faults: {len(results)} cells, {failed} failed, {caught} of {total} mutations caught")
    return 1 if failed or wrong or caught != total else 0


if __name__ == "__main__":
    sys.exit(main())
