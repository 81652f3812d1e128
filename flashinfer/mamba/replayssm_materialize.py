"""States of Mamba-2 at a token of a ring, for all layers in one call: what a prefix cache keeps."""

import torch

from .._common.checks import count as check_count
from .._common.checks import tensor as check_tensor
from .._instrument.decorator import flashinfer_api
from .._linear_attention.selective_state import get_materialize_kernel
from ..jit.mamba import ReplayssmMaterializeConfig

__all__ = ["replayssm_materialize"]


@flashinfer_api
def replayssm_materialize(
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: torch.Tensor,
    state_scale_slot_strides: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 0,
    dependency_inputs: list[torch.Tensor] | None = None,
    dependency_outputs: list[torch.Tensor] | None = None,
) -> None:
    """Write the state after the first tokens of a ring of ``checkpointing_ssu`` to another slot.

    Layers are told by tables of addresses, since their caches are separate tensors. Addresses,
    slots and lengths lie on the GPU and are not checked: wrong ones are the caller's error.

    Parameters
    ----------
    state_ptrs, x_cache_ptrs, B_cache_ptrs, dt_cache_ptrs, A_ptrs, state_scale_ptrs : torch.Tensor
        ``[layers]``, int64: addresses of each layer's tensors, as ``checkpointing_ssu`` has them;
        of `A` one number per head. Zeros for scales that there are not.
    state_slot_strides, x_cache_slot_strides, B_cache_slot_strides, dt_cache_slot_strides, \
state_scale_slot_strides : torch.Tensor
        ``[layers]``, int64: from one slot to the next, in elements. A slot is contiguous.
    src_slots, dst_slots : torch.Tensor
        ``[layers, batch]``, int32: slots that are read, with their rings, and slots that are
        written. Nothing happens where one of the two is `pad_slot_id`.
    ring_start, replay_prefix_len : torch.Tensor
        ``[batch]``, int32: the oldest row of a request's rings, and how many tokens from there on
        the state shall have; 0 copies state and scales as they are.
    active_request_indices : torch.Tensor
        ``[batch]``, int32: the requests that are served, each once, and -1 after them.
    state_dtype, input_dtype, matrixA_dtype : torch.dtype
        The dtypes of states, of `x` and `B` (bfloat16 or float16), and of `A`.
    dim, dstate, num_heads, heads_per_group : int
        Sizes that all layers share; `heads_per_group` divides `num_heads`.
    max_window : int
        A bound of `replay_prefix_len`, at most `ring_buffer_len`.
    ring_buffer_len : int
        Rows of the rings.
    pad_slot_id : int
        The slot that means none.
    rand_seed, philox_rounds
        As for ``selective_state_update``; rounds need a seed.
    dependency_inputs, dependency_outputs : list of torch.Tensor, optional
        Tensors that the addresses belong to, to be kept alive by the caller's compiler.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    for name, number in (("dim", dim), ("num_heads", num_heads), ("max_window", max_window)):
        check_count(name, number)
    if check_count("ring_buffer_len", ring_buffer_len) < max_window:
        raise ValueError(f"`ring_buffer_len` must be at least {max_window}, got {ring_buffer_len}")
    if num_heads % check_count("heads_per_group", heads_per_group) != 0:
        raise ValueError(f"`heads_per_group` must divide {num_heads}, got {heads_per_group}")
    if input_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"`input_dtype` must be bfloat16 or float16, got {input_dtype}")
    if check_count("philox_rounds", philox_rounds, 0) and rand_seed is None:
        raise ValueError(f"`rand_seed` must be given with {philox_rounds} `philox_rounds`")
    check_tensor("src_slots", src_slots, 2)
    fp32 = torch.float32
    config = ReplayssmMaterializeConfig(
        input_dtype, state_dtype, fp32, matrixA_dtype, fp32, dstate, True, philox_rounds > 0
    )
    get_materialize_kernel(config)(
        (state_ptrs, state_slot_strides),
        (x_cache_ptrs, x_cache_slot_strides),
        (B_cache_ptrs, B_cache_slot_strides),
        (dt_cache_ptrs, dt_cache_slot_strides),
        A_ptrs,
        (state_scale_ptrs, state_scale_slot_strides),
        (src_slots, dst_slots, pad_slot_id),
        (ring_start, replay_prefix_len, active_request_indices),
        (dim, num_heads, heads_per_group, ring_buffer_len),
        (rand_seed if philox_rounds > 0 else None, philox_rounds),
    )
