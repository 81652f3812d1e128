"""Draw what the groups of one CTA did in a profile, as a timeline.

    python benchmarks/draw_profile.py trace.json timeline.svg [--block 0] [--microseconds 20]

``trace.json`` is a file of `flashinfer.profiler.export_to_perfetto_trace`. A row is a group; events
within others are drawn lower. Times count from the block's first event.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLOURS = ("#4c78a8", "#9ecae9", "#f58518", "#54a24b", "#b279a2", "#79706e", "#e45756", "#72b7b2")
WIDTH, LEFT, ROW, TOP = 1130, 80, 46, 44
STYLE = """<style>
  .bg { fill: #ffffff; }
  text { font: 12px sans-serif; fill: #1f2328; }
  @media (prefers-color-scheme: dark) { .bg { fill: #0d1117; } text { fill: #e6edf3; } }
</style>"""


class Span(NamedTuple):
    """An event from its begin to its end, in microseconds; `depth` others are open around it."""

    name: str
    begin: float
    end: float
    depth: int


def spans_of(rows: list[dict], block: int) -> dict[int, list[Span]]:
    """The events of a block by group."""
    groups: dict[int, int] = {}
    for row in rows:
        found = row["ph"] == "M" and re.fullmatch(
            rf"block {block}, group (\d+)", str(row.get("args", {}).get("name", ""))
        )
        if found:
            groups[row["tid"]] = int(found[1])
    spans: dict[int, list[Span]] = {group: [] for group in groups.values()}
    is_open: dict[int, list[tuple[str, float]]] = {tid: [] for tid in groups}
    for row in rows:
        if row.get("tid") not in groups or row["ph"] not in "BE":
            continue
        stack = is_open[row["tid"]]
        if row["ph"] == "B":
            stack.append((row["name"], row["ts"]))
        else:
            name, begin = stack.pop()
            spans[groups[row["tid"]]].append(Span(name, begin, row["ts"], len(stack)))
    return spans


def picture(spans: dict[int, list[Span]], block: int, microseconds: float) -> str:
    """The timeline as SVG."""
    first = min(span.begin for found in spans.values() for span in found)
    last = max(span.end for found in spans.values() for span in found)
    shown = min(microseconds, last - first)
    scale = (WIDTH - LEFT - 20) / shown
    names = sorted({span.name for found in spans.values() for span in found})
    colour = dict(zip(names, COLOURS, strict=False))
    height = TOP + ROW * len(spans) + 30
    title = f"Events of block {block} in its first {shown:.1f} microseconds"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{title}</title>',
        f'<desc id="desc">A row for each of {len(spans)} groups, with {", ".join(names)}.</desc>',
        STYLE,
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
    ]
    for i, name in enumerate(names):
        x = LEFT + 110 * i
        lines.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour[name]}"/>')
        lines.append(f'<text x="{x + 17}" y="22">{escape(name)}</text>')
    for place, group in enumerate(sorted(spans)):
        y = TOP + ROW * place
        lines.append(f'<text x="12" y="{y + 20}">group {group}</text>')
        for span in sorted(spans[group], key=lambda span: span.depth):
            begin, end = span.begin - first, min(span.end - first, shown)
            if begin >= shown:
                continue
            lines.append(
                f'<rect x="{LEFT + begin * scale:.1f}" y="{y + 12 * span.depth}" '
                f'width="{max((end - begin) * scale, 0.4):.1f}" height="{30 - 12 * span.depth}" '
                f'fill="{colour[span.name]}"/>'
            )
    for i in range(6):
        x, y = LEFT + i * (WIDTH - LEFT - 20) / 5, height - 12
        lines.append(
            f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{i * shown / 5:.1f} us</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--microseconds", type=float, default=20.0)
    given = parser.parse_args()
    try:
        rows = json.loads(given.trace.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{given.trace} is no trace file: {error!r}")
    spans = spans_of(rows, given.block)
    if not any(spans.values()):
        parser.error(f"--block {given.block} has no events in {given.trace}")
    given.out.write_text(picture(spans, given.block, given.microseconds))


if __name__ == "__main__":
    main()
