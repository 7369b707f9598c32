"""What megatron-core and MSAdapter need before they can be imported and run in a simulation, without MindSpeed.

`before_import` touches nothing but `sys.modules`; `after_import` replaces a handful of functions in place. Each
replacement says why. Everything here stands for something MindSpeed does, or for something only a device could do; what
both trainers need (process groups without a scheduler, a device count) is in the patch catalogue.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any


def before_import() -> None:
    """Must run before `torch` (MSAdapter's) and `megatron` are imported."""
    # MSAdapter's wheel brings a `transformer_engine` without the parts megatron-core asks for; MindSpeed hides it too.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    # MSAdapter's `apex` holds CUDA-only optimizers; without it megatron-core falls back to its own loops and `Adam`.
    sys.modules["apex"] = None  # type: ignore[assignment]
    # Read by megatron-core for `--gradient-accumulation-fusion`; the kernel adds into the gradient it is given.
    fused = types.ModuleType("fused_weight_gradient_mlp_cuda")
    fused.__spec__ = importlib.machinery.ModuleSpec(fused.__name__, None)
    fused.wgrad_gemm_accum_fp32 = fused.wgrad_gemm_accum_fp16 = lambda *_: None  # type: ignore[attr-defined]
    sys.modules[fused.__name__] = fused


def after_import() -> None:
    """Must run before `init_process_group`."""
    import torch

    _view_of_any_layout(torch)
    _norms_and_scales()
    _pipeline_outputs()
    _one_collective_per_bucket()
    _no_fp8_shards()
    _collectives_on_host(torch)


def _view_of_any_layout(torch: Any) -> None:
    """MindSpeed lets `view` copy a tensor that is not contiguous, where torch would refuse; its layers rely on it."""
    view = torch.Tensor.view

    def view_or_copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return view(tensor if tensor.is_contiguous() else tensor.contiguous(), *args, **kwargs)

    torch.Tensor.view = view_or_copy


def _norms_and_scales() -> None:
    """Gradient norm and scaling one tensor at a time, as MindSpeed does in place of apex."""
    # `multi_tensor_l2norm`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/megatron_basic/requirements_basic.py#L18
    import torch
    from megatron.core.optimizer import clip_grads, optimizer

    def l2_norm(_: Any, tensor_lists: Iterable[Iterable[Any]], *__: Any) -> tuple[Any, None]:
        total = 0.0
        for tensors in tensor_lists:
            for tensor in tensors:
                total = total + torch.norm(tensor, 2.0) ** 2.0
        return total**0.5, None

    def scale(_: Any, tensor_lists: list[list[Any]], factor: float) -> None:
        with torch.no_grad():
            for source, target in zip(*tensor_lists, strict=True):
                target.copy_(source * factor)

    def apply(operation: Callable[..., Any], overflow: Any, tensor_lists: Any, *args: Any) -> Any:
        return operation(overflow, tensor_lists, *args)

    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = apply
        module.multi_tensor_scale_impl = scale
    clip_grads.l2_norm_impl = l2_norm


def _pipeline_outputs() -> None:
    """An output that was sent on gives its memory back; torch's way (`.data = scalar`) does not do so on MindSpore."""
    # `deallocate_output_tensor`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/pipeline_parallel/schedules.py#L116
    import torch
    from megatron.core.pipeline_parallel import schedules

    def deallocate(output: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if output is not None and deallocate_pipeline_outputs:
            output.untyped_storage().resize_(0)

    def backward(output: Any, gradient: Any) -> None:
        if gradient is None:
            gradient = torch.ones_like(output)
        engine = torch.autograd.variable.Variable._execution_engine
        engine.run_backward(
            tensors=(output,), grad_tensors=(gradient,), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip

    schedules.deallocate_output_tensor = deallocate
    schedules.custom_backward = backward


def _no_fp8_shards() -> None:
    """The distributed optimizer asks even where no parameter has 8 bits, and fails without Transformer Engine."""
    # `_get_fp8_params_and_shard_fp32_from_fp8`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/optimizer/distrib_optimizer.py#L1904
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.quantize_param_shard = lambda *_: None


class _Buckets:
    """Stands for torch's coalescing manager, which MSAdapter lacks: the buckets' collectives run one by one."""

    # `_coalescing_manager`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/distributed/param_and_grad_buffer.py#L217

    current: _Buckets | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.handles: list[Any] = []

    def __enter__(self) -> _Buckets:
        _Buckets.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        _Buckets.current = None

    def wait(self) -> None:
        """From MindSpore 2.8 on a handle that is dropped before anybody has waited for it stops the run."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


def _one_collective_per_bucket() -> None:
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            handle = function(*args, **kwargs)
            if handle is not None and _Buckets.current is not None:
                _Buckets.current.handles.append(handle)
            return handle

        return call

    param_and_grad_buffer._coalescing_manager = _Buckets
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, kept(getattr(param_and_grad_buffer, name)))
    torch.distributed.all_reduce = kept(torch.distributed.all_reduce)


def _collectives_on_host(torch: Any) -> None:
    """A collective of a host tensor aborts in simulation; its result would be the tensor itself."""
    all_reduce = torch.distributed.all_reduce

    def all_reduce_on_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(tensor, "is_cpu", False):
            return None
        return all_reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce_on_device
