"""Distributions as an index and its users see them: files, metadata, dependencies."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests import install_check
from tests.unit.test_packaging import ROOT, VERSION
from tests.unit.test_packaging import dist as dist
from tests.unit.test_packaging import wheel as wheel

# Files that setuptools and the build backend write for an sdist.
GENERATED = {"MANIFEST.in", "PKG-INFO", "README.index.md", "setup.cfg"}
GENERATED |= {"flashinfer/_build_meta.py"}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"flashinfer_python-{VERSION}.dist-info/METADATA").decode()
    return Parser().parsestr(text)


def listed(*options: str) -> set[str]:
    """Files of the checkout as git lists them."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("the sources are no git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *options]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


def test_sdist_has_what_git_tracks(dist: Path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert listed() - files == set()
    known = listed() | listed("--others", "--exclude-standard") | GENERATED
    assert {name for name in files - known if ".egg-info/" not in name} == set()


def test_wheel_has_every_file_of_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {n for n in listed() if n.startswith("flashinfer/")} - names == set()


def test_metadata_names_authors_and_addresses(metadata: Message):
    assert metadata["Author"] and metadata["Maintainer"]
    urls = dict(text.split(", ", 1) for text in metadata.get_all("Project-URL", []))
    assert len(urls) >= 2 and all(re.fullmatch(r"https://[\w./-]+", u) for u in urls.values())
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_description_has_no_link_that_an_index_cannot_follow(metadata: Message):
    description = str(metadata.get_payload())
    readme = (ROOT / "README.md").read_text()
    assert "](docs/" in readme and description.count("\n") == readme.count("\n")
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert [target for target in targets if not re.match(r"[a-z]+:", target)] == []
    assert "Quickstart (`docs/quickstart.md`)" in description


def backend():
    import importlib.util

    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_to_the_repository_that_a_publisher_names():
    build_backend = backend()
    project = (ROOT / "pyproject.toml").read_text()
    with_address = build_backend.with_repository(project, {"repository": "https://host/a/b/"})
    assert 'Repository = "https://host/a/b"' in with_address
    text = "[a](docs/a.md) [b](https://b) [c](#c)\n```\n[d](d.md)\n```\n`[x]`(y) [e.md](e.md)\n"
    assert build_backend.index_readme(text, with_address) == (
        f"[a](https://host/a/b/blob/v{VERSION}/docs/a.md) [b](https://b) [c](#c)\n"
        "```\n[d](d.md)\n```\n"
        f"`[x]`(y) [e.md](https://host/a/b/blob/v{VERSION}/e.md)\n"
    )
    assert (
        build_backend.index_readme("[e.md](e.md), [x y](e.md)", project) == "`e.md`, x y (`e.md`)"
    )
    assert build_backend.with_repository(project, None) == project
    with pytest.raises(ValueError, match="repository must be an address"):
        build_backend.with_repository(project, {"repository": 'https://a"\nname = "b'})


def test_every_dependency_of_users_has_a_lower_bound(wheel: Path):
    pins = install_check.lowest(wheel, ("", "bench", "cuda", "cutlass", "docs", "serve"))
    assert {"torch", "apache-tvm-ffi", "uvicorn"} <= {pin.partition("==")[0] for pin in pins}
    needed = {requirement.name for requirement in install_check.requirements(wheel, ("",))}
    assert needed == {
        *("apache-tvm-ffi", "click", "jinja2", "ninja", "numpy", "nvidia-ml-py"),
        *("packaging", "tabulate", "torch", "tqdm"),
    }


def test_versions_of_python_are_stated_once_and_alike(metadata: Message):
    """The lowest classifier is the bound of pip, of ruff and of mypy."""
    classifiers = metadata.get_all("Classifier", [])
    minors = [int(c.rpartition("3.")[2]) for c in classifiers if ":: 3." in c]
    assert minors == list(range(minors[0], minors[-1] + 1))
    project = (ROOT / "pyproject.toml").read_text()
    assert metadata["Requires-Python"] == f">=3.{minors[0]}"
    assert f'target-version = "py3{minors[0]}"' in project
    assert f'python_version = "3.{minors[0]}"' in project


def test_no_hint_installs_a_distribution_of_that_name_from_an_index():
    """There it is another project: a hint says `pip install -e ".[serve]"`.

    With a version of that project the name means it, as in the comparison of both.
    """
    texts = {n: (ROOT / n).read_text() for n in listed() if n.endswith((".py", ".md"))}
    wanted = re.compile(r"pip install[^\n]*\bflashinfer-python(?!==0\.7\.2)")
    assert {n for n, text in texts.items() if wanted.search(text) and "/tests/" not in n} == set()


@pytest.mark.full
def test_the_lowest_dependencies_work(wheel: Path, tmp_path: Path):
    """pip installs them into a new environment, where the smoke test and the example run."""
    pins = install_check.lowest(wheel)
    try:
        report = install_check.check(install_check.sys.executable, wheel, pins, tmp_path)
    except RuntimeError as error:
        if "Could not find a version" in str(error) and "from versions: none" in str(error):
            pytest.skip("pip reaches no index")
        raise
    finally:
        shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # gigabytes
    assert report["torch"].partition("+")[0] == dict(pin.split("==") for pin in pins)["torch"]
