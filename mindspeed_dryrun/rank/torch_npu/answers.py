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

# Their formulas are answers once they are imported.
FORMULAS = (attention, fused_products, gradients, indexed, inner_tensors, products, workspace)
CANN_VERSION = runtime.CANN_VERSION
communicators = runtime.communicators
memory = runtime.memory
described = objects.described
workspaces = workspace.largest
__all__ = [
    "CANN_VERSION",
    "FORMULAS",
    "SLOT",
    "communicators",
    "described",
    "install",
    "memory",
    "names",
    "workspaces",
]


def names() -> tuple[str, ...]:
    """Every function that has an answer."""
    return tuple(sorted(ANSWERS))


def install(library: str) -> None:
    """Makes this process ready for the stand-in library at this path. Must run before `import torch_npu`."""
    memory.reserve()
    fill_slots(library)
