"""Process groups of one simulated rank, and the random states megatron-core forks from."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mindspeed_dryrun.megatron.settings import Settings


def initialize(settings: Settings) -> None:
    """No rank answers, none is asked: MindSpore makes the groups from the rank and world size it was started with."""
    torch.distributed.init_process_group("nccl", world_size=settings.world_size, rank=settings.rank)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=settings.virtual_stages,
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_size,
        order=settings.layout.order,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)
