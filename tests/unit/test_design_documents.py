"""Pages of docs/design and docs/tuning: size, links, pictures, and whether examples are true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.attention_plans import Options, Requests, make_plan

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUNING = sorted((DOCS / "tuning").glob("*.md"))
PICTURES = sorted(DOCS.rglob("*.svg"))


def table(text: str, head: str) -> list[list[str]]:
    """Cells of the rows under a table's head."""
    rows = text.partition(head)[2].partition("\n\n")[0].strip().splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_index_lists_every_page():
    links = set(re.findall(r"\]\(([\w/]+\.md)\)", (DOCS / "index.md").read_text()))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages - {"index.md"} == links


def test_pages_of_measurements_are_short():
    assert len((DOCS / "performance.md").read_text().splitlines()) <= 200
    lengths = {path.name: len(path.read_text().splitlines()) for path in TUNING}
    assert lengths and max(lengths.values()) <= 150, lengths


@pytest.mark.parametrize("path", TUNING, ids=lambda path: path.stem)
def test_a_page_of_measurements_begins_with_today(path: Path):
    headings = re.findall(r"^## (.*)", path.read_text(), flags=re.M)
    assert headings[0] == "Today"


def test_pages_that_the_code_names_exist():
    sources = [
        path
        for folder in ("include", "csrc", "flashinfer", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cuh", ".h", ".cu", ".cc", ".py")
    ]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in sources
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())
    }
    assert len(named) > 20
    assert not [(path, name) for path, name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_xml_for_light_and_dark_pages(path: Path):
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("}svg") and root.get("viewBox")
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text and "<title" in text and "<desc" in text
    assert any(f"]({path.name})" in page.read_text() for page in path.parent.glob("*.md"))


def test_there_is_a_picture():
    assert PICTURES


@pytest.mark.compiler
def test_the_example_of_the_scheduler():
    """One KV head, groups of four, four CTA slots; requests of 4096, 1024 and 512 keys."""
    text = (DOCS / "design" / "scheduler.md").read_text()
    options = Options(num_kv_heads=1, group_size=4, tile_q=16, cta_slots=4)
    plan = make_plan(options, Requests(1, (4096, 1024, 512)))
    expected = []
    for number, column in enumerate(plan.columns):
        for item in plan.items[column]:
            tiles = -(-(int(item["kv_end"]) - int(item["kv_begin"])) // options.tile_kv)
            slot = str(item["partial_slot"]) if item["partial_slot"] >= 0 else "none"
            keys = f"{item['kv_begin']} to {item['kv_end']}"
            row = [number, item["request"], keys, slot, tiles + options.piece_tiles]
            expected.append([str(cell) for cell in row])
    assert table(text, "| column | request | keys | slot | cost |\n") == expected
    merges = [(m["request"], m["slot_begin"], m["slot_end"] - 1) for m in plan.merges]
    assert merges == [(0, 0, 2), (1, 3, 4)], "as the page says below the table"
