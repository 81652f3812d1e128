"""``torch.compile(fullgraph=True)`` of public operations, and what the operators of all promise.

Dynamo takes a quarter of a second for a graph, and ``torch.library.opcheck`` half a second for an
operator: by default they look at every sixth and at every twelfth operation. The stand-in that
Dynamo traces is called by itself for each. Without a GPU the operators compute by their references.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

import flashinfer
from flashinfer._compile.handles import references
from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace.calls import Operation, operations, runs_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


OPERATIONS = [operation for operation in operations() if runs_on(operation, DEVICE)]
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.label)


def every(nth: int) -> pytest.MarkDecorator:
    """All operations, of which each `nth` runs by default."""
    cases = [
        pytest.param(operation, id=operation.label, marks=pytest.mark.full if i % nth else ())
        for i, operation in enumerate(OPERATIONS)
    ]
    return pytest.mark.parametrize("operation", cases)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    torch._dynamo.reset()
    with contextlib.nullcontext() if DEVICE == "cuda" else flashinfer.reference_backend():
        yield


def is_random(operation: Operation) -> bool:
    return "generator" in inspect.signature(operation.function).parameters


def assert_same(actual: Any, expected: Any) -> None:
    pairs = list(zip(iter_tensors(actual), iter_tensors(expected), strict=True))
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def drawn_arguments(operation: Operation) -> dict[str, Any]:
    """Arguments with which two calls of an operation give the same."""
    arguments = operation.arguments(device=DEVICE)
    return (
        {**arguments, "seed": torch.tensor([5], device=DEVICE)}
        if is_random(operation)
        else arguments
    )


def check_call(call: Callable[..., Any], operation: Operation) -> Any:
    """`call` returns and writes what the operation does; the result."""
    arguments = drawn_arguments(operation)
    eager, given = clone_arguments(arguments), clone_arguments(arguments)
    expected = operation.api(**eager)
    actual = call(**given)
    assert type(actual) is type(expected)
    assert_same(actual, expected)
    assert_same([given[name] for name in eager], [eager[name] for name in eager])
    return actual


@every(6)
def test_one_graph_computes_and_writes_what_the_call_does(operation: Operation):
    api = operation.api
    compiled = torch.compile(lambda **call: api(**call), fullgraph=True, backend="aot_eager")
    check_call(compiled, operation)


@each_operation
def test_the_stand_in_computes_writes_and_foretells_what_the_call_does(operation: Operation):
    """Its operator's results are those of the call, and of tensors without values of that form."""
    stand_in = operation.api._torchdynamo_inline
    results = check_call(stand_in, operation)
    arguments = drawn_arguments(operation)
    if "self" in arguments:
        return  # Dynamo knows how to hold the plan of a wrapper while it traces
    with FakeTensorMode() as mode:
        try:
            foretold = stand_in(**tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        except DynamicOutputShapeException:
            return  # what is not known beforehand
    for fake, real in zip(iter_tensors(foretold), iter_tensors(results), strict=True):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert fake.stride() == real.stride()


def graph_of(call: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Operators of this package that a compiled call uses, with their arguments."""
    found = []

    class Noted(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "namespace", None) == "flashinfer":
                given = clone_arguments(dict(enumerate(args)))
                found.append((target, tuple(given.values())))
            return super().call_function(target, args, kwargs)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: Noted(graph).run(*args)

    torch.compile(lambda **given: call(**given), fullgraph=True, backend=backend)(**arguments)
    yield from found


def is_float8(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 1


@every(12)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_operators_pass_the_check_of_torch(operation: Operation):
    arguments = operation.arguments(device=DEVICE)
    checked = 0
    for operator, args in graph_of(operation.api, arguments):
        names = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if not any(is_float8(arg) for arg in args):
            names.append("test_schema")  # which multiplies the arguments
        torch.library.opcheck(operator, args, test_utils=names)
        checked += 1
    assert checked == 1


def operator_of(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    ((operator, args),) = graph_of(call, arguments)
    return operator, args


def planned(
    wrapper: Any = None,
    o_dtype: torch.dtype | None = None,
    pages: tuple[int, ...] = (0, 1, 2),
) -> Any:
    """A decode wrapper with a plan of two requests."""
    wrapper = wrapper or flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 24, dtype=torch.uint8, device=DEVICE)
    )
    wrapper.plan(
        indptr=torch.tensor([0, 1, 3], dtype=torch.int32),
        indices=torch.tensor(pages, dtype=torch.int32, device=DEVICE),
        last_page_len=torch.tensor([3, 4], dtype=torch.int32),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=4,
        q_data_type=torch.float16,
        o_data_type=o_dtype,
    )
    return wrapper


def queries_and_cache() -> dict[str, torch.Tensor]:
    """Tensors of a run of `planned`."""
    return {
        "q": torch.randn(2, 4, 64, dtype=torch.float16, device=DEVICE),
        "paged_kv_cache": torch.randn(8, 2, 4, 2, 64, dtype=torch.float16, device=DEVICE),
    }


def test_the_operator_shows_in_the_graph_with_what_it_writes():
    x, weight = torch.randn(4, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    call = {"input": x, "residual": x.clone(), "weight": weight}
    operator, _ = operator_of(flashinfer.fused_add_rmsnorm, call)
    arguments = operator._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert operator._schema.name == "flashinfer::fused_add_rmsnorm"
    assert written == ["input", "residual"]
    operator, _ = operator_of(flashinfer.softmax, {"logits": x})
    assert not operator._schema.is_mutable and len(operator._schema.returns) == 1


def test_a_graph_allocates_the_results_that_a_call_leaves_out():
    """Inductor plans their memory then, and checks no result's strides."""
    x, weight = torch.randn(2, 4, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    for call in ({"input": x, "weight": weight}, {"input": x, "weight": weight, "out": None}):
        operator, args = operator_of(flashinfer.rmsnorm, call)
        written = [a.name for a in operator._schema.arguments if a.is_write]
        assert written == ["out_"] and not operator._schema.returns
        assert args[-1].shape == x.shape and args[-1].is_contiguous()
    lse = {"self": planned(), **queries_and_cache(), "return_lse": True}
    operator, args = operator_of(type(lse["self"]).run, lse)
    assert [a.name for a in operator._schema.arguments if a.is_write] == ["out_", "lse"]
    assert [(t.shape, t.dtype) for t in args[-2:]] == [
        ((2, 4, 64), torch.float16),
        ((2, 4), torch.float32),
    ]


def test_sizes_may_change_without_a_new_graph():
    graphs = []
    call = torch.compile(
        lambda x, w: flashinfer.rmsnorm(x, w),
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )
    weight = torch.ones(64, device=DEVICE)
    for rows in (3, 5, 17):
        x = torch.randn(rows, 64, device=DEVICE)
        assert_same(call(x, weight), flashinfer.rmsnorm(x, weight))
    assert len(graphs) == 1


def test_a_new_plan_serves_the_graph_and_other_results_make_another():
    graphs = []
    wrapper = planned()
    q, cache = queries_and_cache().values()
    step = torch.compile(
        lambda q, cache: wrapper.run(q, cache),
        fullgraph=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )
    for pages in ((0, 1, 2), (5, 6, 7)):
        planned(wrapper, pages=pages)
        assert_same(step(q, cache), wrapper.run(q, cache))
    assert len(graphs) == 1
    planned(wrapper, torch.bfloat16)
    assert step(q, cache).dtype == torch.bfloat16 and len(graphs) == 2
    lse = torch.compile(lambda q, cache: wrapper.run_return_lse(q, cache)[1], fullgraph=True)
    assert_same(lse(q, cache), wrapper.run_return_lse(q, cache)[1])


def test_two_wrappers_of_one_function_have_their_own_plans():
    wrappers = [planned(pages=pages) for pages in ((0, 1, 2), (5, 6, 7))]
    q, cache = queries_and_cache().values()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(wrapper: Any, q: torch.Tensor) -> torch.Tensor:
        return wrapper.run(q, cache)

    for wrapper in (*wrappers, *wrappers):
        assert_same(step(wrapper, q), wrapper.run(q, cache))


def test_a_wrapper_that_is_gone_is_named():
    wrapper = planned()
    call = {"self": wrapper, **queries_and_cache()}
    operator, args = operator_of(type(wrapper).run, call)
    assert args[0] in references
    del wrapper, call
    gc.collect()
    assert args[0] not in references
    with pytest.raises(RuntimeError, match=f"the object with handle {args[0]} .* no longer exists"):
        operator(*args)


def test_strides_that_callers_rely_on_are_kept():
    x = torch.randn(6, 256, device=DEVICE, dtype=torch.bfloat16)

    def quantize(x: torch.Tensor) -> Any:
        return flashinfer.quantization.per_token_group_quant_8bit(x, 128, column_major_scales=True)

    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")(x)
    assert_same(compiled, quantize(x))
    assert [t.stride() for t in compiled] == [t.stride() for t in quantize(x)]
    rows = torch.randn(3, 5, 64, device=DEVICE).transpose(0, 1)  # the kernel's result is permuted
    weight = torch.ones(64, device=DEVICE)
    norm = torch.compile(lambda x: flashinfer.rmsnorm(x, weight), fullgraph=True)
    torch.testing.assert_close(norm(rows), flashinfer.rmsnorm(rows, weight), rtol=0, atol=0)


def test_mistakes_are_refused_as_without_compile():
    x, weight = torch.randn(4, 64, device=DEVICE), torch.ones(32, device=DEVICE)
    norm = torch.compile(lambda: flashinfer.rmsnorm(x, weight), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="weight"):
        norm()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    )
    with pytest.raises(Exception, match=r"plan\(\) must be called before run\(\)"):
        torch.compile(lambda: wrapper.run(x, (x, x)), fullgraph=True, backend="eager")()


def test_eager_calls_do_not_come_here():
    """Without tracing, a public function is the function that was written, with no test in it."""
    traced = flashinfer.rmsnorm._torchdynamo_inline
    assert flashinfer.rmsnorm.__code__.co_filename != traced.__code__.co_filename
    assert "is_compiling" not in flashinfer.rmsnorm.__code__.co_names


def test_a_graph_that_nobody_watches_leaves_out_the_dispatcher(monkeypatch: pytest.MonkeyPatch):
    x, weight = torch.randn(4, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    operator, args = operator_of(flashinfer.rmsnorm, {"input": x, "weight": weight})
    known = operator._op.__globals__
    dispatched = []
    monkeypatch.setitem(known, "_dispatch", lambda *leaves: dispatched.append(leaves))
    operator(*args)
    assert_same(args[-1], flashinfer.rmsnorm(x, weight))
    assert not dispatched
    with torch.profiler.profile():
        operator(*args)
    torch.vmap(lambda x: operator(x, weight, x.clone()) or x)(x[None])
    operator(x.as_subclass(type("Watched", (torch.Tensor,), {})), *args[1:])
    assert len(dispatched) == 3


def test_modes_and_the_profiler_see_operators():
    x, weight = torch.randn(4, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    operator, args = operator_of(flashinfer.rmsnorm, {"input": x, "weight": weight})
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        operator(*args)
    assert operator in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operator(*args)
    assert "flashinfer::rmsnorm" in {event.name for event in profile.events()}
