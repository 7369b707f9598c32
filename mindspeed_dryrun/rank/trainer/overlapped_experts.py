"""`--moe-alltoall-overlap-comm`: a layer of experts as one autograd function, so that exchanges run beside products.

MindSpeed's `MoELayerOverlapAllToAllSeq` and `GroupedMlpWithCompAndCommOverlapAll2AllSeq` (mindspeed/core/transformer/moe/
moe_feature/overlap). What each step made is freed by hand as soon as the next one has what it needs, so memory differs from
the plain layer's. Streams do not matter in a dry run; the order of the operators does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from mindspore.ops.function import math_func

from mindspeed_dryrun.rank.trainer import releases, zero_memory
from mindspeed_dryrun.rank.trainer.extended_experts import ExtendedLayer
from mindspeed_dryrun.rank.trainer.grouped import exchange, weights_gradient_in_place
from mindspeed_dryrun.rank.trainer.zero_memory import free


class OverlappedLayer(ExtendedLayer):
    """Experts of one rank; with tensor parallelism only where it extends expert parallelism."""

    # `MoELayerOverlapAllToAllSeq`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/moe/moe_feature/overlap/moe_layer_overlap_all2allseq.py#L26

    memory = ""  # what it gives up with `--moe-zero-memory`
    recomputes_activation = False

    def forward(self, hidden_states: Any) -> tuple[Any, Any]:
        return _Layer.apply(hidden_states, self), None


class Handover:
    """What the layer's backward pass gives the experts', and takes from it."""

    needed: tuple[Any, ...] = ()
    gradients: tuple[Any, Any] | None = None
    again: zero_memory.Again | None = None
    given_up: tuple[Any, ...] = ()

    def __init__(self, layer: Any) -> None:
        self.memory = layer.memory
        self.recomputes_activation = layer.recomputes_activation or layer.memory == zero_memory.REBUILD


def leaf(x: Any) -> Any:
    """The start of a graph of its own (`detach_tensor` in moe_common.py)."""
    if x.requires_grad and x.grad_fn is None:
        return x
    x = x.detach()
    x.requires_grad = True
    return x


def run_backward(output: Any, gradient: Any) -> None:
    """The backward pass of one step's graph."""
    if gradient is not None and output.grad_fn is not None:
        output.backward(gradient)


class _Layer(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden_states: Any, layer: Any) -> Any:
        hidden_states = hidden_states.detach()
        hidden_states.requires_grad = True
        dispatcher, handover = layer.token_dispatcher, Handover(layer)
        with torch.enable_grad():
            scores_graph, routing_map = layer.router(hidden_states)
        scores = leaf(scores_graph)
        shape = hidden_states.shape
        # The dispatcher keeps these two until the next forward pass of its layer brings others.
        dispatcher.routing_map = routing_map
        with torch.enable_grad():
            counts = dispatcher.preprocess(routing_map)
            rows = hidden_states.view(-1, shape[-1])
            sent, sent_scores, mapping = permute(rows, routing_map, probs=scores, num_out_tokens=dispatcher.num_out_tokens)
        dispatcher.reversed_local_input_permutation_mapping = mapping
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        splits = dispatcher.output_splits, dispatcher.input_splits
        received, received_scores = (exchange(group, x, *splits) for x in (sent, sent_scores))
        shared, ctx.in_parts = _shared(layer, hidden_states)
        free(sent)
        received, received_scores = leaf(received), leaf(received_scores)
        with torch.enable_grad():
            tokens = _sorted(dispatcher, received)
            free(sent_scores)  # the exchange of the scores is waited for only now
            token_scores = _sorted(dispatcher, received_scores)
        free(received, received_scores)
        tokens_leaf, scores_leaf = leaf(tokens), leaf(token_scores)
        with torch.enable_grad():
            outcome, _ = layer.experts(tokens_leaf, counts, scores_leaf, handover)
        outcome_leaf = leaf(outcome)
        with torch.enable_grad():
            ordered = _restored(dispatcher, outcome_leaf)
        free(outcome_leaf)
        returned = exchange(group, ordered, *reversed(splits))
        free(ordered)
        returned_leaf = leaf(returned)
        with torch.enable_grad():
            output = unpermute(returned_leaf, mapping, restore_shape=rows.shape, routing_map=routing_map).view(shape)
        free(returned_leaf, returned)
        if shared is None:
            total = output.detach()
        else:
            total = output + shared
            free(output, shared)
        if layer.memory:
            handover.again = zero_memory.Again(layer, (hidden_states, routing_map, scores), (group, splits))
            ctx.layer, ctx.counts = layer, counts
        ctx.handover, ctx.splits, ctx.group = handover, splits, group
        ctx.save_for_backward(
            scores_graph, scores, sent, sent_scores, received, tokens, received_scores, token_scores, outcome, outcome_leaf,
            ordered, returned_leaf, output, hidden_states, shared, routing_map,
        )  # fmt: skip
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (
            scores_graph, scores, sent, sent_scores, received, tokens, received_scores, token_scores, outcome, outcome_leaf,
            ordered, returned_leaf, output, hidden_states, shared, _,
        ) = ctx.saved_tensors  # fmt: skip
        ctx.handover.needed = (ctx.group, ctx.splits, (scores,), received, tokens, received_scores, token_scores)
        replayed = ctx.handover.memory == zero_memory.REPLAY
        if replayed:
            with torch.no_grad():
                ctx.handover.again.send()
            free(scores)
        output.backward(gradient)
        free(output)
        sent_back = exchange(ctx.group, returned_leaf.grad, *ctx.splits)
        if ctx.in_parts is not None:
            ctx.in_parts.backward(hidden_states, gradient)
        elif shared is not None:
            shared.backward(gradient)
        if replayed:
            free(ctx.handover.again.sent)
            zero_memory.replay(ctx.layer, ctx.handover.again, ctx.counts, ctx.handover.given_up)
            ctx.handover.given_up = ()
        free(returned_leaf.grad)
        run_backward(ordered, sent_back)
        free(sent_back)
        run_backward(outcome, outcome_leaf.grad)
        free(outcome_leaf.grad)
        gradients = ctx.handover.gradients
        ctx.handover.gradients = None
        torch.autograd.backward([sent, sent_scores], grad_tensors=list(gradients))
        free(*gradients)
        scores_graph.backward(scores.grad)
        return hidden_states.grad, None


