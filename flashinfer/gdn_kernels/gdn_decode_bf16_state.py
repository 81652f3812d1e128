"""`gated_delta_rule_mtp` as engines import it from here, with the state pool as a keyword."""

import torch

from .._common.checks import tensor as check_tensor
from .._instrument.decorator import flashinfer_api
from .._linear_attention.checks import check_flags
from .._linear_attention.decode import run_decode
from ..trace.templates.gated_delta_rule import gated_delta_rule_bf16_state_trace

__all__ = ["gated_delta_rule_mtp"]


@flashinfer_api(trace=gated_delta_rule_bf16_state_trace)
def gated_delta_rule_mtp(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    accepted_steps: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
) -> torch.Tensor:
    """`flashinfer.gdn_decode.gated_delta_rule_mtp` for a bfloat16 state, which is updated here.

    Parameters
    ----------
    A_log, a, dt_bias, q, k, v, b, scale, output
        As there; none of them may be None but the last two.
    softplus_beta, softplus_threshold : float
        1 and 20: no other softplus is supported.
    initial_state_source : torch.Tensor
        Pool of states, ``[slots, v_heads, head_dim_v, head_dim_k]``.
    initial_state_indices, output_state_indices, intermediate_states_buffer, ssm_state_indices
        As there.
    disable_state_update : bool
        Leave the pool as it is.
    use_qk_l2norm_in_kernel : bool
        Divide `q` and `k` by their Euclidean norms.
    accepted_steps, disable_output, recovery_steps
        Not supported: None, False and 0.

    Returns
    -------
    torch.Tensor
        `output`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        raise ValueError(
            "`softplus_beta` and `softplus_threshold` must be 1 and 20, got "
            f"{softplus_beta} and {softplus_threshold}"
        )
    if accepted_steps is not None or disable_output or recovery_steps:
        raise ValueError(
            "`accepted_steps`, `disable_output` and `recovery_steps` must be None, False and 0: "
            "not supported"
        )
    check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, disable_state_update=disable_state_update
    )
    return run_decode(
        check_tensor("q", q, 4),
        check_tensor("k", k, 4),
        check_tensor("v", v, 4),
        check_tensor("initial_state_source", initial_state_source, 4),
        (A_log, a, dt_bias, check_tensor("b", b, 3)),
        scale,
        output,
        normalize_qk=use_qk_l2norm_in_kernel,
        frozen=disable_state_update,
        read_slots=initial_state_indices,
        write_slots=output_state_indices,
        token_slots=ssm_state_indices,
        intermediate=intermediate_states_buffer,
    )
