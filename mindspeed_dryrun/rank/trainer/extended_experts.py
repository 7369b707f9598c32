"""`--moe-tp-extend-ep`: the ranks that share tensors share out whole experts as well, instead of cutting each of them.

MindSpeed's `All2AllSeqTpExtendEpMoELayerImpl` and its dispatcher, in the form that MindSpore runs (mindspeed/core/transformer/
moe/moe_feature/tp_extend_ep and mindspeed/mindspore/core/transformer/moe/moe_feature/tp_extend_ep).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.legacy_a2a_token_dispatcher import MoEAlltoAllSEQTokenDispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import build_module

from mindspeed_dryrun.rank.handlers import moe


class ExtendedLayer(MoELayer):  # type: ignore[misc]
    """A layer whose experts are spread over the tensor-parallel and the expert-parallel ranks."""

    # `All2AllSeqTpExtendEpMoELayerImpl`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/moe_layer.py#L58

    def __init__(self, config: Any, submodules: MoESubmodules, layer_number: int | None = None, *, extends: bool = True) -> None:
        MegatronModule.__init__(self, config)
        self.submodules = submodules
        self.layer_number = layer_number
        tensor_parts = parallel_state.get_tensor_model_parallel_world_size()
        self.num_local_experts = config.num_moe_experts // (config.expert_model_parallel_size * tensor_parts)
        place = parallel_state.get_expert_model_parallel_rank() * tensor_parts + parallel_state.get_tensor_model_parallel_rank()
        first = place * self.num_local_experts
        self.local_expert_indices = list(range(first, first + self.num_local_experts))
        self.router = TopKRouter(config=config)
        with _uncut_experts():
            self.experts = build_module(submodules.experts, self.num_local_experts, config)
        self.token_dispatcher = ExtendedDispatcher(self.num_local_experts, self.local_expert_indices, config=config)
        self.token_dispatcher.extends = extends
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = build_module(submodules.shared_experts, config=config)

    def forward(self, hidden_states: Any) -> tuple[Any, Any]:
        probabilities, routing_map = self.router(hidden_states)
        shared = self.shared_experts(hidden_states) if self.shared_experts is not None else None
        tokens, counts, tokens_probabilities = self.token_dispatcher.token_permutation(hidden_states, probabilities, routing_map)
        experts_output, bias = self.experts(tokens, counts, tokens_probabilities)
        output, bias = self.token_dispatcher.token_unpermutation(experts_output, bias)
        if shared is not None:
            output = output + shared
        return output, bias


@contextmanager
def _uncut_experts() -> Iterator[None]:
    """Experts that are built in here have their full width on this rank."""
    size = parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = 1
    try:
        yield
    finally:
        parallel_state._MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = size


class ExtendedDispatcher(MoEAlltoAllSEQTokenDispatcher):  # type: ignore[misc]
    """One exchange of tokens between all ranks that have experts, with the hidden size uncut.

    Where nothing extends (`--moe-alltoall-overlap-comm` without TP) the counts are those of alltoall_seq's dispatcher.
    """

    extends: bool

    def counts(self, routing_map: Any) -> Any:
        """What upstream allocates to know how many tokens go where, before `preprocess` puts known counts in place."""
        local = routing_map.sum(dim=0).long()
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        ranks = self.num_experts // self.num_local_experts
        if ranks > 1:
            self.input_splits = local.reshape(ranks, self.num_local_experts).sum(axis=1).to(torch.device("cpu")).numpy()
            everywhere = tensor_parallel.gather_from_sequence_parallel_region(local, group=group)
            everywhere = everywhere.reshape(ranks, self.num_experts)
            # A copy of some columns, or a view, which keeps all of them.
            local_experts: Any = self.local_expert_indices
            if not self.extends:
                local_experts = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
            self.num_global_tokens_per_local_expert = everywhere[:, local_experts]
            self.output_splits = self.num_global_tokens_per_local_expert.sum(axis=-1).to(torch.device("cpu")).numpy()
        else:
            self.num_global_tokens_per_local_expert = local.reshape(-1, self.num_experts)
        if self.num_local_experts > 1:
            by_expert = self.num_global_tokens_per_local_expert.view(-1, self.num_local_experts)
            self.num_global_tokens_per_local_expert_cpu = by_expert.to(torch.device("cpu"))
            if self.extends:
                # `preprocess` gives it the size that it has with known counts.
                self.global_input_tokens_local_experts_indices = torch.empty(0, dtype=torch.int32, device=routing_map.device)
        return self.num_global_tokens_per_local_expert.sum(axis=0)

    preprocess = moe.preprocess(counts)

    def token_permutation(self, hidden_states: Any, probs: Any, routing_map: Any) -> tuple[Any, Any, Any]:
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        tokens_per_expert = self.preprocess(routing_map)
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = hidden_states.shape
        sent, sent_probabilities, self.reversed_local_input_permutation_mapping = permute(
            hidden_states, routing_map, probs=probs, num_out_tokens=self.num_out_tokens
        )
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        tokens = tensor_parallel.all_to_all(group, sent, self.output_splits, self.input_splits)
        probabilities = tensor_parallel.all_to_all(group, sent_probabilities, self.output_splits, self.input_splits)
        if self.num_local_experts > 1:
            sizes = self.num_global_tokens_per_local_expert_cpu.ravel()
            tokens, probabilities = sort_chunks_by_idxs(tokens, sizes, self.sort_input_by_local_experts, probs=probabilities)
        return tokens, tokens_per_expert, probabilities

    def token_unpermutation(self, hidden_states: Any, bias: Any = None) -> tuple[Any, Any]:
        if self.num_local_experts > 1:
            sizes = self.num_global_tokens_per_local_expert_cpu.T.ravel()
            hidden_states, _ = sort_chunks_by_idxs(hidden_states, sizes, self.restore_output_by_local_experts)
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        received = tensor_parallel.all_to_all(group, hidden_states, self.input_splits, self.output_splits)
        output = unpermute(
            received,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.routing_map,
        )
        return output.view(self.hidden_shape), None
