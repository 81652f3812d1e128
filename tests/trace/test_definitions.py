"""From a call to a definition and back: the JSON is valid, and computes what the call computed."""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.fi_trace import qualified_name, save_definition
from flashinfer.testing.tensors import clone_arguments
from flashinfer.trace.check import default_check
from flashinfer.trace.specs import argument_of
from tests.trace.calls import Operation, operations, results_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# This process may find its packages by PYTHONPATH itself.
SEARCH_PATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
COMMITTED = sorted((HERE / "fi_trace_out").glob("*.json"))

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_operation = pytest.mark.parametrize("operation", operations(), ids=lambda o: o.label)


def _model(text: str):
    bench = pytest.importorskip(
        "flashinfer_bench.data", reason="needs the flashinfer-bench package"
    )
    return bench.Definition.model_validate_json(text)


def _execute(reference: str, monkeypatch: pytest.MonkeyPatch):
    """`run` of a definition's source, which gets nothing but torch and the standard library."""
    real_import = builtins.__import__

    def guarded(name, *args, **kwargs):
        assert not name.startswith("flashinfer"), f"the reference imports {name}"
        return real_import(name, *args, **kwargs)

    namespace: dict = {}
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", guarded)
        exec(compile(reference, "<definition>", "exec"), namespace)
    return namespace["run"]


def _defaults(operation: Operation) -> dict[str, Any]:
    """What inputs of the template are where a call leaves them out."""
    parameters = inspect.signature(operation.function).parameters
    names = {key: spec.param or key for key, spec in operation.template.inputs.items()}
    found = {key: parameters[name].default for key, name in names.items() if name in parameters}
    given = {key: value for key, value in found.items() if isinstance(value, (int, float))}
    return {"eps": 1e-6, "scale": 1.0} | given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_operation
def test_round_trip(operation: Operation, dtype, device, tmp_path, monkeypatch):
    """Call, definition, file, model of flashinfer-bench, its reference run: the same result."""
    arguments = operation.arguments(dtype, device)
    definition = operation.api.fi_trace(save_dir=tmp_path, **arguments)
    model = _model((tmp_path / f"{definition['name']}.json").read_text())
    assert model.model_dump(mode="json", exclude_none=True)["inputs"].keys() == model.inputs.keys()

    template = operation.template
    gathered = template.gathered(arguments)
    given = {key: argument_of(key, template.inputs[key], gathered) for key in model.inputs}
    defaults = _defaults(operation)
    values = [defaults.get(key) if value is None else value for key, value in given.items()]
    values = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
    from_json = _execute(model.reference, monkeypatch)(*values)
    from_json = from_json if isinstance(from_json, tuple) else (from_json,)

    called = clone_arguments(arguments)
    returned = operation.api(**called)
    results = results_of(template, called, returned)
    results = tuple(r.view(torch.int8) if r.dtype == torch.uint8 else r for r in results)
    for spec, mine, theirs in zip(model.outputs.values(), results, from_json, strict=True):
        assert mine.dtype == theirs.dtype == getattr(torch, spec.dtype.value)
        assert mine.shape == theirs.shape
        if device.type == "cpu":  # the same reference on both ways: no bit may differ
            assert torch.equal(mine.float(), theirs.float())
    assert default_check(from_json, results)


@each_operation
def test_eps_and_scale_are_inputs_of_the_definition(operation: Operation, monkeypatch):
    """What a call can vary is not baked into its definition."""
    definition = operation.api.fi_trace(**operation.arguments())
    scalars = [
        key
        for key, entry in definition["inputs"].items()
        if entry["shape"] is None and entry["dtype"].startswith("float")
    ]
    arguments = operation.template.gathered(operation.arguments())
    run = _execute(definition["reference"], monkeypatch)
    usual = _defaults(operation)
    for key, spec in operation.template.inputs.items():
        given = argument_of(key, spec, arguments)
        usual |= {key: given} if given is not None else {}
    for changed in scalars:
        base = arguments.get(operation.template.inputs[changed].param or changed, 1.0)
        low, high = (
            run(*({**usual, changed: value}[key] for key in definition["inputs"]))
            for value in (base / 2, 2 * base + 1)
        )
        pairs = zip(low, high, strict=True) if isinstance(low, tuple) else [(low, high)]
        assert not all(torch.equal(x.float(), y.float()) for x, y in pairs), changed


