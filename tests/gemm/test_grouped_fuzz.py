"""Random products of groups and segments of rows, and hostile ones: right, or refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gemm
from flashinfer.gemm import _launch
from flashinfer.jit import JitSpec
from flashinfer.jit.gemm import gen_gemm_sm90_module
from flashinfer.testing import CheckOptions, unit_roundoff
from flashinfer.testing.attention import SpreadBound
from flashinfer.testing.reference import template_of
from tests.fuzzing import (
    CALLS_OF_A_FUNCTION,
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    expanded,
    longer,
    one_row_more,
    over,
    put,
    replace,
    run_fuzz,
    sliding,
    strided,
    with_dtype,
)

pytestmark = pytest.mark.usefixtures("hopper")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OFFSETS, MASKED, SEGMENTS = "group_gemm_fp8_nt_groupwise", "batch_deepgemm_fp8_nt_groupwise", "run"
BY_INDEX = ("group_deepgemm_fp8_nt_groupwise", "group_gemm_fp8_nt_groupwise_contiguous")
BLOCKS = (OFFSETS, *BY_INDEX, MASKED)  # with scales of 128 elements
FUNCTIONS = (*BLOCKS, "grouped_mm_fp8", "grouped_mm_bf16", SEGMENTS)
_WRAPPER = gemm.SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8))
_MODULE = SimpleNamespace(
    **{name: getattr(gemm, name) for name in FUNCTIONS[:-1]}, run=_WRAPPER.run
)

# Types of a, of b and of the result. The first ones meet many sizes, the others few, because each
# may need a tile of its own.
_TYPES = {
    **dict.fromkeys(BLOCKS, ((E4M3, E4M3, BF16), (E5M2, E4M3, F16))),
    "grouped_mm_fp8": ((E4M3, E4M3, BF16), (E4M3, E5M2, F32)),
    "grouped_mm_bf16": ((BF16, BF16, BF16), (BF16, BF16, F32), (F16, F16, F16)),
    SEGMENTS: ((BF16, BF16, BF16), (F16, F16, F16)),
}
_TERMS = {"grouped_mm_fp8": (16, 80, 1152), "grouped_mm_bf16": (8, 72, 1160), SEGMENTS: (8, 136)}
ROWS, COLUMNS, GROUPS = (0, 1, 3, 8, 17, 64, 70, 130, 300), (8, 72, 264), (1, 7)
FEW_ROWS, FEW_COLUMNS = (0, 3, 1000), (72,)
LARGE = (2000, 3080, 256)  # rows, columns and k of several large tiles for a CTA


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides the module of a call that the documentation allows; the seed gives the rest."""

    function: str
    types: tuple[torch.dtype, torch.dtype, torch.dtype]
    rows: int  # of all groups, or of each one where they are masked
    columns: int
    k: int
    groups: int
    by_length: bool  # of segments
    is_full: bool  # masked groups are said to have all rows, not few
    seed: int


def _sizes(function: str) -> Iterator[Case]:
    """All that cases of a function differ in, but for the seed."""
    terms = _TERMS.get(function, (128, 384, 1152))
    main = _TYPES[function][0]
    columns = FEW_COLUMNS if function in (MASKED, "grouped_mm_fp8") else COLUMNS
    many = itertools.product(ROWS, columns, terms, GROUPS)
    large = [(*LARGE, groups) for groups in (GROUPS[:1] if function == MASKED else GROUPS)]
    few_rows = (0, 3, 130) if function == MASKED else FEW_ROWS
    few = [*itertools.product(few_rows, FEW_COLUMNS, terms, GROUPS[1:])]
    for sizes in itertools.chain(many, large):
        yield Case(function, main, *sizes, by_length=False, is_full=True, seed=0)
    for types, sizes in itertools.product(_TYPES[function], few):
        yield Case(function, types, *sizes, by_length=True, is_full=types != main, seed=0)


def cases() -> st.SearchStrategy[Case]:
    sizes = st.sampled_from(FUNCTIONS).flatmap(lambda name: st.sampled_from([*_sizes(name)]))
    seeds = st.integers(0, 2**31)
    return st.builds(lambda case, seed: dataclasses.replace(case, seed=seed), sizes, seeds)


