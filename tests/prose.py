"""Finds sentences of comments, docstrings and documents that are not plain English.

It counts what a rule can count. A sentence that begins with Of, That, Those, From, By or What has
a main clause with a verb. Time is "after" and "before": `_TIME` has the words for places.

``python tests/prose.py FILE ...`` looks at the folders of the named files, and at files at the
root, if they are in `ALLOWED`. It prints the findings of a folder that has more than it may still
have, and then fails.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cuh", ".cu", ".cc", ".py", ".md"}

# Findings that a folder, or a file at the root, may still have. These numbers only shrink.
ALLOWED = {
    "include": 0,
    "csrc": 0,
    "flashinfer": 0,
    "docs": 0,
    "benchmarks": 0,
    "examples": 0,
    "tests": 0,
    ".claude": 0,
    "README.md": 0,
    "CLAUDE.md": 0,
    "CHANGELOG.md": 0,
}

_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|does|do|did|can|cannot|could|may|might|must|will|would|should|"
    r"(?:take|give|read|write|hold|keep|run|start|begin|end|make|use|need|come|return|count|cost|fit|get|stay|lie|"
    r"follow|belong|become|fail|raise|mean|say|tell|ask|call|copy|load|see|share|pay|move|leave|work|wait|let|set|"
    r"serve|lose|win|gain|contain|apply|accept|expect|decide|depend|differ|remain|happen|pass|grow|go|add)(?:s|es)?)\b"
)
_FRAGMENT_START = re.compile(r"(Of|That|Those|From|By|What)\b")
_TIME = re.compile(r"\bbehind\b|\bahead of\b(?! time)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def is_fragment(sentence: str) -> bool:
    """Whether a sentence begins as a fragment does and lacks the verb of a main clause."""
    start = _FRAGMENT_START.match(sentence)
    if not start or sentence.endswith("?"):
        return False
    rest = sentence[start.end() :]
    if start[1] in ("That", "Those"):  # "That is", "Those rows are": the verb follows soon
        return not _VERB.search(" ".join(rest.split()[:3]))
    if start[1] == "What":  # "What it writes goes there": one verb for each clause
        return len(_VERB.findall(rest)) < 2
    return not _VERB.search(
        rest.partition(",")[2]
    )  # "From here on, values are": a clause follows the comma


def findings(sentences: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """The (line, sentence) pairs among `sentences` that break a rule."""
    return [(line, text) for line, text in sentences if is_fragment(text) or _TIME.search(text)]


def _split(first: int, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Sentences of a text from line `first` on.

    A blank line, a list item or another indent ends a paragraph.
    """
    paragraph: list[str] = []
    begin = indent = 0
    for number, text in enumerate([*lines, ""], first):
        words = text.strip()
        is_item = words.startswith(("- ", "* "))
        if paragraph and (not words or is_item or len(text) - len(text.lstrip()) != indent):
            yield from ((begin, sentence) for sentence in _SENTENCE_END.split(" ".join(paragraph)))
            paragraph = []
        if words:
            if not paragraph:
                begin, indent = number, len(text) - len(text.lstrip()) + 2 * is_item
            paragraph.append(words[2:] if is_item else words)


def _comment_blocks(comments: list[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Sentences of (line, column, text) comments.

    Comments of consecutive lines at one column are one text.
    """
    block: list[str] = []
    last = first = (-1, -1)
    for line, column, text in [*comments, (-1, -1, "")]:
        if (line, column) != (last[0] + 1, last[1]):
            yield from _split(first[0], block)
            block, first = [], (line, column)
        block.append(text)
        last = (line, column)


def _cpp_sentences(code: str) -> Iterator[tuple[int, str]]:
    comments = []
    for line, text in enumerate(code.split("\n"), 1):
        match = re.match(r'((?:[^"/]|"(?:\\.|[^"\\])*"|/(?!/))*)//+ ?(.*)', text)
        if match:
            comments.append((line, len(match[1]), match[2]))
    return _comment_blocks(comments)


def _python_sentences(code: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield from _split(node.body[0].lineno, docstring.split("\n"))
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [
        (*token.start, token.string.lstrip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    yield from _comment_blocks(comments)


def _markdown_sentences(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    lines = []
    for line in text.split("\n"):
        is_code ^= line.startswith("```")
        lines.append("" if is_code or line.startswith(("```", "|", "#")) else line)
    return _split(1, lines)


def file_findings(path: Path) -> list[tuple[int, str]]:
    """The (line, sentence) pairs of a file that break a rule; the line is where the text begins."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return findings(_python_sentences(text))
    return findings(_markdown_sentences(text) if path.suffix == ".md" else _cpp_sentences(text))


def folder_findings(folder: str) -> list[str]:
    """Every finding under a folder of the repository, or in a file at its root, as text."""
    root = ROOT / folder
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    paths = [path for path in paths if path.suffix in SUFFIXES]
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in file_findings(path)
    ]


def main(names: list[str]) -> int:
    folders = {Path(name).resolve().relative_to(ROOT).parts[0] for name in names} & ALLOWED.keys()
    status = 0
    for folder in sorted(folders):
        found = folder_findings(folder)
        if len(found) > ALLOWED[folder]:
            print(
                "\n".join(found),
                f"{folder}/: {len(found)} sentences, {ALLOWED[folder]} allowed",
                sep="\n",
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
