# SPDX-License-Identifier: Apache-2.0
"""Runs the cells that it is told of, one a line of its input as `group TAB row TAB way`, and answers each with a line
of JSON. A process of its own: a crash or a hang is one cell's."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback

import cell
from table import table

# Violations are printed as they happen, those of closing too; the device cannot be asked for them any more then.
os.environ["UGDS_EMULATOR_LOG"] = "1"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    rows = {(group, row.name): row for group, members in table().items() for row in members}
    warm = next(row for row in rows.values() if row.name == "in reverse order")
    for way in ("sync", "batch", "stream", "asyncio"):
        cell.scenes.attempt(warm, way)  # what is made once and kept
    log, path = tempfile.mkstemp()
    os.unlink(path)
    os.dup2(log, 2)
    os.dup2(log, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        group, name, way = line.rstrip("\n").split("\t")
        row = rows[group, name]
        logged, start, wrong = os.lseek(log, 0, os.SEEK_END), time.monotonic(), ""
        try:
            cell.run(row, way)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            wrong = f"{what} ({os.path.basename(where.filename)}:{where.lineno})"
            error.__traceback__ = None
            del error
        spent = time.monotonic() - start
        sys.stderr.flush()
        said = os.pread(log, 1 << 16, logged).decode(errors="replace")
        seen = [text for text in said.splitlines() if "violation" in text]
        seen = [text for text in seen if not any(f" {rule}" in text or f"{rule}:" in text for rule in row.violations)]
        if seen and not wrong:
            wrong = f"violations of the protocol: {seen}"
        print(json.dumps({"ms": round(spent * 1000), "wrong": wrong}), file=answers, flush=True)


main()
