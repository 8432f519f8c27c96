# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: the same as the safetensors package writes and reads, and nothing else is taken for one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import ugds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ugds._load import files, layout, progress, transfer
from ugds._load.layout import Item, Run
from ugds.safetensors import InvalidFile, _header, load_file, load_files, safe_open, save_file

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64",
]  # fmt: skip
NAMES = st.text(max_size=12).filter(lambda name: name != "__metadata__" and is_text(name))
CASES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
FOLDER = Path(tempfile.mkdtemp(prefix="ugds-safetensors-"))


@pytest.fixture(autouse=True, scope="module")
def folder() -> Iterator[None]:
    yield
    for path in FOLDER.iterdir():
        path.unlink()
    FOLDER.rmdir()


def is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@st.composite
def arrays(draw: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    count = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 1 << 32))
    made = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, "u1")
    return made.view(dtype).reshape(shape)


DICTS = st.dictionaries(NAMES, arrays(), max_size=8)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return set(ours) == set(theirs) and all(
        (a.dtype, a.shape, a.tobytes()) == (theirs[name].dtype, theirs[name].shape, theirs[name].tobytes())
        for name, a in ours.items()
    )


def written(head: bytes, data: bytes, length: int | None = None) -> str:
    path = FOLDER / "written"
    path.write_bytes((len(head) if length is None else length).to_bytes(8, "little") + head + data)
    return str(path)


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def tensor(dtype: Any = "U8", shape: Any = (4,), data_offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


# --- The same bytes as the package ------------------------------------------------------------------------------------


@settings(CASES)
@given(DICTS, st.one_of(st.none(), st.dictionaries(NAMES, NAMES, max_size=1)))
def test_a_file_is_what_the_package_writes(tensors: dict[str, Any], metadata: dict[str, str] | None) -> None:
    assume(tensors or metadata != {})  # of which the package makes a header that is no JSON
    ours, theirs = FOLDER / "ours", FOLDER / "theirs"
    save_file(tensors, ours, metadata)
    safetensors.numpy.save_file(tensors, theirs, metadata)
    assert ours.read_bytes() == theirs.read_bytes()


@settings(CASES)
@given(DICTS)
def test_what_the_package_wrote_is_read(tensors: dict[str, Any]) -> None:
    path = FOLDER / "theirs"
    safetensors.numpy.save_file(tensors, path)
    found = load_file(path, framework="np")
    assert same(found, tensors)
    assert all(array.flags.aligned and array.flags.writeable for array in found.values())


@settings(CASES)
@given(DICTS, st.sampled_from([8, 64, 512, 4096]))
def test_the_package_reads_what_was_written(tensors: dict[str, Any], align: int) -> None:
    path = FOLDER / "ours"
    save_file(tensors, path, {"b": "1", "a": "2"}, align=align, durable=False)
    assert same(safetensors.numpy.load_file(path), tensors)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"b": "1", "a": "2"}
    data = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert data % align == 0


def test_bytes_in_the_other_order_are_turned() -> None:
    path = FOLDER / "ours"
    save_file({"a": np.arange(5, dtype=">i4")}, path)
    assert (load_file(path, framework="np")["a"] == np.arange(5)).all()


def test_several_chunks_are_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("TO_DISK", "TO_CACHE"):
        monkeypatch.setattr(transfer, way, transfer.Way(4, 4096))
    monkeypatch.setattr(layout.pieces, "__defaults__", (8192,))
    tensors = {f"t{i}": np.random.default_rng(i).integers(0, 256, 1000 * i + 1, "u1") for i in range(40)}
    path = FOLDER / "ours"
    save_file(tensors, path)
    assert same(safetensors.numpy.load_file(path), tensors)
    assert same(load_file(path, framework="np"), tensors)


# --- What is no such file ---------------------------------------------------------------------------------------------


def read_by_both(path: str) -> tuple[dict[str, Any] | str, dict[str, Any] | str]:
    """What is found, or the error's text; nothing else may be raised."""
    ours: dict[str, Any] | str
    theirs: dict[str, Any] | str
    try:
        ours = load_file(path, framework="np")
    except ValueError as error:
        ours = str(error)
    try:
        theirs = safetensors.numpy.load_file(path)
    except Exception as error:  # of several kinds
        theirs = str(error) or "refused"
    return ours, theirs


