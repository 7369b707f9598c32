"""How much workspace an operator of CANN asks for, by formulas from its public host code (hicann/ops-nn, Ascend 910B).

torch_npu takes the workspace of an operator from its caching allocator for as long as the operator is being launched, so that it
is part of the allocated figure; with TASK_QUEUE_ENABLE=2 it takes it from another allocator, and it is not (OpPreparation.cpp,
`unsafe_empty_workspace`). Nothing here is fitted to a measured figure. An operator without a formula answers 0 and is named in
the report.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.torch_npu import TASK_QUEUE_VARIABLE
from mindspeed_dryrun.rank.torch_npu.objects import tensor_of
from mindspeed_dryrun.rank.torch_npu.slots import QUESTION, answers, store

SYSTEM = 16 << 20  # what a kernel in Ascend C keeps for itself
# Operators whose workspace does not depend on shapes, for code that asks by name.
constants = dict.fromkeys(("aclnnApplyAdamWV2", "aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingGrad",
                           "aclnnMoeTokenUnpermute", "aclnnMoeTokenUnpermuteGrad", "aclnnMoeTokenPermuteGrad",
                           "aclnnGroupedMatmulV2", "aclnnGroupedMatmulV4"), SYSTEM)  # fmt: skip
formulas: dict[str, Callable[..., int]] = {}  # by operator
largest: dict[str, int] = {}  # operator → its largest workspace in this process, wherever it was taken from


def workspace(signature: str, operator: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers a formula. `signature`: the operator's parameters, without the two out-parameters at its end."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        formulas[operator] = formula

        @answers(signature + "pp", operator + QUESTION)
        def answer(*parameters: Any) -> int:
            *inputs, place, _ = parameters
            size = formula(*inputs)
            note(operator, size)
            return store(place, size if counted() else 0, ctypes.c_uint64)

        return formula

    return register


def note(operator: str, size: int) -> None:
    """Keeps the largest workspace of each operator for the report."""
    largest[operator] = max(largest.get(operator, 0), size)


def rounded_up(size: int, unit: int) -> int:
    """To whole units."""
    return -(-size // unit) * unit


def cube_cores() -> int:
    """Of the card that the verdict is about."""
    return config.current().cube_cores


def vector_cores() -> int:
    """Two for each cube core."""
    return 2 * cube_cores()


def deterministic() -> bool:
    """Whether the script asked for results that are the same each time (`--npu-deterministic`): torch_npu hands it to CANN
    before it asks for a workspace (op-plugin, op_api_common.h; OpParamMaker.cpp, `SetDeterministic`)."""
    asked = getattr(sys.modules.get("torch"), "are_deterministic_algorithms_enabled", None)
    return asked is not None and bool(asked())


def counted() -> bool:
    """Whether the script's own setting lets workspace come from the caching allocator."""
    return os.environ.get(TASK_QUEUE_VARIABLE) != "2"


@workspace("ppppppfffffbb", "aclnnApplyAdamWV2")
def apply_adam_w(*parameters: Any) -> int:
    """optim/apply_adam_w_v2/op_host/apply_adam_w_v2_tiling.cpp:32 and 400."""
    return constants["aclnnApplyAdamWV2"]


@workspace("ppdpp", "aclnnRmsNorm")
def rms_norm(*parameters: Any) -> int:
    """norm/rms_norm/op_host/rms_norm_tiling.cpp:315-318."""
    return SYSTEM + 256


@workspace("pppppp", "aclnnRmsNormGrad")
def rms_norm_grad(gradient: int, values: int, deviation: int, weight: int, *outputs: int) -> int:
    """norm/rms_norm_grad/op_host/rms_norm_grad_tiling.cpp:300: with deterministic sums each core has a row of its own."""
    scale = tensor_of(weight)
    columns = scale.elements if deterministic() and scale else 0
    return SYSTEM + (rounded_up(columns, 16) + 8) * vector_cores() * 4


@workspace("pqp", "aclnnSwiGlu")
@workspace("ppqp", "aclnnSwiGluGrad")
def swi_glu(*parameters: Any) -> int:
    """activation/swi_glu/op_host/swi_glu_tiling.cpp:47 and 550-553, for both."""
    return SYSTEM


_EXPERTS = "p" * 12 + "qqqq"  # of a grouped product: from its inputs to the kind of its activation


@workspace("pppqp", "aclnnRotaryPositionEmbedding")
@workspace("ppppqppp", "aclnnRotaryPositionEmbeddingGrad")
@workspace("pppbpp", "aclnnMoeTokenUnpermute")
@workspace("ppppbppp", "aclnnMoeTokenUnpermuteGrad")
@workspace("ppqbp", "aclnnMoeTokenPermuteGrad")
@workspace("ppppbppppp", "aclnnMoeTokenUnpermuteWithRoutingMap")
@workspace("ppppppbppp", "aclnnMoeTokenUnpermuteWithRoutingMapGrad")
@workspace("ppppppppqqp", "aclnnGroupedMatmulV2")
@workspace(_EXPERTS + "ppp", "aclnnGroupedMatmulV4")
@workspace(_EXPERTS + "pppp", "aclnnGroupedMatmulV5")
def system_only(*parameters: Any) -> int:
    """ops-transformer: posembedding/rotary_position_embedding{,_grad}, moe/moe_token_{permute_grad,unpermute,unpermute_grad},
    moe/moe_token_unpermute_with_routing_map{,_grad} for tokens that are not padded, gmm/grouped_matmul
    (op_tiling/grouped_matmul_tiling.cpp:567, for weights that are not quantized)."""
    return SYSTEM


def token_permute_size(choices: int) -> int:
    """ops-transformer, moe/moe_token_permute/op_host/moe_token_permute_tiling.cpp:440: the sort of tokens × chosen experts."""
    return SYSTEM + 4 * choices * 2 * 3 + vector_cores() * 32 * 2


@workspace("ppqbpp", "aclnnMoeTokenPermute")
def token_permute(tokens: int, indices: int, *parameters: Any) -> int:
    """ops-transformer, moe/moe_token_permute/op_host/moe_token_permute_tiling.cpp:440: the sort of all choices."""
    chosen = tensor_of(indices)
    return token_permute_size(chosen.elements) if chosen else 0


@workspace("pppqbppp", "aclnnMoeTokenPermuteWithRoutingMap")
def permute_by_map(tokens: int, routing: int, scores: int, count: int, *parameters: Any) -> int:
    """ops-transformer, moe/moe_token_permute_with_routing_map/op_host: the map and the scores turned over, and a sort."""
    turned = sum(tensor.size for handle in (routing, scores) if (tensor := tensor_of(handle)))
    return SYSTEM + 4 * count * 2 * 2 + vector_cores() * 32 * 2 + turned


@workspace("ppppqqbpp", "aclnnMoeTokenPermuteWithRoutingMapGrad")
def permute_by_map_grad(gradient: int, scores: int, indices: int, routing: int, *parameters: Any) -> int:
    """ops-transformer, moe/moe_token_permute_with_routing_map_grad/op_host: the scores' gradient, turned over and back."""
    mask, result = tensor_of(routing), tensor_of(parameters[-1])
    return SYSTEM + (3 * result.size + mask.size if mask and result else 0)
