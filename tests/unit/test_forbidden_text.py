"""No file of the repository has text that belongs to one machine or one day of work."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_layering import rel, tracked

# Text that belongs to one machine or one day of work, written so that this file does not match.
FORBIDDEN = {
    r"/work/" + r"(main|shared)": "a path of one machine",
    r"(?<![\w.])/ro" + r"ot/": "a path of one machine",
    r"/home/" + r"\w+/": "a path of one machine",
    r"/tmp/" + r"(?!cc)\w+": "a fixed temporary path (other than in gcc's messages); use tempfile",
    r"pypi\." + r"org|files\.pythonhosted": "a registry host; pip knows its own",
    r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b": "an unfinished part",
}


@pytest.mark.parametrize("pattern", sorted(FORBIDDEN))
def test_forbidden_text(pattern: str):
    hits = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            hits.append(f"{rel(path)}:{line}: {match[0]}")
    assert not hits, f"{FORBIDDEN[pattern]}:\n" + "\n".join(hits)
