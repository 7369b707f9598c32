"""The flags that the embedded trainer models, as typed fields: `--num-layers` is `num_layers: int`.

One class for each thing that flags change; its docstring is what the flag table says of them. A field's type and default
are the flag's; `bool` is a switch, `X | None` has no default. The tags are those of `flags.py`. Where a value cannot be
modelled, `only` names those that can.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


def only(*values: object, default: object = ..., tags: tuple[str, ...] = ()) -> Any:
    """Modelled with these values only; the first is the default unless another one is given."""
    chosen = values[0] if default is ... else default
    return field(default=chosen, metadata={"allowed": values, "tags": tags})


def tagged(default: object, *tags: str) -> Any:
    """A flag with tags."""
    return field(default=default, metadata={"tags": tags})


def by_strategy(default: object) -> Any:
    """A flag that a parallel strategy decides."""
    return tagged(default, "strategy")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """size of the model"""

    # `_add_network_size_args`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L1221

    about: ClassVar[str] = "model"
    num_layers: int = tagged(0, "required", "strategy")
    hidden_size: int = tagged(0, "required")
    ffn_hidden_size: int | None = None
    num_attention_heads: int = tagged(0, "required")
    kv_channels: int | None = None
    group_query_attention: bool = False
    num_query_groups: int | None = None
    max_position_embeddings: int | None = None
    padded_vocab_size: int | None = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    normalization: str = only("LayerNorm", "RMSNorm")
    post_norm: bool = False
    position_embedding_type: str = only("learned_absolute", "rope", "none")
    no_position_embedding: bool = False
    use_rotary_position_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerFlags:
    """how the layers compute, and so what they save for the backward pass"""

    # `_add_network_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/arguments.py#L532

    about: ClassVar[str] = "layers"
    transformer_impl: str = only("transformer_engine", "local")
    swiglu: bool = False
    geglu: bool = False
    gelu_tanh: bool = False
    no_bias_swiglu_fusion: bool = False
    no_bias_gelu_fusion: bool = False
    no_bias_dropout_fusion: bool = False
    use_fused_rmsnorm: bool = False
    use_fused_rotary_pos_emb: bool = False
    use_glm_rope: bool = False
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    partial_rotary_factor: float | None = None
    use_flash_attn: bool = False
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    no_masked_softmax_fusion: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    add_rmsnorm_offset: bool = False
    rmsnorm_weight_in_fp32: bool = False
    input_embeds_norm: bool = False
    scale_emb: float | None = None
    scale_depth: float | None = None
    dim_model_base: float | None = None
    embedding_multiplier_scale: float = 1.0
    output_multiplier_scale: float | None = None
    output_logit_softcapping: float | None = None
    output_layer_slice_num: int = 1
    interleave_sliding_window: int | None = None
    sliding_window: int | None = None
    query_pre_attn_scalar: int | None = None
    fp32_residual_connection: bool = False
    no_post_layer_norm: bool = False
    attention_mask_type: str = only("causal", "general")
    shape_order: str = only("SBH", "BNSD")
    fp16_lm_cross_entropy: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = only("native")
    no_check_for_nan_in_loss_and_grad: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    spec: str | None = None


@dataclass(frozen=True, kw_only=True)
class RotaryFlags:
    """rotary frequencies: a table of [sequence, head] kept for the step"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/common/rotary.py#L9

    about: ClassVar[str] = "layers"
    rotary_base: float = 10000.0
    rope_scaling_type: str | None = only("llama3", "yarn", "longrope", default=None)
    longrope_freqs_type: str = only("mul", "outer")


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """tokens of one microbatch and how many are in flight"""

    # `_add_training_args`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L1494

    about: ClassVar[str] = "batch"
    seq_length: int = tagged(0, "required")
    micro_batch_size: int = tagged(0, "required", "strategy")
    global_batch_size: int | None = None
    train_iters: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutFlags:
    """what a rank holds of the model"""

    # `_add_distributed_args`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L2033

    about: ClassVar[str] = "layout"
    tensor_model_parallel_size: int = by_strategy(1)
    pipeline_model_parallel_size: int = by_strategy(1)
    num_layers_per_virtual_pipeline_stage: int | None = by_strategy(None)
    num_virtual_stages_per_pipeline_rank: int | None = by_strategy(None)
    sequence_parallel: bool = by_strategy(False)
    num_layer_list: str | None = by_strategy(None)
    noop_layers: str | None = by_strategy(None)
    decoder_first_pipeline_num_layers: int | None = by_strategy(None)
    decoder_last_pipeline_num_layers: int | None = by_strategy(None)
    no_overlap_p2p_communication: bool = False
    microbatch_group_size_per_virtual_pipeline_stage: int | None = tagged(None, "filling")
    use_tp_pp_dp_mapping: bool = False


