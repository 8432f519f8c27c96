# SPDX-License-Identifier: Apache-2.0
"""`ugds bench report`: what benchmarks printed, as figures and a page of them.

matplotlib draws, and is loaded by `make` alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ugds._report import CommandError


@dataclass(frozen=True)
class Drawn:
    """One figure that was drawn."""

    name: str
    title: str
    caption: str
    file: Path


@dataclass(frozen=True)
class Report:
    charts: list[Drawn]
    page: Path


def make(files: Sequence[Path], out: Path) -> Report:
    """Draws every figure that the files have data for: a PNG file each in the folder `out`, and index.html. Without
    files, of what standard input holds. Raises CommandError for what cannot be read or written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "figures are drawn by matplotlib, which is not installed\n"
            "  what to do: python -m pip install 'ugds[report]', or: python -m pip install matplotlib"
        )
    from ugds.bench.report import charts, data, gpu, page, single

    records = data.read(files)
    kinds = (
        single.setup,
        charts.sync_bandwidth,
        charts.sync_latency,
        charts.many_threads,
        charts.batch_bandwidth,
        charts.first_batch,
        single.completion,
        charts.mixed,
        gpu.serialized,
        gpu.overlap,
        gpu.streams,
        single.others,
    )
    found = sorted((chart for kind in kinds for chart in kind(records)), key=lambda chart: _order(chart.name))
    names: list[str] = []
    for index, chart in enumerate(found):
        names.append(chart.name)
        if (count := names.count(chart.name)) > 1:  # a file each
            found[index] = dataclasses.replace(chart, name=f"{chart.name}-{count}")
    if not found:
        raise CommandError("nothing of what was read has a figure to draw", status=2)
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = []
        for chart in found:
            file = out / f"{chart.name}.png"
            file.write_bytes(chart.png(alone=True))
            drawn.append(Drawn(chart.name, chart.title, chart.caption, file))
        index_file = out / "index.html"
        index_file.write_text(page.render([(chart, chart.png(alone=False)) for chart in found]))
    except OSError as error:
        raise CommandError(f"cannot write {error.filename or out}: {error.strerror}") from None
    return Report(drawn, index_file)


def _order(name: str) -> tuple[bool, str]:
    """Those of the paper first, by their numbers."""
    return not name.startswith("figure-"), name
