"""The site of documents and API reference: built without a warning, whole, good in a browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import json
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests import browser

ROOT = Path(__file__).resolve().parents[2]


# Of modules inside packages, which have pages only by `DEEPER` of docs/site/api.py.
NAMED_BY_GUIDES = (
    "autotuner.listeners.call_on_change",
    "comm.comm_backend.ThreadBackend",
    "comm.mnnvl.CommBackend",
    "comm.trtllm_alltoall.MnnvlMoe",
    "fused_moe.adapters.expand_pairs",
    "fused_moe.adapters.shrink_pairs",
    "gdn_kernels.gdn_decode_bf16_state.gated_delta_rule_mtp",
)


def test_the_site_is_whole(tmp_path: Path):
    """One test: the pages are built once, in whichever process it runs."""
    pytest.importorskip("furo", reason="the extra docs is not installed")
    site = build(tmp_path / "html")
    every_public_name_has_an_entry(site)
    assert len([*site.rglob("*.html")]) > 100
    assert not dead_links(site)
    the_search_knows_names_and_words(site)
    if (path := browser.find()) is None:
        pytest.skip("all but what a browser shows: apt-get install chromium-headless-shell")
    with served(site) as address:
        a_browser_shows_search_a_table_and_a_plot(path, address)


def build(out: Path) -> Path:
    command = [sys.executable, "-m", "docs.site", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def inventory_of(site: Path) -> dict[str, str]:
    """Address of every object that the site describes, by name."""
    data = (site / "objects.inv").read_bytes()
    body = zlib.decompress(data.split(b"\n", 4)[4]).decode()
    rows = re.findall(r"^(\S+) py:\w+ \S+ (\S+) .*$", body, flags=re.M)
    return {name: address.replace("$", name) for name, address in rows}


def every_public_name_has_an_entry(site: Path) -> None:
    import flashinfer

    api = importlib.import_module("docs.site.api")
    inventory = inventory_of(site)
    lines = (ROOT / "tests/unit/public_api.txt").read_text().splitlines()
    public = [line.split(": ", 1) for line in lines if not line.startswith("#")]
    shown = {"flashinfer", *(module.__name__ for module in api.modules())}
    names = {
        f"{m}.{call.split('(')[0].split('.')[0]}"
        for ms, call in public
        for m in ms.split()
        if m in shown
    }
    exported = api.imported_as_themselves(flashinfer)
    names |= {f"flashinfer.{n}" for n in exported if api.is_ours(getattr(flashinfer, n))}
    names |= {name for all_of_one in api.names().values() for name in all_of_one}
    assert len(names) > 600
    names |= {f"flashinfer.{name}" for name in NAMED_BY_GUIDES}
    assert names <= inventory.keys()
    identifiers: dict[str, set[str]] = {}
    for name in names:
        page, _, anchor = inventory[name].partition("#")
        if page not in identifiers:
            identifiers[page] = set(re.findall(r'\bid="([^"]+)"', (site / page).read_text()))
        assert anchor in identifiers[page], name


def dead_links(site: Path) -> list[str]:
    """Links whose page or place is not there, and what a page would load from elsewhere."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    identifiers = {p: set(re.findall(r'\bid="([^"]*)"', text)) for p, text in texts.items()}
    dead = []
    for page, text in texts.items():
        dead += re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="(?:https?:)?//[^"]*', text)
        for link in set(re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or anchor and anchor not in identifiers[target] | {""}:
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead


def the_search_knows_names_and_words(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(")"))
    objects = index["objects"].items()
    names = {f"{prefix}.{entry[4]}" for prefix, found in objects for entry in found}
    assert {"flashinfer.rmsnorm", "flashinfer.gemm.fp8_linear"} <= names
    pages = {index["docnames"][i] for i in index["terms"]["warpgroup"]}
    assert {"gemm", "tuning/mla"} <= pages


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves is no event."""


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with _Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def a_browser_shows_search_a_table_and_a_plot(path: str, address: str) -> None:
    with browser.Browser(path) as chromium:
        chromium.open(f"{address}/search.html?q=fused_add_rmsnorm")
        found = "document.querySelector('#search-results li a[href*=\"api/norm.html\"]')"
        assert chromium.wait_for(found), "the search finds no entry"

        chromium.open(f"{address}/index.html")
        assert chromium.evaluate("document.querySelectorAll('.sidebar-tree a').length") > 50
        rows = "document.querySelector('table').querySelectorAll('tbody tr')"
        assert chromium.evaluate(f"{rows}.length") >= 5
        assert chromium.evaluate(f"{rows}[0].getBoundingClientRect().height") > 10

        chromium.open(f"{address}/performance.html")
        assert chromium.evaluate("document.querySelectorAll('table').length") >= 10
        plots = chromium.evaluate(
            "Promise.all([...document.querySelectorAll('article img[src$=\".svg\"]')].map("
            "p => (p.loading = 'eager', p.decode().then(() => p.naturalWidth))))"
        )
        assert len(plots) >= 8 and min(plots) > 300
        assert all(url.startswith((address, "data:", "about:")) for url in chromium.requested)
        assert not chromium.complaints


def test_numbers_of_plots_are_those_of_the_tables():
    page = (ROOT / "docs/performance.md").read_text()
    results = sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert len(results) >= 8
    for path in results:
        result = json.loads(path.read_text())
        section = page.partition(f"\n## {result['section']}\n")[2].partition("\n## ")[0]
        numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", section)}
        cases = result["cases"].values()
        values = [value for case in cases for value in case.values()]
        flat = {n for value in values for n in (value if isinstance(value, list) else [value])}
        assert flat <= numbers, f"{path.name} has numbers that docs/performance.md has not"


def test_dead_links_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<p id="x"></p><a href="b.html#y"></a><a href="#x"></a>')
    (tmp_path / "b.html").write_text('<p id="y"></p><a href="a.html"></a><img src="c.svg"/>')
    (tmp_path / "c.svg").write_text("")
    assert dead_links(tmp_path) == []
    (tmp_path / "d.html").write_text(
        '<a href="a.html#y"></a><img src="d.svg"/><script src="https://host/s.js"></script>'
    )
    found = dead_links(tmp_path)
    assert sorted(found) == [
        '<script src="https://host/s.js',
        "d.html: a.html#y",
        "d.html: d.svg",
    ]


def test_a_page_or_a_plot_without_a_place_is_refused(tmp_path: Path, monkeypatch):
    pytest.importorskip("matplotlib")
    pages, plots = (importlib.import_module(f"docs.site.{name}") for name in ("pages", "plots"))

    plot = plots.Plot("performance", "Nowhere", "a.svg", "numbers")
    with pytest.raises(ValueError, match="performance has no section 'Nowhere'"):
        plots.Plots((plot,)).add_to("performance", "# Title\n\n## Norm\n")
    listed = pages.navigation()
    monkeypatch.setattr(pages, "navigation", lambda: {"Using it": listed["Using it"]})
    with pytest.raises(ValueError, match=r"docs/index.md does not link to .*docs/attention.md"):
        pages.write(tmp_path, {}, lambda _, text: text)
