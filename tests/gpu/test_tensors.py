# SPDX-License-Identifier: Apache-2.0
"""Files of tensors to and from a GPU's memory: safetensors files, checkpoints, storages, fastsafetensors' copier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ugds
from gpu_support import FAKE, MIB
from ugds._load import layout, transfer
from ugds._load.files import Source
from ugds._load.layout import Run
from ugds._load.transfer import Piece
from ugds.bench import cuda
from ugds.safetensors import load_file, load_files, safe_open, save_file

DTYPES = ("bfloat16", "float32", "uint8", "float16", "int64", "float8_e4m3fn", "bool")


@pytest.fixture(scope="module")
def torch() -> Any:
    if FAKE:
        pytest.skip("frameworks need a GPU")
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return found


@pytest.fixture
def tensors(torch: Any) -> dict[str, Any]:
    """On the host: of every kind of size, so that places in the file are aligned for nothing."""
    generator, made = torch.Generator().manual_seed(1), {}
    for number, size in enumerate((0, 1, 3, 4096, 5 * MIB + 1, 40 * MIB, 17, 2 * MIB)):
        kind = getattr(torch, DTYPES[number % len(DTYPES)])
        data = torch.randint(0, 2, (size * kind.itemsize,), dtype=torch.uint8, generator=generator)
        made[f"layers.{number}"] = data.view(kind) if size else torch.empty(0, dtype=kind)
    return made


def same(torch: Any, ours: Any, theirs: Any) -> bool:
    one, other = ours.cpu(), theirs.cpu()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 4])
def test_pieces_of_a_file_land_in_the_gpus_memory(
    gpu: cuda.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    path, size = tmp_path / "file", 9 * MIB + 77
    data = cuda.pattern(size, 3)
    data.tofile(path)
    monkeypatch.setattr(transfer, "READERS", threads)
    done: list[int] = []
    with gpu.memory(size) as memory, Source(path) as source:
        with ugds.register(memory, devices=[source.device()]) as buffer:
            runs = layout.pieces([Run(5, size - 9, 3)], MIB)
            transfer.read([Piece(str(path), source.device(), buffer, *run) for run in runs], done.append)
        assert (gpu.read(memory.address + 3, size - 9) == data[5:-4]).all()
    assert sum(done) == size - 9


@pytest.mark.parametrize("in_cache", [True, False])
def test_a_file_is_loaded_onto_the_gpu(torch: Any, tensors: dict[str, Any], tmp_path: Path, in_cache: bool) -> None:
    path = tmp_path / "model"
    save_file(tensors, path, durable=not in_cache)
    if not in_cache:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = load_file(path, device="cuda")
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.device == torch.device("cuda", torch.cuda.current_device())
        assert same(torch, tensor, tensors[name]), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.nbytes >= 4096:
            assert tensor.data_ptr() % 16 == 0
    assert (found["layers.5"].float() + 1).sum() > 0  # kernels take it
    with safe_open(path, device="cuda") as file:
        assert same(torch, file.get_slice("layers.4")[MIB : 2 * MIB], tensors["layers.4"][MIB : 2 * MIB])


def test_tensors_of_the_gpu_are_saved_as_those_of_the_host(torch: Any, tensors: dict[str, Any], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "host")
    for durable in (True, False):
        save_file({name: t.cuda() for name, t in tensors.items()}, tmp_path / "gpu", durable=durable)
        assert (tmp_path / "gpu").read_bytes() == (tmp_path / "host").read_bytes()


def test_several_files_go_to_several_gpus(torch: Any, tensors: dict[str, Any], tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        save_file({f"{path.name}.{name}": t for name, t in tensors.items()}, path)
    devices = {"a": torch.device("cuda", 0), "b": torch.device("cuda", last)}
    for found in (
        load_files(paths, list(devices.values())),
        load_files(paths, lambda name: devices[name[0]]),
    ):
        assert len(found) == 2 * len(tensors)
        for name, tensor in found.items():
            assert tensor.device == devices[name[0]]
            assert same(torch, tensor, tensors[name[2:]]), name


def test_memory_beside_the_tensors_is_bounded(torch: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_file({str(i): torch.ones(32 * MIB, dtype=torch.uint8) for i in range(16)}, path, durable=False)
    load_file(path, device="cuda")  # what is kept for the next time is there then
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found = load_file(path, device="cuda")
    size = sum(t.nbytes for t in found.values())
    assert torch.cuda.max_memory_allocated() - before <= size + MIB
    assert free - torch.cuda.mem_get_info()[0] <= size + 256 * MIB


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_what_is_enqueued_is_saved_and_memory_in_use_is_left_alone(torch: Any, tmp_path: Path, own: bool) -> None:
    """The allocator gives memory again that kernels of the stream are still to read."""
    from ugds.torch import load, save

    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        for turn in range(5):
            tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(50_000_000)
            tensor.fill_(turn + 1)
            save({"a": tensor}, tmp_path / "c.pt", durable=False)
            save_file({"a": tensor}, tmp_path / "c", durable=False)
            torch.cuda._sleep(50_000_000)
            total = tensor.sum()
            del tensor
            found = load(tmp_path / "c.pt")["a"], load_file(tmp_path / "c", device="cuda")["a"]
            assert int(total) == (turn + 1) * 8 * MIB
            assert all(bool((t == turn + 1).all()) for t in found)


def test_a_checkpoint_comes_back_where_it_was_or_elsewhere(torch: Any, tensors: dict[str, Any], tmp_path: Path) -> None:
    from ugds.torch import load, save

    obj = {"gpu": {name: t.cuda() for name, t in tensors.items()}, "host": tensors, "step": 3}
    obj["view"] = obj["gpu"]["layers.5"][5:10]
    save(obj, tmp_path / "ours.pt")
    torch.save(obj, tmp_path / "theirs.pt")
    for path in (tmp_path / "ours.pt", tmp_path / "theirs.pt"):
        for device in (None, "cpu", "cuda"):
            found = load(path, device)
            for where in ("gpu", "host"):
                for name, tensor in found[where].items():
                    assert same(torch, tensor, tensors[name])
                    assert tensor.device.type == (device or {"gpu": "cuda", "host": "cpu"}[where])
            assert found["view"].data_ptr() == found["gpu"]["layers.5"][5:].data_ptr()
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert all(same(torch, found["gpu"][name], t) for name, t in tensors.items())


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("offset", [0, 4096, 777])
def test_a_storage_comes_back(torch: Any, tmp_path: Path, offset: int, registered: bool) -> None:
    from ugds.torch import GdsFile, gds_deregister_buffer, gds_register_buffer

    source, target = torch.randn(MIB + 3, device="cuda"), torch.zeros(MIB + 3, device="cuda")
    storages = [source.untyped_storage(), target.untyped_storage()]
    for storage in storages if registered else []:
        gds_register_buffer(storage)
    with GdsFile(tmp_path / "f", os.O_CREAT | os.O_RDWR) as file:
        file.save_storage(storages[0], offset)
        file.load_storage(storages[1], offset)
        assert torch.equal(source, target)
        with pytest.raises(ugds.Error, match="ends 1 bytes before"):
            file.load_storage(storages[1], offset + 1)
    for storage in storages if registered else []:
        gds_deregister_buffer(storage)


def test_fastsafetensors_reads_by_the_copier(torch: Any, tensors: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("fastsafetensors")
    import ugds.fastsafetensors  # noqa: F401
    from fastsafetensors.loader import BaseSafeTensorsFileLoader
    from fastsafetensors.st_types import Device

    given = {name: t for name, t in tensors.items() if t.numel()}
    save_file(given, tmp_path / "model")
    loader = BaseSafeTensorsFileLoader(None, Device.from_str("cuda:0"), copier_type="ugds", set_numa=False)
    try:
        loader.add_filenames({0: [str(tmp_path / "model")]})
        buffers = loader.copy_files_to_device()
        for name, tensor in given.items():
            assert same(torch, buffers.get_tensor(name), tensor), name
        buffers.close()
    finally:
        loader.close()
