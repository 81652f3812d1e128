"""Checks the batch and the options that a plan of MLA is made for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .._attention.checks import resolve_dtype, scalar
from .._attention.index_tensors import check_index_vector, device_indices, host_indices
from .._common.arch import is_sm90a_supported
from .._common.checks import count as check_count
from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from ..jit.attention.mla import FEW_ROWS, FLOAT8, HEAD_DIMS, MlaConfig
from .metadata import MLAPlanMetadata

_LIST = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_LEAST_FACTOR = torch.finfo(torch.float32).tiny
_MOST_FACTOR = torch.finfo(torch.float32).max / math.log2(math.e)
_TABLE = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclass(frozen=True)
class MlaBatch:
    """Requests of a plan: index tensors on the host, page numbers where they were given.

    Attributes
    ----------
    qo_indptr, kv_indptr, kv_len_arr : torch.Tensor
        int32 on the host.
    kv_indices : torch.Tensor
        Page numbers of all requests, as a vector.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @cached_property
    def max_q_len(self) -> int:
        """Query tokens of the longest request."""
        return int(self.qo_indptr.diff().max()) if len(self.qo_indptr) > 1 else 0


@dataclass(frozen=True)
class MlaOptions:
    """What of a plan does not depend on the batch.

    Attributes
    ----------
    num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale
        As ``plan`` takes them.
    q_dtype, kv_dtype, o_dtype : torch.dtype
        Types of queries, caches and outputs.
    lse_mode : str
        ``"none"``, ``"base2"`` or ``"basee"``.
    use_profiler : bool
        Whether the kernel records its events.
    """

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    lse_mode: str
    use_profiler: bool = False

    @property
    def results(self) -> tuple[int, torch.dtype]:
        """Columns and dtype of the results; a compiled graph depends on them."""
        return self.head_dim_ckv, self.o_dtype

    def config(self, backend: str, device: torch.device, max_q_len: int) -> MlaConfig:
        """The configuration of the kernel for a device; `backend` may be ``"auto"``.

        It is chosen for requests of at most `max_q_len` query tokens, and serves longer ones too.
        """
        if backend == "auto":
            on_hopper = device.type != "cuda" or is_sm90a_supported(device)
            backend = "fa3" if on_hopper else "fa2"
        types = (self.q_dtype, self.kv_dtype, self.o_dtype)
        has_few_rows = backend == "fa3" and self.num_heads * max_q_len <= FEW_ROWS
        return MlaConfig(
            backend,
            *types,
            self.head_dim_ckv,
            self.head_dim_kpe,
            self.kv_dtype,
            tile_rows=FEW_ROWS if has_few_rows and not self.use_profiler else 64,
            profiled=self.use_profiler,
        )

    def is_lse_on_e(self, return_lse_base_on_e: Any) -> bool:
        """Whether a ``run`` with this argument returns natural logarithms.

        Raises
        ------
        TypeError, ValueError
            If the argument is no bool, or contradicts `lse_mode`.
        """
        if not return_lse_base_on_e:
            return self.lse_mode == "basee"
        on_e = check_flag("return_lse_base_on_e", return_lse_base_on_e)
        if self.lse_mode == "base2":
            raise ValueError("`return_lse_base_on_e` must be False: `lse_mode` is 'base2'")
        return on_e


def read_options(
    num_heads: Any,
    head_dim_ckv: Any,
    head_dim_kpe: Any,
    page_size: Any,
    causal: Any,
    sm_scale: Any,
    q_data_type: Any,
    kv_data_type: Any,
    output_dtype: Any,
    lse_mode: Any,
    use_profiler: Any = False,
) -> MlaOptions:
    """Options of ``plan``, checked.

    Raises
    ------
    TypeError, ValueError
        If one is missing or not as ``plan`` describes it.
    """
    if lse_mode not in ("none", "base2", "basee"):
        raise ValueError(f"`lse_mode` must be 'none', 'base2' or 'basee', got {lse_mode!r}")
    q_dtype = resolve_dtype("q_data_type", q_data_type)
    dims = (check_count("head_dim_ckv", head_dim_ckv), check_count("head_dim_kpe", head_dim_kpe, 0))
    if dims not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"`head_dim_ckv` and `head_dim_kpe` must be one of {allowed}, got {dims}")
    return MlaOptions(
        num_heads=check_count("num_heads", num_heads, 1, 65535),
        head_dim_ckv=dims[0],
        head_dim_kpe=dims[1],
        page_size=check_count("page_size", page_size),
        causal=check_flag("causal", causal),
        sm_scale=factor("sm_scale", sm_scale),
        q_dtype=q_dtype,
        kv_dtype=resolve_dtype("kv_data_type", kv_data_type),
        o_dtype=_output_dtype(q_dtype, output_dtype),
        lse_mode=lse_mode,
        use_profiler=check_flag("use_profiler", use_profiler),
    )


