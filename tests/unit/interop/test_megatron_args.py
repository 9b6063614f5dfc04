"""Arguments of Megatron runs are compared with the config, each by its name."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.contrib.megatron_args import ALIASES, arguments_of, contradictions, unsayable
from fsharding.models import DecoderConfig, Experts
from tests.helpers import slow

# What the parser of Megatron-LM (the release of megatron-core 0.19.2) gives for a Llama with experts, but for arguments
# of precision, parallelism, data and logging.
ARGUMENTS = {
    "activation_func_clamp_value": None, "add_bias_linear": False, "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_output_gate": False,
    "experimental_attention_variant": None, "glu_linear_offset": 0.0, "group_query_attention": True,
    "heterogeneous_layers_config_encoded_json": None, "heterogeneous_layers_config_path": None, "hidden_dropout": 0.0,
    "hidden_size": 16, "hybrid_layer_pattern": None, "hybrid_override_pattern": None, "is_hybrid_model": False,
    "kv_channels": 4, "layernorm_epsilon": 1e-05, "layernorm_zero_centered_gamma": False, "linear_attention_freq": None,
    "moe_apply_probs_on_input": False, "moe_expert_capacity_factor": None, "moe_expert_rank_capacity_factor": None,
    "moe_ffn_hidden_size": 12, "moe_input_jitter_eps": None, "moe_latent_size": None, "moe_layer_freq": 1,
    "moe_mlp_glu_interleave_size": None, "moe_router_enable_expert_bias": False, "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False, "moe_router_group_topk": None, "moe_router_num_groups": None,
    "moe_router_load_balancing_type": "aux_loss", "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax", "moe_router_topk": 2, "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None, "mrope_section": None, "mtp_num_layers": None,
    "multi_latent_attention": False, "no_rope_freq": None, "normalization": "RMSNorm", "num_attention_heads": 4,
    "num_experts": 4, "num_layers": 2, "num_query_groups": 2, "openai_gelu": False, "position_embedding_type": "rope",
    "qk_l2_norm": False, "qk_layernorm": False, "quick_geglu": False, "rope_scaling_factor": 8.0, "rotary_base": 500000,
    "rotary_interleaved": False, "rotary_percent": 1.0, "rotary_seq_len_interpolation_factor": None,
    "softmax_type": "vanilla", "spec": None, "squared_relu": False, "swiglu": True,
    "untie_embeddings_and_output_weights": True, "use_mup": False, "use_rope_scaling": True, "window_size": None,
}  # fmt: skip
# Older spellings, and fields of TransformerConfig that the parser lacks.
OLDER = {
    "norm_epsilon": 1e-5, "apply_layernorm_1p": False, "num_moe_experts": 4, "gated_linear_unit": True,
    "activation_func": "torch.nn.functional.silu", "softmax_scale": None, "moe_router_topk_limited_devices": None,
    "heterogeneous_block_specs": False,
}  # fmt: skip
CONFIG = DecoderConfig(
    vocab_size=40, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=12, rope_base=500_000.0, experts=Experts(4, 2, 12),
    rope_scaling=fs.ops.LlamaScaling(8.0, 8192, 1.0, 4.0),
)  # fmt: skip

# Fields of TransformerConfig, of Megatron Core 0.16.1 and 0.19.2, that are not compared.
IGNORED = {
    "precision and kernels": """activation_func_fp8_input_store apply_query_key_layer_scaling apply_rope_fusion
        attention_backend attention_softmax_in_fp32 autocast_dtype batch_invariant_mode bf16 bias_activation_fusion
        bias_dropout_fusion cross_entropy_fusion_impl cross_entropy_loss_fusion deterministic_mode
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache enable_autocast first_last_layers_bf16
        flash_decode fp16 fp32_residual_connection fp4 fp4_param fp4_quantizer_factory fp4_recipe fp8
        fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
        fp8_multi_head_attention fp8_param fp8_quantizer_factory fp8_recipe fp8_wgrad fused_single_qkv_rope
        gradient_accumulation_fusion kitchen_attention_backend masked_softmax_fusion memory_efficient_layer_norm
        moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_router_fusion moe_use_legacy_grouped_gemm
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 params_dtype persist_layer_norm pipeline_dtype
        quant_recipe symmetric_ar_type tp_only_amax_red transformer_impl use_fused_weighted_squared_relu
        use_inference_optimized_layers use_kitchen use_kitchen_attention use_te_activation_func flash_attention_version
        fp8_output_proj fused_residual_rmsnorm mamba_training_ssm_states_dtype moe_single_grouped_bias
        moe_single_grouped_weight use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
        use_transformer_engine_op_fuser""",
    "memory, graphs and parallelism": """_cpu_offloading_context account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split async_tensor_model_parallel_allreduce barrier_with_L1_time batch_p2p_comm
        batch_p2p_sync clone_scatter_output_in_embedding context_parallel_size cp_comm_type cpu_offloading
        cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_weights
        cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_warmup_steps deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute
        distribute_saved_activations enable_cuda_graph ep_overlap_early_attn_memory_release expert_model_parallel_size
        expert_tensor_parallel_size external_cuda_graph finalize_model_grads_func fine_grained_activation_offloading
        grad_scale_func grad_sync_func hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes
        hybrid_context_parallel inference_fuse_tp_communication max_seqlen_per_dp_cp_rank
        microbatch_group_size_per_vp_stage min_offloaded_tensor_size mlp_chunks_for_prefill moe_deepep_num_sms
        moe_enable_deepep moe_extended_tp moe_flex_dispatcher_backend moe_hybridep_num_sms moe_layer_recompute
        moe_shared_expert_overlap moe_token_dispatcher_type no_sync_func num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints offload_modules
        overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func
        pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size
        recompute_granularity recompute_method recompute_modules recompute_num_layers sequence_parallel
        tensor_model_parallel_size tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_ring_exchange_p2p
        variable_seq_lengths virtual_pipeline_model_parallel_size wgrad_deferral_limit activation_offload_fraction
        cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        fine_grained_offloading_max_inflight_offloads gtp_weight_remat_size high_priority_a2a_comm_stream
        inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type mlp_chunks_for_training
        moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        moe_permute_fusion_into_hybridep nccl_all_reduce_for_prefill overlap_dispatch_backward_with_experts_wgrad
        tensor_parallel_num_weight_shards""",
    "initialization, logs and tests": """config_logger_dir embedding_init_method embedding_init_method_std
        inference_rng_tracker inference_sampling_seed init_method init_method_std init_model_with_meta_device
        log_max_attention_logit moe_enable_routing_replay moe_per_layer_logging output_layer_init_method
        perform_initialization test_mode timers use_cpu_initialization use_te_rng_tracker""",
    "gradients alone": """calculate_per_token_loss moe_aux_loss_coeff moe_router_bias_update_rate moe_z_loss_coeff
        moe_grad_scale_func mtp_grad_scale_func mtp_loss_scaling_factor qk_clip qk_clip_alpha qk_clip_threshold""",
    "without effect unless a compared field is set": """dsa_indexer_head_dim dsa_indexer_loss_coeff
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_n_heads dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq
        dsa_kernel_backend experimental_attention_variant_loss_scale_func moe_router_quantile_balancing_ema
        moe_shared_expert_glu_interleave_size mtp_detach_heads mtp_hybrid_override_pattern mtp_use_repeated_layer
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
        dsa_indexer_topk dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_state_dim moe_pad_expert_input_to_capacity moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_shared_expert_gate moe_token_drop_policy moe_token_dropping
        mtp_standalone use_mamba_mem_eff_path window_attn_skip_freq""",
}  # fmt: skip


def others(value):
    """Values of the same kind that differ."""
    kinds = {
        bool: st.just(not value),
        int: st.integers(1, 1000),
        float: st.floats(1e-6, 100.0),
        str: st.sampled_from(["LayerNorm", "sigmoid", "yarn", "none", "sinkhorn", "torch.nn.functional.gelu"]),
        type(None): st.sampled_from([2, 0.5, "other", True, [1, 0], (4, 0)]),
    }
    return kinds[type(value)].filter(lambda other: other != value)


def test_the_arguments_of_a_run_agree_with_its_config():
    assert contradictions(ARGUMENTS, CONFIG, training=True) == []
    assert contradictions({**ARGUMENTS, **OLDER}, CONFIG, training=True) == []
    dense = dataclasses.replace(CONFIG, experts=None)
    moe = [name for name in ARGUMENTS if name.startswith("moe_")]
    without = {name: value for name, value in ARGUMENTS.items() if name not in moe}
    assert contradictions({**without, "num_experts": None, "ffn_hidden_size": 12}, dense, training=True) == []


@slow
@given(name=st.sampled_from(sorted({**ARGUMENTS, **OLDER})), data=st.data())
def test_each_argument_changed_alone_is_named(name, data):
    said = {**ARGUMENTS, **OLDER}
    value = data.draw(others(said[name]), label=name)
    if name == "moe_router_load_balancing_type" and value == "none":
        value = "sinkhorn"  # without a balance loss a router computes the same
    rows = contradictions({**said, name: value}, CONFIG, training=True)
    if name == "group_query_attention":  # without it, every head has a key of its own
        assert rows == ["num_query_groups is 4 there, 2 in the config"]
    elif name == "gated_linear_unit":
        assert rows == ["gated_linear_unit is False there, True in the config"]
    else:
        assert len(rows) == 1 and rows[0].startswith(f"{name} is {value!r} there, "), rows


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layers": 3}, "num_layers"), ({"dim": 32, "head_size": 4}, "hidden_size"), ({"heads": 8}, "num_attention_heads"),
        ({"kv_heads": 1}, "num_query_groups"), ({"head_size": 8}, "kv_channels"), ({"rope_base": 1e4}, "rotary_base"),
        ({"eps": 1e-6}, "layernorm_epsilon"), ({"tied": True}, "untie_embeddings_and_output_weights"),
        ({"bias": True}, "add_qkv_bias"), ({"qk_norm": True}, "qk_layernorm"), ({"rope_scaling": None}, "use_rope_scaling"),
        ({"rope_scaling": fs.ops.LlamaScaling(4.0, 8192)}, "rope_scaling_factor"),
        ({"rope_scaling": fs.ops.LlamaScaling(8.0, 4096)}, "use_rope_scaling"),
        ({"rope_scaling": fs.ops.YarnScaling()}, "position_embedding_type"),
        ({"experts": None}, "num_experts"), ({"experts": Experts(8, 2, 12)}, "num_experts"),
        ({"experts": Experts(4, 1, 12)}, "moe_router_topk"), ({"experts": Experts(4, 2, 8)}, "moe_ffn_hidden_size"),
        ({"experts": Experts(4, 2, 12, normalize=False)}, "moe_router_pre_softmax"),
        ({"experts": Experts(4, 2, 12, score="sigmoid")}, "moe_router_score_function"),
        ({"experts": Experts(4, 2, 12, scale=2.5)}, "moe_router_topk_scaling_factor"),
        ({"experts": Experts(4, 2, 12, groups=2, kept_groups=1)}, "moe_router_num_groups"),
    ],
)  # fmt: skip
def test_each_field_of_the_config_changed_alone_is_named(change, name):
    rows = contradictions(ARGUMENTS, dataclasses.replace(CONFIG, **change), training=True)
    assert any(row.startswith(f"{name} is ") for row in rows), rows


def test_dropout_counts_where_a_run_continues():
    said = {**ARGUMENTS, "hidden_dropout": 0.1}
    assert contradictions(said, CONFIG, training=False) == []
    assert contradictions(said, CONFIG, training=True) == ["hidden_dropout is 0.1 there, 0.0 in the config"]


@pytest.mark.parametrize(
    "experts", [None, Experts(4, 2, 12), Experts(8, 4, 6, score="sigmoid", groups=4, kept_groups=2)]
)
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "tied": True}, {"qk_norm": True, "kv_heads": 4, "rope_scaling": None}]
)
def test_what_a_save_writes_agrees_with_the_config(experts, options):
    config = dataclasses.replace(CONFIG, experts=experts, **options)
    assert not unsayable(config)
    written = arguments_of(config)
    assert contradictions(written, config, training=True) == []
    assert all(isinstance(value, bool | int | float | str | None) for value in written.values())
    assert all(written[new] == written[old] for new, old in ALIASES.items())


def test_what_no_argument_says_is_named():
    for change, said in (
        ({"rope_scaling": fs.ops.YarnScaling()}, "rope_scaling is YarnScaling"),
        ({"rope_base": 10000.5}, "rope_base is 10000.5"),
        ({"experts": Experts(4, 2, 12, groups=2, kept_groups=1)}, "groups of experts"),
        ({"experts": Experts(4, 2, 12, score="sigmoid", normalize=False)}, "normalize is False"),
    ):
        assert said in unsayable(dataclasses.replace(CONFIG, **change))[0]


@slow
def test_every_field_of_the_configuration_of_megatron_core_is_known():
    # In a process of its own: it warns that Transformer Engine is not installed, and changes settings of torch.
    code = "import megatron.core.transformer as t; print(*t.TransformerConfig.__dataclass_fields__)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    fields = set(done.stdout.split())
    ignored = {name for names in IGNORED.values() for name in names.split()}
    assert fields - ignored - {*ARGUMENTS, *OLDER, "ffn_hidden_size"} == set()
    assert not ignored & {*ARGUMENTS, *OLDER}
