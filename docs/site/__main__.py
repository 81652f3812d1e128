"""Builds the site of the documents and the API reference.

    python -m docs.site                 into build/site/html, which git ignores
    python -m docs.site --out FOLDER

Nothing is downloaded, and the pages need no network. A warning of Sphinx is an error: a link that
leads nowhere, a docstring that does not parse, a page that the navigation does not have.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from docs.site import api, pages, plots

HERE = Path(__file__).resolve().parent


def build(out: Path) -> None:
    """Build the site into a folder, which is made new.

    Raises
    ------
    SystemExit
        With the status of Sphinx if it warns.
    """
    from sphinx.cmd.build import build_main

    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        api.write(source)
        pictures = plots.write(source / "pictures")
        pages.write(source, {"API reference": ["api/index"]}, pictures.add_to)
        options = ["-q", "-W", "--keep-going", "-c", str(HERE), "-d", f"{name}/doctrees"]
        status = build_main([*options, "-b", "html", str(source), str(out)])
    if status:
        raise SystemExit(status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.site")
    parser.add_argument("--out", type=Path, default=pages.ROOT / "build/site/html")
    out = parser.parse_args().out
    try:
        import furo  # noqa: F401
    except ImportError:
        sys.exit("Sphinx and its theme are not installed: pip install -e '.[docs]', or make docs")
    build(out)
    print(f"The site is in {out}: open {out / 'index.html'}")


if __name__ == "__main__":
    main()
