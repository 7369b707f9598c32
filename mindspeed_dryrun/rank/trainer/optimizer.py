"""Adam as MindSpeed runs it on an NPU, inside megatron-core's mixed-precision and distributed optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import reuse_fp32 as reuse


class FusedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """One fused operator per parameter; the two states appear in the first step."""

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor(1, dtype=torch.int64, device=torch.cuda.current_device())
            updates = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                updates.append((parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
            beta1, beta2 = group["betas"]
            for parameter, gradient, average, average_of_squares in updates:
                torch._fused_adamw_(
                    [parameter], [gradient], [average], [average_of_squares], [], [group["step"]], amsgrad=False,
                    lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                    maximize=False,
                )  # fmt: skip


def build(settings: Settings, chunks: list[Any], dtype: Any) -> Any:
    """megatron-core's optimizer for these chunks."""
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
    )
    optimizer = megatron_optimizer.get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    if settings.reuse_fp32_param:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            reuse.share(part)
    return optimizer
