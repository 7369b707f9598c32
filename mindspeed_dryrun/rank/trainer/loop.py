"""Mock data, the loss, and the iterations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication
from megatron.core.utils import get_model_config

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank import activation, collector, installed, progress
from mindspeed_dryrun.rank.trainer import context_parallel, preference, recompute, tuning


class MockData:
    """Microbatches of this stage: what Megatron sends to it, and nothing on the stages in between.

    The first rank of a tensor-parallel group reads the data and holds all of a sample, whatever its stage needs; its data
    set keeps one table of positions and one loss mask for all samples, made with the first of them. With context parallelism
    the whole sequence arrives, and all that is there is cut to this rank's part.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.part = context_parallel.sequence_slicer(settings)
        self.reader = parallel_state.get_tensor_model_parallel_rank() == 0
        self.tables: tuple[Any, Any] | None = None

    def __next__(self) -> dict[str, Any]:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        inputs = first or (last and bool(self.settings.mtp_num_layers))
        wanted = {"tokens": inputs, "labels": last, "loss_mask": last, "position_ids": inputs}
        data: dict[str, Any] = dict.fromkeys(wanted)
        packed = self.settings.reset_attention_mask
        if not (first or last or packed):
            return data
        wanted["position_ids"] |= packed  # all stages need to know where documents begin
        if self.reader and self.tables is None and not packed:
            length = self.settings.seq_length
            positions = torch.arange(length, dtype=torch.int64, device="npu")
            self.tables = positions, torch.ones(length, dtype=torch.float32, device="npu")
        split = self.settings.context_parallel_size > 1
        shape = (self.settings.micro_batch_size, self.settings.seq_length)
        for name, needed in wanted.items():
            if needed or self.reader:
                dtype = torch.float32 if name == "loss_mask" else torch.int64
                whole = torch.zeros(shape, dtype=dtype, device="npu")
                data[name] = self.part(whole.transpose(0, 1)).transpose(0, 1).contiguous() if split else whole
        return data


def loss(settings: Settings, loss_mask: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The mean over unmasked tokens, summed over context-parallel ranks, with the sums that Megatron reports."""
    # `loss_func`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/pretrain_gpt.py#L158
    losses = output.float()
    loss_mask = loss_mask.view(-1).float()
    tokens = loss_mask.sum()
    sums = torch.cat([torch.sum(losses.view(-1) * loss_mask).view(1), tokens.view(1)])
    if settings.context_parallel_size > 1:
        torch.distributed.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    reported = sums.clone().detach()
    torch.distributed.all_reduce(reported, group=parallel_state.get_data_parallel_group())
    count = sums[1].clone().detach().to(torch.int)
    return sums[0].clone(), count, {"lm loss": (reported[0], reported[1])}


def forward_step_of(settings: Settings, pair: preference.Policies | None) -> Any:
    """One microbatch through the model, or through the pair of them, and the function that takes the loss of it."""
    loss_of = tuning.loss if settings.stage else loss

    def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
        data = next(iterator)
        if pair is not None:
            output = pair(data["tokens"], data["position_ids"], data["attention_mask"])
            return output, functools.partial(preference.loss, settings, data["labels"])
        output = model(
            data["tokens"], data["position_ids"], data.get("attention_mask"), labels=data["labels"], loss_mask=data["loss_mask"]
        )
        return output, functools.partial(loss_of, settings, data["loss_mask"])

    return forward_step


def _connect(settings: Settings, chunks: list[Any], optimizer: Any) -> None:
    """What megatron-core's schedule calls on the way: scaling, and gradients and weights exchanged while others compute."""
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss if settings.fp16 else None
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks] if settings.virtual_stages else None
    if settings.overlap_param_gather and settings.virtual_stages:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    if len(chunks) == 1:
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            functions = getattr(config, name)
            if isinstance(functions, list):
                setattr(config, name, functions[0])


def _announce_shapes(settings: Settings, config: Any, micro_batch_size: int) -> None:
    """With samples of any length the stages tell each other what they send; that reads as zeros, and all have the longest sample.

    Waiting for the answer also gives back what an earlier exchange has sent, so it decides how long that is held.
    """
    # `post_validate_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/features_manager/finetune/finetune.py#L39
    if not tuning.unpadded(settings, activation.current().release or installed.MASTER):
        return
    exchange = p2p_communication._communicate_shapes
    split = settings.context_parallel_size * (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
    shape = [settings.seq_length // split, micro_batch_size, settings.hidden_size]

    def announce(*args: Any) -> tuple[list[int], list[int]]:
        exchange(*args)
        return shape, shape

    p2p_communication._communicate_shapes = announce
    config.variable_seq_lengths = True


def train(settings: Settings, chunks: list[Any], optimizer: Any, frozen: list[Any] | None = None) -> None:
    """`--train-iters` iterations: forward and backward by megatron-core's schedule, then an optimizer step."""
    _connect(settings, chunks, optimizer)
    for chunk in chunks:
        chunk.train()

    micro_batch_size = settings.micro_batch_size * (4 if frozen else 1)  # what stages send each other
    _announce_shapes(settings, get_model_config(chunks[0]), micro_batch_size)
    mock = tuning.TuningData(settings) if settings.stage else MockData(settings)
    forward_step = forward_step_of(settings, preference.Policies(chunks, frozen) if frozen else None)
    keeps = settings.recompute_granularity == "full" and activation.current().keeps_checkpoints
    if keeps:
        recompute.keep_until_collected()
    total = settings.train_iters or 1
    for iteration in range(total):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[mock] * len(chunks) if settings.virtual_stages else mock,
            model=chunks,
            num_microbatches=settings.batch.microbatches,
            seq_length=settings.seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=settings.seq_length,
            forward_only=False,
        )
        optimizer.step()
        if settings.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        progress.iteration(iteration + 1, total)
        print(f"iteration {iteration + 1}/{total}", flush=True)
    if keeps:
        collector.look()
