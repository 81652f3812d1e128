"""Prepares the launches of a plan: which module, and what it is told before it runs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...jit.attention.config import AttentionConfig
from ...jit.attention.modules import AttentionModule, get_attention_module
from .choice import KernelChoice
from .requests import AttentionProblem, CustomMask, ItemScoring
from .spec import KernelOptions


class ModuleKey(NamedTuple):
    """What selects a module: quicker to make and to look up than an ``AttentionConfig``."""

    options: KernelOptions
    choice: KernelChoice
    paged: bool
    mask_mode: str
    mask_mode_second: str
    sliding_window: bool
    sinks: bool = False
    head_scales: bool = False

    @functools.lru_cache(maxsize=256)  # noqa: B019 - keys are few and small
    def config(self) -> AttentionConfig:
        """The same as a configuration, which refuses what there is no kernel for."""
        options, choice = self.options, self.choice
        return AttentionConfig(
            dtype_q=options.dtype_q,
            dtype_kv=options.dtype_kv,
            dtype_o=options.dtype_o,
            head_dim_qk=options.head_dim_qk,
            head_dim_vo=options.head_dim_vo,
            tile_q=choice.tile_q,
            paged=self.paged,
            mask_mode=self.mask_mode,
            pos_encoding=options.pos_encoding,
            sliding_window=self.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            sinks=self.sinks,
            tile_q_second=choice.tile_q_second,
            mask_mode_second=self.mask_mode_second,
            custom_variant=options.variant is not None,
            backend=choice.backend,
            head_scales=self.head_scales,
        )

    def load(self) -> AttentionModule:
        """The module, compiled first if need be."""
        return get_attention_module(self.config(), self.options.variant)


class Workspaces(NamedTuple):
    """Memory of a plan on the device."""

    floats: torch.Tensor  # partial results of requests that are split
    ints: torch.Tensor  # the work list


def bind(
    module: AttentionModule,
    launch: torch.Tensor,
    layout: torch.Tensor,
    workspaces: Workspaces,
    problem: AttentionProblem,
    second: AttentionProblem | None,
    is_graph: bool,
) -> None:
    """Put everything that a plan fixes into the bytes of a launch.

    Parameters
    ----------
    module : AttentionModule
        Of the plan.
    launch : torch.Tensor
        Receives the launch.
    layout : torch.Tensor
        The planner's bytes of the plan.
    is_graph : bool
        Whether q may have more rows than the plan.
    """
    spec, tensors = problem.spec, problem.tensors
    module.bind(
        launch,
        layout,
        workspaces.ints,
        workspaces.floats,
        tensors.kv_indices,
        spec.num_qo_heads,
        spec.num_kv_heads,
        problem.requests.page_size,
        spec.kv_layout == "HND",
        is_graph,
    )
    mask = tensors.mask
    if second is not None:
        rows = int(problem.requests.kv_lengths()[0]) if tensors.rows_as_pages else -1
        is_hnd = second.spec.kv_layout == "HND"
        module.bind_second(launch, layout, second.tensors.kv_indices, is_hnd, rows)
        mask = mask or second.tensors.mask
    if spec.logits_soft_cap > 0.0 or spec.pos_encoding_mode != "NONE":
        slopes = tensors.alibi_slopes
        module.options(launch, spec.logits_soft_cap, spec.rope_scale, spec.rope_theta, slopes)
    if isinstance(mask, CustomMask):
        module.mask(launch, *mask)
    elif isinstance(mask, ItemScoring):
        module.items(launch, *mask)
