"""The tuner's say in the choice of tiles.

Within ``autotune()`` a product's call measures the tiles that `worth_measuring` gives, for its own
operands, and the tuner keeps the fastest under the product's types and sizes. Without results the
model of `_choice` decides. Callers keep the answers while these cannot change, so that the usual
call never comes here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from .._common.arch import get_compute_capability
from ..autotuner.autotuner import AutoTuner
from ..autotuner.candidates import HEURISTIC, compile_specs
from ..autotuner.runner import TunableRunner
from ..autotuner.specs import (
    DynamicTensorSpec,
    OptimizationProfile,
    TuningConfig,
    make_bucket_mapper,
)
from ..jit.core import JitSpec
from ..jit.gemm import GemmConfig, gen_gemm_sm90_module
from ._choice import GemmProblem, all_configs, choose_config, serves, worth_measuring

GetKernel = Callable[[GemmConfig], Callable[..., Any]]
LIBRARY = "cublas"
"""The tactic that takes the other library's product."""

HOPPER = (9, 0)
_BY_K, _BY_BLOCK = 2, 4  # bits of the binding's layout
_logger = logging.getLogger("flashinfer.autotuner")
_warned: set[str] = set()

# A tile that suits the largest size of a bucket has enough rows for the smaller ones.
_bucket_of = make_bucket_mapper([1 << i for i in range(25)], round_map=True)


def is_hopper(cc: int) -> bool:
    """Whether a compute capability, as 10 major + minor, is that of `HOPPER`."""
    return cc == 90


def _buckets_below(rows: int) -> tuple[int, ...]:
    """The call's bucket, and the smaller ones, which its operands have rows for."""
    largest = _bucket_of(rows)
    return tuple(size for size in (1 << i for i in range(14)) if size < largest) + (largest,)


_ANY_ROWS = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), _buckets_below, _bucket_of),)
)
_THESE_ROWS = TuningConfig()


def operation(problem: GemmProblem) -> str:
    """The name that the tuner knows a product by; those of mixtures and of dense products are
    FlashInfer's."""
    if problem.routed:
        return f"trtllm::fused_moe::gemm{1 if problem.gathers else 2}"
    prefix = "" if problem.groups == "batch" else "grouped_"
    return f"{prefix}{'bf16' if problem.dtype_a.itemsize == 2 else 'fp8'}_gemm"


def is_tuning() -> bool:
    """Whether answers are not to be kept, because calls are tuned."""
    tuner = AutoTuner._instance
    return tuner is not None and tuner.is_tuning_mode


def tiles_of(problem: GemmProblem, tactic: int) -> GemmConfig:
    """The tile with a number."""
    configs = worth_measuring(problem)
    if isinstance(tactic, bool) or not isinstance(tactic, int) or not -1 < tactic < len(configs):
        raise ValueError(
            f"`tactic` must be -1, or from 0 to {len(configs) - 1} for these sizes, got {tactic!r}"
        )
    return configs[tactic]


def compile_all(problems: Iterable[GemmProblem]) -> None:
    """Build the candidates of several products' buckets side by side."""
    buckets = {replace(problem, rows=_bucket_of(problem.rows)) for problem in problems}
    configs = {config for bucket in buckets for config in worth_measuring(bucket)}
    compile_specs([gen_gemm_sm90_module(config) for config in configs])


def choose_tiles(
    problem: GemmProblem, arguments: tuple[Any, ...], get_kernel: GetKernel
) -> GemmConfig:
    """The configuration for a launch with the binding's `arguments`, measured if need be."""
    chosen = _ask(TileRunner(problem, arguments, get_kernel))
    return choose_config(problem) if chosen is None else chosen


def choose_product(
    problem: GemmProblem,
    arguments: tuple[Any, ...],
    get_kernel: GetKernel,
    library: Callable[..., Any],
    prefers_library: bool,
) -> Callable[..., Any]:
    """A kernel, or `library`, which takes the same arguments; not on Hopper `library` alone."""
    if get_compute_capability(arguments[1].device) != HOPPER:
        return library
    runner = TileRunner(problem, arguments, get_kernel, library, prefers_library)
    chosen = _ask(runner)
    return runner.product(HEURISTIC if chosen is None else chosen, problem)


def _ask(runner: TileRunner) -> Any:
    """The tuner's answer: a configuration, `LIBRARY`, or None if it has none."""
    tuner, problem = AutoTuner.get(), runner.problem
    if tuner.is_idle or runner.is_empty:
        return None
    name = operation(problem)
    # What groups have is in tensors, so a call measures its own rows alone, whatever buckets
    # ``autotune()`` names.
    is_divisible = problem.groups == "batch"
    find = tuner.get_effective_map_to_tuning_buckets(_ANY_ROWS) if is_divisible else _bucket_of
    rows = find(problem.rows)
    shape = (rows, problem.columns, problem.k)
    if tuner.measures(name):
        # A tensor without memory says what is multiplied; the runner has the operands.
        sizes = torch.empty(problem.rows if is_divisible else rows, *shape[1:], device="meta")
        tuner.choose_one(name, [runner], _ANY_ROWS if is_divisible else _THESE_ROWS, [sizes])
    found, _, tactic, _ = tuner.search_cache(name, [runner], (shape,), _THESE_ROWS)
    return runner.config_of(tactic, problem) if found else None


