"""Multi-token prediction: one more layer for each further token, behind the last layer of the model.

Upstream: mindspeed_llm/core/transformer/multi_token_prediction.py. The layers share the model's embedding and output layer, so
the last stage holds a copy of the embedding.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    all_gather_last_dim_from_tensor_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    roll_tensor,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.utils import make_viewless_tensor

from mindspeed_dryrun.megatron.settings import Settings


class PredictionLayer(MegatronModule):  # type: ignore[misc]
    """The embedding of a later token joined to the hidden states, through a transformer layer of its own."""

    # `mtp_layer_forward`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/multi_token_prediction.py#L80

    def __init__(self, config: Any, layer_number: int, norm: ModuleSpec, layer: ModuleSpec) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        size = config.hidden_size
        self.enorm, self.hnorm = (build_module(norm, config=config, hidden_size=size) for _ in range(2))
        options = {"gather_output": False, "bias": False, "skip_bias_add": False}
        self.eh_proj = ColumnParallelLinear(size * 2, size, config=config, init_method=config.init_method, **options)
        # From 26.1.0 on `mtp_layer_init_wrapper` builds it twice. What is left of the first one goes with the collector, which a
        # dry run lets look before the first iteration.
        self.transformer_layer = build_module(layer, config=config)

    def forward(self, embedded: Any, hidden_states: Any, attention_mask: Any, rotary_pos_emb: Any) -> Any:
        config = self.config
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        with tensor_parallel.get_cuda_rng_tracker().fork() if config.sequence_parallel else nullcontext():
            embedded = self.enorm(embedded)
            hidden_states = self.hnorm(hidden_states)
            hidden_states = torch.cat((embedded, hidden_states), -1)
            hidden_states, _ = self.eh_proj(hidden_states)
            hidden_states = all_gather_last_dim_from_tensor_parallel_region(hidden_states)
            if config.sequence_parallel:
                hidden_states = scatter_to_sequence_parallel_region(hidden_states)
            hidden_states, _ = self.transformer_layer(
                hidden_states=hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
            )
        return hidden_states


def block_spec(settings: Settings, norm: ModuleSpec, layer: ModuleSpec) -> ModuleSpec:
    """The block that megatron-core's model builds on the last stage."""
    one = ModuleSpec(module=PredictionLayer, params={"norm": norm, "layer": layer})
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[one] * (settings.mtp_num_layers or 0))
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=layers)


def add_norms(block: Any, norm: ModuleSpec) -> None:
    """Each depth has a norm before the shared output layer."""
    size = block.config.hidden_size
    norms = [build_module(norm, config=block.config, hidden_size=size) for _ in block.layers]
    block.final_layernorms = torch.nn.ModuleList(norms)


def predict(model: Any, batch: tuple[Any, Any, Any, Any], hidden_states: Any, mask: Any, rotary: Any, weight: Any) -> Any:
    """The hidden states of the model, with the losses of all depths attached (`mtp_block_forward`)."""
    # `mtp_block_forward`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/multi_token_prediction.py#L184
    tokens, position_ids, labels, loss_mask = batch
    settings, block = model.settings, model.mtp
    attached = hidden_states
    for depth, layer in enumerate(block.layers):
        if loss_mask is None:
            loss_mask = torch.ones_like(labels)
        tokens, labels, loss_mask = (roll_tensor(x, shifts=-1, dims=-1)[0] for x in (tokens, labels, loss_mask))
        embedded = model.embedding(input_ids=tokens, position_ids=position_ids)
        hidden_states = layer(embedded, hidden_states, mask, rotary)
        normed = block.final_layernorms[depth](hidden_states)
        normed = make_viewless_tensor(inp=normed, requires_grad=True, keep_graph=True)
        logits, _ = model.output_layer(normed, weight=weight)
        count = torch.sum(loss_mask)
        targets, weights = labels, loss_mask
        if settings.is_instruction_dataset:
            targets, logits = labels[:, 1:].contiguous(), logits[:-1, :, :].contiguous()
            weights = loss_mask[..., 1:].view(-1).float()
            count = torch.sum(weights)
        loss = model.compute_language_model_loss(targets, logits)
        loss = weights * loss
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.save_loss_to_tracker(torch.sum(loss) / count, depth, settings.mtp_num_layers, avg_group=group)
        loss *= parallel_state.get_context_parallel_world_size()
        scale = settings.mtp_loss_scaling_factor / len(block.layers)
        attached = MTPLossAutoScaler.apply(attached, scale * loss / count)
    return attached


def largest_logits(logits: Any) -> tuple[Any, Any]:
    """`VocabParallelCrossEntropy.calculate_logits_max` with `--mtp-mem-efficient-logits`: 16 bits go when 32 are there."""
    # `calculate_logits_max`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/tensor_parallel/cross_entropy.py#L23
    wide = logits.float()
    if logits.dtype != torch.float32:
        logits.untyped_storage().resize_(0)
    return wide, torch.max(wide, dim=-1)[0]
