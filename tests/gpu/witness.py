# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that side_by_side.py loads into other people's tests (`-p witness`): it runs this process's part
of them, and writes down what happens, when it happens: a process that hangs or falls has said which test it was in.

The environment tells it: WITNESS_LOG, where lines of JSON are added; WITNESS_DONE, a file of the tests that are not run
again; WITNESS_PART, as 2/8: of every eight tests the one after the second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def libraries() -> list[str]:
    """The files of libcufile that this process has mapped."""
    found = set()
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line[73:] if len(line) > 73 else ""
        if os.path.basename(path).startswith("libcufile.so"):
            found.add(os.path.realpath(path))
    return sorted(found)


class Witness:
    def __init__(self) -> None:
        self._log = open(os.environ["WITNESS_LOG"], "a", buffering=1)  # noqa: SIM115
        self._done = set(Path(os.environ["WITNESS_DONE"]).read_text().splitlines())
        part, parts = os.environ["WITNESS_PART"].split("/")
        self._part, self._parts = int(part), int(parts)
        self._seen: list[str] = []
        self.say(pid=os.getpid())

    def say(self, **what: Any) -> None:
        self._log.write(json.dumps(what) + "\n")

    def look(self) -> None:
        """Says which libraries there are, where that changed."""
        if (now := libraries()) != self._seen:
            self._seen = now
            self.say(libraries=now)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for at, item in enumerate(items) if at % self._parts == self._part]
        kept = [item for item in mine if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        self.say(kept=[item.nodeid for item in kept])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(test=report.nodeid, when="collect", outcome="failed", words=str(report.longrepr)[-600:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        if outcome == "passed" and report.when != "call":
            return
        words = report.longrepr
        crash = getattr(words, "reprcrash", None)
        if crash is not None:
            words = f"{crash.path}:{crash.lineno}: {crash.message}"
        elif isinstance(words, tuple):
            words = words[-1]
        self.say(test=report.nodeid, when=report.when, outcome=outcome, words=str(words or "")[:600])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.look()
        self.say(end=nodeid)

    def pytest_sessionfinish(self) -> None:
        self.look()
        self.say(finished=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Witness(), "ugds-witness")