def factor(name: str, value: Any) -> float:
    """A factor of the logits, which kernels multiply by log2(e) in float32."""
    number = scalar(name, value)
    if not _LEAST_FACTOR <= number <= _MOST_FACTOR:
        raise ValueError(f"`{name}` must be positive and finite in float32, got {number}")
    return number


def _output_dtype(q_dtype: torch.dtype, output_dtype: Any) -> torch.dtype:
    if output_dtype is not None:
        return resolve_dtype("output_dtype", output_dtype)
    return torch.bfloat16 if q_dtype == FLOAT8 else q_dtype


def read_batch(metadata: Any, given: dict[str, Any], page_size: int) -> MlaBatch:
    """Index tensors of ``plan``, from `metadata` or from its arguments, as one form.

    Raises
    ------
    TypeError, ValueError
        If tensors are missing, given twice, or not what they should be.
    """
    if metadata is not None:
        if not isinstance(metadata, MLAPlanMetadata):
            raise TypeError(f"`metadata` must be an MLAPlanMetadata, got {type(metadata).__name__}")
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ValueError(f"`{twice[0]}` must be left out: `metadata` has the index tensors")
        given = {name: getattr(metadata, name) for name in given}
    most = given["max_q_len"]
    if most is not None:
        most = check_count("max_q_len", most)
    listed = [name for name in _LIST if given[name] is not None]
    batch = _from_list(given) if listed else _from_table(given)
    if most is not None and batch.max_q_len > most:
        raise ValueError(
            f"`max_q_len` must be at least the {batch.max_q_len} of a request, got {most}"
        )
    return batch


def _from_list(given: dict[str, Any]) -> MlaBatch:
    for name in _LIST:
        if given[name] is None:
            raise TypeError(f"`{name}` must be a torch.Tensor, got None")
    qo, kv, lengths = host_indices(
        {name: given[name] for name in ("qo_indptr", "kv_indptr", "kv_len_arr")}
    )
    check_index_vector("kv_indices", given["kv_indices"])
    return MlaBatch(qo, kv, given["kv_indices"], lengths)


def _from_table(given: Mapping[str, Any]) -> MlaBatch:
    cum_seq_lens_q, block_tables, seq_lens = (given[name] for name in _TABLE)
    for name, value in zip(_TABLE, (cum_seq_lens_q, block_tables, seq_lens), strict=True):
        check_tensor(name, value)
    if block_tables.ndim != 2:
        raise ValueError(
            f"`block_tables` must have 2 dimensions, got shape {list(block_tables.shape)}"
        )
    qo, lengths = host_indices({"cum_seq_lens_q": cum_seq_lens_q, "seq_lens": seq_lens})
    batch_size, width = block_tables.shape
    if len(qo) != batch_size + 1 or len(lengths) != batch_size:
        raise ValueError(
            f"`block_tables` must have a row for each of the {len(lengths)} requests of "
            f"`seq_lens` and the {len(qo) - 1} of `cum_seq_lens_q`, got {batch_size}"
        )
    kv = torch.arange(batch_size + 1, dtype=torch.int32) * width
    return MlaBatch(qo, kv, block_tables.reshape(-1), lengths)


def place_indices(batch: MlaBatch, device: torch.device) -> torch.Tensor:
    """Page numbers as the kernel reads them."""
    return device_indices("kv_indices", batch.kv_indices, device)
