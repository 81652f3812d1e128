"""Chain speculative sampling: draft tokens checked against the target model."""

from typing import cast

import torch

from .._common import checks
from .._common.conversions import as_dtype, converted, is_convertible
from .._common.dtypes import check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.speculative import SpeculativeConfig, gen_speculative_module
from ..trace.templates.sampling import chain_speculative_sampling_trace
from ._inputs import resolve_seed


def _speculative_kernel(dtype: torch.dtype) -> Kernel:
    check_dtype("draft_probs", dtype, (torch.float32,))
    module = gen_speculative_module(SpeculativeConfig()).build_and_load()
    return cast(Kernel, module.chain_speculative)


_chain_speculative = KernelTable(_speculative_kernel)
_DTYPES = {1: torch.int32, 2: torch.int32, 4: torch.int32, 5: torch.float32}


@flashinfer_api(trace=chain_speculative_sampling_trace)
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep draft tokens while the target model agrees, then draw one token of its own.

    Draft token ``x`` at position ``i`` is accepted with probability
    ``min(1, target_probs[:, i, x] / draft_probs[:, i, x])``. Drafts before the first that is not
    accepted are emitted, then a token from ``max(target_probs - draft_probs, 0)`` at that
    position; from the target's last position if all drafts were accepted. What is emitted is
    distributed as the target model's own tokens.

    Parameters
    ----------
    draft_probs : torch.Tensor
        ``[batch, num_drafts, vocab]``, float32, contiguous: what the drafts were drawn from. Here
        and below, floats and integers of another dtype than the listed one are converted.
    draft_token_ids : torch.Tensor
        ``[batch, num_drafts]``, int32, contiguous. A token out of range is not accepted.
    target_probs : torch.Tensor
        ``[batch, num_drafts + 1, vocab]``, float32, contiguous.
    maybe_output_accepted_token_num : torch.Tensor, optional
        ``[batch]``, int32: the number of drafts that are accepted, each looked at on its own, is
        added to it. None means a new tensor of zeros.
    maybe_output_emitted_draft_token_num : torch.Tensor, optional
        ``[batch]``, int32: the number of drafts that are emitted is added to it. None means
        a new tensor of zeros.
    deterministic, generator, seed, offset
        As for `sampling_from_probs`; a seed per row of the batch.

    Returns
    -------
    tuple of torch.Tensor
        Emitted tokens ``[batch, num_drafts + 1]``, int32, -1 after the last one; and the two
        counts. A position without positive weight, or with a NaN, emits token 0.

    Raises
    ------
    TypeError, ValueError
        As for `sampling_from_probs`.

    Notes
    -----
    C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    try:
        kernel = _chain_speculative[draft_probs.dtype]
    except NOT_LOADED:
        if is_convertible(draft_probs, torch.float32):
            draft_probs = as_dtype(draft_probs, torch.float32)
        kernel = _chain_speculative.load(draft_probs=draft_probs)
    checks.cuda_tensors(draft_token_ids=draft_token_ids, target_probs=target_probs)
    device, batch = draft_probs.device, draft_probs.shape[:1]
    token_ids = torch.empty(target_probs.shape[:2], dtype=torch.int32, device=device)
    accepted = maybe_output_accepted_token_num
    if accepted is None:
        accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    emitted = maybe_output_emitted_draft_token_num
    if emitted is None:
        emitted = torch.zeros(batch, dtype=torch.int32, device=device)
    checks.optional_flag("deterministic", deterministic)
    seed, offset = resolve_seed(seed, offset, generator, device)
    inputs = (draft_probs, draft_token_ids, target_probs)
    arguments = (token_ids, accepted, emitted, *inputs, seed, offset, None)
    try:
        kernel(*arguments)
    except ValueError:
        changed = converted(arguments, _DTYPES)
        kernel(*changed)
        for given, counted in zip(arguments[1:3], changed[1:3], strict=True):
            if counted is not given:
                given.copy_(counted)
    return token_ids, accepted, emitted
