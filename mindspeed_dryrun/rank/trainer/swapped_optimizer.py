"""`--swap-optimizer`: main parameters and optimizer states live on the host, and come to the device a part at a time.

MindSpeed's `SwapDistributedOptimizer` and its step (mindspeed/core/optimizer/swap_optimizer and mindspeed/mindspore/core/
optimizer/swap_optimizer), without the copies on the host, which nobody reads in a dry run.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer


@contextmanager
def main_parameters_on_host() -> Iterator[None]:
    """A distributed optimizer that is built in here frees each main parameter before it makes the next one."""
    tensor_parallel = distrib_optimizer.tensor_parallel
    copy_attributes = tensor_parallel.copy_tensor_model_parallel_attributes

    def copy_and_free(destination: Any, source: Any) -> None:
        copy_attributes(destination, source)
        if destination.dtype != source.dtype:
            destination.untyped_storage().resize_(0)

    replaced = {"copy_tensor_model_parallel_attributes": copy_and_free}
    distrib_optimizer.tensor_parallel = types.SimpleNamespace(**{**vars(tensor_parallel), **replaced})
    try:
        yield
    finally:
        distrib_optimizer.tensor_parallel = tensor_parallel


def swap(parts: list[Any], times: int) -> None:
    """Makes the steps of these distributed optimizers fetch their parameters and states, and send them back.

    `times` is how many rounds the fetching takes. Upstream counts the parameters of all optimizers built so far.
    """
    counted = 0
    for part in parts:
        counted += sum(main.numel() for group in part.shard_fp32_from_float16_groups for main in group)
        _Swapping(part, counted // times).install()


class _Swapping:
    """One optimizer's tensors on their way."""

    def __init__(self, optimizer: Any, most: int) -> None:
        self.optimizer = optimizer
        self.most = most
        self.to_device, self.to_host = torch.cuda.Stream(), torch.cuda.Stream()
        self.model_parameters = {
            main: model
            for mains, models in zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
            for main, model in zip(mains, models, strict=True)
        }

    def install(self) -> None:
        """Makes the states, and puts the step in place."""
        inner = self.optimizer.optimizer
        for main in self.model_parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                state = inner.state[main][name] = torch.zeros_like(main)
                state.untyped_storage().resize_(0)
        inner.step = self.step
        self.optimizer._copy_main_params_to_model_params = lambda: None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, *_: Any) -> None:
        """Adam, parameter by parameter: the next ones are fetched when all that were fetched are done."""
        inner = self.optimizer.optimizer
        inner.count_step()
        groups = {parameter: group for group in inner.param_groups for parameter in group["params"]}
        parameters = list(groups)
        fetched = 0
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            if fetched == 0:
                torch.cuda.current_stream().wait_stream(self.to_host)
                fetched = self._fetch(parameters[index:])
            torch.cuda.current_stream().wait_stream(self.to_device)
            inner.update(parameter, groups[parameter])
            if parameter in self.model_parameters:
                self.model_parameters[parameter].data.copy_(parameter)
            fetched -= parameter.numel()
            with torch.cuda.stream(self.to_host):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                self._free(parameter)

    def _fetch(self, parameters: list[Any]) -> int:
        fetched = 0
        with torch.cuda.stream(self.to_device):
            torch.cuda.current_stream().wait_stream(self.to_host)
            for parameter in parameters:
                if fetched and fetched + parameter.numel() > self.most:
                    break
                for tensor in self._moved(parameter):
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                fetched += parameter.numel()
        return fetched

    def _free(self, parameter: Any) -> None:
        for tensor in self._moved(parameter):
            tensor.untyped_storage().resize_(0)

    def _moved(self, parameter: Any) -> list[Any]:
        """Parameters that the model itself holds in 32 bits stay where they are."""
        if parameter not in self.model_parameters:
            return []
        return [parameter, *self.optimizer.optimizer.state[parameter].values()]
