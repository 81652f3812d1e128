"""Multi-head latent attention in its absorbed form, in float64.

For a request with query tokens at positions P_i = kv_len - qo_len + i, all heads h sharing the
latent row c_j and the rotary row r_j of KV token j,

    x_hij = sm_scale * (q_nope_hi . c_j + rope_factor * q_pe_hi . r_j)
    o_hi  = o_scale * sum_j exp(x_hij) c_j / (sum_j exp(x_hij) + exp(sink_h))
    lse_hi = log(sum_j exp(x_hij) + exp(sink_h))

where j runs over the tokens of the request, with `causal` those up to P_i.

Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
Model", 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention import by_lse, indices

Arguments = Mapping[str, Any]


def _mla_paged_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    sm_scale: float,
    o_scale: float = 1.0,
    rope_factor: float = 1.0,
    causal: bool = False,
    lse_base: str = "log2",
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = o_scale softmax(sm_scale (q_nope ckv^T + rope_factor q_pe kpe^T)) ckv, and its LSE.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """
    page_size, device, shape = ckv_cache.shape[1], q_nope.device, q_nope.shape
    q_nope = q_nope.flatten(0, -3)
    q_pe = None if q_pe is None else q_pe.flatten(0, -3)
    output = torch.zeros(q_nope.shape, dtype=torch.float64, device=device)
    lse = torch.full(q_nope.shape[:2], float("-inf"), dtype=torch.float64, device=device)
    extra = lse.new_full((q_nope.shape[1],), float("-inf")) if sinks is None else sinks.double()
    for b, kv_len in enumerate(kv_len_arr.tolist()):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        qo_len = rows.stop - rows.start
        tokens = torch.arange(kv_len, device=device)
        pages = kv_indices[int(kv_indptr[b]) + tokens // page_size].long()
        latent = ckv_cache[pages, tokens % page_size].double()
        logits = torch.einsum("qhd,kd->qhk", q_nope[rows].double(), latent)
        if q_pe is not None and kpe_cache is not None:
            rotary = kpe_cache[pages, tokens % page_size].double()
            products = torch.einsum("qhd,kd->qhk", q_pe[rows].double(), rotary)
            logits = logits + rope_factor * products
        logits = logits * sm_scale
        if causal:
            position = torch.arange(qo_len, device=device) + kv_len - qo_len
            hidden = tokens[None] > position[:, None]
            logits = logits.masked_fill(hidden[:, None], float("-inf"))
        both = torch.cat([logits, extra[None, :, None].expand(qo_len, -1, 1)], -1)
        total = torch.logsumexp(both, -1)
        weights = torch.exp(logits - total.nan_to_num(neginf=0.0)[..., None])
        output[rows] = torch.einsum("qhk,kd->qhd", weights, latent) * o_scale
        lse[rows] = total
    return output.view(shape), lse / (torch.log(lse.new_tensor(2.0)) if lse_base == "log2" else 1.0)


_DESTINATIONS = {"self", "out", "lse", "return_lse"}


def _gather(run: Arguments) -> dict[str, Any]:
    wrapper = run.get("self")
    options, batch = getattr(wrapper, "_options", None), getattr(wrapper, "_batch", None)
    if wrapper is None or options is None or batch is None:
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    call = wrapper._read_call(**{name: run[name] for name in run if name not in _DESTINATIONS})
    if tuple(call.q_nope.shape[1:2]) != (options.num_heads,):
        raise ValueError(
            f"`q_nope` must have num_heads {options.num_heads} as plan() was told, got shape "
            f"{list(call.q_nope.shape)}"
        )
    device = call.q_nope.device
    return {
        "q_nope": call.q_nope,
        "q_pe": call.q_pe,
        "ckv_cache": call.ckv_cache,
        "kpe_cache": call.kpe_cache,
        "qo_indptr": batch.qo_indptr.to(device),
        "kv_indptr": batch.kv_indptr.to(device),
        "kv_indices": wrapper._kv_indices.to(device),
        "kv_len_arr": batch.kv_len_arr.to(device),
        "head_dim_kpe": options.head_dim_kpe,
        "sm_scale": call.sm_scale,
        **({"o_scale": call.o_scale} if call.o_scale != 1.0 else {}),
        **({"rope_factor": call.rope_factor} if call.rope_factor != 1.0 else {}),
        "causal": options.causal,
        "lse_base": "ln" if call.lse_on_e else "log2",
        "sinks": run.get("sinks"),
        "o_dtype": options.o_dtype,
        "out": run.get("out"),
        "lse": run.get("lse"),
    }


def _predict(run: Arguments) -> dict[str, Any]:
    wrapper = run["self"]
    if wrapper._planned_results is None:
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    call = wrapper._read_call(**{name: run[name] for name in run if name not in _DESTINATIONS})
    return {"q_nope": call.q_nope, "o_dtype": wrapper._planned_results[1]}


_AXES: dict[str, Axis] = {
    "total_q": Var("Query tokens of all requests."),
    "num_heads": Const("Query heads.", abbrev="h"),
    "head_dim_ckv": Const("Columns of a latent row.", abbrev="ckv"),
    "head_dim_kpe": Const("Columns of a rotary row.", abbrev="kpe"),
    "num_pages": Var("Pages of the cache."),
    "page_size": Const("Tokens of a page.", abbrev="ps"),
    "num_kv_indices": Var("Pages of all requests."),
    "batch_size": Var("Requests."),
    "len_indptr": Var("batch_size + 1."),
}
_FLOAT16 = ("bfloat16", "float16")
_FLOAT = (*_FLOAT16, "float8_e4m3fn")


def mla_template(
    *, lse: bool, name: str, ranks: tuple[int, ...] | None = None, **properties: Any
) -> TraceTemplate:
    """Template of a call whose queries have so many dimensions; None: three."""
    page = ["num_pages", "page_size"]
    outputs: dict[str, Value] = {
        "output": Tensor(
            ["total_q", "num_heads", "head_dim_ckv"],
            param="out",
            dtype_from_scalar="o_dtype",
            dtypes=_FLOAT16,
            ranks=ranks,
        )
    }
    if lse:
        outputs["lse"] = Tensor(
            ["total_q", "num_heads"],
            param="lse",
            dtype="float32",
            description="Logarithm of the sum of exponentials; -inf: no token in sight.",
        )
    return TraceTemplate(
        op_type="mla_paged",
        name_prefix=f"{name}_lse" if lse else name,
        description="Absorbed latent attention of ragged queries over pages.",
        axes=_AXES,
        inputs={
            "q_nope": Tensor(
                ["total_q", "num_heads", "head_dim_ckv"],
                dtypes=_FLOAT,
                layout="rows",
                ranks=ranks,
            ),
            "q_pe": Tensor(
                ["total_q", "num_heads", "head_dim_kpe"],
                dtype_from="q_nope",
                optional=True,
                layout="rows",
                ranks=ranks,
            ),
            "ckv_cache": Tensor([*page, "head_dim_ckv"], dtypes=_FLOAT, layout="rows"),
            "kpe_cache": Tensor(
                [*page, "head_dim_kpe"], dtypes=_FLOAT, optional=True, layout="rows"
            ),
            "qo_indptr": indices("len_indptr", "First query token of each request."),
            "kv_indptr": indices("len_indptr", "First entry of each request in kv_indices."),
            "kv_indices": indices("num_kv_indices", "Page numbers."),
            "kv_len_arr": indices("batch_size", "KV tokens of each request."),
            "sm_scale": Scalar("float32", description="Factor of the logits."),
            "o_scale": Scalar("float32", optional=True, description="Factor of the output."),
            "rope_factor": Scalar(
                "float32", optional=True, description="Factor of rotary logits beside sm_scale."
            ),
            "sinks": Tensor(
                ["num_heads"], dtype="float32", optional=True, description="Logit of no token."
            ),
        },
        outputs=outputs,
        constraints=["len_indptr == batch_size + 1"],
        options={"causal": (False, True), **({"lse_base": ("log2", "ln")} if lse else {})},
        tags=["status:verified"],
        reference=_mla_paged_reference,
        **properties,
    )


mla_run_trace = by_lse(mla_template, name="mla_paged", gather=_gather, predict=_predict)