def _shared(layer: Any, hidden_states: Any) -> tuple[Any, Any]:
    """The output of the shared experts, and them where they are run in parts."""
    if layer.shared_experts is None:
        return None, None
    with torch.enable_grad():
        if layer.memory != zero_memory.REPLAY:
            return layer.shared_experts(hidden_states), None
        parts = zero_memory.SharedInParts(layer.shared_experts, hidden_states)
    return parts.output, parts


def _sorted(dispatcher: Any, x: Any) -> Any:
    if dispatcher.num_local_experts == 1:
        return x.clone()
    sizes = dispatcher.num_global_tokens_per_local_expert_cpu.ravel()
    return sort_chunks_by_idxs(x, sizes, dispatcher.sort_input_by_local_experts)[0]


def _restored(dispatcher: Any, tokens: Any) -> Any:
    if dispatcher.num_local_experts == 1:
        return tokens.clone()
    sizes = dispatcher.num_global_tokens_per_local_expert_cpu.T.ravel()
    return sort_chunks_by_idxs(tokens, sizes, dispatcher.restore_output_by_local_experts)[0]


class Products(torch.autograd.Function):  # type: ignore[misc]
    """Both products of the experts; the backward pass starts the exchanges of the layer's."""

    # `GroupedMlpWithCompAndCommOverlapAll2AllSeq`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/moe/moe_feature/overlap/grouped_mlp_with_comp_and_comm_overlap_all2allseq.py#L20

    @staticmethod
    def forward(ctx: Any, tokens: Any, first: Any, second: Any, how: Any, scores: Any) -> Any:
        hidden = leaf(math_func.gmm([tokens], [first], [], how.groups, 0, 0)[0])
        memory = how.handover.memory
        if memory:
            free(tokens)
        scores = leaf(scores)
        with torch.enable_grad():
            unscaled = how.activation(hidden)
            activated = (unscaled * scores.unsqueeze(-1)).to(hidden.dtype)
        if memory == zero_memory.REPLAY:
            free(hidden, scores)
        output = math_func.gmm([activated], [second], [], how.groups, 0, 0)[0]
        # From 2.3.0 on the backward pass holds this to its end, or it is given up and made again; before, it stayed and went with
        # the graph of the activation.
        kept = unscaled if releases.since("2.3.0") else None
        if memory == zero_memory.REPLAY:
            how.handover.given_up = (tokens, hidden, scores, activated, kept)
        if memory or how.handover.recomputes_activation:
            free(activated, *([] if kept is None else [kept]))
        ctx.how = how
        ctx.save_for_backward(tokens, scores, hidden, activated, first, second, kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        tokens, scores, hidden, activated, first, second, kept = ctx.saved_tensors
        how = ctx.how
        again = how.handover.again if how.handover.memory == zero_memory.REBUILD else None
        group, splits, spent, received, tokens_graph, received_scores, scores_graph = how.handover.needed
        how.handover.needed = ()
        back = math_func.gmm([gradient], [second.permute(0, 2, 1)], [], how.groups, 0, 0)[0]
        inputs = activated
        if how.handover.recomputes_activation:
            unscaled = how.activation(hidden)
            inputs = (unscaled * scores.unsqueeze(-1)).to(hidden.dtype)
            zero_memory.restore(kept, unscaled)
            kept = None
        second_gradient = how.weights_gradient(1, inputs, gradient, second)
        free(gradient, inputs)
        activated.backward(back)
        free(scores, back, hidden)
        if again is not None:
            again.send()
        tokens_gradient = math_func.gmm([hidden.grad], [first.permute(0, 2, 1)], [], how.groups, 0, 0)[0]
        free(*spent)
        run_backward(scores_graph, scores.grad)
        scores_back = exchange(group, received_scores.grad, *reversed(splits))
        run_backward(tokens_graph, tokens_gradient)
        free(tokens_gradient)
        if again is not None:
            free(again.sent)
        tokens_back = exchange(group, received.grad, *reversed(splits))
        how.handover.gradients = (tokens_back, scores_back)
        if again is not None:
            tokens, _ = again.sort()
            free(again.received)
        first_gradient = how.weights_gradient(0, tokens, hidden.grad, first)
        free(hidden.grad)
        return tokens_gradient, first_gradient, second_gradient, None, None


class How:
    """What one call of `Products` needs beside tensors."""

    def __init__(self, groups: Any, activation: Any, originals: tuple[Any, Any], fused: bool, handover: Any) -> None:
        self.groups = groups
        self.activation = activation
        self.originals = originals
        self.fused = fused
        self.handover = handover

    def weights_gradient(self, index: int, x: Any, gradient: Any, weight: Any) -> Any:
        """A tensor, or the buffer that holds all gradients with `--gemm-gradient-accumulation-fusion`."""
        if self.fused:
            return weights_gradient_in_place(self.originals[index], weight, x.dtype)
        return math_func.gmm([x.t()], [gradient], [], self.groups, 2, 0)[0]
