"""Every snippet of docs/variants.md gives the right result on a GPU."""

from __future__ import annotations

import pytest

from tests.unit.test_variants_document import SNIPPETS, execute

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


def test_every_snippet_gives_the_right_result():
    names: dict = {}
    for snippet in SNIPPETS:
        execute(snippet, names)