def check_alike(path: str) -> None:
    ours, theirs = read_by_both(path)
    if isinstance(ours, str):
        assert path in ours or "tensor" in ours
        # They take the last of several of a name, and lists for objects.
        assert isinstance(theirs, str) or "comes twice" in ours or "is not an object" in ours, ours
    else:
        assert not isinstance(theirs, str), theirs
        assert same(ours, theirs)


NUMBERS = st.one_of(
    st.integers(0, 12), st.sampled_from([-1, 1 << 32, 1 << 61, (1 << 64) - 1, 1 << 64, 1.5, 2.0, True, None, "4", []])
)


@settings(CASES, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "é", "__metadata__"]),
            st.sampled_from(["U8", "F32", "BOOL", "I16", "F4", "F6_E2M3", "F99", "u8", 3, None]),
            st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS),
            st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), st.lists(NUMBERS, max_size=3), NUMBERS),
        ),
        max_size=3,
    ),
    st.integers(0, 24),
    st.sampled_from(["", " ", "\n ", "x", "\0"]),
)
def test_a_header_is_taken_as_the_package_takes_it(tensors: list[Any], size: int, padding: str) -> None:
    members = [
        f"{json.dumps(name)}:{json.dumps({'dtype': dtype, 'shape': shape, 'data_offsets': place})}"
        for name, dtype, shape, place in tensors
    ]
    check_alike(written(f"{{{','.join(members)}}}{padding}".encode(), bytes(size)))


@st.composite
def nearly_right(draw: Any) -> tuple[list[Any], int]:
    """A header's tensors and the bytes behind it; of a number of them, one is a little wrong."""
    made, end = [], 0
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(["U8", "BOOL", "F32", "I16", "F64", "C64", "F4"]))
        shape = [*draw(st.lists(st.integers(0, 4), max_size=3)), 2]
        size = int(np.prod(shape)) * _header.BITS[dtype] // 8
        made.append([name, dtype, shape, [end, end + size]])
        end += size
    made = draw(st.permutations(made))
    if made and draw(st.booleans()):
        wrong = made[draw(st.integers(0, len(made) - 1))]
        by = draw(st.sampled_from([-1, 1]))
        what = draw(st.sampled_from(["dtype", "shape", "both", "begin", "end", "size"]))
        if what == "dtype":
            wrong[1] = draw(st.sampled_from(["U8", "F32", "F64", "F6_E2M3"]))
        elif what == "shape":
            wrong[2][draw(st.integers(0, len(wrong[2]) - 1))] += by
        elif what == "both":
            wrong[3] = [place + by for place in wrong[3]]
        elif what == "size":
            end = max(0, end + by)
        else:
            wrong[3][what == "end"] += by
    return made, end


@settings(CASES, max_examples=300)
@given(nearly_right())
def test_a_header_that_is_nearly_right_is_taken_as_the_package_takes_it(found: tuple[list[Any], int]) -> None:
    members = {name: tensor(dtype, shape, place) for name, dtype, shape, place in found[0]}
    check_alike(written(header(**members), bytes(found[1])))


@settings(CASES, max_examples=300)
@given(DICTS.filter(bool), st.data())
def test_a_damaged_file_is_taken_as_the_package_takes_it(tensors: dict[str, Any], data: Any) -> None:
    whole = bytearray(safetensors.numpy.save(tensors))
    end = min(len(whole), 8 + int.from_bytes(whole[:8], "little"))
    for at in data.draw(st.lists(st.integers(0, end - 1), max_size=3)):
        whole[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b'0123456789[]{},:"'))))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    path = FOLDER / "damaged"
    path.write_bytes(whole[:cut] + data.draw(st.sampled_from([b"", b"\0"])))
    check_alike(str(path))


