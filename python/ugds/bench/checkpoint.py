# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: `ugds.torch.save` and `load` beside `torch.save` and `torch.load`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ugds._report import Record
from ugds.bench import _models
from ugds.bench._gpu import Figures, in_turn


def measure(folder: str | None, size: int, gpu: int | None, rounds: int) -> list[Record]:
    """Records of saving to the page cache, of saving to the disk, and of loading from the page cache. Both load, and
    compare, what the other saved."""
    _models.needed("torch")
    import torch

    from ugds.torch import load, save

    with _models.folder(folder, size) as place:
        tensors = _models.model(size, gpu)
        if gpu is None:
            tensors = {name: torch.from_numpy(array.view("i2")) for name, array in tensors.items()}
        ours, theirs = place / "ours", place / "theirs"
        params = {"size": sum(t.nbytes for t in tensors.values()), "gpu": "none" if gpu is None else gpu}
        params["rounds"] = rounds
        where = "cpu" if gpu is None else f"cuda:{gpu}"

        def by_torch(durable: bool) -> None:
            torch.save(tensors, theirs)
            if durable:
                _models.sync(theirs)

        made = []
        for word, to, durable in (("save", "page cache", False), ("durable_save", "disk", True)):
            ways: dict[str, Callable[[], object]] = {
                "ugds": partial(save, tensors, ours, durable=durable, progress=False),
                "torch": partial(by_torch, durable),
            }
            figures = _figures(ways, gpu, rounds, params["size"], word)
            made.append(_record(ours, gpu, {**params, "to": to}, figures))
        for path in (ours, theirs):
            _models.remember(path)
        found = {"ugds": load(theirs, where), "torch": torch.load(ours, where, weights_only=True)}
        # As integers: a number that is none equals nothing, not even itself.
        wrong = [
            name
            for name, each in found.items()
            if not all(torch.equal(each[k].view(torch.int16), t.view(torch.int16)) for k, t in tensors.items())
        ]
        if wrong:
            raise RuntimeError(f"what {wrong[0]} loaded is not what was saved")
        del found
        ways = {
            "ugds": lambda: load(ours, where, progress=False),
            "torch": lambda: torch.load(ours, where, weights_only=True),
        }
        figures = _figures(ways, gpu, rounds, params["size"], "load")
        return [*made, _record(ours, gpu, {**params, "from": "page cache"}, figures)]


def _figures(ways: dict[str, Callable[[], object]], gpu: int | None, rounds: int, size: int, word: str) -> Figures:
    found = in_turn(rounds, {name: _models.timed(work, gpu) for name, work in ways.items()})
    rates = {f"{word}_{name}": value for name, value in _models.rates(found, size).items()}
    return {**rates, **_models.ratios(found, "ugds", f"{word}_ratio_to")}


def _record(path: Path, gpu: int | None, params: dict[str, Any], figures: Figures) -> Record:
    memory = "host" if gpu is None else "cuda"
    return Record("checkpoint", params, f"file:{path.parent.parent}", memory, _models.route(path, gpu), figures)
