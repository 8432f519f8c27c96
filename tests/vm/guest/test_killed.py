# SPDX-License-Identifier: Apache-2.0
"""A C program on a controller that is vfio's, killed a hundred times: what it was told is in the drive's image, and the
next one opens the device."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ugds
from devices import wait_for
from host import JOB, Host
from support import MIB, descriptors, write_and_read

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))
from journal_client import SLOT, SLOTS, Journal

Open = Callable[..., ugds.Device]
UriOf = Callable[..., str]


@pytest.mark.limit(240)
@pytest.mark.boot("iommufd")
def test_after_a_hundred_kills_what_was_flushed_is_there(
    uri_of: UriOf, open_ssd: Open, host: Host, tmp_path: Path
) -> None:
    uri, way, before = uri_of("two", "iommufd"), random.Random(6), descriptors()
    journal, size = Journal(tmp_path / "told"), SLOTS * SLOT
    host.write_image("two1", 0, bytes(size))
    for turn in range(100):
        command = [str(JOB / "journal"), uri, str(journal.path), str(turn + 1), str(journal.next)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as client:
            if turn % 5 != 4:  # else it is killed while it starts, or opens the device
                wait_for("the client has opened the device", journal.has_opened, 20)
            time.sleep(way.random() * 0.06)
            client.send_signal(signal.SIGKILL)
            _, words = client.communicate(timeout=20)
            assert client.returncode == -signal.SIGKILL, words
        journal.take()
        journal.check(host.read_image("two1", 0, size), lost_power=False)
    assert journal.opened >= 80
    assert journal.flushes > 80
    assert descriptors() == before
    with open_ssd("two", "iommufd") as ssd, ugds.empty(size) as buffer:
        assert ssd.read(buffer) == size
        journal.check(bytes(memoryview(buffer)), lost_power=True)
        write_and_read(ssd, MIB, 64 * 1024, seed=5)
    print(f"{journal.opened} clients, {journal.writes} writes, {journal.flushes} flushes")
