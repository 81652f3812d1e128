"""The lint of comments and documents (tests/prose.py): its rules, its readers, the repository."""

import pytest

from tests import prose


@pytest.mark.parametrize(
    "sentence",
    [
        "Of the latest keys; those of 8 bits.",
        "Of tiles of one number of rows.",
        "Those of the latest item.",
        "That of the graph.",
        "From rows of a token to rows of a column.",
        "By one warp: a lane per page.",
        "What the wrappers share.",
    ],
)
def test_a_fragment_is_found(sentence):
    assert prose.is_fragment(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "Of the four kernels, one is chosen.",
        "Those rows are zero.",
        "That costs a register.",
        "From sm_90 on, threads may use the copy engine.",
        "By default, the planner decides.",
        "What the kernel writes is read by the merge.",
        "What decides?",
        "Offsets of the rows.",
        "Frames of a video.",
    ],
)
def test_a_sentence_is_not_a_fragment(sentence):
    assert not prose.is_fragment(sentence)


@pytest.mark.parametrize(
    ("sentence", "is_found"),
    [
        ("Loaded ahead of the wait.", True),
        ("The merge runs behind the kernel.", True),
        ("Kernels can be built ahead of time.", False),
        ("Loaded before the wait.", False),
    ],
)
def test_time_is_after_and_before(sentence, is_found):
    assert bool(prose.findings(iter([(1, sentence)]))) == is_found


def test_cpp_comments_are_read(tmp_path):
    path = tmp_path / "kernel.cuh"
    path.write_text(
        '// Keys arrive first. Of the next\n// tile.\nint a = 0;  // behind it\nf("// Of text.");\n'
        "\n//   Of a table.\n"
    )
    assert prose.file_findings(path) == [
        (1, "Of the next tile."),
        (3, "behind it"),
        (6, "Of a table."),
    ]


def test_docstrings_and_python_comments_are_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Holds plans."""\n\n\ndef f():\n    """Of a plan.\n\n    Returns\n    -------\n'
        '    int\n        By rows.\n    """\n    # Those of it.\n    return "Of text."\n'
    )
    assert prose.file_findings(path) == [
        (5, "Of a plan."),
        (10, "By rows."),
        (12, "Those of it."),
    ]


def test_documents_are_read_without_code_and_tables(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "# What is here\n\nA plan.\nOf it.\n\n- Those of it\n\n| Of | it |\n\n```\nOf code.\n```\n"
    )
    assert prose.file_findings(path) == [(3, "Of it."), (6, "Those of it")]


@pytest.mark.parametrize("folder", sorted(prose.ALLOWED))
def test_the_repository_has_no_more_than_allowed(folder):
    found = prose.folder_findings(folder)
    assert len(found) <= prose.ALLOWED[folder], "\n".join(found)


def test_the_command_fails_on_one_finding_too_many(monkeypatch, capsys):
    name = str(prose.ROOT / "include" / "flashinfer" / "x.cuh")
    monkeypatch.setattr(prose, "ALLOWED", {"include": 0})
    monkeypatch.setattr(prose, "folder_findings", lambda folder: [f"{folder}/x.cuh:1: Of it."])
    assert prose.main([name]) == 1
    assert "include/x.cuh:1: Of it." in capsys.readouterr().out
    monkeypatch.setattr(prose, "ALLOWED", {"include": 1})
    assert prose.main([name]) == 0
