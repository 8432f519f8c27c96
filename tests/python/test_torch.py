# SPDX-License-Identifier: Apache-2.0
"""PyTorch's storages and checkpoints, and its tensors in safetensors files, on the host. tests/gpu has the same on a
GPU."""

from __future__ import annotations

import collections
import errno
import io
import os
import pickle
import re
import resource
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ugds

torch: Any = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from ugds._load import archive, checkpoint, transfer  # noqa: E402
from ugds.safetensors import load_file, safe_open, save_file  # noqa: E402
from ugds.torch import (  # noqa: E402
    GdsFile,
    InvalidFile,
    gds_deregister_buffer,
    gds_register_buffer,
    load,
    save,
)

CASES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch")


def made(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return flat.view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)


TENSORS = st.builds(
    made, st.sampled_from(DTYPES), st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(0, 1 << 32)
)
NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")


def raw(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(ours: Any, theirs: Any) -> bool:
    """Bit for bit, also where values are no numbers."""
    if isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs) and raw(ours) == raw(theirs) and ours.stride() == theirs.stride()
    if torch.is_storage(theirs):  # which come back typed
        return bytes(checkpoint.untyped_of(ours)) == bytes(checkpoint.untyped_of(theirs))
    if isinstance(theirs, dict):
        return type(ours) is type(theirs) and list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(theirs, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


# --- Safetensors files ------------------------------------------------------------------------------------------------


@CASES
@given(tensors=st.dictionaries(NAMES, TENSORS, max_size=8))
def test_safetensors_are_bit_for_bit_the_packages(folder: Path, tensors: dict[str, Any]) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    save_file(tensors, ours, {"format": "pt"}, durable=False)
    safetensors.torch.save_file(tensors, theirs, {"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    found = load_file(theirs)
    assert found.keys() == tensors.keys()
    assert all(raw(found[name]) == raw(tensors[name]) for name in tensors)


@CASES
@given(tensors=st.dictionaries(st.sampled_from("abcdef"), TENSORS, min_size=1), order=st.randoms(use_true_random=False))
def test_tensors_that_lie_anyhow_in_the_file_are_aligned(folder: Path, tensors: dict[str, Any], order: Any) -> None:
    """Of files that others wrote, in any order, with a header of any length."""
    names, described, data = list(tensors), {}, b""
    order.shuffle(names)
    for name in names:
        dtype, shape, content = raw(tensors[name])
        described[name] = {
            "dtype": _format_name(dtype),
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    head = str(described).replace("'", '"').encode() + b" " * order.randrange(8)
    path = folder / "anyhow"
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    for name, tensor in load_file(path).items():
        assert raw(tensor) == raw(tensors[name])
        assert tensor.data_ptr() % tensor.itemsize == 0


def _format_name(dtype: Any) -> str:
    from ugds.safetensors import _types

    return next(ours for ours, name in _types._NAMES.items() if f"torch.{name}" == str(dtype))


def test_pairs_of_four_bits_are_as_the_package_has_them(folder: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has none")
    tensor = torch.arange(24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 8)
    ours, theirs = folder / "ours", folder / "theirs"
    save_file({"a": tensor}, ours)
    safetensors.torch.save_file({"a": tensor}, theirs)
    assert ours.read_bytes() == theirs.read_bytes()
    found = load_file(theirs)["a"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_each_tensor_has_a_storage_of_its_own_bytes(folder: Path) -> None:
    path = folder / "ours"
    save_file({"a": torch.arange(1000), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(2.5)}, path)
    found = load_file(path)
    assert {name: t.untyped_storage().nbytes() for name, t in found.items()} == {"a": 8000, "b": 6, "c": 4}
    assert all(t.storage_offset() == 0 and not t.requires_grad for t in found.values())
    kept = found.pop("b")
    del found
    assert torch.equal(kept, torch.ones(3, dtype=torch.bfloat16))
    kept += 1
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    assert len(buffer.getvalue()) < 4000


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (lambda: {"a": torch.eye(3).to_sparse()}, "to_dense"),
        (lambda: {"a": torch.ones(4, 4).t()[:2]}, "contiguous"),
        (lambda: {"a": torch.ones(4, device="meta")}, "it is on meta"),
        (lambda: {"a": torch.ones(4, dtype=torch.complex128)}, "the format has no complex128"),
        (lambda: (lambda t: {"a": t, "b": t[2:]})(torch.ones(4)), r'"a" and "b" share memory.*clone'),
    ],
)
def test_what_the_format_cannot_have_is_refused(folder: Path, given_: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        save_file(given_(), folder / "refused")
    assert not (folder / "refused").exists()


def test_parts_of_one_storage_that_do_not_overlap_are_saved(folder: Path) -> None:
    whole = torch.arange(10)
    save_file({"a": whole[:5], "b": whole[5:], "c": whole[3:3]}, folder / "parts")
    assert torch.equal(load_file(folder / "parts")["b"], whole[5:])


def test_numbers_that_are_conjugated_later_are_saved_conjugated(folder: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    save_file({"a": tensor.conj(), "b": tensor.imag.neg().clone()}, folder / "conj")
    assert torch.equal(load_file(folder / "conj")["a"], tensor.conj().resolve_conj())


@pytest.mark.parametrize(
    ("device", "said"),
    [("meta", "cpu"), ("nonsense", "no device"), ("cuda:0", "finds no GPU"), (3, "finds no GPU"), (2.5, "no device")],
)
def test_a_device_that_is_not_there_is_refused(folder: Path, device: Any, said: str) -> None:
    if torch.cuda.is_available() and "GPU" in said:
        pytest.skip("it is there")
    save_file({"a": torch.ones(3)}, folder / "ours")
    with pytest.raises(ValueError, match=said):
        load_file(folder / "ours", device)
    with pytest.raises(ValueError, match=said):
        safe_open(folder / "ours", device=device)


# --- Checkpoints ------------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    TENSORS,
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.none(),
    st.booleans(),
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@CASES
@given(obj=OBJECTS)
def test_a_checkpoint_is_read_as_torch_reads_it(folder: Path, obj: Any) -> None:
    ours, theirs = folder / "ours.pt", folder / "theirs.pt"
    save(obj, ours, durable=False)
    torch.save(obj, theirs)
    wanted = torch.load(theirs, weights_only=True)
    assert same(wanted, obj)
    assert same(load(ours), wanted)
    assert same(load(theirs), wanted)
    assert same(torch.load(ours, weights_only=True), wanted)
    assert same(torch.load(ours, weights_only=True, mmap=True), wanted)


def an_object() -> dict[str, Any]:
    base, nothing = torch.arange(100_000, dtype=torch.float32), torch.empty(0)
    return {
        "base": base,
        "view": base[10:40].reshape(5, 6).t(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(4).to_sparse(),
        "none": torch.empty(0, 3),
        "nothing": nothing,
        "nothing again": nothing.reshape(0, 2),  # of the same storage, for which torch.load asks twice
        "storage": torch.arange(5).untyped_storage(),
        "typed": base,
        "words": ["a", 1, None],
    }


def test_views_and_parameters_stay_what_they_are(folder: Path) -> None:
    path, obj = folder / "o.pt", an_object()
    save(obj, path)
    found = load(path, device="cpu")
    assert found["typed"] is not obj["typed"]
    assert found["view"].data_ptr() == found["base"].data_ptr() + 40
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["parameter"].requires_grad
    assert torch.equal(found["sparse"].to_dense(), torch.eye(4))
    for name in ("base", "view", "none", "nothing", "nothing again", "storage", "words"):
        assert same(found[name], obj[name]), name


def test_the_file_is_laid_out_as_torch_lays_it_out(folder: Path) -> None:
    path, obj = folder / "o.pt", an_object()
    save(obj, path)
    stream = io.BytesIO()
    torch.save(obj, stream)
    ours, theirs = path.read_bytes(), stream.getvalue()
    assert len(ours) == len(theirs)
    with zipfile.ZipFile(io.BytesIO(ours)) as a, zipfile.ZipFile(stream) as b:
        assert a.namelist() == b.namelist()
        assert [i.header_offset for i in a.infolist()] == [i.header_offset for i in b.infolist()]
    with open(path, "rb") as file:
        records = archive.read(file, "").records
    for item in records.values():
        assert ours[item.start : item.start + item.size] == theirs[item.start : item.start + item.size]
        assert item.start % 64 == 0


def test_a_model_and_its_optimizer_go_on_where_they_were(folder: Path) -> None:
    def trained() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()

    model, optimizer = trained()
    steps(model, optimizer, 3)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "m.pt")
    again, its = trained()
    found = load(folder / "m.pt")
    again.load_state_dict(found["model"])
    its.load_state_dict(found["optimizer"])
    steps(model, optimizer, 3)
    steps(again, its, 3)
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_many_chunks_are_written_in_parallel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("TO_DISK", "TO_CACHE"):
        monkeypatch.setattr(transfer, way, transfer.Way(4, 4096))
    obj = {str(i): torch.arange(i * 37) for i in range(60)}
    save(obj, folder / "many.pt", durable=False)
    assert same(torch.load(folder / "many.pt", weights_only=True), obj)


class Harmful:
    """What runs code when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


def test_nothing_in_a_checkpoint_is_run(folder: Path) -> None:
    torch.save({"a": torch.ones(3), "b": Harmful()}, folder / "harmful.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        load(folder / "harmful.pt")
    assert not Harmful.ran
    torch.load(folder / "harmful.pt", weights_only=False)
    assert Harmful.ran  # so it would have


@CASES
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_right(folder: Path, data: Any) -> None:
    """What names storages and where they are is at the file's beginning and end."""
    path = folder / "whole.pt"
    if not path.exists():
        save({"a": torch.arange(3000), "b": [torch.ones(7), torch.zeros(5)]}, path)
    whole = bytearray(path.read_bytes())
    places = st.one_of(st.integers(0, 1200), st.integers(len(whole) - 1200, len(whole) - 1))
    for at in data.draw(st.lists(places, min_size=1, max_size=2)):
        whole[at] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged.pt"
    damaged.write_bytes(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
    try:
        ours = load(damaged)
    except Exception:
        return
    assert same(ours, torch.load(damaged, weights_only=True))


def test_what_is_no_checkpoint_says_so(folder: Path) -> None:
    path = folder / "other"
    torch.save({"a": torch.ones(3000)}, path)
    for content, words in (
        (b"", "it is empty"),
        (path.read_bytes()[:9000], "it is cut off"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ((30).to_bytes(8, "little") + b'{"a":1}' + bytes(50), "safetensors"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidFile, match=words):
            load(path)
    for content in (b"x" * 100, pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(InvalidFile, match=r"other is no checkpoint that can be read.*torch\.load"):
            load(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidFile, match=r"torch\.load"):
        load(path)
    with zipfile.ZipFile(path, "w") as script:
        script.writestr("a/data.pkl", pickle.dumps({}))
        script.writestr("a/constants.pkl", pickle.dumps(()))
    with pytest.raises(InvalidFile, match="TorchScript"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(folder / "nowhere")


def rewritten(source: Path, target: Path, change: Any) -> None:
    """A checkpoint with other records."""
    with zipfile.ZipFile(source) as a, zipfile.ZipFile(target, "w") as b:
        for info in a.infolist():
            name, content, how = change(info.filename, a.read(info) if info.CRC else b"\1" * info.file_size)
            if name:
                b.writestr(zipfile.ZipInfo(name), content, how)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n, c: (n, c, zipfile.ZIP_DEFLATED), "compressed"),
        (lambda n, c: (None if n.endswith("data/0") else n, c, 0), "lacks the record data/0"),
        (lambda n, c: (n, c[:-1] if n.endswith("data/0") else c, 0), "says that the storage 0 has 24 bytes"),
        (lambda n, c: (n, b"big" if n.endswith("byteorder") else c, 0), "another order"),
        (lambda n, c: (n, b"\x80\x02" if n.endswith("data.pkl") else c, 0), "its pickle cannot be read"),
        (lambda n, c: (n.replace("data.pkl", "date.pkl"), c, 0), "has 0 records data.pkl"),
    ],
)
def test_a_checkpoint_with_wrong_records_is_refused(folder: Path, change: Any, said: str) -> None:
    save({"a": torch.arange(3)}, folder / "right.pt")
    rewritten(folder / "right.pt", folder / "wrong.pt", change)
    with pytest.raises(InvalidFile, match=said):
        load(folder / "wrong.pt")


def with_directory(path: Path, name: str, place: int) -> None:
    """The archive's directory says that a record is somewhere else, by 64 bits."""
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        infos, start = archive.infolist(), archive.start_dir
    made = whole[:start]
    at = start
    for info in infos:
        length, extra = struct.unpack_from("<HH", whole, at + 28)
        entry = bytearray(whole[at : at + 46 + length])
        more = b""
        if info.filename.endswith(name):
            struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
            more = struct.pack("<HHQ", 1, 8, place)
        struct.pack_into("<H", entry, 30, len(more))
        made += entry + more
        at += 46 + length + extra
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(infos), len(infos), len(made) - start, start, 0)
    path.write_bytes(made + end)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (1 << 40, "a place that cannot be"),
        ((1 << 63) - 1, "a place that cannot be"),
        ((1 << 64) - 1, "a place that cannot be"),
        (0, "overlap"),
        (1, "is not where the archive's directory says"),
    ],
)
def test_a_directory_that_says_another_place_is_not_followed(folder: Path, place: int, said: str) -> None:
    save({"a": torch.arange(1000), "b": torch.ones(30)}, folder / "placed.pt")
    with_directory(folder / "placed.pt", "data/1", place)
    with pytest.raises(InvalidFile, match=said):
        load(folder / "placed.pt")


def test_a_record_that_the_file_has_no_room_for_is_refused(folder: Path) -> None:
    path = folder / "roomy.pt"
    save({"a": torch.arange(1000)}, path)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        at = file.start_dir
        for info in file.infolist():
            if info.filename.endswith("data/0"):
                struct.pack_into("<2I", whole, at + 20, len(whole), len(whole))
            at += 46 + len(info.filename) + len(info.extra)
    path.write_bytes(whole)
    with pytest.raises(InvalidFile, match=r"the file ends within the record .*data/0"):
        load(path)


def test_records_that_overlap_are_refused(folder: Path) -> None:
    """Where one lies in another there would be no bytes for the rest of it."""
    path = folder / "overlap.pt"
    save({"a": torch.arange(1000), "b": torch.ones(30)}, path)
    with zipfile.ZipFile(path) as file:
        place = next(info.header_offset for info in file.infolist() if info.filename.endswith("data/0"))
    with_directory(path, "data/1", place)
    with pytest.raises(InvalidFile, match="overlap"):
        load(path)


def test_a_record_is_not_expanded_before_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(name: str, content: bytes) -> tuple[str, bytes, int]:
        return name, content, zipfile.ZIP_DEFLATED if name.endswith("byteorder") else zipfile.ZIP_STORED

    save({"a": torch.arange(3)}, folder / "right.pt")
    rewritten(folder / "right.pt", folder / "deflated.pt", change)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(InvalidFile, match="byteorder is compressed"):
        load(folder / "deflated.pt")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x02", b"p50000000\n"])
def test_a_few_bytes_of_a_pickle_take_no_memory(put: bytes) -> None:
    """Python's own unpickler makes room for as many objects as the largest number says."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidFile, match="remembers 50"):
        archive.scan(b"\x80\x02N" + put + b".", "a file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_storages_are_told_apart_by_their_keys(folder: Path) -> None:
    """Whatever order others gave their records and keys."""
    torch.save([torch.full((4,), i) for i in range(4)], folder / "a.pt")

    def turned(name: str, content: bytes) -> tuple[str, bytes, int]:
        turn = bytes.maketrans(b"0123", b"3210")
        if "/data/" in name:
            name = name[:-1] + name[-1:].translate(str.maketrans("0123", "3210"))
        elif name.endswith("data.pkl"):
            content = re.sub(rb"X\x01\x00\x00\x00[0-3]", lambda key: key[0][:-1] + key[0][-1:].translate(turn), content)
        return name, content, 0

    rewritten(folder / "a.pt", folder / "b.pt", turned)
    assert [int(t[0]) for t in torch.load(folder / "b.pt", weights_only=True)] == [0, 1, 2, 3]
    assert [int(t[0]) for t in load(folder / "b.pt")] == [0, 1, 2, 3]


def test_a_save_that_fails_leaves_the_old_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "kept.pt"
    save({"a": torch.ones(3)}, path)
    before, names = path.read_bytes(), os.listdir(folder)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        save({"a": threading.Lock()}, path)

    def write(*_: Any) -> None:
        raise ugds.Error(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(checkpoint.transfer, "write", write)
    with pytest.raises(ugds.Error, match="the disk is full"):
        save({"a": torch.zeros(3)}, path)
    assert path.read_bytes() == before
    assert os.listdir(folder) == names


# --- Storages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GdsFile]:
    with GdsFile(tmp_path / "storages", os.O_CREAT | os.O_RDWR) as opened:
        yield opened


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("offset", [0, 4096, 5000, 1])
def test_a_storage_comes_back(file: GdsFile, offset: int, registered: bool) -> None:
    source, target = torch.randn(3000), torch.zeros(3000)
    storages = [source.untyped_storage(), target.untyped_storage()]
    for storage in storages if registered else []:
        gds_register_buffer(storage)
    file.save_storage(storages[0], offset=offset)
    file.flush()
    file.load_storage(storages[1], offset=offset)
    for storage in storages if registered else []:
        gds_deregister_buffer(storage)
    assert torch.equal(source, target)
    with open(file.filename, "rb") as plain:
        plain.seek(offset)
        assert plain.read() == source.numpy().tobytes()


def test_pytorchs_example_runs(tmp_path: Path) -> None:
    src1, src2 = torch.randn(1024), torch.randn(2, 1024)
    file = GdsFile(str(tmp_path / "f"), os.O_CREAT | os.O_RDWR)
    file.save_storage(src1.untyped_storage(), offset=0)
    file.save_storage(src2.untyped_storage(), offset=src1.nbytes)
    dest1, dest2 = torch.empty(1024), torch.empty(2, 1024)
    file.load_storage(dest1.untyped_storage(), offset=0)
    file.load_storage(dest2.untyped_storage(), offset=src1.nbytes)
    assert torch.equal(src1, dest1)
    assert torch.equal(src2, dest2)
    fd = file.fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_that_ends_before_is_an_error(file: GdsFile) -> None:
    file.save_storage(torch.ones(10).untyped_storage())
    with pytest.raises(ugds.Error, match="ends 4 bytes before") as caught:
        file.load_storage(torch.zeros(10).untyped_storage(), offset=4)
    assert (caught.value.errno, caught.value.offset, caught.value.completed) == (errno.ENODATA, 4, 36)


def test_handles_and_buffers_are_registered_once(file: GdsFile) -> None:
    storage = torch.ones(10).untyped_storage()
    with pytest.raises(AssertionError, match="already registered"):
        file.register_handle()
    file.deregister_handle()
    with pytest.raises(AssertionError, match="not registered"):
        file.deregister_handle()
    with pytest.raises(AssertionError, match="not registered"):
        file.load_storage(storage)
    with pytest.raises(AssertionError, match="not registered"):
        file.save_storage(storage)
    file.register_handle()
    file.save_storage(storage)
    with pytest.raises(ugds.Error, match="not registered"):
        gds_deregister_buffer(storage)
    gds_register_buffer(storage)
    file.load_storage(storage)
    gds_deregister_buffer(storage)
    with pytest.raises(ugds.Error):
        gds_deregister_buffer(storage)


def test_flags_are_those_of_open(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GdsFile(tmp_path / "none", os.O_RDWR)
    (tmp_path / "some").write_bytes(b"12345678")
    with GdsFile(tmp_path / "some", os.O_RDONLY) as file:
        target = torch.zeros(8, dtype=torch.uint8)
        file.load_storage(target.untyped_storage())
        assert bytes(target.numpy()) == b"12345678"
        with pytest.raises(ugds.Error):
            file.save_storage(target.untyped_storage())
    with GdsFile(tmp_path / "some", os.O_RDWR | os.O_TRUNC):
        assert (tmp_path / "some").stat().st_size == 0


def test_an_empty_storage_is_no_request(file: GdsFile) -> None:
    file.save_storage(torch.UntypedStorage(0))
    file.load_storage(torch.UntypedStorage(0), offset=10)


# --- fastsafetensors --------------------------------------------------------------------------------------------------


def test_fastsafetensors_reads_by_the_copier(folder: Path) -> None:
    pytest.importorskip("fastsafetensors")
    import ugds.fastsafetensors  # noqa: F401
    from fastsafetensors.loader import BaseSafeTensorsFileLoader
    from fastsafetensors.st_types import Device

    files = {folder / name: {f"{name}{i}": torch.randn(i * 100 + 2) for i in range(4)} for name in ("x", "y")}
    for path, tensors in files.items():
        safetensors.torch.save_file(tensors, path)
    loader = BaseSafeTensorsFileLoader(None, Device.from_str("cpu"), copier_type="ugds", set_numa=False)
    try:
        loader.add_filenames({0: [str(path) for path in files]})
        buffers = loader.copy_files_to_device()
        for tensors in files.values():
            for name, tensor in tensors.items():
                assert torch.equal(buffers.get_tensor(name), tensor)
        buffers.close()
    finally:
        loader.close()