def test_a_reference_is_built_by_flashinfer_bench(monkeypatch, tmp_path):
    """The tool's own builder takes the definition and runs it."""
    compiler = pytest.importorskip("flashinfer_bench.compile", reason="needs flashinfer-bench")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    text = (HERE / "fi_trace_out" / "fused_add_rmsnorm_h4096.json").read_text()
    runnable = compiler.BuilderRegistry.get_instance().build_reference(_model(text))
    rows = torch.randn(3, 4096, dtype=torch.bfloat16)
    output, residual = runnable(rows, rows, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(residual, rows + rows)
    assert output.dtype == torch.bfloat16 and output.shape == rows.shape


# ---- committed definitions ---------------------------------------------------------------------


def test_committed_definitions_are_what_the_code_writes(tmp_path):
    written = subprocess.run(
        [sys.executable, str(HERE / "example.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        capture_output=True,
        text=True,
    )
    assert written.returncode == 0, written.stderr
    new = {path.name: path.read_text() for path in tmp_path.iterdir()}
    old = {path.name: path.read_text() for path in COMMITTED}
    assert new == old, "run `rm -rf tests/trace/fi_trace_out && python tests/trace/example.py`"


def test_example_lists_its_files():
    docstring = (HERE / "example.py").read_text().split('"""')[1]
    assert [path.name for path in COMMITTED if path.name not in docstring] == []


def test_example_covers_every_operation():
    tags = {tag for path in COMMITTED for tag in json.loads(path.read_text())["tags"]}
    for operation in operations():
        assert f"fi_api:{qualified_name(operation.function)}" in tags


def test_tags_name_what_users_import():
    tags = {tag for path in COMMITTED for tag in json.loads(path.read_text())["tags"]}
    for path in (tag.removeprefix("fi_api:") for tag in tags if tag.startswith("fi_api:")):
        package, module, *names = path.split(".")
        assert package == "flashinfer" and not module.startswith("_")
        found = importlib.import_module(f"flashinfer.{module}")
        for name in names:
            found = getattr(found, name)
        assert callable(found)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_definition_is_valid(path: Path):
    assert _model(path.read_text()).name == path.stem


_RUN_ALL = """
import json, math, sys, torch
for path in sys.argv[1:]:
    definition = json.load(open(path))
    sizes = {a: e.get("value", 3) for a, e in definition["axes"].items()}
    shapes = [entry["shape"] or [] for entry in definition["inputs"].values()]
    if max(math.prod(sizes[axis] for axis in shape) for shape in shapes) > 2**20:
        # Half as many rows, columns and blocks of a large matrix are as good.
        sizes = {axis: size // 2 if size >= 6 else size for axis, size in sizes.items()}
    seen = {a for shape in shapes for a in shape}
    seen |= {a for a, e in definition["axes"].items() if "value" in e}
    inputs = []
    for entry in definition["inputs"].values():
        if entry["shape"] is None:
            inputs.append(0.5)
        else:
            shape = [sizes[axis] for axis in entry["shape"]]
            inputs.append(torch.rand(shape).add(0.5).to(getattr(torch, entry["dtype"])))
    namespace = {}
    exec(definition["reference"], namespace)
    outputs = namespace["run"](*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for entry, output in zip(definition["outputs"].values(), outputs, strict=True):
        for axis, size in zip(entry["shape"], output.shape, strict=True):
            assert axis not in seen or size == sizes[axis], path
        assert output.dtype == getattr(torch, entry["dtype"]), path
        assert output.float().isfinite().all(), path
assert "flashinfer" not in sys.modules
print(len(sys.argv) - 1)
"""


def test_committed_references_run_without_this_package(tmp_path):
    """In an isolated interpreter, in a folder from which flashinfer cannot be imported.

    With random inputs: not where one input says how another is laid out.
    """
    tied = (
        "dequantize",
        "scale_to_float",
        "segment_packbits",
        "gqa",
        "attention",
        "bidirectional_ranges",
        "mla_paged",
        "mla_decode",
        "trtllm",
        "xqa",
        "checkpoints",
        "fused_kda",
        "gdn_fused",
        "replayssm",
        "group_gemm",  # rows of no group are not defined
        "segment_gemm",  # the same of segments
        "group_deepgemm",
        "moe_activation",
        "moe_finalize",
        "moe_grouped_gemm",
        "grouped_mm",
        "fused_topk",  # counts are whole numbers, as in the next
        "mono_moe",
        "batch_deepgemm",
        "chunk_gated_delta",
        "cudnn_batch",
        "packed_kda",
        "pod",
        "convert_bsr",
        "rope",
        "append",
        "batch_indices",
        "seq_lens",
        "top_k_k",
        "top_k_varlen",  # fills what is left with -inf
        "concat_mla_kv",
        "mqa_logits",  # gives infinities, as the next
        "top_k_mask",
        "transform",
    )
    free = [path for path in COMMITTED if not any(word in path.stem for word in tied)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", _RUN_ALL, *map(str, free)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(free))]


# ---- dumps -------------------------------------------------------------------------------------

_DUMPED_CALLS = """
import torch, flashinfer
from pathlib import Path
with flashinfer.reference_backend():
    weight = torch.ones(64)
    for rows in (1, 2, 3):
        flashinfer.rmsnorm(torch.randn(rows, 64), weight)
    written = {p: p.stat().st_mtime_ns for p in Path("defs").iterdir()}
    flashinfer.rmsnorm(torch.randn(2, 3, 64), weight)
    flashinfer.rmsnorm(torch.randn(2, 64).half(), weight.half())
    flashinfer.rmsnorm(torch.randn(2, 32), weight[:32])
    try:
        flashinfer.rmsnorm(torch.randn(2, 48), weight)
    except ValueError as error:
        print(error)
    assert all(p.stat().st_mtime_ns == t for p, t in written.items())
"""


def test_dump_writes_one_file_per_definition(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _DUMPED_CALLS],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": SEARCH_PATH,
            "FLASHINFER_TRACE_DUMP": "1",
            "FLASHINFER_TRACE_DUMP_DIR": "defs",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "defs").iterdir())
    assert names == ["rmsnorm_h32_f32.json", "rmsnorm_h64_f16.json", "rmsnorm_h64_f32.json"]
    assert "`weight`" in done.stdout, "a bad call is refused by the operation, not by the dump"


def test_nothing_is_written_without_the_variable(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _DUMPED_CALLS.replace('Path("defs").iterdir()', "[]")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_does_not_stop_the_call(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = "import torch, flashinfer\nwith flashinfer.reference_backend():\n" + (
        "    print(flashinfer.silu_and_mul(torch.zeros(2, 8)).shape)\n" * 2
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": SEARCH_PATH,
            "FLASHINFER_TRACE_DUMP": "1",
            "FLASHINFER_TRACE_DUMP_DIR": str(blocked / "defs"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([2, 4])") == 2
    assert done.stderr.count("cannot write the definition") == 1


def test_saving_twice_leaves_the_file_alone(tmp_path):
    definition = {"name": "one", "axes": {}}
    path = save_definition(definition, tmp_path / "new")
    before = path.stat().st_mtime_ns
    assert save_definition(definition, tmp_path / "new").stat().st_mtime_ns == before
    save_definition({**definition, "axes": {"a": 1}}, tmp_path / "new")
    assert json.loads(path.read_text())["axes"] == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["one.json"]
