"""Which operation runs on which architecture: the table of README.md, made from the code.

    python -m flashinfer.cli.support              print it
    python -m flashinfer.cli.support README.md    put it between the marks of that file

An operation is a public function, or a wrapper with a `run`, that has a trace template; those that
`flashinfer` itself does not export stand with their module. It runs wherever our kernels compile,
unless it declares its compute capabilities with `backend_requirement` or the configuration of its
modules does.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .._instrument.call import public_path
from ..jit.attention import AttentionConfig
from ..jit.attention.mla import MlaConfig
from ..jit.config import ModuleConfig
from ..jit.cute_dsl_norm import CuteDslNormConfig
from ..jit.delta_rule import ChunkDeltaRuleConfig, DeltaRuleConfig
from ..jit.mamba import SelectiveStateConfig
from ..jit.mqa_logits import MqaLogitsConfig

ARCHITECTURES = (
    "7.5", "8.0", "8.6", "8.9", "9.0a", "10.0a", "10.3a", "11.0a", "12.0a", "12.1a",
)  # fmt: skip
"""What kernels are written for; the tests compile modules of every generator for each of these."""

TESTED = "9.0a"
"""Where GPU tests of all families have been run: an H200."""


_ATTENTION = ("attention", "cudnn", "decode", "pod", "prefill", "sparse")  # modules of one family
_CONFIGS: dict[str, type[ModuleConfig]] = {
    "attention": AttentionConfig,
    "attn_scores": MqaLogitsConfig,
    "cute_dsl": CuteDslNormConfig,
    "dense_mqa": MqaLogitsConfig,
    "gdn2_prefill": ChunkDeltaRuleConfig,
    "gdn_decode": DeltaRuleConfig,
    "gdn_prefill": ChunkDeltaRuleConfig,
    "kda_decode": DeltaRuleConfig,
    "mamba": SelectiveStateConfig,
    "mla": MlaConfig,
}
"""What says which architectures a family's kernels are for, if not all."""


def operations() -> list[tuple[str, str, list[str]]]:
    """Every public operation: functions, and wrappers by their `run`.

    Returns
    -------
    list of tuple
        (family, name, architectures), sorted.
    """
    import flashinfer

    found, seen = [], set()
    for module in (flashinfer, *_public_modules(flashinfer)):
        prefix = f"{module.__name__}.".removeprefix("flashinfer.")
        for name in dir(module):
            value = getattr(module, name)
            function = getattr(value, "run", None) if isinstance(value, type) else value
            if function is None or not hasattr(function, "fi_trace"):
                continue
            if name.startswith("_") or id(value) in seen:
                continue
            seen.add(id(value))
            family = _family(value)
            runs_on = [a for a in ARCHITECTURES if _runs_on(function, a, family)]
            found.append((family, prefix + name, runs_on))
    return sorted(found)


_OLDER_PATHS = ("fp4_quantization", "fp8_quantization")  # of what another module has


def _public_modules(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_") and info.name not in _OLDER_PATHS:
            yield importlib.import_module(f"{package.__name__}.{info.name}")


def _family(operation: Callable[..., Any]) -> str:
    module = operation.__module__.split(".")[1]
    if module in ("_attention", "_common"):
        module = public_path(operation).split(".")[1]
    module = module.lstrip("_")
    is_attention = module in _ATTENTION or "Attention" in operation.__name__
    return "attention" if is_attention and module != "mla" else module


def _runs_on(function: Callable[..., Any], arch: str, family: str = "") -> bool:
    major, minor = arch.rstrip("af").split(".")
    supported = getattr(function, "is_compute_capability_supported", None)
    if supported is not None:
        return bool(supported(10 * int(major) + int(minor)))
    config = _CONFIGS.get(family)
    majors = config.supported_major_versions if config else None
    return majors is None or int(major) in majors


def markdown() -> str:
    """The table in Markdown, with its legend."""
    headers = ["family", "operation", *(f"SM{arch.replace('.', '')}" for arch in ARCHITECTURES)]
    lines = [_row(headers), _row(["---"] * len(headers))]
    previous = ""
    for family, name, archs in operations():
        marks = [_mark(arch, archs) for arch in ARCHITECTURES]
        lines.append(_row([family if family != previous else "", f"`{name}`", *marks]))
        previous = family
    lines += ["", "● tested on a GPU (SM90a: H200); ○ compiled by the tests, never run; – refused."]
    return "\n".join(lines) + "\n"


def _mark(arch: str, archs: list[str]) -> str:
    if arch not in archs:
        return "–"
    return "●" if arch == TESTED else "○"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_MARKED = re.compile(
    r"(<!-- operations: [^\n]* -->\n).*?(<!-- end of operations -->)", flags=re.DOTALL
)


def rewrite(document: str) -> str:
    """The text of a document with the current table between the marks.

    Raises
    ------
    ValueError
        If the document has no marks.
    """
    new, count = _MARKED.subn(lambda m: f"{m[1]}\n{markdown()}\n{m[2]}", document)
    if count != 1:
        raise ValueError(f"expected one table between `<!-- operations`, got {count}")
    return new


def main() -> None:
    """Print the table, or rewrite it in the documents that are named."""
    parser = argparse.ArgumentParser(
        "python -m flashinfer.cli.support", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "documents", nargs="*", type=Path, help="files with the table's marks; none: print it"
    )
    documents = parser.parse_args().documents
    for file in documents:
        try:
            file.write_text(rewrite(file.read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
    if not documents:
        print(markdown(), end="")


if __name__ == "__main__":
    main()
