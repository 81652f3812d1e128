struct EveryHook : AttentionVariantBase {
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ EveryHook(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_QUERY_TRANSFORM(params, q, { return q * 0.5f; })

  REGISTER_KEY_TRANSFORM(params, k, { return k + 0.25f; })

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                            { return logits / params.temperature[qo_head_idx]; })

  // Every third diagonal is hidden.
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int position = qo_idx + params.get_kv_len(batch_idx) - params.get_qo_len(batch_idx);
    return (position + static_cast<int>(kv_idx)) % 3 != 0;
  })

  // One more logit in the denominator.
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    const float extra = params.extra_logits[qo_head_idx] * math::log2e;
    const float largest = m > extra ? m : extra;
    scale = math::ptx_exp2(m - largest);
    d = d * scale + math::ptx_exp2(extra - largest);
    m = largest;
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale,
                            { return output * scale / d * (1.f + 0.25f * (qo_head_idx % 4)); })
};
