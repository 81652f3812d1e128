"""docs/names.md: which public names of FlashInfer exist here, and why the others do not."""

from __future__ import annotations

from pathlib import Path

from tests.unit import names_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "names.md"


def test_the_document_is_what_the_package_has() -> None:
    command = "python -m tests.unit.names_table docs/names.md"
    assert DOCUMENT.read_text() == names_table.markdown(), f"run `{command}`"


def test_states_are_told_apart() -> None:
    assert names_table.state("flashinfer.norm", "rmsnorm") == "works"
    assert names_table.state("flashinfer", "shuffle_matrix_a") == "refuses"
    assert names_table.state("flashinfer", "nothing") == "absent"
    assert names_table.state("flashinfer.nowhere", "nothing") == "absent"


def test_no_name_is_lost() -> None:
    """More exist than before, and the list is whole."""
    found = names_table.states()
    assert len(found) == 791
    assert sum(state != "absent" for state in found.values()) >= 504
