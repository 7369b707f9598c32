"""The model chunks of one rank, wrapped as Megatron's training loop wraps them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import (
    context_parallel,
    experts,
    latent_attention,
    layers,
    lora,
    multi_token,
    recompute,
    releases,
    reuse_fp32,
    rotary,
)


def params_dtype(settings: Settings) -> Any:
    """The type weights are made and sent in."""
    return torch.bfloat16 if settings.bf16 else torch.half if settings.fp16 else torch.float


def _no_initialisation(weight: Any) -> Any:
    """Values do not matter in a dry run, and making them is most of the time of a real start."""
    return weight


def transformer_config(settings: Settings) -> TransformerConfig:
    """megatron-core's configuration, as Megatron's training loop fills it from the same flags."""
    fields = _config_fields(settings)
    hidden = experts.hidden_fields(settings) if settings.num_experts else {}
    config = TransformerConfig(**(fields | hidden))
    for name in hidden:
        setattr(config, name, fields[name])
    return config


def _config_fields(settings: Settings) -> dict[str, Any]:
    # `core_transformer_config_from_args`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L994
    gated = settings.swiglu or settings.geglu or settings.gelu_tanh
    activation = F.silu if settings.swiglu else layers.gelu_tanh if settings.gelu_tanh else F.gelu
    overlap_p2p = settings.virtual_stages is not None and not settings.no_overlap_p2p_communication
    grouping = settings.microbatch_group_size_per_virtual_pipeline_stage
    return dict(
        **(experts.config_fields(settings) if settings.num_experts else {}),
        num_layers=_divisible(settings),
        mtp_num_layers=settings.mtp_num_layers,
        mtp_loss_scaling_factor=settings.mtp_loss_scaling_factor,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.ffn_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.query_groups,
        kv_channels=settings.kv_size,
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.virtual_stages,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.sequence_parallel,
        add_bias_linear=not settings.disable_bias_linear,
        add_qkv_bias=settings.add_qkv_bias,
        gated_linear_unit=gated,
        activation_func=activation,
        normalization=settings.normalization,
        qk_layernorm=settings.query_key_norms,
        rotary_interleaved=settings.rotary_interleaved,
        attention_dropout=settings.attention_dropout,
        attention_softmax_in_fp32=settings.attention_softmax_in_fp32,
        apply_query_key_layer_scaling=settings.apply_query_key_layer_scaling,
        hidden_dropout=settings.hidden_dropout,
        fp32_residual_connection=settings.fp32_residual_connection,
        fp16=settings.fp16,
        bf16=settings.bf16,
        params_dtype=params_dtype(settings),
        pipeline_dtype=params_dtype(settings),
        autocast_dtype=params_dtype(settings),
        enable_autocast=False,
        gradient_accumulation_fusion=not settings.no_gradient_accumulation_fusion and settings.output_layer_slice_num == 1,
        # Gated GELUs are set behind Megatron's back, with its fusion switched off.
        bias_activation_fusion=not (settings.no_bias_swiglu_fusion if settings.swiglu else gated or settings.no_bias_gelu_fusion),
        bias_dropout_fusion=not settings.no_bias_dropout_fusion,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=settings.cross_entropy_loss_fusion,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method,
        recompute_num_layers=settings.recompute_num_layers,
        distribute_saved_activations=settings.distribute_saved_activations,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=not overlap_p2p,
        overlap_p2p_comm=overlap_p2p,
        microbatch_group_size_per_vp_stage=grouping or settings.pipeline_model_parallel_size,
        init_method=_no_initialisation,
        output_layer_init_method=_no_initialisation,
        use_cpu_initialization=False,
    )


def _divisible(settings: Settings) -> int:
    """megatron-core expects equal stages; the layers themselves are built from the layout, and this is not read."""
    pp = settings.pipeline_model_parallel_size * (settings.virtual_stages or 1)
    return -(-settings.num_layers // pp) * pp


class Model(GPTModel):  # type: ignore[misc]
    """megatron-core's GPT with MindSpeed-LLM's forward pass."""

    # `GPTModel`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/models/gpt/gpt_model.py#L31

    def __init__(self, settings: Settings, config: TransformerConfig, numbers: Sequence[int], **kwargs: Any) -> None:
        norm = ModuleSpec(module=layers.Norm, params={"settings": settings})
        block = TransformerBlockSubmodules(
            layer_specs=[layer_spec(settings, norm, number) for number in numbers],
            # With multi-token prediction the norm stands behind the added layers.
            layer_norm=None if settings.no_post_layer_norm or settings.mtp_num_layers else norm,
        )
        prediction = None
        if settings.mtp_num_layers and kwargs["post_process"]:
            prediction = multi_token.block_spec(settings, norm, layer_spec(settings, norm, settings.num_layers - 1, real=True))
        learned = settings.position_embedding_type == "learned_absolute" and not settings.rope
        super().__init__(
            config=config,
            transformer_layer_spec=block,
            vocab_size=settings.padded_vocab,
            max_sequence_length=settings.max_position_embeddings or settings.seq_length,
            position_embedding_type="learned_absolute" if learned else "none",
            fp16_lm_cross_entropy=settings.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not settings.untie_embeddings_and_output_weights,
            mtp_block_spec=prediction,
            **kwargs,
        )
        self.settings = settings
        if settings.output_layer_slice_num > 1 and self.post_process:
            self.output_layer.forward = layers.sliced_product(self.output_layer, settings.output_layer_slice_num)
        if self.mtp_process:
            multi_token.add_norms(self.mtp, norm)
            self.final_layernorm = build_module(norm, config=config, hidden_size=config.hidden_size)
        self.rotary = rotary.Rotary(settings, context_parallel.sequence_slicer(settings)) if settings.rope else None
        for layer, number in zip(self.decoder.layers, numbers, strict=True):
            if isinstance(layer, TransformerLayer):
                _set_number(layer, number + 1)
                layers.finish_layer(layer, settings)
        recompute.prepare(self.decoder, settings)

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None, loss_mask: Any = None, **_: Any
    ) -> Any:
        settings = self.settings
        decoder_input = None
        if self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if settings.scale_emb is not None:
                decoder_input = decoder_input * settings.scale_emb
        rotary_pos_emb = self.rotary(settings.seq_length) if self.rotary is not None else None
        # `decoder_input` stays referenced here until the loss is computed, whether or not the decoder scales a copy of it.
        hidden_states = self.decoder(
            hidden_states=self._scaled(decoder_input), attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.mtp_process:
            batch = (input_ids, position_ids, labels, loss_mask)
            hidden_states = multi_token.predict(self, batch, hidden_states, attention_mask, rotary_pos_emb, weight)
            hidden_states = self.final_layernorm(hidden_states)
        if settings.dim_model_base is not None:
            hidden_states = hidden_states / (settings.hidden_size / settings.dim_model_base)
        logits, _ = self.output_layer(hidden_states, weight=weight)
        if settings.output_multiplier_scale:
            logits = logits * settings.output_multiplier_scale
        if settings.output_logit_softcapping:
            logits = logits / settings.output_logit_softcapping
            logits = torch.tanh(logits)
            logits = logits * settings.output_logit_softcapping
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        if settings.is_instruction_dataset:
            labels = labels[:, 1:].contiguous()
            logits = logits[:-1, :, :].contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _scaled(self, decoder_input: Any) -> Any:
        """Gemma's scale of the embeddings (`--input-embeds-norm`)."""
        # `input_embeds_norm`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_block.py#L228
        if decoder_input is None or not self.settings.input_embeds_norm:
            return decoder_input
        return decoder_input * torch.tensor(self.settings.hidden_size**0.5, dtype=decoder_input.dtype)