@pytest.mark.parametrize(
    ("head", "data", "length", "said"),
    [
        (b"", b"", 0, "not the JSON"),
        (b"{}", b"", 3, "the file ends after 2"),
        (b"{}", b"", 100_000_001, "may have 100000000"),
        (b"{}", b"", (1 << 64) - 1, "may have 100000000"),
        (b"{}", b"x", None, "behind its header are 1"),
        (b"[]", b"", None, "not a JSON object"),
        (b"\xff{}", b"", None, "not UTF-8 at byte 0"),
        (b'{"a":NaN}', b"", None, "NaN is no JSON"),
        (b"[" * 100_000, b"", None, "nested too deeply"),
        (b'{"a":1,"a":1}', b"", None, "'a' comes twice"),
        (b'{"__metadata__":{"a":1}}', b"", None, "not an object of strings"),
        (b'{"\\ud800":{}}', b"", None, "no Unicode text"),
        (header(a=7), b"", None, "is not an object"),
        (header(a=tensor(dtype="F31")), bytes(4), None, "'F31', which the format has not"),
        (header(a=tensor(dtype=["F32"])), bytes(4), None, "which the format has not"),
        (header(a=tensor(shape=[-4])), bytes(4), None, "not a list of numbers"),
        (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"", None, "not a list of numbers"),
        (header(a=tensor(shape=[1 << 62, 4, 0])), bytes(4), None, "more than 2^64 bits"),
        (header(a=tensor(shape=[0, 1 << 63], data_offsets=[0, 0])), b"", None, "more than 2^64 bits"),
        (header(a=tensor(shape=[0, 1 << 32, 1 << 32], data_offsets=[0, 0])), b"", None, "more than 2^64 bits"),
        (header(a=tensor(shape=[True])), bytes(4), None, "not a list of numbers"),
        (header(a=tensor(data_offsets=[4, 0])), bytes(4), None, "not two numbers in order"),
        (header(a=tensor(dtype="F32", shape=[2])), bytes(4), None, "has 8 bytes, and its data_offsets 4"),
        (header(a=tensor(dtype="F4", shape=[3])), bytes(4), None, "does not end with a byte"),
        (header(a=tensor(), b=tensor()), bytes(4), None, "overlaps"),
        (header(a=tensor(data_offsets=[1, 5])), bytes(5), None, "leaves a hole before it"),
        (header(a=tensor()), bytes(3), None, "have 4 bytes, and behind its header are 3"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_reason(
    head: bytes, data: bytes, length: int | None, said: str
) -> None:
    path = written(head, data, length)
    with pytest.raises(InvalidFile) as caught:
        load_file(path, framework="np")
    assert str(caught.value).startswith(f"{path} is no valid safetensors file: ")
    assert said in str(caught.value)
    with pytest.raises(InvalidFile):
        safe_open(path, framework="np")


def test_a_name_that_comes_twice_among_many_is_found_soon() -> None:
    """By looking at each once: for these it would be minutes, for a header at its largest, years."""
    names = b",".join(b'"%d":0' % number for number in [*range(200_000), 199_999])
    start = time.process_time()
    with pytest.raises(InvalidFile, match="'199999' comes twice"):
        load_file(written(b"{" + names + b"}", b""), framework="np")
    assert time.process_time() - start < 10


def test_what_numpy_has_not_is_refused_by_name() -> None:
    path = written(header(wide=tensor("F8_E5M2", [4])), bytes(4))
    with pytest.raises(ValueError, match=r'"wide".*NumPy has no F8_E5M2.*ml_dtypes.*framework="pt"'):
        load_file(path, framework="np")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "a dict of names"),
        ({3: np.zeros(1)}, "3 is no name"),
        ({"__metadata__": np.zeros(1)}, "no name of a tensor"),
        ({"a": [1]}, "'a': it is no tensor or array, but list"),
        ({"a": np.array(["x"])}, "'a': the format has no str"),
        ({"a": np.zeros((4, 4))[:, ::2]}, "'a': it is not in one piece"),
        ({"\ud800": np.zeros(1)}, "surrogates"),
    ],
)
def test_what_the_format_cannot_have_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        save_file(given, FOLDER / "refused")
    assert not (FOLDER / "refused").exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda path: load_file(path, framework="jax"), "none of"),
        (lambda path: load_file(path, device="cuda", framework="np"), '"cpu" alone'),
        (lambda path: load_files(path, framework="np"), "load_file"),
        (lambda path: load_files([path, path], device=["cpu"], framework="np"), "2 files and 1 devices"),
        (lambda path: load_files([path, path], framework="np"), 'has a tensor "a", and so has'),
        (lambda path: save_file({}, path, align=24), "align"),
        (lambda path: save_file({}, path, {"a": 1}), "metadata are strings"),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_asked_is_refused(call: Any, said: str) -> None:
    path = written(header(a=tensor()), bytes(4))
    with pytest.raises(ValueError, match=said):
        call(path)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_file(FOLDER / "nowhere", framework="np")
    with pytest.raises(IsADirectoryError):
        load_file(FOLDER, framework="np")


# --- Several files, and parts of one ----------------------------------------------------------------------------------


