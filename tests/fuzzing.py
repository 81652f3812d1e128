"""Helpers of all fuzzers: awkward layouts, faults, the verdict and the driver.

A fuzzer draws a call that the documentation allows, and with some probability one fault. Without
a fault the call must be accepted and match the reference; with a fault it must be refused by name
and must not have written anything. There is no third outcome.

A family states in one `Family` what is called, how calls are drawn and built, and which faults
there are. `run_fuzz` draws, `check_fault` applies one fault to an ordinary call of each function,
and `tests/unit/test_refusals.py` sends the same faults to the bindings on the CPU.
"""

from __future__ import annotations

import importlib
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from flashinfer.jit import JitSpec, MissingJITCacheError, build_jit_specs
from flashinfer.testing import CheckOptions, assert_matches_reference
from flashinfer.testing.tensors import clone_arguments, fill_with_poison, iter_tensors

ROOT = Path(__file__).resolve().parents[1]
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
GPU_EXAMPLES, FULL_GPU_EXAMPLES = 250, 12500
CALLS_OF_A_FUNCTION = 2500  # under `--full`, of a family that counts by functions
FULL_PARTS = 8  # tests of a fuzzer under `--full`, each with its share of the cases
MODULES_PER_COMPILED = 3  # by default one module in so many is compiled for a family
CPU_EXAMPLES = 25  # of the reference backend; every fault also has a test of its own
FIRST_EXAMPLES = 3  # of each function, before functions are drawn too
LAST_EXAMPLES = 10  # at least, of drawn functions with drawn faults

WIDTHS = st.one_of(
    st.sampled_from([1, 2, 3, 7, 8, 16, 31, 64, 127, 128, 129, 256, 1024, 1032, 2048, 4096, 8192]),
    st.sampled_from([0, 8200, 16384, 16392, 32768, 33000, 65536, 131072]),
    st.integers(1, 600),
)
"""Row lengths: powers of two, their neighbours, what a vector does not divide, and long ones."""

ROWS = st.one_of(st.sampled_from([0, 1, 2, 3, 132, 133]), st.integers(1, 40))
MAX_ELEMENTS = 2**18

Fault = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Changes arguments so that they must be refused; None where it does not apply to them."""


# ---- layouts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie; the last dimension is contiguous."""

    offset: int = 0  # elements before the first: misalignment
    gap: int = 0  # elements between rows
    permuted: bool = False  # the two leading dimensions of three lie in the other order


LAYOUTS = st.builds(
    Layout,
    offset=st.sampled_from([0, 0, 0, 1, 2, 4, 8]),
    gap=st.sampled_from([0, 0, 0, 1, 3, 8, 64]),
    permuted=st.booleans(),
)


def empty_in_layout(
    shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor full of NaN, gaps and margins included."""
    order = list(range(len(shape) - 1))
    if layout.permuted:
        order.reverse()
    strides, step = [0] * (len(shape) - 1) + [1], (shape[-1] if shape else 1) + layout.gap
    for dimension in reversed(order):
        strides[dimension] = max(step, 1)
        step *= shape[dimension]
    margin = 8
    storage = torch.empty(layout.offset + step + margin, dtype=dtype, device=device)
    return fill_with_poison(storage).as_strided(shape, strides, layout.offset)


# ---- faults of a single tensor -----------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor | None:
    """Every second element of a wider tensor."""
    if tensor.numel() == 0 or tensor.shape[-1] < 2:
        return None
    return torch.repeat_interleave(tensor, 2, dim=-1)[..., ::2]


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """One element more in the last dimension."""
    return tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1))


def one_row_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros((tensor.shape[0] + 1, *tensor.shape[1:]))


def expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """All rows in one place."""
    if tensor.ndim < 2 or tensor.shape[0] < 2 or tensor.numel() == 0:
        return None
    return torch.zeros_like(tensor[:1]).expand_as(tensor)


def sliding(tensor: torch.Tensor) -> torch.Tensor | None:
    """Each row begins one element after the one before."""
    if tensor.ndim != 2 or tensor.shape[0] < 2 or tensor.shape[1] < 2:
        return None
    return tensor.new_zeros(sum(tensor.shape)).as_strided(tensor.shape, (1, 1))


def shifted(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same layout one element further, over the elements of `tensor` itself."""
    if tensor.shape[-1] < 2 or tensor.numel() == 0:
        return None
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


def with_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor | None]:
    return lambda tensor: None if tensor.dtype == dtype else tensor.float().to(dtype)


