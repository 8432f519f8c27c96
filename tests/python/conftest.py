# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test file shares."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ugds
import ugds.testing
from host_machine import Machine

DEFAULT_URI = "emulated:64MiB"

# Faults that tests play are not kept among those of the user.
if "UGDS_STATE_DIR" not in os.environ:
    os.environ["UGDS_STATE_DIR"] = tempfile.mkdtemp(prefix="ugds-state-")
    atexit.register(shutil.rmtree, os.environ["UGDS_STATE_DIR"], ignore_errors=True)


@pytest.fixture
def open_ssd() -> Iterator[Callable[..., ugds.Device]]:
    """Opens emulated devices, as many as a test wants: `open_ssd(uri, **options)`. When the test ends, none of them may
    have seen a violation of the protocol; then they are closed."""
    with ExitStack() as stack:

        def open_one(uri: str = DEFAULT_URI, **options: float) -> ugds.Device:
            device = stack.enter_context(ugds.open(uri, **options))
            stack.enter_context(ugds.testing.strict(device))
            return device

        yield open_one


@pytest.fixture
def ssd(request: pytest.FixtureRequest, open_ssd: Callable[..., ugds.Device]) -> ugds.Device:
    """An emulated device that saw no violation by the end of the test. `@pytest.mark.device(URI, **options)` asks for
    another one than 64 MiB with default traits."""
    marker = request.node.get_closest_marker("device")
    return open_ssd(*marker.args, **marker.kwargs) if marker else open_ssd()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A made-up machine without devices, for tests to furnish."""
    return Machine(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ugds.Server]]:
    """Starts servers: `serve(uri)`. None may have seen a violation in the end."""
    with ExitStack() as stack:

        def start(uri: str = DEFAULT_URI, name: str = "s", **options: Any) -> ugds.Server:
            server = stack.enter_context(ugds.serve(uri, str(tmp_path / name), **options))
            stack.callback(lambda: server.closed or check(server))
            return server

        def check(server: ugds.Server) -> None:
            assert server.emulator.violations() == []

        yield start
