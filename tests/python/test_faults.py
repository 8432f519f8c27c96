# SPDX-License-Identifier: Apache-2.0
"""The fault matrix's own parts: the table, the patches, and a runner that outlives what it runs. `./test --faults` runs
the matrix itself."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest
import run
from rows import OPEN, WAYS
from table import table

WORKER = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    group, name, way = line.rstrip("\\n").split("\\t")
    if name == "crash": os.abort()
    if name == "hang": time.sleep(60)
    print(json.dumps({"ms": 1, "wrong": "" if name == "right" else "as it should not be"}), flush=True)
"""


def test_the_table_says_what_every_fault_gives_by_every_way_in() -> None:
    cells = faults = 0
    for group, rows in table().items():
        names = [row.name for row in rows]
        assert len(set(names)) == len(names), f"{group}: two rows of one name"
        for row in rows:
            assert set(row.results) in ({OPEN}, set(WAYS)), row.name
            given = [result for result in row.results.values() if result is not None]
            if OPEN not in row.results:
                cells += len(given)
                faults += 1
            assert given, row.name
    assert faults >= 80
    assert cells >= 320


def test_every_patch_applies_and_has_cells_that_must_notice_it(tmp_path: Path) -> None:
    mutations.patch(tmp_path)
    text = "".join(path.read_text() for path in (tmp_path / "core").rglob("*.?pp"))
    assert len(mutations.names()) >= 8
    assert set(mutations.names()) == set(mutations.CHOSEN)
    _, bounds = run.plan(table())
    for name, cells in mutations.CHOSEN.items():
        assert f'mutation("{name}")' in text
        assert cells
        assert set(cells) <= set(bounds), name


def test_a_patch_that_does_not_apply_any_more_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches, engine = tmp_path / "patches", tmp_path / "engine"
    patches.mkdir()
    engine.mkdir()
    for path in mutations.PATCHES.glob("*.patch"):
        text = path.read_text()
        if path.stem == "skip-drain":
            text = text.replace("in_flight() != 0", "in_flight() != 1")
        (patches / path.name).write_text(text)
    monkeypatch.setattr(mutations, "PATCHES", patches)
    with pytest.raises(mutations.BuildError, match=r"skip-drain\.patch does not apply any more"):
        mutations.patch(engine)


def test_a_cell_that_crashes_or_hangs_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(run, "HERE", tmp_path)
    names = ["right", "crash", "right ", "hang", "wrong", "right"]
    cells = [("g", name, str(at)) for at, name in enumerate(names)]
    results = run.run_group(cells, dict.fromkeys(cells, 2.0), {})
    told = [results[cell].wrong for cell in cells]
    assert told[0] == told[5] == ""
    assert "ended by itself" in told[1]
    assert "did not end within 2 s" in told[3]
    assert told[4] == "as it should not be"


def test_the_matrix_is_plain_and_narrow_where_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table()
    _, bounds = run.plan(rows)
    run.show(rows, {cell: run.Result(12345, "") for cell in bounds}, plain=True)
    text = capsys.readouterr().out
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("+ 12345") == len(bounds)
