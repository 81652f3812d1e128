"""A mixture of experts in one call, from the router's logits on: 8-bit weights, few tokens."""

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._common.dtypes import FLOAT
from .._instrument.decorator import flashinfer_api
from .._moe.arguments import check_workspace
from .._moe.experts import Experts
from .._moe.maps import route
from .._moe.workspace import MixtureShape, workspace_bytes
from ..compat.backends import backend_requirement, supported_compute_capability
from ..quantization._kernels import SCALE_BLOCK
from ..trace.templates.moe_mono import mono_moe_trace

_E4M3 = torch.float8_e4m3fn
_MAX_TOP_K, _MAX_EXPERTS = 32, 1024
_USUAL = MixtureShape(16, 8, 256, 2048, 512, torch.bfloat16, torch.bfloat16, "block")
"""The largest call that a scratchpad is for: 16 tokens of a layer of Qwen3.5 35B A3B."""


def has_monomoe() -> bool:
    """Whether the current GPU has the kernels of `mono_moe`: a Hopper."""
    if not torch.cuda.is_available():
        return False
    return get_compute_capability(torch.device("cuda", torch.cuda.current_device())) == (9, 0)


def get_scratchpad_size_bytes() -> int:
    """Bytes of memory between the steps of `mono_moe`.

    They are enough for 16 tokens with 8 experts each of 256, a hidden size of 2048 and an
    intermediate size of 512.
    """
    return workspace_bytes(_USUAL)


def alloc_scratchpad(device: torch.device) -> torch.Tensor:
    """Memory between the steps of `mono_moe`, to be used again by every call of a stream.

    Parameters
    ----------
    device : torch.device
        The GPU of the calls.

    Returns
    -------
    torch.Tensor
        ``[get_scratchpad_size_bytes()]``, uint8, zeros.
    """
    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


@flashinfer_api
def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """The first weights that `mono_moe` reads with ``interleave_up=False``: the checkpoint's.

    The order of rows belongs to the kernels that read them, and ours read gates and values from the
    two halves, so that nothing has to be prepared. Weights that were ordered for other kernels
    cannot be told from others, and give wrong results.

    Parameters
    ----------
    w_fp8 : torch.Tensor
        ``[experts, 2 * intermediate, hidden]``, float8_e4m3fn: gates, then values; intermediate is
        a multiple of 64.

    Returns
    -------
    torch.Tensor
        `w_fp8`, contiguous: itself if it is.

    Raises
    ------
    TypeError, ValueError
        If `w_fp8` is no such tensor.
    """
    checks.tensor("w_fp8", w_fp8, 3)
    checks.dtype("w_fp8", w_fp8.dtype, (_E4M3,))
    if w_fp8.shape[1] % 128:
        raise ValueError(
            f"`w_fp8` must have a multiple of 128 rows, 64 gates and 64 values each, got shape "
            f"{list(w_fp8.shape)}"
        )
    return w_fp8.contiguous()


@supported_compute_capability([90])
def _check(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
    interleave_up: bool,
) -> bool:
    """Shapes and dtypes: all sizes are those of the second weights and of the tokens."""
    checks.tensor("activations_in", activations_in, 2)
    experts, hidden, intermediate = checks.tensor(
        "expert_weights_down", expert_weights_down, 3
    ).shape
    multiples = hidden % SCALE_BLOCK == 0 and intermediate % SCALE_BLOCK == 0
    if not multiples or 0 in expert_weights_down.shape or experts > _MAX_EXPERTS:
        raise ValueError(
            f"`expert_weights_down` must be [experts, hidden, intermediate] with at most "
            f"{_MAX_EXPERTS} experts and multiples of {SCALE_BLOCK} elements, got shape "
            f"{list(expert_weights_down.shape)}"
        )
    tokens, bf16 = activations_in.shape[0], (torch.bfloat16,)
    blocks = hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK
    given: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "activations_in": (activations_in, (tokens, hidden), bf16),
        "router_logits": (router_logits, (tokens, experts), FLOAT),
        "expert_weights_up": (expert_weights_up, (experts, 2 * intermediate, hidden), (_E4M3,)),
        "expert_scales_up": (
            expert_scales_up,
            (experts, 2 * blocks[1], blocks[0]),
            (torch.float32,),
        ),
        "expert_weights_down": (expert_weights_down, (experts, hidden, intermediate), (_E4M3,)),
        "expert_scales_down": (expert_scales_down, (experts, *blocks), (torch.float32,)),
    }
    if out is not None:
        given["out"] = (out, (tokens, hidden), bf16)
    for name, (tensor, shape, dtypes) in given.items():
        checks.dtype(name, checks.tensor(name, tensor).dtype, dtypes)
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(tensor.shape)}")
    checks.count("top_k", top_k, 1, min(_MAX_TOP_K, experts))
    checks.choice("scoring_func", scoring_func, ("softmax", "sigmoid"))
    checks.flag("renormalize", renormalize)
    checks.flag("interleave_up", interleave_up)
    if scratchpad is not None:
        check_workspace("scratchpad", scratchpad, activations_in.device)
        checks.dtype("scratchpad", scratchpad.dtype, (torch.uint8,))
    return True


