"""The layer rules of the repository, checked on its text: nothing is imported or compiled."""

from __future__ import annotations

import ast
import re
import subprocess
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include" / "flashinfer"
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "flashinfer"

CXX = {".h", ".cuh", ".cu", ".cc", ".cpp", ".inc", ".jinja"}

# The layers that a layer of include/flashinfer may include. Other folders are op families.
BASE_LAYERS = {
    "common": set(),
    "ptx": {"common"},
    "collective": {"ptx", "common"},
    "layout": {"ptx", "common"},
    "scheduler": set(),
    "profiler": set(),
}
# (family, family it includes): reason.
FAMILY_EDGES: dict[tuple[str, str], str] = {
    ("norm", "activation"): "a norm with an activation behind is one kernel",
    ("attention", "quantization"): "attention whose result is quantised in groups is one kernel",
    ("norm", "quantization"): "a norm whose result is quantised in groups is one kernel",
    ("gemm", "rope"): "a row's product whose columns are heads, which it turns, is one kernel",
    ("comm", "quantization"): "a sum over ranks, normed and quantised, is one kernel",
    ("quantization", "activation"): "a gated activation with quantised output is one kernel",
}

# Folders of a family that hold one implementation each, in the same namespace of file names. What
# they share lies one level up and knows neither.
IMPLEMENTATIONS = {"portable", "sm90"}

# Files of csrc/ that may name tvm/ffi, beside *_jit_binding.cc.
TVM_HEADERS = {"ffi.h", "tvm_ffi_utils.h"}

# Programs that take variables of a compiler away, which are no part of a module's identity.
REMOVES_VARIABLES = {"flashinfer.jit.cute_dsl_compile"}

# Modules of the package that import nothing of ours.
PYTHON_LEAVES = {"env", "version", "_common.dtypes", "_common.arch"}
# Modules outside jit/ that jit/ may import; the handles of compiled graphs import nothing of ours.
JIT_MAY_IMPORT = {
    *("env", "version", "compilation_context", "_common.dtypes", "_common.locks"),
    "_compile.handles",
}
# Public modules and packages that private ones may import: they know no operation.
BELOW_PRIVATE = {
    *("env", "version", "tllm_enums", "compilation_context", "jit", "trace", "autotuner"),
}
MAX_LINES = {"include": 500, "csrc": 500, "flashinfer": 500, "tests": 400}


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository: what git tracks or would add, else everything but hidden folders."""
    git = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        files = [
            p
            for p in ROOT.rglob("*")
            if not any(q.startswith(".") for q in p.relative_to(ROOT).parts)
        ]
    return tuple(sorted(p for p in files if p.is_file()))


def under(folder: Path, *suffixes: str) -> list[Path]:
    return [
        p for p in tracked() if p.is_relative_to(folder) and (not suffixes or p.suffix in suffixes)
    ]


def rel(path: Path) -> str:
    return str(path.relative_to(ROOT))


def strip_comments(code: str) -> str:
    """C++ without comments (line count kept) so that prose about a rule does not break it."""
    blank = lambda m: "\n" * m[0].count("\n") if m[0].startswith("/") else m[0]  # noqa: E731
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, code, flags=re.S)


@cache
def cxx(path: Path) -> str:
    return strip_comments(path.read_text())


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """(opening bracket, included name) of every #include."""
    yield from re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', cxx(path), flags=re.M)


def layer(name: str) -> str:
    """Layer of `flashinfer/<layer>/...`; a header without a folder is a family of its own."""
    parts = Path(name).parts
    return parts[1] if len(parts) > 2 else Path(parts[1]).stem


def implementation(name: str) -> str | None:
    """`portable` or `sm90` of `flashinfer/<family>/<implementation>/...`; None: what they share."""
    folder = Path(name).parts[2:-1]
    return folder[0] if folder and folder[0] in IMPLEMENTATIONS else None


# ---- C++ ----


def test_there_is_something_to_check():
    assert under(INCLUDE) and under(CSRC) and under(PACKAGE, ".py")


