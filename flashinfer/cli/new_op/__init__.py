"""`new-op`: every file of an element-wise operation, from the templates beside this file.

The new operation multiplies by a number. It builds, runs on the reference backend and passes its
own tests as it is; the formula is then yours to change. Lists of names get a line each.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ...env import child_environment
from ..failure import explained

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

# Template: where its file goes.
FILES = {
    "params.h": "include/flashinfer/@family@/@op@_params.h",
    "kernel.cuh": "include/flashinfer/@family@/@op@.cuh",
    "launcher.h": "csrc/@op@.h",
    "launcher.cu": "csrc/@op@.cu",
    "binding.cc": "csrc/@op@_jit_binding.cc",
    "generator.py": "flashinfer/jit/@op@.py",
    "template.py": "flashinfer/trace/templates/@op@.py",
    "test.py": "tests/@family@/test_@op@.py",
    "fuzzer.py": "tests/@family@/test_@op@_fuzz.py",
    "routine.py": "benchmarks/routines/@op@.py",
}

# Makes the trace file of the new call, and the lists that are made from the code, in a process
# that has the op.
FINISH = """
from pathlib import Path
import torch
import flashinfer
from flashinfer.cli import support
from tests.trace.example import list_files
with flashinfer.reference_backend():
    flashinfer.{op}(torch.randn(32, 4096, dtype=torch.bfloat16), 2.0)
list_files(Path("tests/trace/fi_trace_out"))
readme = Path("README.md")
readme.write_text(support.rewrite(readme.read_text()))
"""

NEXT = """
Next: the formula, in include/flashinfer/{family}/{op}.cuh and in the reference, then
  python -m pytest tests/{family} -k {op}
  python benchmarks/flashinfer_benchmark.py --routine {op} --refcheck
README.md marks whole families as tested on a GPU: run the tests there before you commit."""


@click.command("new-op")
@click.argument("name")
@click.option("--family", required=True, help="Folder of kernels and tests, such as norm.")
@explained
def new_op(name: str, family: str) -> None:
    """Write every file of an element-wise operation NAME into this checkout."""
    _check(name, family)
    written = [*_write_files(name, family), *_register(name, family)]
    written += _finish(name)
    _tidy([path for path in written if path.suffix != ".json"])
    for path in dict.fromkeys(written):
        click.echo(f"  {path.relative_to(ROOT)}")
    click.echo(NEXT.format(op=name, family=family))


def _check(name: str, family: str) -> None:
    for what, word in (("NAME", name), ("--family", family)):
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", word):
            raise click.BadParameter(f"{what} must be words like `silu_and_mul`, got {word!r}")
    if not (ROOT / "csrc" / "ffi.h").is_file() or not (HERE / "kernel.cuh.in").is_file():
        raise click.ClickException("this installation is no checkout: there is nothing to add to")
    if len(name) > 40:
        raise click.BadParameter(f"NAME must have at most 40 letters, got {len(name)}")
    exists = [p for p in FILES.values() if (ROOT / _filled(p, name, family)).exists()]
    if exists or re.search(rf"\bas {name}\b", (ROOT / "flashinfer" / "__init__.py").read_text()):
        found = _filled(exists[0], name, family) if exists else f"flashinfer.{name}"
        raise click.ClickException(f"{found} exists already")


def _filled(text: str, name: str, family: str, up: str = "") -> str:
    pascal = "".join(word.capitalize() for word in name.split("_"))
    for mark, value in {"op": name, "Op": pascal, "family": family, "up": up}.items():
        text = text.replace(f"@{mark}@", value)
    return text


def _template(file: str, name: str, family: str, up: str = "") -> str:
    return _filled((HERE / f"{file}.in").read_text(), name, family, up)


def _write_files(name: str, family: str) -> Iterator[Path]:
    for file, place in FILES.items():
        path = ROOT / _filled(place, name, family)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_template(file, name, family))
        yield path
    yield from _write_function(name, family)


def _write_function(name: str, family: str) -> Iterator[Path]:
    """The public function: in the family's only module, or in one of its own in its package."""
    module, package = ROOT / "flashinfer" / f"{family}.py", ROOT / "flashinfer" / family
    if module.is_file():
        text = _with_imports(
            module.read_text(), _template("function_imports.py", name, family, ".")
        )
        body = _template("function.py", name, family)
        module.write_text(_with_public_name(f"{text}\n\n{body}", name))
        yield module
        return
    face = package / "__init__.py"
    if not face.is_file():
        package.mkdir()
        face.write_text(f'"""Operations of the family {family}."""\n\n__all__ = []\n')
    imports = _template("function_imports.py", name, family, "..")
    head = f'"""{name}."""\n\nfrom __future__ import annotations\n\n'
    path = package / f"{name}.py"
    path.write_text(f"{head}{imports}\n{_template('function.py', name, family)}")
    text = _with_imports(face.read_text(), f"from .{name} import {name} as {name}\n")
    face.write_text(_with_public_name(text, name))
    yield from (path, face)