def test_several_files_are_read_at_once_and_some_of_their_tensors(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for number, path in enumerate(paths):
        save_file({f"{path.name}{i}": np.full(1000 * i, number, "u2") for i in range(5)}, path)
    found = load_files(paths, framework="np")
    assert list(found) == [f"{path.name}{i}" for path in paths for i in range(5)]
    assert all((found[f"c{i}"] == 2).all() and len(found[f"c{i}"]) == 1000 * i for i in range(5))
    some = load_files(paths, lambda name: None if name.endswith("3") else "cpu", framework="np")
    assert set(some) == {name for name in found if not name.endswith("3")}
    assert same(some, {name: found[name] for name in some})
    assert load_files([], framework="np") == {}


def test_tensors_that_are_left_out_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "file", []
    save_file({name: np.zeros(1 << 20, "u1") for name in "abcd"}, path)
    read = transfer.read
    monkeypatch.setattr(transfer, "read", lambda *of: (asked.extend(every := list(of[0])), read(every, *of[1:])))
    load_file(path, lambda name: "cpu" if name in "ad" else None, framework="np")
    assert sum(piece.size for piece in asked) == 2 << 20


INDICES = st.one_of(
    st.integers(-7, 7),
    st.builds(slice, *[st.one_of(st.none(), st.integers(-7, 7))] * 2),
    st.builds(slice, st.integers(-3, 3), st.integers(0, 6), st.sampled_from([1, 2, -1])),
    st.just(Ellipsis),
    st.just(None),
)


@settings(CASES)
@given(arrays(), st.lists(INDICES, max_size=3))
def test_a_slice_is_what_the_array_gives(array: np.ndarray[Any, Any], index: list[Any]) -> None:
    path = FOLDER / "sliced"
    save_file({"before": np.zeros(3, "u1"), "a": array}, path, durable=False)
    with safe_open(path, framework="np") as file:
        part = file.get_slice("a")
        assert part.get_shape() == list(array.shape)
        for asked in (tuple(index), index[0] if index else ...):
            try:
                wanted = array[asked]
            except IndexError:
                with pytest.raises(IndexError):
                    part[asked]
                continue
            assert (part[asked].shape, part[asked].tobytes()) == (wanted.shape, wanted.tobytes())


def test_rows_are_read_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "file", []
    array = np.arange(1 << 16, dtype="u4").reshape(256, 256)
    save_file({"a": array}, path, {"format": "np"})
    read = transfer.read
    monkeypatch.setattr(transfer, "read", lambda *of: (asked.extend(every := list(of[0])), read(every, *of[1:])))
    with safe_open(path, framework="np") as file:
        assert (file.keys(), file.offset_keys(), file.metadata()) == (["a"], ["a"], {"format": "np"})
        assert asked == []
        assert (file.get_slice("a")[10:12, 5] == array[10:12, 5]).all()
        assert [piece.size for piece in asked] == [2 * 1024]
        assert (file.get_tensor("a") == array).all()
        assert same(file.get_tensors(), {"a": array})
        with pytest.raises(KeyError, match="no tensor"):
            file.get_tensor("b")


# --- Where bytes land -------------------------------------------------------------------------------------------------


@settings(CASES)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 3_000_000), st.integers(0, 6)), max_size=12),
    st.booleans(),
)
def test_every_item_has_its_aligned_place(given: list[tuple[int, int, int]], like_the_file: bool) -> None:
    items, at = [], 11
    for gap, size, power in given:
        items.append(Item(at + gap, size, 1 << power))
        at += gap + size
    laid = layout.lay_out(items, like_the_file)
    taken = sorted((place, item.size) for item, place in zip(items, laid.places, strict=True) if item.size)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
    assert all(place + size <= laid.size for place, size in taken)
    for item, place in zip(items, laid.places, strict=True):
        assert place % item.align == 0 or not item.size
        if item.size:
            run = next(run for run in laid.runs if run.start <= item.start < run.start + run.size)
            assert item.start + item.size <= run.start + run.size
            assert place - run.place == item.start - run.start
    spare = laid.size - sum(run.size for run in laid.runs)
    assert spare <= layout.PAGE * len(laid.runs)


