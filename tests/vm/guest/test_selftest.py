# SPDX-License-Identifier: Apache-2.0
"""Tests that must not all pass: the boot "selftest" of boots.py says what the runner has to make of each."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.boot("selftest")


def test_passes() -> None:
    assert Path("/job/boot.json").exists()


def test_fails() -> None:
    assert Path("/job/boot.json").read_text() == "on purpose"


def test_skips() -> None:
    pytest.skip("on purpose")


def test_passes_while_the_kernel_warns() -> None:
    Path("/dev/kmsg").write_text("DMAR: [DMA Write] Request device [01:00.0] fault addr 0x1000, on purpose\n")


@pytest.mark.provokes("DMAR")
def test_announces_a_message_that_does_not_come() -> None:
    pass


@pytest.mark.limit(2)
def test_takes_too_long() -> None:
    signal.pause()


@pytest.mark.limit(1000)
def test_hangs_the_guest() -> None:
    signal.pause()


def test_comes_after_that() -> None:
    pass
