"""Every function of CANN that must answer something, with the signatures of CANN's public headers."""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu import (
    attention,
    fused_products,
    gradients,
    indexed,
    inner_tensors,
    objects,
    products,
    runtime,
    workspace,
)
from mindspeed_dryrun.rank.torch_npu.slots import ANSWERS, SLOT, fill_slots

CANN_VERSION = runtime.CANN_VERSION
communicators = runtime.communicators
memory = runtime.memory
described = objects.described
workspaces = workspace.largest
inner_tensor_size = inner_tensors.aligned
product_size = products.product
embedding_size = gradients.embedding
put_size = indexed.put
attention_size = attention.backward
fused_product_size = fused_products.all_gather_matmul
__all__ = [
    "CANN_VERSION",
    "SLOT",
    "attention_size",
    "communicators",
    "described",
    "embedding_size",
    "fused_product_size",
    "install",
    "memory",
    "names",
    "product_size",
    "put_size",
    "workspaces",
]


def names() -> tuple[str, ...]:
    """Every function that has an answer."""
    return tuple(sorted(ANSWERS))


def install(library: str) -> None:
    """Makes this process ready for the stand-in library at this path. Must run before `import torch_npu`."""
    memory.reserve()
    fill_slots(library)