@dataclass(frozen=True, kw_only=True)
class FusedLinearFlags:
    """linear layers in one kernel with their collective, whose own buffers (NNAL) no engine counts"""

    # `coc-fused-kernel`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/features_manager/tensor_parallel/locl_coc.py#L21

    about: ClassVar[str] = "layers"
    use_ascend_coc: bool = False
    coc_fused_kernel: bool = False


@dataclass(frozen=True, kw_only=True)
class ContextFlags:
    """what a rank holds of the sequence"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/features_manager/context_parallel/context_parallel_feature.py#L19

    about: ClassVar[str] = "layout"
    context_parallel_size: int = by_strategy(1)
    context_parallel_algo: str = only("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", tags=("strategy",))
    ulysses_degree_in_cp: int | None = by_strategy(None)
    cp_window_size: int = 1
    use_cp_send_recv_overlap: bool = False
    use_fused_ring_attention_update: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertFlags:
    """experts: their weights, the tokens that are sent to them, and what the router keeps"""

    # `_add_moe_args`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L2461

    about: ClassVar[str] = "experts"
    num_experts: int | None = None
    expert_model_parallel_size: int = by_strategy(1)
    expert_tensor_parallel_size: int | None = by_strategy(None)
    moe_ffn_hidden_size: int | None = None
    moe_intermediate_size: int | None = None
    moe_grouped_gemm: bool = False
    gemm_gradient_accumulation_fusion: bool = False
    moe_layer_freq: int | None = None
    first_k_dense_replace: int | None = None
    n_shared_experts: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    moe_token_dispatcher_type: str = only("allgather", "alltoall", "alltoall_seq")
    moe_permutation_async_comm: bool = False
    moe_tp_extend_ep: bool = by_strategy(False)
    moe_alltoall_overlap_comm: bool = False
    moe_zero_memory: str = only("disable", "level0", "level1", tags=("fewer_activations",))
    moe_zero_memory_num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class PermutationFlags:
    """nothing on MindSpore: MSAdapter has no operator that permutes tokens by a routing map, so MindSpeed switches these off"""

    about: ClassVar[str] = "experts"
    moe_permute_fusion: bool = False
    use_fused_moe_token_permute_and_unpermute: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterFlags:
    """how the router scores and chooses experts, and so what it keeps for its gradient"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/moe/moe_router.py#L9

    about: ClassVar[str] = "experts"
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str = only(
        "aux_loss", "none", "softmax_topk", "group_limited_greedy", "pai_megatron_aux_loss", "seq_aux_loss"
    )
    moe_aux_loss_coeff: float = 0.0
    moe_device_level_aux_loss_coeff: float = 0.0
    moe_comm_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = only("probs", "position")
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = only("softmax", "sigmoid")
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_dtype: str | None = only("fp32", default=None)
    norm_topk_prob: bool = False
    seq_aux: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentFlags:
    """multi-latent attention: queries, keys and values from compressed ones"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/transformer/multi_latent_attention/mla_feature.py#L9

    about: ClassVar[str] = "attention"
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    padded_base_length: int = 128
    mla_fa_without_pad: bool = False
    mla_mm_split: bool = False


@dataclass(frozen=True, kw_only=True)
class PredictionFlags:
    """multi-token prediction: a layer, an embedding and a second loss on the last stage"""

    # `mtp_num_layers`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/transformer_config.py#L32

    about: ClassVar[str] = "model"
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    mtp_mem_efficient_logits: bool = False


@dataclass(frozen=True, kw_only=True)
class TuningFlags:
    """fine-tuning: samples with a mask of [sequence, sequence] each"""

    # `is-instruction-dataset`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/arguments.py#L418

    about: ClassVar[str] = "fine-tuning"
    stage: str | None = only("sft", "dpo", default=None)
    is_instruction_dataset: bool = False
    variable_seq_lengths: bool = False
    no_pad_to_seq_lengths: bool = False
    padded_samples: bool = False
    neat_pack: bool = False
    pad_to_multiple_of: int = 8  # of tokens, where samples are not padded to the sequence length


@dataclass(frozen=True, kw_only=True)
class PreferenceFlags:
    """DPO: a second, frozen model beside the trained one, and four times the rows in a microbatch"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/dpo/dpo.py#L14

    about: ClassVar[str] = "fine-tuning"
    is_pairwise_dataset: bool = False
    dpo_loss_type: str = only("sigmoid", "hinge", "ipo", default="sigmoid")
    dpo_beta: float = 0.1
    dpo_label_smoothing: float = 0.0
    pref_ftx: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """LoRA: frozen weights without gradients or optimizer states, and small trained ones beside them"""

    # `register_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/finetune/lora.py#L12

    about: ClassVar[str] = "fine-tuning"
    lora_r: int = tagged(16, "fewer_states", "fewer_activations")
    lora_alpha: int = 32
    lora_target_modules: str | None = field(default=None, metadata={"tags": ("fewer_states",), "takes": -1})
    lora_fusion: bool = False


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """activations kept or recomputed"""

    # `recompute-granularity`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L1533

    about: ClassVar[str] = "recompute"
    recompute_granularity: str | None = only("full", "selective", default=None, tags=("strategy",))
    recompute_activations: bool = by_strategy(False)
    recompute_method: str | None = only("uniform", "block", default=None, tags=("strategy",))
    recompute_num_layers: int | None = by_strategy(None)
    distribute_saved_activations: bool = False
    enable_recompute_layers_per_pp_rank: bool = by_strategy(False)
    recompute_activation_function: bool = tagged(False, "fewer_activations")
    recompute_activation_function_num_layers: int | None = None
    recompute_norm: bool = tagged(False, "fewer_activations")
    recompute_norm_num_layers: int | None = None
    reduce_recompute_for_last_chunk: bool = False