@pytest.mark.parametrize("path", under(INCLUDE), ids=rel)
def test_include_edges(path: Path):
    own = layer(str(path.relative_to(INCLUDE.parent)))
    own_implementation = implementation(str(path.relative_to(INCLUDE.parent)))
    for bracket, name in includes(path):
        assert bracket == "<", f'{rel(path)}: #include "{name}" must be written <flashinfer/...>'
        assert not re.match(r"(torch|ATen|c10|tvm|dlpack)/", name), f"{rel(path)} includes <{name}>"
        if not name.startswith("flashinfer/"):
            if own == "scheduler":
                assert "cuda" not in name, f"{rel(path)}: scheduler/ is plain C++, not <{name}>"
            continue
        assert (INCLUDE.parent / name).is_file(), f"{rel(path)}: <{name}> does not exist"
        other = layer(name)
        if other == own:
            assert implementation(name) in {own_implementation, None}, (
                f"{rel(path)} includes <{name}>, which is of another implementation"
            )
            continue
        allowed = BASE_LAYERS.get(own)
        if allowed is None:
            ok = other in BASE_LAYERS or (own, other) in FAMILY_EDGES
            assert ok, f"{rel(path)}: family {own} includes family {other} (<{name}>)"
        else:
            assert other in allowed, (
                f"{rel(path)}: {own} may include {sorted(allowed)}, not <{name}>"
            )


def test_no_include_cycles():
    graph = {
        str(p.relative_to(INCLUDE.parent)): [
            n for _, n in includes(p) if n.startswith("flashinfer/")
        ]
        for p in under(INCLUDE)
    }
    assert find_cycle(graph) is None, f"include cycle: {' -> '.join(find_cycle(graph) or [])}"


@pytest.mark.parametrize("path", under(INCLUDE), ids=rel)
def test_header_form(path: Path):
    text = cxx(path)
    assert path.suffix in {".h", ".cuh"}, f"{rel(path)}: headers end in .h (plain C++) or .cuh"
    assert re.search(r"^\s*#pragma once", text, flags=re.M), f"{rel(path)} lacks #pragma once"
    for number, depth, line in with_depth(text):
        if re.search(r"\busing\s+namespace\b", line):
            assert depth > 0, (
                f"{rel(path)}:{number}: `using namespace` at namespace scope in a header"
            )


def with_depth(code: str) -> Iterator[tuple[int, int, str]]:
    """(line number, depth in braces that are not a namespace's, line)."""
    stack: list[bool] = []
    opens_namespace = False
    for number, line in enumerate(code.splitlines(), 1):
        yield number, sum(not is_namespace for is_namespace in stack), line
        for token in re.findall(r'"(?:\\.|[^"\\])*"|\bnamespace\b|[{};]', line):
            if token == "namespace":
                opens_namespace = not re.search(r"\busing\s+namespace\b", line)
            elif token == "{":
                stack.append(opens_namespace)
                opens_namespace = False
            elif token == "}" and stack:
                stack.pop()
            elif token == ";":
                opens_namespace = False


@pytest.mark.parametrize("path", [p for p in under(CSRC) if p.suffix in CXX], ids=rel)
def test_csrc(path: Path):
    text = cxx(path)
    assert "__global__" not in text, f"{rel(path)}: kernels live in include/"
    assert not re.search(r"<\s*(torch|ATen|c10)/", text), f"{rel(path)} includes torch"
    if not (path.name.endswith("_jit_binding.cc") or path.name in TVM_HEADERS):
        named = [name for _, name in includes(path) if name.startswith("tvm/")]
        assert not named, f"{rel(path)} includes {named}: tvm/ffi belongs to the binding"
        if path.suffix == ".cu":
            ffi = [name for _, name in includes(path) if Path(name).name in TVM_HEADERS]
            assert not ffi, f"{rel(path)} includes {ffi}: a launcher knows nothing of tvm"
    for _, name in includes(path):
        assert not name.endswith((".cu", ".cc")), f"{rel(path)} includes the source {name}"


@pytest.mark.parametrize(
    "path", [*under(PACKAGE, ".py"), *under(ROOT / "benchmarks", ".py")], ids=rel
)
def test_no_cuda_source_in_python(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.search(r"__global__\s+void", node.value), f"{rel(path)}:{node.lineno}"


# ---- Python ----


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {
        module_name(p): p
        for p in under(PACKAGE, ".py")
        if "data" not in p.relative_to(PACKAGE).parts
    }


def imported(name: str) -> set[str]:
    """Modules of ours that `name` imports: the deepest that exists for each import statement.

    Imports inside functions and under `if TYPE_CHECKING:` count like any other: one that hides
    there is still an arrow that a reader has to follow.
    """
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "flashinfer"}
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source.split(".")[0] != "flashinfer":
                continue
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in modules() else source)
    return found - {name}


