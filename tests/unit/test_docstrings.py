"""The examples of docstrings run, and give what they say: by PyTorch where there is no GPU."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashinfer

# Tools of a machine with a GPU; the command line has tests of its own.
LEFT_OUT = ("flashinfer.__main__", "flashinfer.cli", "flashinfer.testing.tim")
# Kernels in CuTe-DSL import these packages, which an extra installs.
EXTRAS = ("cuda", "cutlass")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def members_of(name: str) -> list[object]:
    """What a module has; nothing where it needs an extra that is not installed."""
    try:
        return list(vars(importlib.import_module(name)).values())
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRAS:
            raise
        return []


def documented() -> Iterator[tuple[str, object]]:
    """Everything of the package whose docstring has an example, by its name."""
    found = {}
    for module in pkgutil.walk_packages(flashinfer.__path__, "flashinfer."):
        for value in members_of(module.name):
            if inspect.isclass(value) or inspect.isfunction(value):
                members = vars(value).values() if inspect.isclass(value) else ()
                for part in (value, *filter(inspect.isfunction, members)):
                    name = f"{part.__module__}.{part.__qualname__}"
                    is_ours = name.startswith("flashinfer.") and not name.startswith(LEFT_OUT)
                    if is_ours and ">>>" in (part.__doc__ or ""):
                        found[name] = part
    yield from sorted(found.items())


EXAMPLES = dict(documented())


def for_this_machine(text: str) -> str:
    if torch.cuda.is_available():
        return text
    return text.replace('device="cuda"', 'device="cpu"').replace(".cuda()", ".cpu()")


def backend() -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if torch.cuda.is_available() else flashinfer.reference_backend()


def test_there_are_examples():
    assert len(EXAMPLES) >= 30
    assert {
        "flashinfer.norm.rms.rmsnorm",
        "flashinfer.page.append_paged_kv_cache",
    } <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str):
    part = EXAMPLES[name]
    text = for_this_machine(inspect.getdoc(part) or "")
    names = {**vars(inspect.getmodule(part)), "torch": torch, "flashinfer": flashinfer}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    runner, failures = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS), []
    with backend():
        runner.run(test, out=failures.append)
    assert runner.failures == 0, "".join(failures)


def test_first_example_of_the_readme():
    readme = (Path(flashinfer.__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", readme, flags=re.S | re.M)
    names: dict = {}
    with backend():
        exec(compile(for_this_machine(snippet), "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape and names["z"].shape == (1024, 14336)
