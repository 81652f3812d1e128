"""The pages of the site: the repository's Markdown as it is, with its links turned to the site.

The navigation is `docs/index.md`: each line in bold begins a group, and every page that a group
links to is one entry, under the text of its link. So a new page needs one line there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"

_FENCE = re.compile(r"(^ *```.*?^ *```)", flags=re.S | re.M)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
_GROUP = re.compile(r"^\*\*(.+)\*\*$", flags=re.M)


def name_of(source: Path) -> str:
    """Name of a page: as under docs/, and what lies elsewhere under `repository/`."""
    if source.is_relative_to(DOCS):
        return str(source.relative_to(DOCS).with_suffix(""))
    return f"repository/{source.relative_to(ROOT).with_suffix('')}".replace("/.", "/")


def links(source: Path) -> Iterator[tuple[str, Path]]:
    """Text and target of every relative link of a page."""
    for mark, text, target, _ in _LINK.findall(_FENCE.sub("", source.read_text())):
        if not mark:
            yield text, (source.parent / target).resolve()


def reachable() -> list[Path]:
    """Pages under docs/, and the Markdown files that these and one another link to."""
    found = sorted(path for path in DOCS.rglob("*.md"))
    for page in found:
        found += sorted({path for _, path in links(page) if path.suffix == ".md"} - {*found})
    return found


def navigation() -> dict[str, dict[str, Path]]:
    """Text of links and their pages, by the groups of `docs/index.md`."""
    parts = _GROUP.split(INDEX.read_text())[1:]
    groups: dict[str, dict[str, Path]] = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        groups[title] = {
            " ".join(text.split()): (DOCS / target).resolve()
            for _, text, target, _ in _LINK.findall(body)
        }
    return groups


def write(folder: Path, generated: dict[str, list[str]], extend: Callable[[str, str], str]) -> None:
    """Write all pages to `folder`.

    Parameters
    ----------
    folder : Path
        Source folder of the site, made new.
    generated : dict of str to list of str
        Pages that are not in the repository, by their group of the navigation.
    extend : callable
        Called with the name and the text of each page, returns the text with what the site adds.

    Raises
    ------
    ValueError
        If a page is not in the navigation: then nobody would find it.
    """
    pages = reachable()
    listed = {path for group in navigation().values() for path in group.values()} | {INDEX}
    if lost := [str(page.relative_to(ROOT)) for page in pages if page not in listed]:
        raise ValueError(f"docs/index.md does not link to {', '.join(lost)}: add a line for each")
    for page in pages:
        place = folder / f"{name_of(page)}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        text = extend(name_of(page), _for_the_site(page, {*pages}, folder))
        place.write_text(text + (_toctrees(generated) if page == INDEX else ""))


def _for_the_site(page: Path, pages: set[Path], folder: Path) -> str:
    """Text of a page with links to pages of the site; a link to another file becomes its text."""

    def turned(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = (page.parent / target).resolve()
        if mark:
            picture = folder / "pictures" / path.name
            picture.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, picture)
            return f"![{text}](/pictures/{path.name})"
        if path in pages:
            return f"[{text}](/{name_of(path)}.md{anchor or ''})"
        return text

    parts = _FENCE.split(page.read_text())
    return "".join(p if i % 2 else _LINK.sub(turned, p) for i, p in enumerate(parts))


def _toctrees(generated: dict[str, list[str]]) -> str:
    """Navigation of the site: the groups of the index, with those that are made after the first."""
    written = [
        (title, [f"{text} </{name_of(page)}>" for text, page in group.items()])
        for title, group in navigation().items()
    ]
    made = [(title, [f"/{name}" for name in names]) for title, names in generated.items()]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(entries) + "\n```\n"
        for title, entries in (*written[:1], *made, *written[1:])
    )
