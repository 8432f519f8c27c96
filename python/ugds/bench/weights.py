# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: loading and saving, beside the safetensors package, and fastsafetensors where it is installed.

Loaded is what is in memory of its own: the package's arrays of a mapped file are copied.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ugds._report import Record
from ugds.bench import _beyond, _models
from ugds.bench._gpu import Figures, in_turn
from ugds.safetensors import load_file, save_file


def measure(folder: str | None, size: int, gpu: int | None, rounds: int, only: str | None = None) -> list[Record]:
    """Records of loading from the page cache and from the disk, of the memory that it takes beside the tensors, and of
    saving; `only` "load" or "save": of these."""
    _models.needed("safetensors")
    if gpu is not None:
        _models.needed("torch")
    with _models.folder(folder, size) as place:
        tensors = _models.model(size, gpu)
        path = place / "model.safetensors"
        save_file(tensors, path)
        params = {"size": path.stat().st_size, "gpu": "none" if gpu is None else gpu, "rounds": rounds}
        made = []
        if only != "save":
            if gpu is not None and not importlib.util.find_spec("fastsafetensors"):
                _models.tell("fastsafetensors is not installed, and is left out (pip install fastsafetensors)")
            made += [_cached(path, gpu, rounds, params), _beyond_tensors(path, gpu, params)]
            made += _cold(path, gpu, rounds, params)
        if only != "load":
            made += _saved(tensors, place, gpu, rounds, params)
        return made


def _record(path: Path, gpu: int | None, params: dict[str, Any], figures: Any) -> Record:
    memory = "host" if gpu is None else "cuda"
    return Record("safetensors", params, f"file:{path.parent.parent}", memory, _models.route(path, gpu), figures)


def _ours(path: Path, gpu: int | None) -> Callable[[], Any]:
    if gpu is None:
        return lambda: load_file(path, framework="np", progress=False)
    return lambda: load_file(path, device=gpu, progress=False)


def loaders(path: Path, gpu: int | None) -> dict[str, Callable[[], Any]]:
    """Ways to load the file, by their names."""
    return {"ugds": _ours(path, gpu), **_others(path, gpu)}


def _others(path: Path, gpu: int | None) -> dict[str, Callable[[], Any]]:
    if gpu is None:
        from safetensors.numpy import load_file as load_array

        return {"safetensors": lambda: {name: array.copy() for name, array in load_array(path).items()}}
    from safetensors.torch import load_file as load_tensor

    made: dict[str, Callable[[], Any]] = {"safetensors": lambda: load_tensor(path, device=f"cuda:{gpu}")}
    if importlib.util.find_spec("fastsafetensors"):
        made["fastsafetensors"] = lambda: _by_fastsafetensors(path, gpu)
    return made


def _by_fastsafetensors(path: Path, gpu: int) -> object:
    from fastsafetensors import fastsafe_open

    # From 0.5 on its tensors outlive the file.
    old = importlib.metadata.version("fastsafetensors").startswith(("0.1.", "0.2.", "0.3.", "0.4."))
    with fastsafe_open(filenames=[str(path)], nogds=True, device=f"cuda:{gpu}") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no dict
        return {name: tensor.clone() for name, tensor in found.items()} if old else found


def _cached(path: Path, gpu: int | None, rounds: int, params: dict[str, Any]) -> Record:
    _models.remember(path)
    found = in_turn(rounds, {name: _models.timed(work, gpu) for name, work in loaders(path, gpu).items()})
    figures = {**_models.rates(found, params["size"]), **_models.ratios(found, "ugds")}
    return _record(path, gpu, {**params, "from": "page cache"}, figures)


def _beyond_tensors(path: Path, gpu: int | None, params: dict[str, Any]) -> Record:
    figures: Figures = {}
    for who in loaders(path, gpu):
        word = "beyond_tensors_mib" if who == "ugds" else f"{who}_beyond_tensors_mib"
        figures[word] = (_beyond.measure(who, path, gpu), "MiB")
    return _record(path, gpu, {**params, "from": "page cache"}, figures)


def _cold(path: Path, gpu: int | None, rounds: int, params: dict[str, Any]) -> list[Record]:
    """Beside what plain pread with O_DIRECT reaches. Nothing where the file cannot leave the page cache."""
    if not _models.forget(path):
        _models.tell(f"reading from the disk is left out: {path.parent} stays in memory")
        return []
    try:
        _models.read_direct(path)
    except OSError as error:
        _models.tell(f"reading from the disk is left out: {path.parent} has no O_DIRECT ({error.strerror})")
        return []
    ways: dict[str, Callable[[], object]] = {"ugds": _ours(path, gpu), "disk": lambda: _models.read_direct(path)}
    ways["safetensors"] = _others(path, gpu)["safetensors"]
    found = in_turn(
        rounds, {name: _models.timed(work, gpu, lambda: _models.forget(path)) for name, work in ways.items()}
    )
    shares = _models.ratios({name: found[name] for name in ("ugds", "disk")}, "ugds", "share_of")
    ratios = _models.ratios({name: found[name] for name in ("ugds", "safetensors")}, "ugds", "cold_ratio_to")
    _models.forget(path)
    figures = {**_models.rates(found, params["size"]), **shares, **ratios}
    return [_record(path, gpu, {**params, "from": "disk"}, figures)]


def _saved(tensors: dict[str, Any], place: Path, gpu: int | None, rounds: int, params: dict[str, Any]) -> list[Record]:
    """To the page cache, as the package does; and to the disk."""
    if gpu is None:
        from safetensors.numpy import save_file as save_by_package
    else:
        from safetensors.torch import save_file as save_by_package

    def theirs(durable: bool) -> None:
        save_by_package(tensors, str(place / "theirs"))
        if durable:
            _models.sync(place / "theirs")

    made = []
    for durable in (False, True):
        ways: dict[str, Callable[[], object]] = {
            "ugds": partial(save_file, tensors, place / "ours", durable=durable, progress=False),
            "safetensors": partial(theirs, durable),
        }
        found = in_turn(rounds, {name: _models.timed(work, gpu) for name, work in ways.items()})
        word = "durable_save" if durable else "save"
        rates = {f"{word}_{name}": value for name, value in _models.rates(found, params["size"]).items()}
        figures = {**rates, **_models.ratios(found, "ugds", f"{word}_ratio_to")}
        made.append(_record(place / "ours", gpu, {**params, "to": "disk" if durable else "page cache"}, figures))
    return made
