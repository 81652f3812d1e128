"""Call every operation once at a realistic shape, and write the definitions of the calls.

    rm -rf tests/trace/fi_trace_out && python tests/trace/example.py

The calls are in the other files ``example_*.py``. The files are committed, and
``test_definitions.py`` checks that the code writes them. This run also writes their list, which is:

    add_rmsnorm_mm_bf16_n128_k2048.json
    add_rmsnorm_mm_rope_append_bf16_hnd_k2048_n5120_d128_kv4_ps16_cos_sin_cache_f32_pos_ids_int32_q_weight_k_weight.json
    add_rmsnorm_mm_rope_append_bf16_k2048_n5120_d128_kv4_ps16_cos_sin_cache_f32_pos_ids_int32_q_weight_k_weight.json
    add_rmsnorm_mm_route_bf16_e128_k2048_topk8.json
    append_paged_kv_cache_fused_hnd_ps16_kv8_d128.json
    append_paged_kv_cache_fused_ps16_kv8_d128.json
    append_paged_kv_cache_hnd_ps16_kv8_d128.json
    append_paged_kv_cache_ps16_kv8_d128.json
    append_paged_mla_kv_cache_ps64_ckv512_kpe64.json
    apply_llama31_rope_inplace_q32_kv8_d128_r128.json
    apply_llama31_rope_pos_ids_inplace_q32_kv8_d128_r128_pos_ids_int32.json
    apply_llama31_rope_pos_ids_q32_kv8_d128_r128_pos_ids_int32.json
    apply_llama31_rope_q32_kv8_d128_r128.json
    apply_rope_inplace_q32_kv8_d128_r128.json
    apply_rope_pos_ids_inplace_q32_kv8_d128_r128_pos_ids_int32.json
    apply_rope_pos_ids_q32_kv8_d128_r128_pos_ids_int32.json
    apply_rope_q32_kv8_d128_r128.json
    apply_rope_with_cos_sin_cache_heads_q32_kv8_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_inplace_heads_q32_kv8_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_inplace_q4096_kv1024_d128_r128_positions_int32_cos_sin_cache_f32.json
    apply_rope_with_cos_sin_cache_q4096_kv1024_d128_r128_positions_int32_cos_sin_cache_f32.json
    attention_sink_h32_kv8_d128_dv128_ps16_sinks_causal.json
    attention_sink_lse_h32_kv8_d128_dv128_ps16_sinks_causal.json
    batch_attention_h32_kv8_d128_dv128_ps16_causal.json
    batch_deepgemm_fp8_nt_groupwise_n1536_k2048_g8_e4m3_masked_m_int32_out_bf16.json
    batch_pod_h32_kv8_d128_dv128_ps16_causal_p.json
    batch_pod_lse_h32_kv8_d128_dv128_ps16_causal_p.json
    bidirectional_ranges_h32_kv8_d128_dv128_ps16.json
    bidirectional_ranges_lse_h32_kv8_d128_dv128_ps16.json
    block_scale_interleave_b448_uint8.json
    block_sparse_attention_h32_kv8_d128_dv128.json
    block_sparse_attention_lse_h32_kv8_d128_dv128.json
    bmm_bf16_b128_n512_k128.json
    bmm_fp8_b128_n512_k128_e4m3_out_bf16.json
    cascade_attention_h32_kv8_d128_dv128_ps16_l2_causal.json
    chain_speculative_sampling_n3_v128256.json
    checkpointing_ssu_h64_g8_d64_n128_A_f32_D_D_f32_z_state_batch_indices_state_batch_indices_int32.json
    chunk_gated_delta_product_final_q16_kh16_hv32_k128_v128_n2_cu_seqlens_int64.json
    chunk_gated_delta_product_initial_final_q16_kh16_hv32_k128_v128_n2_cu_seqlens_int64_initial_state_f32_final_state_f32.json
    chunk_gated_delta_product_initial_q16_kh16_hv32_k128_v128_n2_cu_seqlens_int64_initial_state_f32.json
    chunk_gated_delta_product_q16_kh16_hv32_k128_v128_n2_cu_seqlens_int64.json
    chunk_gated_delta_rule2_final_q16_hv32_k128_v128_g_g_f32_beta_beta_f32_w_w_f32_cu_seqlens_int64.json
    chunk_gated_delta_rule2_initial_final_q16_hv32_k128_v128_g_g_f32_beta_beta_f32_w_w_f32_cu_seqlens_int64_initial_state_f32_final_state_f32.json
    chunk_gated_delta_rule2_initial_q16_hv32_k128_v128_g_g_f32_beta_beta_f32_w_w_f32_cu_seqlens_int64_initial_state_f32.json
    chunk_gated_delta_rule2_q16_hv32_k128_v128_g_g_f32_beta_beta_f32_w_w_f32_cu_seqlens_int64.json
    chunk_gated_delta_rule_final_q16_kh16_hv32_k128_v128_cu_seqlens_int64.json
    chunk_gated_delta_rule_initial_final_q16_kh16_hv32_k128_v128_cu_seqlens_int64_initial_state_f32_final_state_f32.json
    chunk_gated_delta_rule_initial_q16_kh16_hv32_k128_v128_cu_seqlens_int64_initial_state_f32.json
    chunk_gated_delta_rule_q16_kh16_hv32_k128_v128_cu_seqlens_int64.json
    concat_mla_k_h128_n128_r64.json
    concat_mla_kv_quant_fp8_h128_kv256_r64.json
    convert_bsr_mask_layout_r16_c16.json
    cudnn_batch_decode_h32_kv8_d128_dv128_ps16_causal.json
    cudnn_batch_decode_lse_h32_kv8_d128_dv128_ps16_causal.json
    cutlass_fused_moe_fp8_block_k8_e4_h2048_i768_token_selected_experts_int32.json
    cutlass_fused_moe_fp8_k8_e4_h2048_i768_token_selected_experts_int32_output_bf16.json
    cutlass_fused_moe_int4_k8_e4_h2048_i768_token_selected_experts_int32.json
    cutlass_fused_moe_k8_e4_h2048_i768_token_selected_experts_int32.json
    cutlass_fused_moe_mxfp4_k8_e4_h2048_i768_token_selected_experts_int32_fc1_scale_uint8_fc2_scale_uint8.json
    cutlass_fused_moe_nvfp4_k8_e4_h2048_i768_token_selected_experts_int32_fc1_scale_e4m3_fc2_scale_e4m3.json
    cutlass_fused_moe_plain_k8_e4_h2048_i768_token_selected_experts_int32.json
    e2m1_and_ufp8sf_scale_to_float_b3584_global_scale_tensor.json
    expand_pairs_2_by_pair_l2_e4_r16_n768_n768_f32_weight_0_bf16_weight_1_bf16_sorted_token_ids_int64_expert_ids_int64_lora_indices_int64_slice_start_loc_int64.json
    expand_pairs_2_l2_e4_r16_n768_n768_f32_weight_0_bf16_weight_1_bf16_sorted_token_ids_int64_expert_ids_int64_lora_indices_int64_slice_start_loc_int64.json
    fp4_quantize_h7168_global_scale.json
    fp8_blockscale_gemm_sm90_n4096_k7168_scales32_e4m3_input_scale_weight_scale_out_bf16.json
    fp8_blockscale_gemm_sm90_n4096_k7168_scales32_weight_e4m3_weight_scale.json
    fp8_blockscale_gemm_swiglu_sm90_n4096_k7168.json
    fp8_linear_n1536_k2048_e4m3_out_bf16.json
    fp8_mqa_logits_h64_d128.json
    fp8_paged_mqa_logits_n2_h64_d128_ps64_logits_f32.json
    fused_add_rmsnorm_cute_h4096.json
    fused_add_rmsnorm_fp8_block_quant_h8192.json
    fused_add_rmsnorm_h4096.json
    fused_add_rmsnorm_quant_cute_h4096_output_e4m3.json
    fused_add_rmsnorm_quant_h8192_output_e4m3.json
    fused_dit_gate_residual_layernorm_gamma_beta_h3072_gate_bias.json
    fused_dit_gate_residual_layernorm_scale_shift_h3072_gate_bias_scale_bias_shift_bias.json
    fused_dit_residual_layernorm_scale_shift_h3072_residual_scale_bias_shift_bias.json
    fused_kda_decode_h12_d128_l3_weight_f32_dt_bias_f32_state_indices_int32_state_f32_norm_weight_f32_lower_bound_state_f32.json
    fused_qk_rmsnorm_rope_fp8_q40_k40_v40_d128_f44_h42_w42_ppf2_pph4_ppw4.json
    fused_qk_rmsnorm_rope_q40_k40_v40_d128_f44_h42_w42_ppf2_pph4_ppw4.json
    fused_rmsnorm_silu_h8192.json
    fused_rmsnorm_silu_h8192_output_e4m3.json
    fused_topk_deepseek_e256_k8_f32.json
    gated_delta_rule_bf16_state_h16_hv32_k128_v128_a_bf16_q_bf16_k_bf16_v_bf16_b_bf16_initial_state_source_bf16_initial_state_indices_initial_state_indices_int32_output_bf16_initial_state_source_bf16.json
    gated_delta_rule_decode_h16_hv32_k128_v128_state_f32_dt_bias_f32_state_f32.json
    gated_delta_rule_decode_key_major_h16_hv32_k128_v128_state_f32_dt_bias_f32_state_f32.json
    gated_delta_rule_mtp_h16_hv32_k128_v128_initial_state_f32_initial_state_indices_int32_dt_bias_f32_initial_state_f32_disable_state_update.json
    gated_delta_rule_mtp_replayssm_h16_hv32_k128_v128_initial_state_f32_initial_state_indices_int32_dt_bias_f32_initial_state_f32.json
    gated_delta_rule_replayssm_commit_h16_hv32_k128_v128_f32_rawv_cache_bf16_rawk_cache_bf16_state_indices_int32_accept_lens_int32.json
    gated_residual_next_rmsnorm_h8192_post_weight.json
    gated_residual_next_rmsnorm_shared_alpha_h8192_post_weight.json
    gated_residual_rmsnorm_h8192_weight.json
    gdn_fused_decode_step_hv32_d128_qkv8192_w4_dt_bias_f32_ssm_state_f32_state_indices_int32_ssm_state_f32.json
    gelu_and_mul_d10240.json
    gelu_tanh_and_mul_d14336.json
    gemm_fp8_nt_blockscaled_k_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_blockscaled_mn_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_k_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_k_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_mn_by_block_n1536_k2048_e4m3_out_bf16.json
    gemm_fp8_nt_groupwise_mn_n1536_k2048_e4m3_out_bf16.json
    gemma_fused_add_rmsnorm_h3584.json
    gemma_rmsnorm_h3584.json
    get_batch_indices_positions_n32.json
    get_seq_lens_ps16.json
    gqa_paged_decode_h32_kv8_d128_dv128_ps16.json
    gqa_paged_decode_lse_h32_kv8_d128_dv128_ps16.json
    gqa_paged_decode_multi_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_decode_multi_lse_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_lse_h32_kv8_d128_dv128_ps16_causal.json
    gqa_paged_prefill_lse_heads_first_h32_kv8_d128_dv128_ps16_causal.json
    gqa_ragged_prefill_h32_kv8_d128_dv128_causal.json
    gqa_ragged_prefill_lse_h32_kv8_d128_dv128_causal.json
    gqa_ragged_prefill_lse_heads_first_h32_kv8_d128_dv128_causal.json
    group_deepgemm_fp8_nt_groupwise_n1536_k2048_g8_e4m3_m_indices_int32_out_bf16.json
    group_gemm_fp8_nt_groupwise_contiguous_n1536_k2048_g8_e4m3_m_indices_int32_out_bf16.json
    group_gemm_fp8_nt_groupwise_k_n1536_k2048_g8_e4m3_m_indptr_int32_out_bf16.json
    group_gemm_fp8_nt_groupwise_mn_n1536_k2048_g8_e4m3_m_indptr_int32_out_bf16.json
    grouped_mm_bf16_n1536_k2048_g8_m_indptr_int32.json
    grouped_mm_fp8_n1536_k2048_g8_e4m3_m_indptr_int32_out_bf16.json
    hash_topk_e256_k6_f32_input_ids_int64_tid2eid_int32.json
    hash_topk_shared_e256_k6_f32_input_ids_int64_tid2eid_int32.json
    layernorm_cute_h4096.json
    layernorm_h128.json
    layernorm_quant_h4096_output_e4m3.json
    merge_state_h32_d128.json
    merge_state_in_place_h32_d128.json
    merge_state_in_place_h32_d128_mask_mask_bool.json
    merge_states_h32_d128.json
    mhc_post_h4096.json
    mhc_pre_big_fuse_h4096_residual_bf16_layer_input_bf16.json
    mhc_pre_big_fuse_with_prenorm_h4096_residual_bf16_layer_input_bf16.json
    min_p_sampling_from_probs_v128256_f32.json
    mla_decode_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_decode_lse_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_decode_xqa_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_paged_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_paged_lse_h128_ckv512_kpe64_ps64_q_pe_kpe_cache_causal.json
    mla_rope_quantize_fp8_q16_r64_qn512_kn512_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3_no_is_neox.json
    mm_M1_16_K6144_N256_n256_k6144.json
    mm_M1_16_K7168_N128_n128_k7168.json
    mm_M1_16_K7168_N256_bf16_n256_k7168.json
    mm_M1_16_K7168_N256_n256_k7168.json
    mm_M1_16_K7168_N384_bf16_n384_k7168.json
    mm_M1_16_K7168_N384_n384_k7168.json
    mm_M1_16_K7168_N896_bf16_n896_k7168.json
    mm_M1_16_K7168_N896_n896_k7168.json
    mm_add_rmsnorm_bf16_n4096_k14336.json
    mm_bf16_n6144_k4096.json
    mm_bf16_n6144_k4096_bias.json
    mm_fp8_n1536_k2048_alpha_out_bf16.json
    mm_silu_and_mul_bf16_n14336_k4096.json
    moe_activation_e2_c4096.json
    moe_finalize_h7168_k2.json
    moe_grouped_gemm_cutedsl_e2_n4096_k7168.json
    moe_grouped_gemm_cutedsl_e2_n7168_k2048.json
    mono_moe_e4_h2048_i768.json
    mxfp4_dequantize_b3584.json
    mxfp4_dequantize_host_b3584_g32.json
    mxfp4_quantize_h7168.json
    mxfp4_quantize_h7168_layout_linear.json
    mxfp8_dequantize_host_h7168_e4m3.json
    mxfp8_grouped_quantize_h7168.json
    mxfp8_quantize_h7168.json
    nvfp4_batched_quantize_h7168.json
    nvfp4_block_scale_interleave_b448_uint8.json
    nvfp4_kv_dequantize_b64_output_bf16.json
    nvfp4_kv_dequantize_paged_ps16_kv8_d128_dv128_output_k_bf16_output_v_bf16_output_k_bf16_output_v_bf16.json
    nvfp4_kv_quantize_h128.json
    nvfp4_quantize_append_paged_kv_cache_ps16_kv8_d128.json
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_ps16_kv8_d128_slot_mapping_int64.json
    nvfp4_quantize_h7168.json
    packbits_bool.json
    packed_fused_kda_decode_h12_d128_l5_weight_f32_dt_bias_f32_state_indices_int32_state_f32_norm_weight_f32_lower_bound_query_start_loc_int32_state_f32.json
    packed_kda_decode_h32_d128_dt_bias_f32_state_f32_state_indices_int32_state_f32.json
    paged_mqa_logits_schedule.json
    per_token_group_quant_8bit_float8_e5m2_h7168_g128.json
    per_token_group_quant_8bit_h7168_g128.json
    per_token_group_quant_8bit_h7168_g128_column_major_scales_scale_tma_aligned_scale_ue8m0.json
    per_token_group_quant_8bit_int8_h7168_g128.json
    pod_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_d_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_p_h32_kv8_d128_dv128_ps16_causal_p.json
    pod_lse_p_lse_d_h32_kv8_d128_dv128_ps16_causal_p.json
    qk_rmsnorm_cute_n8_d128_1.0.json
    recurrent_kda_checkpoints_h32_hv32_k128_v128_state_checkpoints_f32_checkpoint_cu_starts_int64_state_checkpoints_f32.json
    recurrent_kda_final_checkpoints_h32_hv32_k128_v128_checkpoint_cu_starts_int64_state_checkpoints_f32.json
    recurrent_kda_final_h32_hv32_k128_v128.json
    recurrent_kda_gate_checkpoints_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_state_checkpoints_f32_checkpoint_cu_starts_int64_state_checkpoints_f32_beta_is_logit.json
    recurrent_kda_gate_final_checkpoints_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_checkpoint_cu_starts_int64_state_checkpoints_f32_beta_is_logit.json
    recurrent_kda_gate_final_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_beta_is_logit.json
    recurrent_kda_gate_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_beta_is_logit.json
    recurrent_kda_gate_initial_checkpoints_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_initial_state_f32_state_checkpoints_f32_checkpoint_cu_starts_int64_initial_state_f32_state_checkpoints_f32_beta_is_logit.json
    recurrent_kda_gate_initial_final_checkpoints_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_initial_state_f32_state_checkpoints_f32_checkpoint_cu_starts_int64_initial_state_f32_state_checkpoints_f32_beta_is_logit.json
    recurrent_kda_gate_initial_final_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_initial_state_f32_initial_state_f32_beta_is_logit.json
    recurrent_kda_gate_initial_h32_hv32_k128_v128_dt_bias_dt_bias_f32_lower_bound_initial_state_f32_initial_state_f32_beta_is_logit.json
    recurrent_kda_h32_hv32_k128_v128.json
    recurrent_kda_initial_checkpoints_h32_hv32_k128_v128_initial_state_f32_state_checkpoints_f32_checkpoint_cu_starts_int64_initial_state_f32_state_checkpoints_f32.json
    recurrent_kda_initial_final_checkpoints_h32_hv32_k128_v128_initial_state_f32_state_checkpoints_f32_checkpoint_cu_starts_int64_initial_state_f32_state_checkpoints_f32.json
    recurrent_kda_initial_final_h32_hv32_k128_v128_initial_state_f32_initial_state_f32.json
    recurrent_kda_initial_h32_hv32_k128_v128_initial_state_f32_initial_state_f32.json
    rmsnorm_cute_h4096.json
    rmsnorm_fp8_block_quant_h8192.json
    rmsnorm_h128.json
    rmsnorm_h4096.json
    rmsnorm_h4096_f16.json
    rmsnorm_quant_cute_h4096_output_e4m3.json
    rmsnorm_quant_h8192_output_e4m3.json
    rmsnorm_sigmoid_gate_d64.json
    rope_append_paged_kv_cache_hnd_q32_kv8_d128_v128_ps16_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_append_paged_kv_cache_hnd_q32_kv8_d128_v128_ps16_cos_sin_cache_f32_pos_ids_int32_q_weight_k_weight.json
    rope_append_paged_kv_cache_q32_kv8_d128_v128_ps16_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_append_paged_kv_cache_q32_kv8_d128_v128_ps16_cos_sin_cache_f32_pos_ids_int32_q_weight_k_weight.json
    rope_quantize_fp8_append_paged_kv_cache_hnd_q32_r128_qn0_kn0_kv8_ps16_v128_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_quantize_fp8_append_paged_kv_cache_mla_q16_r64_qn512_kn512_ps16_q_nope_k_nope_cos_sin_cache_f32_pos_ids_int32_ckv_cache_e4m3_kpe_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_ckv_cache_e4m3_kpe_cache_e4m3.json
    rope_quantize_fp8_append_paged_kv_cache_q32_r128_qn0_kn0_kv8_ps16_v128_cos_sin_cache_f32_pos_ids_int32_k_cache_e4m3_v_cache_e4m3_q_rope_out_e4m3_q_nope_out_e4m3_k_cache_e4m3_v_cache_e4m3.json
    rope_quantize_fp8_one_head_q16_r64_qn512_kn512_q_nope_k_nope_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3.json
    rope_quantize_fp8_q32_r128_qn0_kn0_kv8_cos_sin_cache_f32_pos_ids_int32_q_rope_out_e4m3_k_rope_out_e4m3_q_nope_out_e4m3_k_nope_out_e4m3.json
    sampling_from_logits_v128256_f32.json
    sampling_from_probs_valid_v128256_f32.json
    scaled_fp4_grouped_quantize_h7168.json
    segment_gemm_n1536_k2048.json
    segment_packbits_bool_indptr_int32_packed_indptr_int32_little.json
    selective_state_update_h64_g8_d64_n128_A_f32_D_f32_state_batch_indices_state_batch_indices_int32.json
    selective_state_update_tokens_h64_g8_d64_n128_A_f32_D_f32_state_batch_indices_state_batch_indices_int32.json
    shrink_pairs_2_by_pair_l2_e4_r16_k2048_sorted_token_ids_int64_expert_ids_int64_lora_indices_int64.json
    shrink_pairs_2_l2_e4_r16_k2048_sorted_token_ids_int64_expert_ids_int64_lora_indices_int64.json
    silu_and_mul_d14336.json
    silu_and_mul_nvfp4_quantize_h4096.json
    silu_and_mul_per_token_group_quant_8bit_float8_e5m2_h4096_g128.json
    silu_and_mul_per_token_group_quant_8bit_h4096_g128.json
    silu_and_mul_per_token_group_quant_8bit_int8_h4096_g128.json
    silu_and_mul_scaled_nvfp4_experts_quantize_h4096.json
    single_decode_h32_kv8_d128_dv128.json
    single_decode_lse_h32_kv8_d128_dv128.json
    single_prefill_h32_kv8_d128_dv128_causal.json
    single_prefill_h32_kv8_d128_dv128_custom_mask.json
    single_prefill_lse_h32_kv8_d128_dv128_causal.json
    softmax_v128256_f32.json
    ssd_combined_final_h64_g8_d64_n128_D_z_dt_bias_final_states_f32_dt_softplus.json
    ssd_combined_h64_g8_d64_n128_D_z_dt_bias_dt_softplus.json
    tinygemm_bf16_n256_k7168.json
    top_k_k2048_f32.json
    top_k_mask_logits_v128256_f32.json
    top_k_page_table_transform_k2048_p64_f32.json
    top_k_ragged_transform_k2048_f32.json
    top_k_renorm_probs_v128256_f32.json
    top_k_sampling_from_probs_v128256_f32.json
    top_k_top_p_sampling_from_logits_v128256_f32.json
    top_k_top_p_sampling_from_probs_v128256_f32.json
    top_k_top_p_sampling_from_probs_v128256_f32_joint.json
    top_k_varlen_k512_n2_c4_f32.json
    top_k_varlen_values_k512_n2_c4_f32.json
    top_p_renorm_probs_v128256_f32.json
    top_p_sampling_from_probs_v128256_f32.json
    trtllm_context_h32_kv8_d128_dv128_ps16_causal.json
    trtllm_context_lse_h32_kv8_d128_dv128_ps16_causal.json
    trtllm_decode_h32_kv8_d128_dv128_ps16_causal.json
    trtllm_decode_lse_h32_kv8_d128_dv128_ps16_causal.json
    trtllm_ragged_h128_kv128_d192_dv128_causal.json
    trtllm_ragged_lse_h128_kv128_d192_dv128_causal.json
    variable_block_sparse_attention_h32_kv8_d128_dv128.json
    variable_block_sparse_attention_lse_h32_kv8_d128_dv128.json
    weight_only_linear_int4_n4096_k4096_s32.json
    weight_only_linear_int8_by_row_n4096_k4096.json
    weight_only_linear_mxfp4_n4096_k4096_s128_weight_scale_uint8.json
    weight_only_linear_nvfp4_n4096_k4096_s256_weight_scale_e4m3_alpha.json
    xqa_decode_h32_kv8_d128_dv128_ps16_causal.json
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Make the calls with the dump on, on the reference backend where there is no GPU."""
    # The decorators read these when the package is imported.
    os.environ["FLASHINFER_TRACE_DUMP"] = "1"
    os.environ["FLASHINFER_TRACE_DUMP_DIR"] = str(folder)
    import example_attention
    import example_calls
    import example_linear
    import example_small
    import torch

    import flashinfer

    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    with contextlib.nullcontext() if on_gpu else flashinfer.reference_backend():
        example_calls.make_calls(torch.bfloat16)
        example_attention.make_calls(torch.bfloat16)
        example_linear.make_calls(torch.bfloat16)
        example_small.make_calls(torch.bfloat16)


def list_files(folder: Path) -> None:
    """Write the names of the definitions into the docstring of this file."""
    here = Path(__file__)
    head, listed, rest = here.read_text().partition("which is:\n\n")
    names = "".join(f"    {path.name}\n" for path in sorted(folder.iterdir()))
    here.write_text(head + listed + names + rest[rest.index('"""') :])


if __name__ == "__main__":
    committed = Path(__file__).parent / "fi_trace_out"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else committed)
    if len(sys.argv) == 1:
        list_files(committed)
