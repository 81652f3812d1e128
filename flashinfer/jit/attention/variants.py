"""Sources of ready variants, for users' modules.

A module of one takes the list of arguments that `docs/variants.md` describes. For sinks these are
the tensor ``sink`` of type ``float`` and the scalar ``sm_scale`` of type ``double``.
"""

from __future__ import annotations

_ATTENTION_SINK = r"""
struct AttentionSink : AttentionVariantBase {
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ AttentionSink(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  // The sink is one more logit of each head, natural, whose value is a row of zeros.
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    const float sink = params.sink[qo_head_idx] * math::log2e;
    const float largest = fmaxf(m, sink);
    if (largest == -math::inf) return;
    scale = math::ptx_exp2(m - largest);
    d = d * scale + math::ptx_exp2(sink - largest);
    m = largest;
  })
};
"""

attention_sink_decl: dict[str, str] = {"fa2": _ATTENTION_SINK, "fa3": _ATTENTION_SINK}
"""Source of the struct ``AttentionSink`` for each backend; both take the same one."""
