"""The modules of a mixture, compiled side by side: its launches would ask for them in turn."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import torch

from ..gemm._choice import GemmProblem, choose_config
from ..jit import JitSpec
from ..jit.gemm import gen_gemm_sm90_module
from ..jit.moe import MoeCombineConfig, MoeMapConfig, gen_moe_combine_module, gen_moe_map_module
from ..jit.quantization import gen_group_quant_module
from ..quantization._kernels import rows_config

_IDS = {torch.int32: "int32", torch.int64: "int64"}


@functools.lru_cache(maxsize=4096)
def build_together(
    first: GemmProblem, second: GemmProblem, dtype: torch.dtype, ids: torch.dtype
) -> None:
    """Compile what is not there yet of a mixture of two products.

    Parameters
    ----------
    first, second : GemmProblem
        The products.
    dtype : torch.dtype
        Of the tokens, before they are quantised.
    ids : torch.dtype
        Type of the chosen experts' numbers. One that the map has no kernel for is refused by it.
    """
    specs = [gen_gemm_sm90_module(choose_config(problem)) for problem in (first, second)]
    specs.append(gen_moe_combine_module(MoeCombineConfig(second.dtype_out, second.dtype_out)))
    if ids in _IDS:
        specs.append(gen_moe_map_module(MoeMapConfig(_IDS[ids])))
    if first.scale == "block":
        specs.append(gen_group_quant_module(rows_config(dtype)))
    modules = {spec.name: spec for spec in specs}.values()
    # Each by itself: one joint build would hold what it shares with other mixtures till its end.
    with ThreadPoolExecutor(len(modules)) as pool:
        list(pool.map(JitSpec.build, modules))