def replace(name: str, change: Callable[[torch.Tensor], Any], source: str | None = None) -> Fault:
    """Fault that replaces argument `name` by a changed version of it (or of `source`)."""

    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        tensor = arguments.get(source or name)
        changed = change(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if changed is None else {**arguments, name: changed}

    return fault


def put(name: str, value: Any) -> Fault:
    """Fault that passes `value` as argument `name`, if the call has it."""
    return lambda arguments: {**arguments, name: value} if name in arguments else None


def over(name: str) -> Fault:
    """Fault whose result lies where argument `name` does, both with their strides."""

    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        pair = {key: arguments.get(key) for key in (name, "out")}
        if not all(isinstance(t, torch.Tensor) and t.numel() for t in pair.values()):
            return None
        size = max(t.untyped_storage().nbytes() for t in pair.values()) // 16 + 1
        at = pair[name].new_zeros(16 * size, dtype=torch.uint8)
        views = {k: at.view(t.dtype).as_strided(t.shape, t.stride()) for k, t in pair.items()}
        return arguments | views

    return fault


# ---- the verdict -------------------------------------------------------------------------------


def _bytes_of(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in iter_tensors(arguments)
    ]


def assert_refused(api: Callable[..., Any], arguments: dict[str, Any], argument: str) -> str:
    """The message with which `api` refuses a call; it names `argument`, and nothing is written."""
    before = _bytes_of(clone_arguments(arguments))
    try:
        api(**arguments)
    except (TypeError, ValueError) as error:
        message = str(error)
        is_named = re.search(rf"\b{re.escape(argument)}\b", message)
        assert is_named, f"the message does not name {argument}: {message}"
    else:
        raise AssertionError("accepted, but must be refused")
    for old, new in zip(before, _bytes_of(arguments), strict=True):
        assert torch.equal(old, new), "refused, but something was written"
    return message


@dataclass
class Tally:
    """Runs the drawn calls and counts what became of them."""

    faults: Mapping[str, Fault]
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    begun: float = field(default_factory=time.monotonic)

    def judge(
        self,
        api: Callable[..., Any],
        arguments: dict[str, Any],
        options: CheckOptions | None,
        fault: str | None,
    ) -> None:
        """Call `api` with the fault, if it applies to the arguments, or else without."""
        changed = self.faults[fault](arguments) if fault is not None else None
        if fault is not None and changed is not None:
            self.refuse(api, changed, fault)
        else:
            assert_matches_reference(api, options, **arguments)
            self.accepted[api.__name__] += 1

    def refuse(self, api: Callable[..., Any], arguments: dict[str, Any], fault: str) -> None:
        """Call `api` with arguments that it must refuse; a fault's first word is the argument."""
        assert_refused(api, arguments, fault.split()[0])
        self.refused[fault] += 1

    def report(self, family: str, device: torch.device) -> str:
        cases = self.accepted.total() + self.refused.total()
        return (
            f"{family} on {device}: {cases} cases in {time.monotonic() - self.begun:.1f} s, "
            f"{self.accepted.total()} accepted and right, {self.refused.total()} refused by name "
            f"({len(self.refused)} kinds of fault), 0 silent mismatches"
        )


def faults(all_faults: Mapping[str, Fault]) -> st.SearchStrategy[str | None]:
    """No fault in two cases of three."""
    return st.one_of(st.none(), st.none(), st.sampled_from(list(all_faults)))


def fuzz_settings(examples: int, derandomize: bool = True) -> settings:
    """The same cases in every run, by `derandomize` or by a seed that the caller sets.

    No database of failures, and no deadline, since a call may compile.
    """
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


# ---- the driver --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """What is called in a family of operations, how calls are drawn, and what is wrong with some.

    A case is any object that the strategy draws; where there are several functions it says in
    `function` which one it calls.
    """

    name: str
    module: Any  # where the functions are
    functions: tuple[str, ...]
    cases: st.SearchStrategy[Any]
    build: Callable[[Any, torch.device], dict[str, Any]]  # the arguments of a case
    usual: Callable[[str, torch.device], dict[str, Any]]  # an ordinary call of a function
    faults: Mapping[str, Fault]
    function_faults: Mapping[str, Mapping[str, Fault]] = field(default_factory=dict)
    kernel_faults: Mapping[str, Fault] = field(default_factory=dict)  # unknown to the reference
    options: Callable[[Any, dict[str, Any]], CheckOptions | None] = lambda case, arguments: None
    specs: Callable[[], list[JitSpec]] = list  # modules that the cases need; none: few
    full_examples: int = FULL_GPU_EXAMPLES  # on a GPU; fewer where a reference walks tokens

    def modules(self, full: bool) -> list[JitSpec]:
        """What is compiled before the cases are drawn: a fixed sample, or all."""
        specs = sorted(self.specs(), key=lambda spec: zlib.crc32(spec.name.encode()))
        return specs if full else specs[: -(-len(specs) // MODULES_PER_COMPILED)]

    def api(self, function: str) -> Callable[..., Any]:
        return getattr(self.module, function)

    def function_of(self, case: Any) -> str:
        return case.function if len(self.functions) > 1 else self.functions[0]

    def faults_of(self, function: str, kernels: bool) -> dict[str, Fault]:
        """The faults that concern `function`, on kernels or on the reference backend."""
        found = {**self.faults, **self.function_faults.get(function, {})}
        return found | self.kernel_faults if kernels else found

    def all_faults(self) -> list[str]:
        """Names of all faults, those of a single function among them."""
        of_functions = (name for known in self.function_faults.values() for name in known)
        return list(dict.fromkeys([*self.faults, *of_functions, *self.kernel_faults]))


def families(paths: Sequence[str] = ("tests",)) -> list[Family]:
    """The `FAMILY` of every fuzzer among the test files at or under `paths`."""
    found = []
    for file in sorted(ROOT.glob("tests/*/test_*fuzz.py")):
        if any(file.is_relative_to((ROOT / path.split("::")[0]).resolve()) for path in paths):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found.append(getattr(importlib.import_module(name), "FAMILY", None))
    return [family for family in found if family is not None]


@dataclass(frozen=True)
class FuzzRun:
    """Where a fuzzer runs, how long, and where its last line goes; the fixture `fuzz_run`."""

    device: torch.device
    full: bool
    part: int | None  # of FULL_PARTS: its cases are drawn from a seed of their own
    tell: Callable[[str], None]

    def examples(self, family: Family) -> int:
        """How many cases of a family this run has."""
        on_gpu = self.device.type == "cuda"
        few, many = (
            (GPU_EXAMPLES, family.full_examples) if on_gpu else (CPU_EXAMPLES, 30 * CPU_EXAMPLES)
        )
        if not self.full:
            return few
        return many if self.part is None else -(-many // FULL_PARTS)


def _draw(
    check: Callable[[Any, str | None], None],
    examples: int,
    part: int | None,
    cases: st.SearchStrategy[Any],
    drawn_faults: st.SearchStrategy[str | None],
) -> None:
    """Call `check` with so many cases."""
    drawn = given(case=cases, fault=drawn_faults)(check)
    if part is not None:
        drawn = seed(part)(drawn)
    fuzz_settings(examples, derandomize=part is None)(drawn)()


@contextmanager
def compiling(allowed: bool) -> Iterator[None]:
    """Without permission, a module that is not compiled yet raises `MissingJITCacheError`."""
    with pytest.MonkeyPatch.context() as patch:
        if not allowed:
            patch.setenv("FLASHINFER_DISABLE_JIT", "1")
        yield


def run_fuzz(family: Family, run: FuzzRun) -> None:
    """Draw calls of a family: each is right, or refused by the name of what is wrong with it.

    The functions take turns without faults first, so that chance cannot leave one out. The rest
    of the cases is drawn freely; on a GPU a case whose module is not in the compiled sample is
    drawn again.
    """
    kernels = run.device.type == "cuda"
    modules = family.modules(run.full) if kernels else []
    build_jit_specs(modules)
    tally = Tally({**family.faults, **(family.kernel_faults if kernels else {})})

    def check(case: Any, fault: str | None) -> None:
        arguments = family.build(case, run.device)
        api = family.api(family.function_of(case))
        try:
            tally.judge(api, arguments, family.options(case, arguments), fault)
        except MissingJITCacheError:
            reject()

    for function in family.functions:
        own = family.cases.filter(lambda case, name=function: family.function_of(case) == name)
        with compiling(not modules), suppress(Unsatisfiable):
            _draw(check, FIRST_EXAMPLES, run.part, own, st.none())
        if not tally.accepted[function]:  # the sample has no module of this function
            _draw(check, FIRST_EXAMPLES, run.part, own, st.none())
    wanted = run.examples(family)
    left = max(LAST_EXAMPLES, wanted - tally.accepted.total())
    with compiling(not modules):
        _draw(check, left, run.part, family.cases, faults(tally.faults))
    run.tell(tally.report(family.name, run.device))
    assert set(tally.accepted) == set(family.functions), "a function was never called"
    assert tally.accepted.total() + tally.refused.total() >= wanted


def check_fault(family: Family, fault: str, device: torch.device) -> None:
    """Every function that a fault concerns refuses it, so that none depends on being drawn."""
    kernels = device.type == "cuda"
    if fault in family.kernel_faults and not kernels:
        pytest.skip("a fault of kernels, which the reference backend does not have")
    refused = 0
    for function in family.functions:
        change = family.faults_of(function, kernels).get(fault)
        changed = change(family.usual(function, device)) if change is not None else None
        if changed is not None:
            assert_refused(family.api(function), changed, fault.split()[0])
            refused += 1
    assert refused, "the fault applies to no function"
