# SPDX-License-Identifier: Apache-2.0
"""The page that shows every figure, with its values: one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from ugds import _report
from ugds._report import Record
from ugds.bench.report.drawing import Chart

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 0 0 0.6rem; }
figure { margin: 2.5rem 0; padding: 1.2rem; border: 1px solid #ddd; border-radius: 6px; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { font-size: 0.9rem; color: #333; margin-top: 0.8rem; overflow-wrap: anywhere; }
details { margin-top: 0.6rem; font-size: 0.85rem; } div.table { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: 0.15rem 0.6rem; border-bottom: 1px solid #eee; }
th { text-align: left; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
nav ul { columns: 2 20rem; font-size: 0.9rem; }"""


def render(charts: Sequence[tuple[Chart, bytes]]) -> str:
    """The page; with each chart its image, which has neither title nor caption of its own."""
    contents = "\n".join(f'<li><a href="#{escape(c.name)}">{escape(c.title)}</a></li>' for c, _ in charts)
    sections = "\n".join(_section(chart, image) for chart, image in charts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>uGDS: what was measured</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>uGDS: what was measured</h1>
<p>Drawn by <code>ugds bench report</code>. Every axis of values starts at zero. Each figure says what it was measured
on and what it was compared with; its values are below it.</p>
<nav><ul>
{contents}
</ul></nav>
{sections}
</body>
</html>
"""


def _section(chart: Chart, image: bytes) -> str:
    data = base64.b64encode(image).decode("ascii")
    return f"""<figure id="{escape(chart.name)}">
<h2>{escape(chart.title)}</h2>
<img alt="{escape(chart.title)}. {escape(chart.note)}" src="data:image/png;base64,{data}">
<figcaption>{escape(chart.caption)}</figcaption>
<details><summary>Values</summary><div class="table">
{_table(chart.records)}
</div></details>
</figure>"""


def _table(records: Sequence[Record]) -> str:
    params = list(dict.fromkeys(name for record in records for name in record.params))
    figures = list(dict.fromkeys((name, unit) for record in records for name, (_, unit) in record.figures.items()))
    names = ["device", "memory", "transport", "route", *params]
    heads = names + [name if unit == "1" else f"{name} ({unit})" for name, unit in figures]
    rows = []
    for record in records:
        words = [record.device, record.memory, record.transport, record.route]
        words += [str(record.params.get(name, "")) for name in params]
        values = [record.figures.get(name) for name, _ in figures]
        cells = "".join(f"<td>{escape(word)}</td>" for word in words)
        cells += "".join(f'<td class="number">{"" if v is None else _report.number(v[0])}</td>' for v in values)
        rows.append(f"<tr>{cells}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"
