"""What the documents say about the code is still true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashinfer.cli import COMMANDS, support

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".claude/skills/*/SKILL.md")]
)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_operations_table_is_current():
    """If not: `python -m flashinfer.cli.support README.md`."""
    readme = (ROOT / "README.md").read_text()
    assert support.rewrite(readme) == readme
    assert support.markdown() in readme
    with pytest.raises(ValueError, match="operations"):
        support.rewrite("a document without marks")


def test_every_public_operation_is_in_the_table():
    import flashinfer
    from flashinfer.api_logging import _TRACE_REGISTRY

    names = {name for _, name, _ in support.operations()}
    traced = {function.__qualname__.removesuffix(".run") for function, _, _ in _TRACE_REGISTRY}
    assert traced & set(dir(flashinfer)) <= names
    assert {"rmsnorm", "BatchAttention", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"} <= names


def test_support_follows_the_configuration_of_modules():
    archs = {name: (family, archs) for family, name, archs in support.operations()}
    attention = ("attention", list(support.ARCHITECTURES[1:]))
    for name in ("single_decode_with_kv_cache", "MultiLevelCascadeAttentionWrapper"):
        assert archs[name] == attention, "from SM80 on"
    from_sm80 = list(support.ARCHITECTURES[1:])
    assert archs["BatchMLAPagedAttentionWrapper"] == ("mla", from_sm80)
    assert archs["chunk_gated_delta_rule2"] == ("gdn2_prefill", from_sm80)
    assert archs["merge_state"] == ("cascade", list(support.ARCHITECTURES))


def test_support_follows_declared_capabilities(monkeypatch: pytest.MonkeyPatch):
    def hopper_only() -> None: ...

    hopper_only.is_compute_capability_supported = lambda cc: cc >= 90
    archs = [a for a in support.ARCHITECTURES if support._runs_on(hopper_only, a)]
    assert archs == ["9.0a", "10.0a", "10.3a", "11.0a", "12.0a", "12.1a"]


# Made by an installation, or by whoever follows the skill that adds an operation called clip.
ABSENT = re.compile(r"flashinfer/(data/|_build_meta)|.*/(test_)?clip(_|\b)")
FOLDERS = (
    "include|csrc|flashinfer|tests|benchmarks|examples|docs|3rdparty|flashinfer-(?:jit-cache|cubin)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_and_paths_exist(document: Path):
    """Relative links, and paths in backticks that start in a folder of the repository."""
    text = document.read_text()
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", prose)
    missing = [link for link in links if not (document.parent / link).exists()]
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", prose):
        if not ABSENT.match(path) and not (ROOT / path).exists():
            missing.append(path)
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_commands_exist(document: Path):
    """Every `flashinfer <command>` that a document names is one."""
    named = re.findall(
        r"(?:^|`|\$ |\" )flashinfer ([a-z][a-z-]+)\b", document.read_text(), flags=re.M
    )
    assert set(named) <= {"version", *COMMANDS}


def test_guide_is_short():
    assert len((ROOT / "CLAUDE.md").read_text().splitlines()) < 200
