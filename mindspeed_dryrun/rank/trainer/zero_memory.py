"""`--moe-zero-memory`: an overlapped layer of experts gives up what it can make again in its backward pass.

Level 0, and level 1 beyond `--moe-zero-memory-num-layers`, send the tokens to their experts a second time ("rebuild"); level 1
also makes the first product of the experts and of the shared ones again, before their backward passes ("replay").
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs
from megatron.core.transformer.transformer_layer import TransformerLayer
from mindspore.ops.function import math_func

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer.grouped import exchange

REBUILD, REPLAY = "rebuild", "replay"


def prepare(block: Any, settings: Settings) -> None:
    """Tells each layer of a chunk what it gives up."""
    # `only_recompute_activation`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/moe/moe_feature/overlap/moe_common.py#L306
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    whole = settings.moe_zero_memory_num_layers or settings.num_layers
    for number, layer in enumerate(block.layers):
        if not isinstance(layer, TransformerLayer):
            continue
        place = number * (settings.virtual_stages or 1) + chunk
        mode = REPLAY if settings.moe_zero_memory == "level1" and place < whole else REBUILD
        if isinstance(layer.mlp, MLP):
            layer.mlp.recomputes_activation = mode == REBUILD
            continue
        layer.mlp.memory = mode
        if layer.mlp.shared_experts is not None:
            layer.mlp.shared_experts.recomputes_activation = mode == REBUILD


def free(*tensors: Any) -> None:
    """Gives back the memory of tensors that something still refers to."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def restore(target: Any, again: Any) -> None:
    """Makes what was given up, if anything was, from a copy of it that goes."""
    if target is not None:
        target.untyped_storage().resize_(again.untyped_storage().size())
        target.untyped_storage().copy_(again.untyped_storage())
    free(again)


class Again:
    """Tokens and scores on their way to the experts once more."""

    def __init__(self, layer: Any, inputs: tuple[Any, Any, Any], way: tuple[Any, Any]) -> None:
        self.dispatcher = layer.token_dispatcher
        self.inputs = inputs
        self.way = way
        self.sent: Any = None
        self.sent_scores: Any = None
        self.received: Any = None
        self.received_scores: Any = None

    def send(self) -> None:
        """As in the forward pass."""
        hidden_states, routing_map, scores = self.inputs
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        self.sent, self.sent_scores, _ = permute(rows, routing_map, probs=scores, num_out_tokens=self.dispatcher.num_out_tokens)
        group, splits = self.way
        self.received = exchange(group, self.sent, *splits)
        self.received_scores = exchange(group, self.sent_scores, *splits)

    def sort(self) -> tuple[Any, Any]:
        """By expert."""
        free(self.sent_scores)
        sizes = self.dispatcher.num_global_tokens_per_local_expert_cpu.ravel()
        order = self.dispatcher.sort_input_by_local_experts
        tokens, scores = sort_chunks_by_idxs(self.received, sizes, order, probs=self.received_scores)
        free(self.received_scores)
        return tokens, scores


class SharedInParts:
    """The shared experts without their first product and its activation, which are made again."""

    def __init__(self, module: Any, hidden_states: Any) -> None:
        self.module = module
        self.product, _ = module.linear_fc1(hidden_states)
        self.activated = self._activate(self.product)
        self.output, _ = module.linear_fc2(self.activated)
        free(self.product, self.activated)
        if module.use_shared_expert_gate:
            logits = torch.nn.functional.linear(hidden_states, module.gate_weight)
            self.output = self.output * torch.nn.functional.sigmoid(logits)

    def _activate(self, x: Any) -> Any:
        return torch_npu.npu_swiglu(x, dim=-1) if self.module.config.gated_linear_unit else self.module.activation_func(x)

    def backward(self, hidden_states: Any, gradient: Any) -> None:
        """Makes both again, and gives them up for good."""
        with torch.no_grad():
            product, _ = self.module.linear_fc1(hidden_states)
            activated = self._activate(product)
            restore(self.activated, activated)
            restore(self.product, product)
        self.output.backward(gradient)
        free(self.activated, self.product)


def replay(layer: Any, again: Again, counts: Any, given_up: tuple[Any, ...]) -> None:
    """The first product of the experts and its activation, from tokens that were sent again."""
    tokens, hidden, scores, activated, unscaled = given_up
    with torch.no_grad():
        tokens_again, scores_again = again.sort()
        again.received = None
        groups = torch.cumsum(counts, dim=0)
        experts = layer.experts
        first = experts.weight1.view(experts.num_local_experts, experts.config.hidden_size, -1)
        hidden_again = math_func.gmm([tokens_again], [first], [], groups, 0, 0)[0]
        free(groups)
        unscaled_again = experts.activation_func(hidden_again)
        activated_again = unscaled_again * scores_again.unsqueeze(-1)
        restore(unscaled, unscaled_again)
        restore(activated, activated_again)
        restore(hidden, hidden_again)
        restore(scores, scores_again)
        restore(tokens, tokens_again)
