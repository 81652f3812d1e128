"""Additions to Sphinx: formulas without a script, links from names to entries, speed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from docs.site import api

_NAME = re.compile(r"(?:flashinfer\.)?[A-Za-z_]\w*(?:\.\w+)*(?=\(\)$|$)")


def mathml(self: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show by themselves."""
    is_block = isinstance(node, nodes.math_block)
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


@cache
def parameters() -> set[str]:
    """Names of parameters of public functions: such a word in a text is rarely a function."""
    functions = [e.value for here, _ in api.entries().values() for e in here]
    callables = [f for f in functions if inspect.isfunction(f)]
    return {name for f in callables for name in inspect.signature(f).parameters}


@cache
def by_last_name() -> dict[str, str]:
    """Entries by the last part of their names, where that is one entry's alone."""
    found: dict[str, set[str]] = {}
    for first, *others in api.names().values():
        for name in (first, *others):
            found.setdefault(name.rpartition(".")[2], set()).add(first)
    return {short: min(names) for short, names in found.items() if len(names) == 1}


def entry_of(text: str) -> str | None:
    """The entry that code names: `flashinfer.norm.rmsnorm`, `norm.rmsnorm`, `rmsnorm()`."""
    match = _NAME.match(text)
    if not match or text[match.end() :] not in ("", "()"):
        return None
    name = match[0].removeprefix("flashinfer.")
    if "." not in name and name == match[0]:
        return None if name in parameters() or len(name) < 6 else by_last_name().get(name)
    return next(iter(api.names().get(id(api.find(f"flashinfer.{name}")), [])), None)


class NamesAreLinks(SphinxTransform):
    """Turn code, and names in docstrings, that name something public into links to its entry."""

    default_priority = 5  # before references are resolved

    def apply(self, **options: Any) -> None:
        for node in list(self._names()):
            if name := entry_of(node.astext()):
                reference = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=name, refexplicit=True
                )
                reference["refdoc"] = self.env.docname
                node.replace_self(reference)
                reference += node

    def _names(self) -> Iterator[nodes.literal | nodes.emphasis]:
        for node in self.document.findall(
            lambda node: isinstance(node, (nodes.literal, nodes.emphasis))
        ):
            parent: Any = node.parent
            while parent and not isinstance(parent, (nodes.reference, addnodes.pending_xref)):
                if isinstance(parent, (nodes.title, nodes.rubric)):
                    break
                parent = parent.parent
            if parent is None:
                yield node


def add_other_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Let references find an entry under all its names; the search finds it under the first."""
    objects = env.domains.python_domain.objects
    for first, *others in api.names().values():
        entry = objects[first]
        for name in others:
            objects.setdefault(name, entry._replace(aliased=True))


def navigation(app: Sphinx, page: str, _: str, context: dict[str, Any], __: object) -> None:
    """Write the theme's navigation: all groups, their pages, and what is below the one shown.

    Sphinx copies every table of contents for each page, which would take half of the build.
    """
    pathto, titles = context["pathto"], app.env.titles

    def item(name: str, text: str, depth: int) -> str:
        below = [] if depth > 1 else app.env.toctree_includes.get(name, [])
        current = " current" if name == page or page in below else ""
        below = below if current else []
        inner = "".join(item(child, titles[child].astext(), depth + 1) for child in below)
        return (
            f'<li class="toctree-l{depth}{current}"><a class="reference internal{current}" '
            f'href="{pathto(name)}">{escape(text)}</a>'
            + (f"<ul>{inner}</ul>" * bool(inner))
            + "</li>"
        )

    def tree(**_: Any) -> str:
        html = ""
        for group in app.env.tocs[app.config.root_doc].findall(addnodes.toctree):
            entries = [item(name, t or titles[name].astext(), 1) for t, name in group["entries"]]
            caption = f'<span class="caption-text">{escape(group["caption"])}</span>'
            html += f'<p class="caption" role="heading">{caption}</p><ul>{"".join(entries)}</ul>'
        return html

    context["toctree"] = tree


class Stems(SearchEnglish):
    """English, each word of all pages stemmed once."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.stem = cache(super().stem)  # type: ignore[method-assign]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.add_search_language(Stems)
    app.add_transform(NamesAreLinks)
    app.connect("env-updated", add_other_names)
    app.connect("html-page-context", navigation, priority=100)  # before the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
