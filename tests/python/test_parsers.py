# SPDX-License-Identifier: Apache-2.0
"""What Python reads of what people and files say: taken, or refused by the exception that is promised."""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ugds import cli, sizes, trace

SIZE = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\s*[0-9]{1,30}(\.[0-9]{1,10})?\s*([kmgt]i?)?b?\s*", fullmatch=True),
    st.integers(),
)


@given(SIZE)
def test_a_size_is_bytes_or_refused(size: int | str) -> None:
    try:
        assert 0 <= sizes.parse(size) < 1 << 63
    except ValueError as error:
        assert str(error)


@given(st.integers(0, (1 << 63) - 1))
def test_a_size_that_is_shown_can_be_read(size: int) -> None:
    assert sizes.parse(size) == size
    assert sizes.parse(str(size)) == size
    assert sizes.format(size)


@given(st.one_of(st.text(max_size=12), st.from_regex(r"[0-9]{1,6}", fullmatch=True)))
def test_a_mode_is_permissions_or_refused(text: str) -> None:
    try:
        assert 0 <= cli.octal(text) <= 0o777
    except argparse.ArgumentTypeError as error:
        assert "octal" in str(error)


def a_trace() -> dict[str, Any]:
    row = {"submitted": 5, "staged": 6, "rung": 7, "completed": 9, "bytes": 512, "queue": 1, "opcode": 2}
    records = np.zeros(2, trace.RECORD)
    for name, value in row.items():
        records[name] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        trace.write_chrome(path, trace.Trace("emulated:1MiB", "emulated", records, 0))
        loaded = json.loads(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


GOOD = a_trace()
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def read(content: bytes, name: str = "t.json") -> None:
    """Is read, or refused as promised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            trace.read_chrome(path)
        except (OSError, ValueError) as error:
            assert str(error)


@settings(max_examples=300)
@given(st.data())
def test_a_trace_with_anything_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    changed = copy.deepcopy(GOOD)
    *way, last = data.draw(st.sampled_from(places(GOOD)[1:]))
    at: Any = changed
    for key in way:
        at = at[key]
    if isinstance(at, dict) and data.draw(st.booleans()):
        del at[last]
    else:
        at[last] = data.draw(JUNK)
    read(json.dumps(changed).encode())


@given(st.binary(max_size=200))
def test_a_file_of_anything_is_no_trace(content: bytes) -> None:
    read(content)
    read(content, "t.json.gz")


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_damaged_or_a_deep_file_is_refused(name: str) -> None:
    whole = json.dumps(GOOD).encode()
    for content in (whole, b"[" * 200_000):
        packed = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
        read(packed, name)
        read(packed[: len(packed) // 2], name)
        for at in range(10, len(packed), max(1, len(packed) // 40)):
            read(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :], name)