@settings(CASES)
@given(st.integers(0, 100_000), st.integers(1, 300_000), st.integers(500, 50_000))
def test_pieces_are_the_run(start: int, size: int, most: int) -> None:
    made = list(layout.pieces([Run(start, size, 7)], most))
    assert [piece.start for piece in made] == [start, *range((start // most + 1) * most, start + size, most)]
    assert sum(piece.size for piece in made) == size
    assert all(0 < piece.size <= most and piece.place - 7 == piece.start - start for piece in made)


def test_a_usual_file_is_one_run_that_lies_as_in_the_file() -> None:
    head, entries = _header.build([(f"t{i}", "BF16", [1000, 1000], 2_000_000) for i in range(30)], None, 8, "")
    laid = layout.lay_out([Item(len(head) + entry.start, entry.size, 2) for entry in entries], True)
    assert [(run.start, run.size) for run in laid.runs] == [(len(head), 60_000_000)]
    assert laid.runs[0].place % layout.PAGE == len(head) % layout.PAGE


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    save_file({"a": np.zeros(5000)}, path)
    before = path.read_bytes()

    def write(*_: Any) -> None:
        raise ugds.Error(errno.EIO, "the disk is gone")

    monkeypatch.setattr(transfer, "write", write)
    with pytest.raises(ugds.Error, match="the disk is gone"):
        save_file({"a": np.ones(5000)}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    save_file({}, path)
    path.chmod(0o640)
    link.symlink_to("file")
    save_file({"a": np.zeros(5)}, link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert load_file(path, framework="np")["a"].shape == (5,)


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": np.zeros(5)}, path)
    with safe_open(path, framework="np") as file:
        save_file({"a": np.ones(5)}, path)
        assert (file.get_tensor("a") == 0).all()
    assert (load_file(path, framework="np")["a"] == 1).all()


def test_a_file_that_is_closed_reads_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": np.zeros(5)}, path)
    with safe_open(path, framework="np") as file:
        pass
    with open(__file__, "rb"), pytest.raises(ValueError, match="file is closed"):  # it has the descriptor's number
        file.get_tensor("a")
    file.close()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_file({"a": np.zeros(5)}, tmp_path / "no" / "file")


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    save_file({"a": np.ones(100_000)}, path)
    read = _header.read

    def cut(source: files.Source) -> _header.Header:
        found = read(source)
        os.truncate(path, 400_000)
        return found

    monkeypatch.setattr(_header, "read", cut)
    with pytest.raises(ugds.Error, match=r"the file ends .* bytes earlier") as caught:
        load_file(path, framework="np")
    assert (caught.value.operation, caught.value.device) == ("read", str(path))
    assert caught.value.offset + caught.value.completed == 400_000


# --- Threads, memory, progress ----------------------------------------------------------------------------------------


def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    done = []

    def one(job: int) -> None:
        if job == 10:
            raise OSError("the tenth")
        done.append(job)

    with pytest.raises(OSError, match="the tenth"):
        transfer.work(range(100_000), lambda: one, 4)
    assert len(done) < 99_999
    transfer.work(range(100, 200), lambda: one, 4)
    assert set(range(100, 200)) <= set(done)


def test_a_bar_is_drawn_where_it_is_asked_for_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model[red].safetensors"
    save_file({"a": np.zeros(1 << 20, "u1")}, path)
    load_file(path, framework="np")
    load_file(path, framework="np", progress=False)
    assert capfd.readouterr() == ("", "")
    load_file(path, framework="np", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading model[red].safetensors" in err
    with progress.bar("nothing", 0, True):
        pass


def test_half_of_a_file_in_the_page_cache_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with open(path, "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"this file system does not tell what is in the page cache: {error}")
        assert files.cached(file.fileno(), 1 << 20)
        assert not files.cached(file.fileno(), 4 << 20)  # the rest is not there at all
        assert not files.cached(file.fileno(), 0)


MEASURED = """
import resource, sys
import numpy as np
from ugds.safetensors import load_file, save_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if sys.argv[1] == "load":
    before = peak()
    found = load_file(sys.argv[2], framework="np")
    assert sum(int(a[-1]) for a in found.values()) == 4 * 7
    print(peak() - before - sum(a.nbytes for a in found.values()))
else:
    tensors = {f"t{i}": np.full(50 << 20, 7, "u1") for i in range(4)}
    before = peak()
    save_file(tensors, sys.argv[2])
    print(peak() - before)
"""


@pytest.mark.slow
def test_memory_beside_the_tensors_is_bounded(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    for what in ("save", "load"):
        done = subprocess.run([sys.executable, "-c", MEASURED, what, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) <= 128 << 20, what


def test_pytorch_that_is_missing_is_named() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "for do in (lambda: __import__('ugds.torch'), lambda: __import__('ugds').safetensors.load_file('x')):\n"
        "    try:\n        do()\n    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.endswith("what to do: pip install torch") for line in done.stdout.splitlines()] == [True, True]


def many(count: int) -> list[Path]:
    paths = [FOLDER / f"many-{i}.safetensors" for i in range(count)]
    for i, path in enumerate(paths):
        safetensors.numpy.save_file({f"t{i}": np.full(5000, i, "u4")}, path)
    return paths


def few_descriptors(program: str, paths: list[Path], limit: int) -> str:
    """What a process prints that may have so many descriptors open."""
    begin = (
        "import resource, sys, numpy as np, ugds\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "from ugds.safetensors import load_file, load_files, safe_open\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + program, *map(str, paths)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_any_number_of_files_is_loaded_with_few_descriptors() -> None:
    program = (
        "found = load_files(sys.argv[1:], framework='np')\n"
        "assert list(found) == [f't{i}' for i in range(150)]\n"
        "assert all((found[f't{i}'] == i).all() and found[f't{i}'].size == 5000 for i in range(150))\n"
        "print('all')"
    )
    assert few_descriptors(program, many(150), 140) == "all\n"


def test_files_are_loaded_where_all_devices_of_a_process_but_one_are_taken() -> None:
    program = (
        "others = [ugds.open('emulated:1MiB') for _ in range(63)]\n"
        "found = load_files(sys.argv[1:], framework='np')\n"
        "assert all((found[f't{i}'] == i).all() for i in range(20))\n"
        "others.append(ugds.open('emulated:1MiB'))\n"
        "try:\n"
        "    load_files(sys.argv[1:], framework='np')\n"
        "except ugds.Error as error:\n"
        "    print(error.errno, error.device)"
    )
    assert few_descriptors(program, many(20), 4096) == f"{errno.EMFILE} {FOLDER}/many-0.safetensors\n"


def test_a_hundred_files_are_read_from_while_each_stays_open() -> None:
    program = (
        "files = [safe_open(path, framework='np') for path in sys.argv[1:]]\n"
        "for _ in range(2):\n"
        "    assert all((file.get_tensor(f't{i}') == i).all() for i, file in enumerate(files))\n"
        "print('all')"
    )
    assert few_descriptors(program, many(100), 256) == "all\n"


def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = many(20)
    opened = files.opened

    def replacing_the_last(fd: int, direct: str, path: str) -> ugds.Device:
        if not (FOLDER / "replaced").exists():
            paths[-1].rename(FOLDER / "replaced")
            safetensors.numpy.save_file({"t19": np.zeros(5000, "u4")}, paths[-1])
        return opened(fd, direct, path)

    monkeypatch.setattr(files, "opened", replacing_the_last)
    with pytest.raises(ugds.Error, match="another file has its name now") as raised:
        load_files(paths, framework="np")
    assert (raised.value.errno, raised.value.device) == (errno.ESTALE, str(paths[-1]))


def test_a_file_that_is_something_else_is_named() -> None:
    path = FOLDER / "other"
    whole = FOLDER / "whole"
    save_file({"a": np.zeros(1000, "u1")}, whole)
    for data, words in (
        (b"", "it is cut off"),
        (whole.read_bytes()[:40], "the file ends after .*it is cut off"),
        (whole.read_bytes()[:-1], "behind its header are 999: it is cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html></html>", "a web page"),
        (b"PK\3\4" + bytes(1000), "ugds.torch.load"),
        (b"\xff" * 1000, "its header is said to have 18446744073709551615 bytes"),
    ):
        path.write_bytes(data)
        with pytest.raises(InvalidFile, match=words):
            load_file(path, framework="np")


def test_saving_looks_at_its_target_first_and_names_it(tmp_path: Path) -> None:
    arrays = {"a": np.zeros(1000, "u1")}
    missing = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError, match=rf"a new file in {tmp_path}/none") as raised:
        save_file(arrays, missing)
    assert raised.value.filename == str(missing)
    with pytest.raises(IsADirectoryError):
        save_file(arrays, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_finds_no_room_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": np.zeros(1000, "u1")}, path)
    before = path.read_bytes()
    script = (
        "import errno, resource, signal, sys, numpy as np, ugds\n"
        "from ugds._load import files\n"
        "from ugds.safetensors import save_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "arrays = {'a': np.zeros(4 << 20, 'u1')}\n"
        "files.os.ftruncate = lambda fd, size: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    save_file(arrays, sys.argv[1], durable=False)\n"
        "except ugds.Error as error:\n"
        "    print(error.errno == errno.EFBIG, error.device == sys.argv[1], '.part' in str(error), error.hint[-19:])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True True False before is as it was\n", done.stderr
    assert [path.read_bytes()] == [before]
    assert list(tmp_path.iterdir()) == [path]
