# SPDX-License-Identifier: Apache-2.0
"""The command line in a process of its own, and the records that it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(
    *arguments: str | Path, status: int = 0, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ugds", *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON lines, each of the published shape."""
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    for record in found:
        assert list(record) == ["name", "params", "device", "memory", "route", "figures"]
        assert isinstance(record["name"], str)
        assert isinstance(record["device"], str)
        assert isinstance(record["params"], dict)
        assert record["memory"] in ("host", "cuda", "hip")
        assert record["route"] in ("direct", "staged", "buffered")
        assert record["figures"]
        for name, figure in record["figures"].items():
            assert re.fullmatch("[a-z0-9_]+", name)
            assert list(figure) == ["value", "unit"]
            assert isinstance(figure["value"], (int, float))
            assert isinstance(figure["unit"], str)
    return found
