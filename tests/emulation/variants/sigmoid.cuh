struct Sigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  float scale;

  template <typename Params>
  __device__ __host__ Sigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    scale = params.sm_scale;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float x = logits * scale / params.temperature[qo_head_idx] + params.bias;
    return math::ptx_rcp(1.f + math::ptx_exp2(-x * math::log2e));
  })
};
