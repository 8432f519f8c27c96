# SPDX-License-Identifier: Apache-2.0
"""Closing a device: it ends what is overdue, replaces no error, and lets no failure go untold."""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ugds
import ugds.testing
from ugds import _core

URI = "emulated:1MiB?lba=512&mdts=1&timeout=1"
READ, WRITE = 2, 1


@pytest.fixture
def buffer() -> Iterator[ugds.Registration]:
    with ugds.empty("64KiB") as made:
        yield made


@pytest.mark.parametrize("kind", ["hang", "reset"])
def test_closing_ends_what_is_overdue_although_nobody_collects(buffer: ugds.Registration, kind: str) -> None:
    ssd = ugds.open(URI, deadline=0.5)
    ugds.testing.emulator(ssd).inject("hang", opcode=READ, abortable=kind == "hang")
    batch = ssd.batch(8)
    batch.read(buffer, [0, 4096], 4096)
    start, cpu = time.monotonic(), time.process_time()
    with pytest.raises(ugds.Error) as caught:  # what became of it: nobody has looked
        ssd.close(drain=20)
    assert time.monotonic() - start < 10
    assert time.process_time() - cpu < 0.5  # it sleeps meanwhile
    assert ssd.closed
    assert caught.value.errno == errno.ETIMEDOUT
    del batch


def test_failures_that_nobody_has_collected_are_told_when_the_device_is_closed(buffer: ugds.Registration) -> None:
    ssd = ugds.open(URI)
    ugds.testing.emulator(ssd).inject("status", opcode=WRITE, status=0x280, skip=3, count=2)
    batch = ssd.batch(16)
    batch.write(buffer, np.arange(8) * 4096, 4096)
    with pytest.raises(ugds.Error) as caught:
        ssd.close()
    error = caught.value
    assert ssd.closed
    assert (error.errno, error.status, error.operation, error.device) == (errno.EIO, 0x280, "write", URI)
    assert "nobody has collected: 2" in error.cause
    ssd.close()  # once
    del batch


def test_results_that_are_good_or_were_collected_hold_nothing_and_are_no_failure(buffer: ugds.Registration) -> None:
    with ugds.open(URI) as ssd:
        ugds.testing.emulator(ssd).inject("status", opcode=WRITE, status=0x280)
        batch = ssd.batch(16)
        batch.write(buffer, 0, 4096)
        assert len(batch.completed(1, timeout=20).errors) == 1
        batch.read(buffer, [0, 4096], 4096)


def test_an_exception_that_leaves_the_block_is_not_replaced(buffer: ugds.Registration) -> None:
    with pytest.raises(ugds.Error) as caught, ugds.open(URI, deadline=0.2) as ssd:
        emulator = ugds.testing.emulator(ssd)
        emulator.inject("hang", opcode=READ, abortable=False)
        emulator.inject("never_stopped", count=100)
        emulator.inject("reset_fails", count=100)
        ssd.read(buffer, 0, 4096)
    assert (caught.value.errno, caught.value.operation) == (errno.ETIMEDOUT, "read")
    assert "close the device, which resets" in caught.value.hint
    if sys.version_info >= (3, 11):
        assert any("close on" in note and "wedged" in note for note in caught.value.__notes__)
    assert not ssd.closed and ssd.state == "wedged"
    with pytest.raises(ugds.Error) as caught:
        ssd.close()
    assert "wait for the requests" not in caught.value.hint and "reset" in caught.value.hint
    emulator.clear_faults()
    ssd.close()


# --- In C ------------------------------------------------------------------------------------------------------------


class Descriptor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("uri", ctypes.c_char_p), ("operations", ctypes.c_void_p))


class Answer(ctypes.Structure):
    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


def library() -> Any:
    c = ctypes.CDLL(_core.library_path())  # type: ignore[attr-defined]
    for name in ("uGDSDriverOpen", "uGDSDriverClose", "uGDSHandleRegister", "uGDSHandleDeregisterEx"):
        getattr(c, name).restype = Answer
    c.uGDSRead.restype = ctypes.c_ssize_t
    c.uGDSRead.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_longlong,
        ctypes.c_longlong,
    )
    return c