def tactic_of(config: GemmConfig) -> tuple[int, ...]:
    """The tiles of a configuration, without types and options; stages last if a tile's are few."""
    tiles = (
        config.tile_rows,
        config.tile_columns,
        config.consumers,
        int(config.swap),
        config.cluster_rows,
        config.cluster_columns,
        config.splits,
    )
    few_stages = config.max_stages != GemmConfig.max_stages
    return (*tiles, config.max_stages) if few_stages else tiles


class TileRunner(TunableRunner):
    """A product of one call, with the tiles that it can have.

    Attributes
    ----------
    problem : GemmProblem
        The call's product.
    """

    def __init__(
        self,
        problem: GemmProblem,
        arguments: tuple[Any, ...],
        get_kernel: GetKernel,
        library: Callable[..., Any] | None = None,
        prefers_library: bool = False,
    ) -> None:
        self.problem = problem
        self._arguments = arguments
        self._get_kernel = get_kernel
        self._library = library
        self._prefers_library = prefers_library
        self._at: dict[int, tuple[Any, ...]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return bool(self._arguments[1].numel() == 0)

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Everything else that selects code."""
        p = self.problem
        types = (str(p.dtype_a), str(p.dtype_b), str(p.dtype_out))
        kind = (p.batches, p.scale, p.groups, p.activation, p.gathers, p.routed)
        return (*types, *kind, *((LIBRARY,) if self._library is not None else ()))

    def get_valid_tactics(
        self, inputs: list[torch.Tensor], profile: OptimizationProfile
    ) -> list[Any]:
        """The tiles that the model finds likely, in its order."""
        problem = self._problem(profile.get_opt_shapes()[0][0])
        tactics: list[Any] = [tactic_of(config) for config in worth_measuring(problem)]
        if self._library is not None:
            tactics.insert(0 if self._prefers_library else 1, LIBRARY)
        return tactics

    def jit_specs(self, inputs: list[torch.Tensor], tactics: list[Any]) -> list[JitSpec]:
        """The module of each tile."""
        configs = {tactic_of(c): c for c in worth_measuring(self._problem(inputs[0].shape[0]))}
        return [gen_gemm_sm90_module(configs[t]) for t in tactics if t in configs]

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = HEURISTIC,
        do_preparation: bool = False,
        **kwargs: Any,
    ) -> None:
        """Multiply as many rows as `inputs` has, into memory of the runner's own."""
        rows = inputs[0].shape[0]
        problem = self._problem(rows)
        chosen = tactic if tactic == HEURISTIC else self.config_of(tactic, problem)
        if chosen is None:
            raise ValueError(f"{tactic} is no tile of {problem}")
        if rows not in self._at:
            self._at = {rows: with_rows(self._arguments, problem, rows)}  # lets go of the last
        self.product(chosen, problem)(*self._at[rows])

    def config_of(self, tactic: Any, problem: GemmProblem) -> Any:
        """The configuration of a tactic, or `LIBRARY`; None if it does not serve the product."""
        if tactic == LIBRARY and self._library is not None:
            return LIBRARY
        for config in all_configs(problem):
            if tactic_of(config) == tactic:
                return config if serves(problem, config) else None
        stored = f"{tactic} of {operation(problem)}"
        if stored not in _warned:
            _warned.add(stored)
            _logger.warning("The stored tactic %s does not exist: it is ignored", stored)
        return None

    def product(self, chosen: Any, problem: GemmProblem) -> Callable[..., Any]:
        """The function for a configuration, `LIBRARY` or `HEURISTIC`."""
        if chosen == LIBRARY or (chosen == HEURISTIC and self._prefers_library):
            assert self._library is not None
            return self._library
        return self._get_kernel(choose_config(problem) if chosen == HEURISTIC else chosen)

    def _problem(self, rows: int) -> GemmProblem:
        return replace(self.problem, rows=rows)


def with_rows(arguments: tuple[Any, ...], problem: GemmProblem, rows: int) -> tuple[Any, ...]:
    """The binding's arguments with another result, and with `rows` rows where rows are batches'."""
    names, out, a, b, scales, bias, alpha, index, gate, layout, max_ctas, pdl = arguments
    out = torch.empty_like(out)
    if problem.groups == "batch":
        a, out = resized(a, -2, rows), resized(out, -2, rows)
        if scales is not None and problem.scale != "none":
            scale_rows = -(-rows // 128) if layout & _BY_BLOCK else rows
            by_k = scales[0].ndim == 1 or layout & _BY_K
            scales = (resized(scales[0], -1 if by_k else -2, scale_rows), *scales[1:])
    if scales is not None and problem.scale == "block" and scales[2] is not None:
        of_codes = torch.empty_like(scales[2])
        if problem.groups == "batch":
            of_codes = resized(of_codes, -2, rows)
        scales = (*scales[:2], of_codes)
    return names, out, a, b, scales, bias, alpha, index, gate, layout, max_ctas, pdl


def resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`tensor` cut to a size, or repeated from its beginning."""
    length = tensor.shape[dim]
    if size <= length:
        return tensor.narrow(dim, 0, size)
    index = torch.arange(size, device=tensor.device) % length
    if tensor.dtype.itemsize == 1:  # torch cannot select 8-bit floats
        return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
    return tensor.index_select(dim, index)