def _with_imports(text: str, imports: str) -> str:
    """`text` with imports after its last one (or its docstring); ruff sorts them."""
    body = ast.parse(text).body
    places = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)] or body[:1]
    lines = text.splitlines(keepends=True)
    lines.insert(places[-1].end_lineno or 1, imports)
    return "".join(lines)


def _with_public_name(text: str, name: str) -> str:
    """`text` whose `__all__`, if there is one, has the name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = sorted({*ast.literal_eval(node.value), name})
            lines = text.splitlines(keepends=True)
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [f"__all__ = {names!r}\n".replace("'", '"')]
            return "".join(lines)
    return text


def _register(name: str, family: str) -> Iterator[Path]:
    """The lines that lists of names get."""
    yield _inserted(
        "flashinfer/__init__.py",
        r"        from \.utils import",
        f"        from .{family} import {name} as {name}\n",
    )
    call = f"    flashinfer.{name}(torch.randn(NUM_TOKENS, 4096, dtype=torch.bfloat16), 2.0)\n"
    yield _inserted("tests/trace/example_calls.py", r"    call_norms\(", call)


def _inserted(file: str, before: str, line: str) -> Path:
    path = ROOT / file
    text, count = re.subn(f"(?m)^(?={before})", lambda _: line, path.read_text(), count=1)
    if count == 0:
        raise click.ClickException(f"{file} has no line like {before!r}: add {line.strip()!r}")
    path.write_text(text)
    return path


def _finish(name: str) -> Iterator[Path]:
    """The trace file of the call in tests/trace/example_calls.py, and README.md."""
    folder = ROOT / "tests" / "trace" / "fi_trace_out"
    before = set(folder.iterdir())
    changes = {
        "PYTHONPATH": str(ROOT),
        "FLASHINFER_TRACE_DUMP": "1",
        "FLASHINFER_TRACE_DUMP_DIR": str(folder),
    }
    command = [sys.executable, "-c", FINISH.format(op=name)]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(changes), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise click.ClickException(f"the new operation does not run:\n{done.stderr}")
    yield from {*folder.iterdir()} - before
    yield ROOT / "README.md"


def _tidy(paths: list[Path]) -> None:
    """Sort imports and lay out lines as `make lint` wants them, where its tools are."""
    files = {
        suffix: [str(path) for path in paths if path.suffix in suffix.split()]
        for suffix in (".py", ".h .cuh .cu .cc")
    }
    for tool, options, kind in (
        ("ruff", ["check", "-q", "--fix", "--select", "I"], ".py"),
        ("ruff", ["format", "-q"], ".py"),
        ("clang-format", ["-i"], ".h .cuh .cu .cc"),
    ):
        beside = Path(sys.executable).with_name(tool)
        program = str(beside) if beside.is_file() else shutil.which(tool)
        if program is None:
            click.echo(f"{tool} is not installed: run it before you commit", err=True)
        else:
            subprocess.run([program, *options, *files[kind]], cwd=ROOT, check=True)


COMMANDS = [new_op]