@pytest.fixture
def c_handle() -> Iterator[Callable[[str], tuple[Any, ctypes.c_void_p]]]:
    c = library()
    assert c.uGDSDriverOpen().err == 0

    def open_one(uri: str) -> tuple[Any, ctypes.c_void_p]:
        handle = ctypes.c_void_p()
        answer = c.uGDSHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(3, uri.encode(), None)))
        assert answer.err == 0
        return c, handle

    yield open_one
    assert c.uGDSDriverClose().err == 0


def test_the_uri_has_a_deadline_for_c(
    buffer: ugds.Registration, c_handle: Callable[[str], tuple[Any, ctypes.c_void_p]]
) -> None:
    with ugds.testing.faults_at_open({"kind": "hang", "opcode": READ}):
        c, handle = c_handle(URI + "&deadline=300ms")
    memory = np.frombuffer(buffer, "u1")
    start = time.monotonic()
    assert c.uGDSRead(handle, memory.ctypes.data, 4096, 0, 0) == -errno.ETIMEDOUT
    assert 0.25 < time.monotonic() - start < 10
    assert c.uGDSHandleDeregisterEx(handle, 0).err == 0
    del memory


@pytest.mark.parametrize(
    ("uri", "deadline", "seconds"),
    [("&deadline=250ms", None, 0.25), ("&deadline=20s", 0.25, 0.25), ("", "250ms", 0.25), ("&deadline=250ms", "", 0)],
)
def test_a_deadline_is_given_by_the_uri_by_a_number_or_by_text(
    buffer: ugds.Registration, uri: str, deadline: Any, seconds: float
) -> None:
    if deadline == "":
        for bad, code in (("0", errno.EINVAL), ("5", errno.EINVAL), ("x", errno.EINVAL)):
            with pytest.raises(ugds.Error) as caught:
                ugds.open(f"{URI}&deadline={bad}")
            assert caught.value.errno == code and "deadline" in str(caught.value)
        return
    with ugds.open(URI + uri, deadline=deadline) as ssd:
        ugds.testing.emulator(ssd).inject("hang", opcode=READ)
        start = time.monotonic()
        with pytest.raises(ugds.Error) as caught:
            ssd.read(buffer)
        assert caught.value.errno == errno.ETIMEDOUT
        assert seconds <= time.monotonic() - start < 10
        assert "0.250 s" in caught.value.cause


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"retry": -1}, "0 to 16"),
        ({"retry": 17}, "0 to 16"),
        ({"deadline": "5"}, "deadline"),
        ({"deadline": 0}, "dead"),
        ({"deadline": "soon"}, "such as"),
    ],
)
def test_what_an_argument_may_not_be_is_said_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ugds.Error) as caught:
        ugds.open(URI, **arguments)
    assert caught.value.errno == errno.EINVAL
    assert words in str(caught.value)


def test_an_argument_of_another_type_is_named() -> None:
    for arguments, name in (({"retry": 1.5}, "retry"), ({"deadline": []}, "deadline")):
        with pytest.raises(TypeError, match=name):
            ugds.open(URI, **arguments)  # type: ignore[arg-type]


def test_the_end_of_a_waits_own_time_is_told_as_that(buffer: ugds.Registration) -> None:
    with ugds.open(URI + "&latency=500ms") as ssd, ssd.batch(8) as batch:
        batch.read(buffer, [0, 4096], 4096)
        with pytest.raises(ugds.Error) as caught:
            batch.wait(timeout=0.05)
        error = caught.value
        assert (error.errno, error.operation, error.device) == (errno.ETIMEDOUT, "wait", ssd.uri)
        assert "the time given to this wait" in error.cause and "wait again" in error.hint
        batch.wait()


def test_a_misspelt_fault_is_answered_with_the_nearest() -> None:
    for kind, words in (("never_redy", 'did you mean "never_ready"'), ("hnag", "ugds.testing.FAULTS has all")):
        with ugds.open(URI) as ssd, pytest.raises(ugds.Error) as caught:
            ugds.testing.emulator(ssd).inject(kind)
        assert words in caught.value.hint
