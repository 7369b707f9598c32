"""What all ways to run experts share: the exchange of tokens, and gradients that the kernel adds to the buffer by itself."""

from __future__ import annotations

from typing import Any

import mindspore
import torch


def exchange(group: Any, x: Any, output_sizes: Any, input_sizes: Any) -> Any:
    """Through MindSpore's collective (MindSpeed's `all_to_all_forward`): MSAdapter's takes no numpy sizes."""
    # `all_to_all_forward`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/mindspore/core/tensor_parallel/mappings.py#L22
    if torch.distributed.get_world_size(group=group) == 1:
        return x
    x = x.contiguous()
    if output_sizes is None:
        output = torch.empty_like(x)
    else:
        output = x.new_empty(size=[int(sum(output_sizes)), *x.size()[1:]], dtype=x.dtype)
    sizes = (None if output_sizes is None else list(part) for part in (output_sizes, input_sizes))
    mindspore.mint.distributed.all_to_all_single(output, x, *sizes, group=group._name)
    return output


def weights_gradient_in_place(original_weight: Any, weight: Any, dtype: Any) -> Any:
    """The kernel adds the weights' gradient to the buffer; what is returned only tells autograd that there is one."""
    if not hasattr(original_weight, "grad_added_to_main_grad"):
        return None
    original_weight.grad_added_to_main_grad = True
    return torch.empty(weight.shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=False)