def _set_number(layer: TransformerLayer, number: int) -> None:
    """From 1; megatron-core counts as if all stages had the same number of layers."""
    layer.layer_number = number
    if hasattr(layer.mlp, "set_layer_number"):
        layer.mlp.set_layer_number(number)


def layer_spec(settings: Settings, norm: ModuleSpec, number: int, real: bool = False) -> ModuleSpec:
    """Layer `number` of the model: megatron-core's modules, with the norm, attention and experts of an NPU.

    With `real` it is never the layer that only fills a place.
    """
    if number in settings.layout.noop and not real:
        return ModuleSpec(module=layers.NoopLayer)
    in_linear = ModuleSpec(module=layers.Norm, params={"settings": settings, "in_linear": True})
    folded = settings.folds_norms and releases.since("26.0.0")
    mlp = experts.expert_layer(settings) if settings.has_experts(number) else experts.dense_layer(settings, in_linear)
    return ModuleSpec(
        module=layers.HalvedLayer if releases.since("26.1.0") else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=in_linear if folded else norm,
            self_attention=attention_spec(settings, norm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=in_linear if folded and not settings.num_experts else norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def attention_spec(settings: Settings, norm: ModuleSpec) -> ModuleSpec:
    """Self-attention: plain, grouped or multi-latent."""
    if settings.latent_attention:
        core = context_parallel.attention_spec(settings)
        return ModuleSpec(
            module=latent_attention.LatentAttention, params={"settings": settings, "norm": norm, "core_attention": core}
        )
    qk_norm = norm if settings.query_key_norms else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=context_parallel.attention_spec(settings) if settings.use_flash_attn else DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention)


def build(settings: Settings) -> list[Any]:
    """The chunks of this rank: on the device, in half precision, with their gradient buffers."""
    config = transformer_config(settings)
    chunks = _chunks(settings, config)
    if settings.reuse_fp32_param:
        reuse_fp32.pad_to_even()
    buffers = _buffer_config(settings, sum(parameter.nelement() for model in chunks for parameter in model.parameters()))
    wrap = functools.partial(DistributedDataParallel, config=config, ddp_config=buffers)
    return [wrap(module=model, disable_bucketing=index > 0) for index, model in enumerate(chunks)]


def build_frozen(settings: Settings) -> list[Any]:
    """The chunks of a model that is not trained: weights, and nothing for a gradient."""
    return [model.eval() for model in _chunks(settings, transformer_config(settings))]


def _chunks(settings: Settings, config: TransformerConfig) -> list[Any]:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(settings.virtual_stages) if settings.virtual_stages else [None]:
        if chunk is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        chunks.append(
            Model(
                settings,
                config,
                settings.layout.stages[stage][chunk or 0],
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        )
    if settings.lora_modules:
        lora.keep_frozen_embeddings()
        for model in chunks:
            lora.add_adapters(model, settings)
    parameters = [parameter for model in chunks for parameter in model.parameters()]
    for parameter in parameters:
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    for model in chunks:
        model.cuda(torch.cuda.current_device())
    return [Float16Module(config, model) for model in chunks] if settings.fp16 or settings.bf16 else chunks


def _buffer_config(settings: Settings, num_parameters: int) -> DistributedDataParallelConfig:
    """Megatron's defaults: one bucket, unless gradients are reduced while the backward pass runs."""
    # `bucket_size`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/distributed/distributed_data_parallel.py#L57
    bucket_size = settings.ddp_bucket_size
    if settings.ddp_num_buckets:
        bucket_size = num_parameters // settings.ddp_num_buckets
    if bucket_size is None:
        with_cp = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        bucket_size = max(40000000, 1000000 * with_cp)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        check_for_nan_in_grad=not settings.no_check_for_nan_in_loss_and_grad,
        bucket_size=bucket_size if settings.overlap_grad_reduce else None,
    )
