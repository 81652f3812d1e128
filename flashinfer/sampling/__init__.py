"""Softmax, sampling, and the filters top-k, top-p and min-p on rows of logits or probabilities.

These rules hold for every function here:

- Rows are ``[batch, vocab]`` in float32, float16 or bfloat16, last dimension contiguous, any row
  stride, 1 to 524288 columns. Probabilities need not be normalised; negative ones count as zero.
- A filter keeps the elements that are at least a threshold, so equal values are all kept or all
  dropped, and the kept set is that of a sort:

  - top-k: threshold is the k-th largest value. ``k < 1`` and ``k >= vocab`` keep the whole row.
  - top-p: the largest threshold whose kept weight is at least ``p`` times the row's weight.
    ``p >= 1`` keeps the whole row, ``p <= 0`` the maximum.
  - min-p: threshold is ``min_p`` times the largest probability. ``min_p > 1`` counts as 1.

- `top_k`, `top_p`, `min_p` and `temperature` are numbers, or tensors with one per input row.
- Weights are summed as 64-bit integers (fixed point; steps of 2^-44 of the largest weight), so a
  result does not depend on the order of a sum: a row gives the same bits in any batch, at any
  position, on any number of multiprocessors. Every search ends after a fixed number of steps.
- A row with a NaN, with a NaN parameter, or without positive weight has no distribution. Its token
  is 0 and its `valid` flag is False; other rows are not affected.

Random numbers: one draw of Philox4x32-10 per row, for top-p at most two, keyed by
``(seed, offset)`` and the number of the output in the batch, whether it has a seed of its own or
all share one: equal seeds give different draws. Seeds in a column, ``[batch, 1]``, leave the number
out: the token of a request then does not depend on where it is in the batch. Without `seed`, seed
and offset come from `generator` (the device's default one), which is advanced. Tensors are read
when the kernel runs, so a captured CUDA graph draws anew when their contents change.
"""

from ..jit.sampling import gen_sampling_module as gen_sampling_module
from ._inputs import get_seed_and_offset as get_seed_and_offset
from ._kernels import get_sampling_module as get_sampling_module
from .draws import min_p_sampling_from_probs as min_p_sampling_from_probs
from .draws import sampling_from_logits as sampling_from_logits
from .draws import sampling_from_probs as sampling_from_probs
from .draws import top_k_sampling_from_probs as top_k_sampling_from_probs
from .draws import top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits
from .draws import top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs
from .draws import top_p_sampling_from_probs as top_p_sampling_from_probs
from .filters import softmax as softmax
from .filters import top_k_mask_logits as top_k_mask_logits
from .filters import top_k_renorm_prob as top_k_renorm_prob
from .filters import top_k_renorm_probs as top_k_renorm_probs
from .filters import top_p_renorm_prob as top_p_renorm_prob
from .filters import top_p_renorm_probs as top_p_renorm_probs
from .speculative import chain_speculative_sampling as chain_speculative_sampling

__all__ = [
    "chain_speculative_sampling",
    "gen_sampling_module",
    "get_sampling_module",
    "get_seed_and_offset",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