@dataclass(frozen=True, kw_only=True)
class SwapFlags:
    """on MindSpore no activation moves to the host (MSAdapter never calls hooks for saved tensors); only MLPs are recomputed"""

    about: ClassVar[str] = "memory"
    swap_attention: bool = tagged(False, "fewer_activations")
    swap_modules: str | None = None


@dataclass(frozen=True, kw_only=True)
class StateFlags:
    """parameter, gradient and optimizer buffers"""

    # `use-distributed-optimizer`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L2131

    about: ClassVar[str] = "optimizer"
    bf16: bool = False
    fp16: bool = False
    use_distributed_optimizer: bool = by_strategy(False)
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = tagged(False, "fewer_states")
    ddp_bucket_size: int | None = None
    ddp_num_buckets: int | None = None
    reuse_fp32_param: bool = False
    swap_optimizer: bool = tagged(False, "fewer_states")
    swap_optimizer_times: int = 16
    no_gradient_accumulation_fusion: bool = False
    optimizer: str = only("adam")
    optimizer_selection: str = only("fused_adamw", "fused_torch_adamw")
    clip_grad: float = 1.0
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    weight_decay: float = 0.01
    log_num_zeros_in_grad: bool = False
    empty_unused_memory_level: int = 0
    num_distributed_optimizer_instances: int = only(1)


GROUPS: tuple[type[Any], ...] = (
    ModelFlags, LayerFlags, RotaryFlags, BatchFlags, LayoutFlags, FusedLinearFlags, ContextFlags, ExpertFlags, PermutationFlags,
    RouterFlags, LatentFlags, PredictionFlags, TuningFlags, PreferenceFlags, LoraFlags, RecomputeFlags,
    SwapFlags, StateFlags,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainerFlags(
    ModelFlags, LayerFlags, RotaryFlags, BatchFlags, LayoutFlags, FusedLinearFlags, ContextFlags, ExpertFlags, PermutationFlags,
    RouterFlags, LatentFlags, PredictionFlags, TuningFlags, PreferenceFlags, LoraFlags, RecomputeFlags,
    SwapFlags, StateFlags,
):  # fmt: skip
    """Every modelled flag of one job."""
