# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: eight bytes of length, a JSON object that says what is where, and the tensors' bytes.

Whatever the safetensors package refuses is refused here, and besides what can be read in two ways: names that come
twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ugds._load.errors import CUT, InvalidFile, taken_for
from ugds._load.files import Source

#: Bytes of the header's JSON, at most.
LARGEST = 100_000_000
METADATA = "__metadata__"
_LENGTH = 8
_OVERFLOW = 1 << 64
_TOO_LARGE = "its header is said to have {} bytes, and may have {}"
#: Bits of an element, from what is aligned least to what is most: files have the opposite order.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_RANK = {name: rank for rank, name in enumerate(BITS)}


class Entry(NamedTuple):
    """A tensor as the header has it. Places are bytes from the end of the header."""

    name: str
    dtype: str  #: a name of BITS
    shape: tuple[int, ...]
    start: int
    size: int


class Header(NamedTuple):
    entries: list[Entry]  #: in the order of the file
    metadata: dict[str, str] | None
    data: int  #: where the tensors' bytes begin in the file


def read(source: Source) -> Header:
    """Raises InvalidFile."""
    length = source.head(_LENGTH)
    if len(length) < _LENGTH:
        what = f"it has {len(length)} bytes, and begins with eight that are the header's length"
        raise _invalid(source.path, f"{what}: {CUT}")
    size = int.from_bytes(length, "little")
    if size > LARGEST:
        raise _invalid(source.path, _mistaken(source.head(512)) or _TOO_LARGE.format(size, LARGEST))
    text = source.head(size, _LENGTH)
    if len(text) < size:
        what = f"its header is said to have {size} bytes, and the file ends after {len(text)}"
        raise _invalid(source.path, _mistaken(source.head(512)) or f"{what}: {CUT}")
    return parse(text, source.size - _LENGTH - size, source.path)


def _mistaken(head: bytes) -> str:
    if head.startswith(b"PK\3\4"):
        return "it is a ZIP archive, as torch.save writes them; what to do: ugds.torch.load()"
    return taken_for(head)


def parse(text: bytes, data_size: int, path: str) -> Header:
    """The header of a file with so many bytes behind it. Raises InvalidFile."""
    try:
        found = json.loads(
            text.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant, parse_int=_whole_number
        )
    except UnicodeDecodeError as error:
        raise _invalid(path, f"its header is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _invalid(path, "its header is nested too deeply") from None
    except ValueError as error:
        raise _invalid(path, f"its header is not the JSON that it should be: {error}") from None
    if not isinstance(found, dict):
        raise _invalid(path, "its header is not a JSON object")
    metadata = _metadata(found.pop(METADATA, None), path)
    entries = [_entry(name, given, path) for name, given in found.items()]
    entries.sort(key=lambda entry: (entry.start, entry.start + entry.size))
    end = 0
    for entry in entries:
        if entry.start != end:
            what = "overlaps with what is before it" if entry.start < end else "leaves a hole before it"
            raise _invalid(
                path, f'tensor "{entry.name}" {what}: it begins at byte {entry.start} of the data, not {end}'
            )
        end += entry.size
    if end != data_size:
        cut = f": {CUT}" if data_size < end else ""
        raise _invalid(path, f"its tensors have {end} bytes, and behind its header are {data_size}{cut}")
    return Header(entries, metadata, _LENGTH + len(text))


def build(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None, align: int, path: str
) -> tuple[bytes, list[Entry]]:
    """The beginning of a file, padded so that data begins at a multiple of `align`, and what comes behind it, in order.
    tensors: name, dtype, shape, bytes. The bytes are those that the safetensors package writes where `align` is 8 (it
    keeps no order of several metadata, and here they have their own). Raises ValueError."""
    entries, end = [], 0
    for name, dtype, shape, size in sorted(tensors, key=lambda tensor: (-_RANK[tensor[1]], tensor[0])):
        entries.append(Entry(name, dtype, tuple(shape), end, size))
        end += size
    made: dict[str, Any] = {}
    if metadata is not None:
        made[METADATA] = dict(metadata)
    for entry in entries:
        place = [entry.start, entry.start + entry.size]
        made[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH + len(text)) % align)
    if len(text) > LARGEST:
        raise ValueError(f"{path} would have a header of {len(text)} bytes, and the format allows {LARGEST}")
    return len(text).to_bytes(_LENGTH, "little") + text, entries


def _metadata(given: Any, path: str) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise _invalid(path, f"its {METADATA} is not an object of strings")
    for pair in given.items():
        _check_text(pair, path)
    return given


def _entry(name: str, given: Any, path: str) -> Entry:
    _check_text((name,), path)
    if not isinstance(given, dict):
        raise _invalid(path, f'what it has of tensor "{name}" is not an object')
    dtype: Any = given.get("dtype")
    shape: Any = given.get("shape")
    place: Any = given.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _invalid(path, f'tensor "{name}" has the dtype {_shown(dtype)}, which the format has not')
    if not _numbers(shape):
        raise _invalid(path, f'tensor "{name}" has a shape that is not a list of numbers: {_shown(shape)}')
    if not _numbers(place) or len(place) != 2 or place[1] < place[0]:
        raise _invalid(path, f'tensor "{name}" has data_offsets that are not two numbers in order: {_shown(place)}')
    # Also of no elements: libraries of tensors reckon with the others' product.
    bits = most = BITS[dtype]
    for size in shape:
        bits *= size
        most *= max(1, size)
        if most >= _OVERFLOW:
            raise _invalid(path, f'tensor "{name}" has a shape of more than 2^64 bits: {_shown(shape)}')
    if bits % 8:
        raise _invalid(path, f'tensor "{name}", {dtype} of shape {_shown(shape)}, does not end with a byte')
    if place[1] - place[0] != bits // 8:
        raise _invalid(
            path,
            f'tensor "{name}", {dtype} of shape {_shown(shape)}, has {bits // 8} bytes, and its data_offsets '
            f"{place[1] - place[0]}",
        )
    return Entry(name, dtype, tuple(shape), place[0], bits // 8)


def _numbers(given: Any) -> bool:
    return isinstance(given, list) and all(type(number) is int and 0 <= number < _OVERFLOW for number in given)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{_shown(twice)} comes twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _whole_number(text: str) -> int | float:
    """-0 is no whole number, and what is longer than any size is none that Python should work on."""
    return int(text) if len(text) <= 20 and not text.startswith("-") else math.nan


def _check_text(texts: Iterable[str], path: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _invalid(path, f"{_shown(text)} is no Unicode text") from None


def _shown(given: Any) -> str:
    text = ascii(given)
    return text if len(text) <= 80 else text[:77] + "..."


def _invalid(path: str, what: str) -> InvalidFile:
    return InvalidFile(f"{path} is no valid safetensors file: {what}")
