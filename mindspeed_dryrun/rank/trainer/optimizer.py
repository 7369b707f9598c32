"""Adam as MindSpeed runs it on an NPU, inside megatron-core's mixed-precision and distributed optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import reuse_fp32
from mindspeed_dryrun.rank.trainer import swapped_optimizer as swapped


class FusedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """One fused operator per parameter; the two states appear in the first step."""

    # `AdamW`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/optimizer/adamw.py#L78

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        self.count_step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._ensure_states(parameter)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def count_step(self) -> None:
        """One more step for every group."""
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor(1, dtype=torch.int64, device=torch.cuda.current_device())

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        """The fused operator for one parameter."""
        self._ensure_states(parameter)
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [group["step"]], amsgrad=False,
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

    def _ensure_states(self, parameter: Any) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)


def build(settings: Settings, chunks: list[Any], dtype: Any) -> Any:
    """megatron-core's optimizer for these chunks."""
    # `get_megatron_optimizer`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/optimizer/__init__.py#L430
    megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdamW
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-6,
        weight_decay=settings.weight_decay,
        fp16=settings.fp16,
        bf16=settings.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        clip_grad=settings.clip_grad,
        loss_scale=settings.loss_scale,
        initial_loss_scale=settings.initial_loss_scale,
        log_num_zeros_in_grad=settings.log_num_zeros_in_grad,
    )
    on_host = swapped.main_parameters_on_host() if settings.swap_optimizer else contextlib.nullcontext()
    with on_host:
        optimizer = megatron_optimizer.get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if not settings.log_num_zeros_in_grad:  # megatron-core's chain counts them all the same; MindSpeed puts that right
        # `def step`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/megatron_basic/count_zero_fix.py#L6
        optimizer.count_zeros = lambda: 0
    if settings.swap_optimizer:
        swapped.swap(parts, settings.swap_optimizer_times)
    if settings.reuse_fp32_param:
        for part in parts:
            reuse_fp32.share(part)
    return optimizer
