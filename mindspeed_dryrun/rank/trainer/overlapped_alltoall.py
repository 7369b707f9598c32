"""`--moe-alltoall-overlap-comm` with the alltoall dispatcher: shared experts run between the exchanges of the others.

MindSpeed's `MoELayerOverlapAllToAll` and `MoEAlltoAllOverLapDispatcher` (mindspeed/core/transformer/moe/moe_feature/overlap).
The products of the experts are those of `overlapped_experts.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

from mindspeed_dryrun.rank.trainer.grouped import exchange
from mindspeed_dryrun.rank.trainer.overlapped_experts import Handover, leaf, run_backward
from mindspeed_dryrun.rank.trainer.zero_memory import free


class OverlappedAllToAllLayer(MoELayer):  # type: ignore[misc]
    """Experts of one rank, without tensor parallelism."""

    memory = ""
    recomputes_activation = False

    def forward(self, hidden_states: Any) -> tuple[Any, Any]:
        return _Layer.apply(hidden_states, self), None


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Tokens on their way back, and their gradients on the same way."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, output_sizes: Any, input_sizes: Any) -> Any:
        ctx.group, ctx.sizes = group, (output_sizes, input_sizes)
        return exchange(group, x, output_sizes, input_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return exchange(ctx.group, gradient, *reversed(ctx.sizes)), None, None, None


@functools.cache
def _stream() -> Any:
    """That of all shared experts."""
    return torch.cuda.Stream()


class _Shared:
    """The shared experts in two halves. What is an attribute here upstream's dispatcher keeps until its next forward pass."""

    def __init__(self, module: Any, hidden_states: Any) -> None:
        self.module = module
        self.stream = _stream()
        self.gate: Any = None
        with torch.cuda.stream(self.stream):
            if module.use_shared_expert_gate:
                logits = torch.nn.functional.linear(hidden_states, module.gate_weight)
                self.gate = torch.nn.functional.sigmoid(logits)
            self.input = copy_to_tensor_model_parallel_region(hidden_states)
        self.product: Any = None
        self.activated: Any = None

    def first(self) -> Any:
        """The first product and the activation. Returns where their graph starts."""
        start = leaf(self.input)
        with torch.cuda.stream(self.stream):
            self.product, _ = self.module.linear_fc1(start)
            self.activated = self._activate(self.product)
        return start

    def _activate(self, x: Any) -> Any:
        config = self.module.config
        if not config.gated_linear_unit:
            return self.module.activation_func(x)
        if config.bias_activation_fusion:
            return fused_bias_swiglu.bias_swiglu_impl(x, None)
        gate, up = torch.chunk(x, 2, dim=-1)
        return config.activation_func(gate) * up

    def second(self) -> Any:
        """The output, without the gate."""
        with torch.cuda.stream(self.stream):
            output, _ = self.module.linear_fc2(self.activated)
            return reduce_from_tensor_model_parallel_region(output)

    def gated(self, output: Any) -> Any:
        """The output, weighed by the gate if there is one."""
        with torch.cuda.stream(self.stream):
            if self.gate is not None:
                output = output * self.gate
                self.gate = None
        torch.cuda.current_stream().wait_stream(self.stream)
        return output


class _Layer(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden_states: Any, layer: Any) -> Any:
        hidden_states = leaf(hidden_states.detach())
        dispatcher, handover = layer.token_dispatcher, Handover(layer)
        with torch.enable_grad():
            scores_graph, routing_map = layer.router(hidden_states)
        scores = leaf(scores_graph)
        shape = hidden_states.shape
        with torch.enable_grad():
            counts = dispatcher.preprocess(routing_map)
            rows = hidden_states.view(-1, shape[-1])
            # A view: what is kept of it does not keep the gradient of `hidden_states`.
            shared = _Shared(layer.shared_experts, rows.view(shape)) if layer.shared_experts is not None else None
            sent, sent_scores, mapping = permute(rows, routing_map, probs=scores, num_out_tokens=dispatcher.num_out_tokens)
        dispatcher.kept = (routing_map, mapping, shared)
        group = parallel_state.get_expert_model_parallel_group()
        splits = dispatcher.output_splits, dispatcher.input_splits
        received, received_scores = (exchange(group, x, *splits) for x in (sent, sent_scores))
        shared_leaf = None
        if shared is not None:
            with torch.enable_grad():
                shared_leaf = shared.first()
        free(sent_scores, sent)
        received, received_scores = leaf(received), leaf(received_scores)
        with torch.enable_grad():
            tokens, token_scores = _sorted(dispatcher, received, received_scores)
        free(received, received_scores)
        with torch.enable_grad():
            outcome, _ = layer.experts(leaf(tokens), counts, leaf(token_scores), handover)
        outcome_leaf = leaf(outcome)
        with torch.enable_grad():
            output = _returned(layer, outcome_leaf, rows.shape, shape, (group, *reversed(splits)))
        free(outcome_leaf)
        ctx.handover, ctx.splits, ctx.group = handover, splits, group
        ctx.shared = (shared.input, shared_leaf) if shared is not None else None
        ctx.save_for_backward(
            scores_graph, scores, routing_map, sent, sent_scores, received, tokens, received_scores, token_scores, outcome,
            outcome_leaf, output, hidden_states,
        )  # fmt: skip
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (
            scores_graph, scores, routing_map, sent, sent_scores, received, tokens, received_scores, token_scores, outcome,
            outcome_leaf, output, hidden_states,
        ) = ctx.saved_tensors  # fmt: skip
        ctx.handover.needed = (ctx.group, ctx.splits, (routing_map, scores), received, tokens, received_scores, token_scores)
        output.backward(gradient)
        del output
        run_backward(outcome, outcome_leaf.grad)
        free(outcome_leaf.grad)
        gradients = ctx.handover.gradients
        ctx.handover.gradients = None
        if ctx.shared is not None:
            graph, graph_leaf = ctx.shared
            run_backward(graph, graph_leaf.grad)
        free(received.grad)
        torch.autograd.backward([sent, sent_scores], grad_tensors=list(gradients))
        free(*gradients)
        scores_graph.backward(scores.grad)
        return hidden_states.grad, None


def _sorted(dispatcher: Any, tokens: Any, scores: Any) -> tuple[Any, Any]:
    sizes = dispatcher.num_global_tokens_per_local_expert.ravel()
    return sort_chunks_by_idxs(tokens, sizes, dispatcher.sort_input_by_local_experts, probs=scores)  # type: ignore[no-any-return]


def _returned(layer: Any, outcome: Any, rows: Any, shape: Any, way: tuple[Any, ...]) -> Any:
    """What the experts made, back where it came from, with the shared experts' output on top."""
    dispatcher = layer.token_dispatcher
    routing_map, mapping, shared = dispatcher.kept
    sizes = dispatcher.num_global_tokens_per_local_expert.T.ravel()
    ordered, _ = sort_chunks_by_idxs(outcome, sizes, dispatcher.restore_output_by_local_experts)
    returned = _Exchange.apply(ordered, *way)
    shared_output = shared.second() if shared is not None else None
    output = unpermute(returned, mapping, restore_shape=rows, routing_map=routing_map).view(shape)
    if shared is not None:
        output += shared.gated(shared_output)
    return output
