"""Modules of MLA: kernels by configuration, and the planner that they share."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..._common.dtypes import check_dtype
from .. import env as jit_env
from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator
from .hopper import TARGET_FLAGS

BACKENDS = {"fa2": "mla_portable.cu", "fa3": "mla_sm90.cu"}
"""Kernels by name: for every GPU, and for Hopper."""

FEW_ROWS = 16
"""Rows of a tile of the kernels for Hopper for few query rows."""

DTYPES = (torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn
"""The type of caches of 8 bits, which the kernel for Hopper has."""

HEAD_DIMS = ((512, 64), (512, 0), (256, 64), (256, 0))
"""Pairs (head_dim_ckv, head_dim_kpe) that there are kernels for."""


@dataclass(frozen=True)
class MlaConfig(ModuleConfig):
    """What selects code; numbers of heads, page sizes and masks are run-time arguments.

    With `scaled_groups`, a float32 for each 128 columns lies after each latent row: its scale.
    `tile_rows`: query rows that are multiplied at a time, 64 or `FEW_ROWS`. `profiled`: whether
    the kernel records its events, which that of few rows does not.
    """

    module: ClassVar[str] = "batch_mla"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    backend: str
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    head_dim_ckv: int
    head_dim_kpe: int
    dtype_kpe: torch.dtype
    scaled_groups: bool = False
    tile_rows: int = 64
    profiled: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {tuple(BACKENDS)}, got {self.backend!r}")
        is_float8 = self.dtype_kv == FLOAT8 and self.backend == "fa3"
        check_dtype("q_data_type", self.dtype_q, (*DTYPES, FLOAT8) if is_float8 else DTYPES)
        kv_dtypes = (self.dtype_q, FLOAT8) if self.backend == "fa3" else (self.dtype_q,)
        check_dtype("kv_data_type", self.dtype_kv, kv_dtypes)
        kpe_dtypes = (FLOAT8, *DTYPES) if is_float8 else (self.dtype_kv,)
        check_dtype("kpe_cache", self.dtype_kpe, kpe_dtypes)
        check_dtype("output_dtype", self.dtype_o, DTYPES)
        kinds = (self.dtype_q, self.dtype_kv, self.dtype_kpe, self.head_dim_ckv, self.head_dim_kpe)
        if self.scaled_groups and kinds != (torch.bfloat16, FLOAT8, torch.bfloat16, 512, 64):
            raise ValueError(
                "tokens with scales of groups must have 512 e4m3 and 64 bfloat16 columns, and "
                f"bfloat16 queries, got {kinds}"
            )
        serves_few = self.tile_rows == FEW_ROWS and self.backend == "fa3"
        if self.tile_rows != 64 and (self.scaled_groups or self.profiled or not serves_few):
            raise ValueError(
                f"`tile_rows` must be 64, or {FEW_ROWS} with backend fa3, without scales of "
                f"groups and without a profile, got {self.tile_rows}"
            )
        if (self.head_dim_ckv, self.head_dim_kpe) not in HEAD_DIMS:
            raise ValueError(
                "`head_dim_ckv` and `head_dim_kpe` must be one of "
                f"{', '.join(map(str, HEAD_DIMS))}, got {(self.head_dim_ckv, self.head_dim_kpe)}"
            )

    @property
    def majors(self) -> tuple[int, ...]:
        return (9,) if self.backend == "fa3" else self.supported_major_versions


def _aot_configs() -> Iterator[MlaConfig]:
    for dtype in DTYPES:
        for backend, rows in (("fa2", 64), ("fa3", 64), ("fa3", FEW_ROWS)):
            yield MlaConfig(backend, dtype, dtype, dtype, 512, 64, dtype, tile_rows=rows)
    for rows in (64, FEW_ROWS):
        types = (torch.bfloat16, FLOAT8, torch.bfloat16)
        yield MlaConfig("fa3", *types, 512, 64, FLOAT8, tile_rows=rows)


def _preset_configs() -> Iterator[MlaConfig]:
    yield from (config for config in _aot_configs() if config.dtype_q == torch.bfloat16)


def _host_specs() -> Iterator[JitSpec]:
    """Beyond the ahead-of-time cases: caches of 8 bits of every kind, and tokens of 656 bytes."""
    for dtype, rows in itertools.product(DTYPES, (64, FEW_ROWS)):
        for dtype_q, dtype_kpe in ((dtype, FLOAT8), (dtype, dtype), (FLOAT8, FLOAT8)):
            types = (dtype_q, FLOAT8, dtype)
            config = MlaConfig("fa3", *types, 512, 64, dtype_kpe, tile_rows=rows)
            yield gen_mla_module_of(config)
    types = (torch.bfloat16, FLOAT8, torch.bfloat16)
    yield gen_mla_module_of(MlaConfig("fa3", *types, 512, 64, torch.bfloat16, scaled_groups=True))


@register_generator(aot=_aot_configs, presets={"mla": _preset_configs}, hosts=_host_specs)
def gen_mla_module_of(config: MlaConfig) -> JitSpec:
    """The module with ``mla_run``, for one configuration."""
    csrc = jit_env.FLASHINFER_CSRC_DIR
    kernel = BACKENDS[config.backend]
    if config.tile_rows == FEW_ROWS:
        kernel = "mla_narrow.cu" if config.dtype_kv == FLOAT8 else "mla_few.cu"
    return JitSpec.from_config(
        config,
        [csrc / kernel, csrc / "mla_jit_binding.cc"],
        extra_cuda_cflags=list(TARGET_FLAGS) if config.backend == "fa3" else None,
    )


def mla_config(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> MlaConfig:
    """The configuration that FlashInfer's arguments of ``gen_batch_mla_module`` name.

    Raises
    ------
    ValueError
        If there is no kernel for it.
    """
    check_dtype("dtype_idx", dtype_idx, (torch.int32,))
    if not isinstance(use_profiler, bool):
        raise TypeError(f"`use_profiler` must be a bool, got {type(use_profiler).__name__}")
    return MlaConfig(
        backend,
        dtype_q,
        dtype_kv,
        dtype_o,
        head_dim_ckv,
        head_dim_kpe,
        dtype_kv,
        profiled=use_profiler,
    )


def gen_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> JitSpec:
    """The module of one configuration, by FlashInfer's arguments.

    Parameters
    ----------
    backend : str
        ``"fa2"``, for every GPU, or ``"fa3"``, for Hopper.
    dtype_q, dtype_kv, dtype_o : torch.dtype
        Types of queries, caches and outputs.
    dtype_idx : torch.dtype
        int32.
    head_dim_ckv, head_dim_kpe : int
        512 or 256, and 64 or 0.
    use_profiler : bool
        Whether the kernel records its events.

    Raises
    ------
    ValueError
        If there is no kernel for them.
    """
    types = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    config = mla_config(backend, *types, head_dim_ckv, head_dim_kpe, use_profiler)
    return gen_mla_module_of(config)


def get_batch_mla_uri(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> str:
    """Name of the module that `gen_batch_mla_module` describes for the same arguments."""
    types = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    return mla_config(backend, *types, head_dim_ckv, head_dim_kpe, use_profiler).uri


@functools.cache
def get_mla_module_of(config: MlaConfig) -> Any:
    """The loaded module, compiled first if need be; kept for the life of the process."""
    return gen_mla_module_of(config).build_and_load()


@dataclass(frozen=True)
class MlaPlanConfig(ModuleConfig):
    """Nothing selects code: the planner is the same for every kernel."""

    module: ClassVar[str] = "mla_plan"


def _plan_configs() -> Iterator[MlaPlanConfig]:
    yield MlaPlanConfig()


@register_generator(aot=_plan_configs, presets={"mla": _plan_configs})
def gen_mla_plan_module(config: MlaPlanConfig | None = None) -> JitSpec:
    """The module with the ``mla_plan`` functions; it has no device code."""
    return JitSpec.from_config(config or MlaPlanConfig(), ["mla_plan_jit_binding.cc"])


@functools.cache
def get_mla_plan_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_mla_plan_module().build_and_load()


@dataclass(frozen=True)
class MlaDevicePlanConfig(ModuleConfig):
    """Nothing selects code: the planner is the same for every kernel."""

    module: ClassVar[str] = "mla_device_plan"

    @property
    def majors(self) -> tuple[int, ...]:
        return (8, 9, 10, 11, 12)


def _device_plan_configs() -> Iterator[MlaDevicePlanConfig]:
    yield MlaDevicePlanConfig()


@register_generator(aot=_device_plan_configs, presets={"mla": _device_plan_configs})
def gen_mla_device_plan_module(config: MlaDevicePlanConfig | None = None) -> JitSpec:
    """The module with ``mla_device_plan``, which plans from lengths on the device."""
    return JitSpec.from_config(
        config or MlaDevicePlanConfig(), ["mla_device_plan.cu", "mla_device_plan_jit_binding.cc"]
    )


@functools.cache
def get_mla_device_plan_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_mla_device_plan_module().build_and_load()


@functools.cache
def mla_plan_size() -> int:
    """Bytes of a plan that ``mla_run`` reads."""
    return get_mla_plan_module().mla_plan_size()


class MlaPlanner:
    """Plans launches, with scratch and staging memory of its own; one thread at a time.

    Attributes
    ----------
    plan : torch.Tensor
        The bytes of the latest plan's ``MlaPlan``, uint8 on the CPU, which ``mla_run`` reads. The
        same tensor for the life of the object.
    """

    def __init__(self) -> None:
        self._num_sms = 0
        module = get_mla_plan_module()
        self._native = torch.zeros(module.mla_planner_size(), dtype=torch.uint8)
        module.mla_plan_create(self._native)
        self._plan = module.mla_plan
        self.plan = torch.zeros(mla_plan_size(), dtype=torch.uint8)
        # The callback keeps the module and the planner's bytes alive.
        weakref.finalize(self, module.mla_plan_destroy, self._native)

    def make(
        self,
        int_workspace: torch.Tensor | None,
        float_workspace_bytes: int,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        page_size: int,
        causal: bool,
        splits: bool = True,
        is_graph: bool = False,
        num_sms: int = 0,
    ) -> torch.Tensor:
        """Divide a batch over multiprocessors and start the copy of the work list.

        Parameters
        ----------
        int_workspace : torch.Tensor or None
            Where the work list goes; None: only `plan` is wanted.
        float_workspace_bytes : int
            Size of the workspace for partial results.
        qo_indptr, kv_indptr, kv_len_arr : torch.Tensor
            int32 on the host: first query token and first page of each request, its KV tokens.
        num_heads, head_dim_ckv, page_size : int
            Query heads, columns of a value, tokens of a page.
        causal : bool
            Whether a query token sees the KV tokens up to its own only.
        splits : bool
            Whether a request's KV may be divided over CTAs.
        is_graph : bool
            Whether a captured launch is to serve later plans, too; the first one's `num_sms` stays.
        num_sms : int
            Multiprocessors that the work is divided for; 0: all of the GPU.

        Returns
        -------
        torch.Tensor
            `plan`.

        Raises
        ------
        ValueError
            If index tensors contradict one another or a workspace is too small.
        """
        # A captured launch has the CTAs of the first plan, so later ones are for as many.
        if not (is_graph and self._num_sms):
            self._num_sms = num_sms
        self._plan(
            self._native,
            self.plan,
            int_workspace,
            float_workspace_bytes,
            (qo_indptr, kv_indptr, kv_len_arr),
            (num_heads, head_dim_ckv, page_size, self._num_sms),
            (causal, splits, is_graph),
        )
        return self.plan