def find_cycle(graph: dict[str, list[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for other in graph.get(node, ()):
                if cycle := visit(other, [*trail, node]):
                    return cycle
            done.add(node)
        return None

    for start in sorted(graph):
        if cycle := visit(start, []):
            return cycle
    return None


def test_imports_are_acyclic():
    """No module needs itself, not even through an import that runs later or never."""
    graph = {name: sorted(imported(name)) for name in modules()}
    cycle = find_cycle(graph)
    assert cycle is None, f"import cycle: {' -> '.join(cycle or [])}"


def is_private(name: str) -> bool:
    return any(re.match(r"_[a-z]", part) for part in name.split("."))


@pytest.mark.parametrize("name", sorted(filter(is_private, modules())))
def test_private_modules_import_no_public_operation(name: str):
    """A public module is a face: what it shows is built from private modules, never under them."""
    for other in imported(name):
        base = other.split(".")[1] if "." in other else ""
        assert is_private(other) or base in BELOW_PRIVATE, f"{rel(modules()[name])} imports {other}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_operations_do_not_know_the_reference_backend(name: str):
    """The reference backend replaces operations from outside; the package's face alone names it."""
    knows = "flashinfer.reference_backend" in imported(name)
    assert not knows or name == "flashinfer", rel(modules()[name])


def test_top_level_is_the_public_api():
    """What stands directly in flashinfer/ is what users import; helpers have packages."""
    top = [n for n in modules() if n.count(".") == 1 and modules()[n].name != "__init__.py"]
    helpers = [n for n in top if is_private(n) and n != "flashinfer.__main__"]
    assert not helpers, f"{helpers} belong into _common/, _instrument/ or a family's package"


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_call_spreads_a_literal_tuple(name: str):
    """Arguments that belong together have a name or a type; `f(*(a, b), *(c, d))` hides them."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        for argument in node.args if isinstance(node, ast.Call) else ():
            spread = isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
            assert not spread, f"{rel(modules()[name])}:{argument.lineno}"


@pytest.mark.parametrize("leaf", sorted(PYTHON_LEAVES))
def test_leaves_import_nothing_of_ours(leaf: str):
    assert imported(f"flashinfer.{leaf}") == set()


@pytest.mark.parametrize("name", sorted(n for n in modules() if n.startswith("flashinfer.jit")))
def test_jit_imports_no_public_module(name: str):
    for other in imported(name):
        inside = other == "flashinfer.jit" or other.startswith("flashinfer.jit.")
        allowed = inside or other.removeprefix("flashinfer.") in JIT_MAY_IMPORT
        assert allowed, f"{rel(modules()[name])} imports {other}"


def op_modules() -> list[str]:
    """Public op modules: those that have a generator of the same name in jit/."""
    return [
        n
        for n in modules()
        if n.count(".") == 1 and n.replace("flashinfer.", "flashinfer.jit.") in modules()
    ]


@pytest.mark.parametrize("name", sorted(set(op_modules()) - {"flashinfer.env"}))
def test_public_modules_do_not_import_each_other(name: str):
    others = imported(name) & set(op_modules()) - {"flashinfer.env"}
    assert not others, (
        f"{rel(modules()[name])} imports {sorted(others)}; share code through a private module"
    )


@pytest.mark.parametrize("name", sorted(modules()))
def test_environment_is_read_in_one_place(name: str):
    if name in ("flashinfer.env", *REMOVES_VARIABLES):
        return
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        found = set()
        if isinstance(node, ast.Attribute):
            found = {ast.unparse(node)} & {"os.environ", "os.getenv", "os.putenv"}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found = {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}
        where = f"{rel(modules()[name])}:{getattr(node, 'lineno', 0)}"
        assert not found, f"{where}: {sorted(found)}; use flashinfer.env"


def test_benchmarks_do_not_import_tests():
    for path in under(ROOT / "benchmarks", ".py"):
        assert not re.search(r"^\s*(from|import)\s+tests\b", path.read_text(), flags=re.M), rel(
            path
        )


# ---- budgets ----


def test_file_budgets():
    """Files of the package and its sources keep their budget; over it a test file warns."""
    over = []
    for top, limit in MAX_LINES.items():
        for path in under(ROOT / top):
            lines = path.read_text().count("\n") if path.suffix in CXX | {".py"} else 0
            if lines > limit:
                over.append(f"{rel(path)}: {lines} lines, budget {limit}")
    for text in over:
        warnings.warn(text, stacklevel=1)
    assert not [text for text in over if not text.startswith("tests/")]


def test_function_budget():
    """No function of the package has more than 60 lines between its signature and its end."""
    over = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and (lines := body_lines(node)) > 60:
                over.append(f"{name}.{node.name}: {lines} lines of code, budget 60")
    assert over == []


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not statements:
        return 0
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1