class _Draw(random.Random):
    """Values and layouts of a call."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed)
        self.device = device

    def maybe(self) -> bool:
        return self.random() < 0.5

    def placed(self, values: torch.Tensor, step: int) -> torch.Tensor:
        """`values` among NaN, every row at a multiple of `step` elements."""
        if values.is_meta:
            return values
        gap, offset = (step * self.choice((0, 0, 1, 3)) for _ in range(2))
        layout = Layout(offset, gap + -values.shape[-1] % step, self.maybe())
        place = empty_in_layout(tuple(values.shape), layout, values.dtype, values.device)
        return place.copy_(values)

    def operand(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, device=self.device).to(dtype)
        return self.placed(values, 16 // dtype.itemsize)

    def scale(self, shape: tuple[int, ...], mode: str) -> torch.Tensor:
        """Scales in any memory: rows or columns together, and gaps of any width."""
        scale = torch.rand(shape, device=self.device) + 0.25
        scale = self.placed(scale, 1) if self.maybe() else self.placed(scale.mT, 1).mT
        return scale.mT if mode == "MN" else scale

    def integers(self, values: list[int]) -> torch.Tensor:
        dtype = self.choice((torch.int32, torch.int64))
        return torch.tensor(values, dtype=dtype, device=self.device)

    def lengths(self, rows: int, groups: int) -> list[int]:
        """Rows of each group, several of which may have none; at times some are of no group."""
        ends = [self.choice((0, rows, self.randint(0, rows))) for _ in range(groups - 1)]
        ends = sorted([*ends, self.choice((rows, rows, self.randint(0, rows)))])
        return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    torch.manual_seed(case.seed)
    draw, name = _Draw(case.seed, device), case.function
    (a_type, b_type, out_type), m, n, k = case.types, case.rows, case.columns, case.k
    batch = (case.groups,) if name == MASKED else ()
    operands = draw.operand((*batch, m, k), a_type), draw.operand((case.groups, n, k), b_type)
    call: dict[str, Any] = dict(zip("ab", operands, strict=True))
    lengths = draw.lengths(m, case.groups)
    first = draw.randint(0, m - sum(lengths))  # rows before it are of no group either
    bounds = [first + sum(lengths[:i]) for i in range(case.groups + 1)]
    if name in BLOCKS:
        mode = draw.choice(("K", "MN")) if name == OFFSETS else "K"
        call["a_scale"] = draw.scale((*batch, m, k // 128), mode)
        call["b_scale"] = draw.scale((case.groups, -(-n // 128), k // 128), mode)
        call["scale_granularity_mnk"] = (1, 128, 128)
    if name == OFFSETS:
        call |= {"m_indptr": draw.integers(bounds), "scale_major_mode": mode}
        call |= {"backend": draw.choice(("trtllm", "cutile")), "mma_sm": draw.choice((1, 2))}
        call["segment_alignment"] = draw.choice((1, 8))
    elif name in BY_INDEX:
        some = [-1, *range(case.groups), *range(case.groups)]
        numbers = [draw.choice(some) for _ in range(-(-m // 128))]
        call["m_indices"] = draw.integers([numbers[row // 128] for row in range(m)])
        if name == BY_INDEX[1]:
            call["validate_indices"] = draw.maybe() and not operands[0].is_meta
    elif name == MASKED:
        counts = [draw.choice((0, m, draw.randint(0, m))) for _ in range(case.groups)]
        call |= {"masked_m": draw.integers(counts), "backend": "deepgemm"}
        call["expected_m"] = max(m, 1) if case.is_full else 1
    elif name == SEGMENTS:
        call = _segments(case, draw, call, lengths, bounds)
    else:
        call |= {"m_indptr": draw.integers(bounds), "tactic": -1}
        call["backend"] = draw.choice(("cudnn", "auto"))
        if name == "grouped_mm_fp8" and (draw.maybe() or case.seed == 0):
            call["alpha"] = torch.rand(1, device=device) + 0.5
    if name != SEGMENTS and (out_type != BF16 or draw.maybe()):
        call["out_dtype"] = out_type
    if draw.maybe() or case.seed == 0:
        # Rows of a result may begin anywhere.
        call["out"] = draw.placed(torch.zeros((*batch, m, n), dtype=out_type, device=device), 1)
    return call


def _segments(
    case: Case, draw: _Draw, call: dict[str, Any], lengths: list[int], bounds: list[int]
) -> dict[str, Any]:
    """Arguments of the wrapper: weights in either order, for segments in their own or another."""
    is_column_major = draw.maybe()
    weights = call["b"] if is_column_major else call["b"].mT
    if not is_column_major and draw.maybe():
        weights = weights.contiguous()
    name, values = ("seg_lens", lengths) if case.by_length else ("seg_indptr", bounds)
    found = {"x": call["a"], "weights": weights, "weight_column_major": is_column_major}
    found |= {"batch_size": case.groups, name: draw.integers(values)}
    if draw.maybe() or case.seed == 0:
        found["weight_indices"] = draw.integers([draw.randrange(case.groups) for _ in lengths])
    return found


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """What the tensor cores lose is a part of the sum of the absolute products.

    Tensor cores add products of 8 bits with 14 bits, and those of 16 bits with nearly the bits of
    float32, whose roundings add up over k.
    """
    positive = {
        name: value.float().abs().to(value.dtype) if name in ("a", "b", "x", "weights") else value
        for name, value in arguments.items()
    }
    (size,) = template_of(_MODULE.__dict__[case.function], positive).compute(positive)
    lost = (2.0**-11 if case.types[0].itemsize == 1 else 2.0**-16) * size.nan_to_num(0.0)
    out = case.types[2]
    smallest = float(torch.finfo(out).smallest_normal)
    return CheckOptions(bound=SpreadBound(unit_roundoff(out), 2.0**-22, smallest, spread=lost))


def _lengths(change: Callable[[torch.Tensor], Any], with_bounds: bool = False) -> Fault:
    """Wrong lengths in place of the offsets of segments, or beside them."""

    def fault(call: dict[str, Any]) -> dict[str, Any] | None:
        bounds = call.get("seg_indptr")
        if bounds is None:
            return None
        return {**call, "seg_indptr": bounds if with_bounds else None, "seg_lens": change(bounds)}

    return fault


def _other_k(call: dict[str, Any]) -> dict[str, Any] | None:
    if "weights" not in call:
        return None
    dimension = 2 if call["weight_column_major"] else 1
    return {**call, "weights": torch.cat([call["weights"]] * 2, dimension)}


def _longer_scale(name: str) -> Fault:
    """More blocks along k; scales of which those lie together may have more rows than are read."""
    change = replace(name, longer)
    return lambda call: None if call.get("scale_major_mode") == "MN" else change(call)


def _misaligned(t: torch.Tensor) -> torch.Tensor | None:
    """Rows that do not begin at multiples of 16 bytes."""
    if t.numel() == 0 or t.shape[-2] < 2 or t.stride(-1) != 1:
        return None
    return t.new_zeros((*t.shape[:-1], t.shape[-1] + 1))[..., :-1]


def _of_no_matrix(name: str) -> Fault:
    """No weights; scales of some are refused before."""
    change = replace(name, lambda t: t[:0] if t.ndim == 3 else None)

    def fault(call: dict[str, Any]) -> dict[str, Any] | None:
        rows = call["a"] if "a" in call else call["x"]
        return None if "b_scale" in call or not rows.numel() else change(call)

    return fault


def _over_weights(call: dict[str, Any]) -> dict[str, Any] | None:
    """Weights of which the function makes no copy in another order."""
    weights = call.get("weights")
    if weights is None or not (call["weight_column_major"] or weights.stride(1) == 1):
        return None
    return over("weights")(call)


_INDICES = ("m_indptr", "m_indices", "masked_m", "seg_indptr", "weight_indices")
_TENSORS = ("a", "b", "x", "weights", "a_scale", "b_scale", *_INDICES[:-1])
_MORE = ("out", "alpha")
FAULTS: dict[str, Fault] = {
    **{f"{name} missing": put(name, None) for name in _TENSORS if "seg" not in name},
    **{f"{name} a number": put(name, 3) for name in (*_TENSORS, "weight_indices", *_MORE)},
    **{f"{name} double": replace(name, with_dtype(torch.float64)) for name in _TENSORS},
    **{f"{name} longer": replace(name, longer) for name in ("a", "b", "x", *_INDICES, *_MORE)},
    **{f"{name} longer": _longer_scale(name) for name in ("a_scale", "b_scale")},
    **{f"{name} in one more": replace(name, lambda t: t[None, None]) for name in _TENSORS},
    **{f"{name} flat": replace(name, lambda t: t.flatten()) for name in (*_TENSORS[:6], "out")},
    "weight_indices of floats": replace("weight_indices", lambda t: t.float()),
    **{f"{name} taller": replace(name, one_row_more) for name in ("a_scale", "b_scale", "out")},
    "out double": replace("out", with_dtype(torch.float64)),
    "out expanded": replace("out", expanded),
    "out sliding": replace("out", sliding),
    **{
        f"out over {name}": over(name)
        for name in ("a", "b", "x", "a_scale", "b_scale", *_INDICES[:-1])
    },
    "scale_granularity_mnk of rows": put("scale_granularity_mnk", (1, 1, 128)),
    "scale_granularity_mnk a number": put("scale_granularity_mnk", 128),
    "scale_major_mode unknown": put("scale_major_mode", "N"),
    "scale_major_mode missing": put("scale_major_mode", None),
    "backend unknown": put("backend", "cutlass"),
    "backend missing": put("backend", None),
    "mma_sm 3": put("mma_sm", 3),
    "mma_sm True": put("mma_sm", True),
    "expected_m text": put("expected_m", "4"),
    "expected_m missing": put("expected_m", None),
    "validate_indices a number": put("validate_indices", 1),
    "alpha double": replace("alpha", with_dtype(torch.float64)),
    "batch_size of others": put("batch_size", 5),
    "batch_size text": put("batch_size", "7"),
    "batch_size missing": put("batch_size", None),
    "weight_column_major a number": put("weight_column_major", 1),
    "weight_column_major missing": put("weight_column_major", None),
    "weights of other k": _other_k,
    "seg_lens longer": _lengths(lambda t: t),
    "seg_lens double": _lengths(lambda t: t[1:].double()),
    "seg_lens a number": _lengths(lambda t: 3),
    "seg_lens flat": _lengths(lambda t: t[None, 1:]),
    "seg_lens and seg_indptr": _lengths(lambda t: t.diff(), with_bounds=True),
    "seg_lens nor seg_indptr": _lengths(lambda t: None),
}
KERNEL_FAULTS: dict[str, Fault] = {
    **{f"{name} strided": replace(name, strided) for name in ("a", "b", "x", "out", *_INDICES)},
    **{f"{name} off its vectors": replace(name, _misaligned) for name in ("a", "b", "x")},
    "out over weights": _over_weights,
    "out over weight_indices": over("weight_indices"),
    "b of no matrix": _of_no_matrix("b"),
    "weights of no matrix": _of_no_matrix("weights"),
    "out_dtype of integers": put("out_dtype", torch.int32),
    "out_dtype text": put("out_dtype", "float16"),
    "expected_m 0": put("expected_m", 0),
    "segment_alignment 0": put("segment_alignment", 0),
    "segment_alignment text": put("segment_alignment", "8"),
    "tactic of no tile": put("tactic", 1000),
    "tactic negative": put("tactic", -2),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`, with all optional arguments."""
    sizes = 130, 72, 384 if function in BLOCKS else 80
    return build(Case(function, _TYPES[function][0], *sizes, 7, False, True, seed=0), device)


def specs() -> list[JitSpec]:
    """The modules that calls of all sizes ask for; tensors without memory have the sizes."""
    found = {}

    def recording(config: Any) -> Any:
        spec = gen_gemm_sm90_module(config)
        found[spec.name] = spec
        return lambda *arguments: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_kernels", {})
        patch.setattr(_launch, "get_gemm_kernel", recording)
        patch.setattr(_launch.checks, "cuda_tensors", lambda **tensors: None)
        for function in FUNCTIONS:
            for case in _sizes(function):
                getattr(_MODULE, function)(**build(case, torch.device("meta")))
    return list(found.values())


FAMILY = Family(
    "products of groups",
    _MODULE,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=options,
    specs=specs,
    full_examples=CALLS_OF_A_FUNCTION * len(FUNCTIONS),
)


def test_grouped_products_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