@backend_requirement({}, common_check=_check)
@flashinfer_api(trace=mono_moe_trace)
def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
    interleave_up: bool = True,
) -> torch.Tensor:
    """Routing and experts of a mixture with 8-bit weights, scales of blocks and SwiGLU.

    A token's experts are those with the best scores of all; ``out[t] = sum_j w[t, j] down[e] (
    silu(gate[e] x[t]) * (up[e] x[t]))`` with the scores w of its experts e. Tokens and the rows
    between the products become 8 bits with a scale for 128 elements. One launch routes, and those
    of `cutlass_fused_moe` follow; nothing waits for the host.

    Parameters
    ----------
    activations_in : torch.Tensor
        ``[tokens, hidden]``, bfloat16, rows contiguous, on a Hopper GPU: any number of tokens,
        though the function is meant for few.
    router_logits : torch.Tensor
        ``[tokens, experts]``, bfloat16, float16 or float32, rows contiguous; at most 1024 experts.
    expert_weights_up : torch.Tensor
        ``[experts, 2 * intermediate, hidden]``, float8_e4m3fn: first the rows of the gates, then
        those of the values; both sizes are multiples of 128.
    expert_scales_up : torch.Tensor
        ``[experts, 2 * intermediate / 128, hidden / 128]``, float32: factors of blocks.
    expert_weights_down : torch.Tensor
        ``[experts, hidden, intermediate]``, float8_e4m3fn.
    expert_scales_down : torch.Tensor
        ``[experts, hidden / 128, intermediate / 128]``, float32.
    top_k : int
        Experts of a token, 1 to 32.
    scoring_func : {"softmax", "sigmoid"}
        How logits become scores.
    renormalize : bool
        The weights of a token are divided by their sum.
    out : torch.Tensor, optional
        ``[tokens, hidden]``, bfloat16: receives the result. May not overlap `activations_in`.
    scratchpad : torch.Tensor, optional
        Memory of `alloc_scratchpad`, or any uint8 vector that is long enough; new memory if None.
        It holds nothing between calls.
    interleave_up : bool
        False if `interleave_for_tma_wgmma_up` gave the first weights, which is the same here.

    Returns
    -------
    torch.Tensor
        ``[tokens, hidden]``, bfloat16; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or the scratchpad is too small.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Shazeer et al., "Outrageously Large Neural Networks", 2017; DeepSeek-AI, "DeepSeek-V3 Technical
    Report", 2024, section 3.3.2.
    """
    tokens, hidden = activations_in.shape
    experts, intermediate = expert_weights_down.shape[0], expert_weights_down.shape[2]
    shape = MixtureShape(
        tokens, top_k, experts, hidden, intermediate, torch.bfloat16, torch.bfloat16, "block"
    )
    if scratchpad is not None and scratchpad.numel() < workspace_bytes(shape):
        raise ValueError(
            f"`scratchpad` must have {workspace_bytes(shape)} bytes for this call, got "
            f"{scratchpad.numel()}"
        )
    checks.cuda_tensors(activations_in=activations_in, router_logits=router_logits)
    if out is None:
        out = torch.empty_like(activations_in, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    weights = activations_in.new_empty((tokens, top_k), dtype=torch.float32)
    chosen = activations_in.new_empty((tokens, top_k), dtype=torch.int32)
    route(router_logits, None, weights, chosen, score=scoring_func, renormalize=renormalize)
    mixture = Experts(
        expert_weights_up,
        expert_weights_down,
        "swiglu",
        "block",
        (expert_scales_up, expert_scales_down),
    )
    return mixture.run(activations_in, chosen, weights, out, scratchpad)
