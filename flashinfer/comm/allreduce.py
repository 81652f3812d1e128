"""All-reduce of a layer's partial sums, fused with residual, RMS norm and quantisation."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .._common import checks
from .._common.dtypes import FLOAT
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs, since
from ..compat.backends import BackendSupportedError
from ..jit.comm import check_ranks
from . import all_reduce_call, patterns
from . import schedule as schedules
from .comm_backend import resolve_backend
from .fusion_names import AllReduceFusionPattern
from .graph_results import FUSION_OUTPUTS, fusion_results
from .peer_workspace import PeerWorkspace, agree
from .workspace_base import AllReduceFusionWorkspace


class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Receive buffers over CUDA IPC. Creation, preparing and restoring are collective.

    Parameters
    ----------
    tp_size, tp_rank : int
        Ranks, 2 to 16 on one host, and this process's place among them.
    max_token_num, hidden_dim : int
        The largest tensor that will be reduced.
    dtype : torch.dtype
        float16, bfloat16 or float32: that of the largest tensor; smaller calls may have another.
    comm_backend : CommBackend, optional
        The ranks; None: `group`.
    group : torch.distributed.ProcessGroup, optional
        The ranks; None: all processes.
    force_oneshot_support : bool
        Room for one-shot at the largest size, which takes ``tp_size - 1`` times as much memory.

    Attributes
    ----------
    metadata : dict
        The arguments, and ``buffer_bytes`` of each rank.

    Raises
    ------
    ValueError
        If the ranks call with different arguments, are on several hosts, or are another number.
    """

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.float16,
        comm_backend: Any | None = None,
        group: Any | None = None,
        *,
        force_oneshot_support: bool = False,
    ) -> None:
        check_ranks(checks.count("world_size", tp_size))
        checks.count("rank", tp_rank, 0, tp_size - 1)
        checks.count("max_token_num", max_token_num)
        checks.count("hidden_dim", hidden_dim)
        checks.dtype("dtype", dtype, FLOAT)
        super().__init__(tp_size, tp_rank)
        self._dtype = dtype
        self._num_bytes = max_token_num * hidden_dim * dtype.itemsize
        self._force_one_shot = force_oneshot_support
        self.metadata: dict[str, Any] = {
            "tp_size": tp_size,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "force_oneshot_support": force_oneshot_support,
        }
        self._peers: PeerWorkspace | None = None
        self._open(resolve_backend(comm_backend, group))
        self.metadata["tp_rank"] = tp_rank

    def _open(self, backend: Any) -> None:
        facts = {k: v for k, v in self.metadata.items() if k not in ("tp_rank", "buffer_bytes")}
        agree(backend, "create_allreduce_fusion_workspace", facts)
        for name, expected, got in (
            ("world_size", self.world_size, backend.Get_size()),
            ("rank", self.rank, backend.Get_rank()),
        ):
            if expected != got:
                raise ValueError(f"`{name}` must be that of the group, {got}, got {expected}")
        # Modules compile now, not while the others wait in a kernel.
        for result in ("sum", "norm"):
            all_reduce_call.load(self._dtype, self.world_size, result=result)
        half = schedules.half_bytes(self._num_bytes, self.world_size, self._force_one_shot)
        self._peers = PeerWorkspace(half, backend)
        self.metadata["buffer_bytes"] = 2 * self._peers.half_bytes

    @property
    def backend(self) -> str:
        """ "trtllm", the name of the backend over CUDA IPC."""
        return "trtllm"

    @property
    def peers(self) -> PeerWorkspace:
        """The open memory, or a ValueError."""
        if self._peers is None:
            raise ValueError("`workspace` is destroyed, or prepared for a checkpoint")
        return self._peers

    def set_timeout(self, seconds: float) -> None:
        """How long kernels wait for another rank, also those of captured graphs."""
        self.peers.set_timeout(seconds)

    def check(self) -> None:
        """Raise CommError, which names the rank and the step, if a wait has timed out."""
        self.peers.check()

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: Any | None = None,
    ) -> bool:
        """Whether an all-reduce of ``[num_tokens, hidden_dim]`` fits."""
        if self._peers is None or tp_size != self.world_size:
            return False
        num_bytes = num_tokens * hidden_dim * dtype.itemsize
        if num_bytes > self._num_bytes:
            return False
        one_shot = use_oneshot
        if one_shot is None:
            one_shot = schedules.takes_one_shot(num_bytes, tp_size)
        return not one_shot or (tp_size - 1) * num_bytes <= self._peers.half_bytes

    def checkpoint_prepare(self) -> None:
        """Free the shared memory and keep the arguments. Collective.

        Graphs captured before are invalid.
        """
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Create the shared memory again, over `comm_backend`."""
        if self._destroyed:
            raise ValueError("`workspace` is destroyed")
        if self._peers is None:
            self._open(comm_backend)

    def destroy(self) -> None:
        """Give the memory up without waiting for another rank; a second call does nothing.

        Other ranks may be gone. What they may have open is freed when the same ranks create their
        next workspace, or with the process; `checkpoint_prepare` before it frees at once.
        """
        self._destroyed = True
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close(collective=False)


@says_where_it_runs(since(80), {"trtllm": since(80), "auto": since(80)})
def create_allreduce_fusion_workspace(
    backend: Literal["trtllm", "mnnvl", "mnnvl-cutedsl", "auto"] = "auto",
    world_size: int = None,  # type: ignore[assignment]
    rank: int = None,  # type: ignore[assignment]
    max_token_num: int = None,  # type: ignore[assignment]
    hidden_dim: int = None,  # type: ignore[assignment]
    dtype: torch.dtype = None,  # type: ignore[assignment]
    gpus_per_node: int | None = None,
    comm_backend: Any | None = None,
    force_oneshot_support: bool = False,
    group: Any | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any | None = None,
) -> AllReduceFusionWorkspace:
    """Create the memory that `allreduce_fusion` needs. Collective.

    Parameters
    ----------
    backend : str
        ``"auto"`` or ``"trtllm"``: peer memory over CUDA IPC. The backends of NVLink multicast,
        ``"mnnvl"`` and ``"mnnvl-cutedsl"``, are refused.
    world_size, rank : int
        Ranks, 2 to 16 on one host, and this process's place among them.
    max_token_num, hidden_dim : int
        The largest tensor that will be reduced, ``[max_token_num, hidden_dim]``.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    gpus_per_node : int, optional
        At least `world_size` if given: the ranks are on one host.
    comm_backend : CommBackend, optional
        The ranks, for setting up; None: `group`.
    force_oneshot_support : bool
        Room for one-shot at the largest size.
    group : torch.distributed.ProcessGroup, optional
        The ranks; None: all processes. Give it wherever there are more processes than ranks.
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert, add_residual
        Must be None, as the next ones: what kernels of multicast are compiled for. Here each call
        says it.
    write_residual_output, apply_rms_norm, output_dtype, dynamic_fp8, write_norm_output, config
        Must be None.

    Returns
    -------
    AllReduceFusionWorkspace
        Its `destroy` waits for nobody.

    Raises
    ------
    BackendSupportedError
        If `backend` is one of NVLink multicast.
    ValueError
        If an argument is missing or not allowed, or differs among the ranks.
    """
    if backend in ("mnnvl", "mnnvl-cutedsl"):
        raise BackendSupportedError(
            f"`backend` {backend!r} needs NVLink multicast, for which there are no kernels here: "
            "take 'trtllm' or 'auto'"
        )
    checks.choice("backend", backend, ("auto", "trtllm"))
    _refuse_constants(
        top_k=top_k,
        rms_eps=rms_eps,
        weight_bias=weight_bias,
        routed_scaling_factor=routed_scaling_factor,
        include_shared_expert=include_shared_expert,
        add_residual=add_residual,
        write_residual_output=write_residual_output,
        apply_rms_norm=apply_rms_norm,
        output_dtype=output_dtype,
        dynamic_fp8=dynamic_fp8,
        write_norm_output=write_norm_output,
        config=config,
    )
    if gpus_per_node is not None and checks.count("gpus_per_node", gpus_per_node) < world_size:
        raise ValueError(
            f"`gpus_per_node` must be at least `world_size`, {world_size}, got {gpus_per_node}: "
            "beyond one host, use torch.distributed"
        )
    return TRTLLMAllReduceFusionWorkspace(
        world_size,
        rank,
        max_token_num,
        hidden_dim,
        dtype,
        comm_backend,
        group,
        force_oneshot_support=checks.flag("force_oneshot_support", force_oneshot_support),
    )


def _refuse_constants(**constants: Any) -> None:
    """Refuse what only workspaces of multicast are made for."""
    for name, value in constants.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be None, got {value!r}: it is of `backend` 'mnnvl-cutedsl', and "
                "here calls of allreduce_fusion say what they compute"
            )


@graph_operator("output", *FUSION_OUTPUTS, results=fusion_results, fixed=("pattern",))
@flashinfer_api
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: Literal["trtllm", "cake"] = "trtllm",
) -> torch.Tensor:
    """Sum a tensor over the ranks, then what the pattern says, in one kernel.

    The sum is taken in float32 in the order of the ranks and rounded once, by one-shot and two-shot
    alike: all ranks hold the same bits, run after run. With a norm, ``h = sum + residual_in`` in
    float32; ``residual_out = h`` and ``norm_out = h / sqrt(mean(h^2) + rms_eps) * (rms_gamma +
    weight_bias)``, each rounded; codes are those of the rounded norm.

    Parameters
    ----------
    input : torch.Tensor
        ``[tokens, hidden]``, contiguous, float16, bfloat16 or float32, rows of whole 16 bytes.
        kMoEFinalize...: ``[permuted rows, hidden]``, this rank's expert outputs.
        kMoEReduction...: not read.
    workspace : AllReduceFusionWorkspace
        Made by `create_allreduce_fusion_workspace`.
    pattern : int
        An `AllReduceFusionPattern`. Patterns with packed scales of groups are refused: only
        products of Blackwell read such scales.
    launch_with_pdl : bool
        Programmatic dependent launch (compute capability 9.0).
    trigger_completion_at_end : bool
        With programmatic launch: the next kernel starts when this one ends, not when it begins.
        With False the next kernel must wait for this one itself.
    output : torch.Tensor, optional
        The sum, ``[tokens, hidden]``; made for kAllReduce, else written only if given. It may be
        `input`.
    residual_out, norm_out, quant_out, scale_out : torch.Tensor, optional
        What the pattern writes; None: made, except `norm_out` where the pattern has codes only.
        Rows may be those of `input` (where it has ``[tokens, hidden]``) and of `residual_in`, one
        result each; any other overlap is refused.
        Codes are float8_e4m3fn ``[tokens, hidden]`` or two e2m1 in a byte, ``[tokens, hidden //
        2]``.
        Scales are e4m3 bytes of 16 elements (FP4), where padding is not written; or float32
        ``[tokens]`` (DynamicFP8).
    residual_in, rms_gamma : torch.Tensor, optional
        ``[tokens, hidden]`` and ``[hidden]``, dtype of `input`; needed by all patterns but
        kAllReduce.
    rms_eps : float
        Added to the mean square.
    scale_factor : torch.Tensor or float, optional
        FP8: the scale of the codes, ``code = norm / scale``. FP4: the global scale that multiplies.
        float32, one element.
    layout_code : int, optional
        A `QuantizationSFLayout` of FP4's scales; None: SWIZZLED_128x4.
    use_oneshot : bool, optional
        The protocol; None: by bytes and ranks. All ranks must choose alike.
    fp32_acc : bool
        Sums are taken in float32 in any case.
    moe_reduction_device_num_experts : int, optional
        Experts of this rank, the first dimension of the next two; None: all of it.
    moe_reduction_scale_input : torch.Tensor, optional
        ``[experts, tokens]``, float32.
    moe_reduction_active_experts_token_input : torch.Tensor, optional
        ``[experts, tokens, hidden]``.
    moe_reduction_token_input : torch.Tensor, optional
        ``[tokens, hidden]``, added to the experts' weighted sum.
    expanded_idx_to_permuted_idx : torch.Tensor, optional
        ``[tokens, top_k]``, int32: rows of `input`; other numbers, as -1, for experts of other
        ranks.
    expert_scale_factor : torch.Tensor, optional
        ``[tokens, top_k]``, dtype of `input`; None: ones.
    shared_expert_output : torch.Tensor, optional
        ``[tokens, hidden]``, added once by this rank.
    block_quant_group_size : int, optional
        Of the patterns with packed scales, which are refused.
    weight_bias : float
        Added to `rms_gamma`: 1 for Gemma's weights.
    moe_finalize_backend : str
        ``"trtllm"``; ``"cake"``, of Blackwell, is refused.

    Returns
    -------
    torch.Tensor
        The sum (kAllReduce), else `norm_out`, or `quant_out` where there is no `norm_out`.

    Raises
    ------
    TypeError, ValueError
        If an argument is missing, has a shape, dtype or layout not listed above, or is too large
        for the workspace; before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.

    Notes
    -----
    A call is collective: a rank that does not take part ends the others with an error after the
    workspace's time-out. Source of the protocol: docs/comm.md.
    """
    if checks.choice("moe_finalize_backend", moe_finalize_backend, ("trtllm", "cake")) == "cake":
        raise BackendSupportedError("`moe_finalize_backend` 'cake' is for Blackwell: take 'trtllm'")
    peers = _peers_of(workspace)
    kind = patterns.pattern_of(pattern)
    launch = patterns.Launch(use_oneshot, launch_with_pdl, trigger_completion_at_end)
    if kind == AllReduceFusionPattern.kAllReduce:
        return _plain(peers, input, output, launch)
    source = patterns.source_of(
        kind,
        input,
        num_experts=moe_reduction_device_num_experts,
        scales=moe_reduction_scale_input,
        active=moe_reduction_active_experts_token_input,
        token_input=moe_reduction_token_input,
        permuted_rows=expanded_idx_to_permuted_idx,
        weights=expert_scale_factor,
        shared=shared_expert_output,
    )
    given = patterns.Outputs(output, residual_out, norm_out, quant_out, scale_out)
    made = patterns.fused(
        peers,
        source,
        kind,
        given,
        residual_in,
        rms_gamma,
        eps=rms_eps,
        weight_bias=weight_bias,
        scale=scale_factor,
        layout=layout_code,
        launch=launch,
    )
    result = made.norm_out if made.norm_out is not None else made.quant_out
    assert result is not None
    return result


def _peers_of(workspace: Any) -> PeerWorkspace:
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise TypeError(
            "`workspace` must be of create_allreduce_fusion_workspace, got "
            f"{type(workspace).__name__}"
        )
    return workspace.peers


def _plain(
    peers: PeerWorkspace,
    input: torch.Tensor,
    output: torch.Tensor | None,
    launch: patterns.Launch,
) -> torch.Tensor:
    checks.tensor("input", input)
    if output is None:
        output = torch.empty_like(input)
    all_reduce_call.run(
        peers,
        input,
        output,
        use_oneshot=launch.use_oneshot,
        enable_pdl=launch.enable_pdl,
        completes_at_end=launch.completes_at_end,
    )
    return output
