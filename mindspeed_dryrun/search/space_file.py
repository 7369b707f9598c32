"""The `space` and `limits` sections of a search file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import HYBRID, Recompute
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.megatron.layout import RING, ULYSSES
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.user_file import Count, Counts, Switches, UserFile, names_of

_CP_ALGORITHMS = {"ring": RING, "ulysses": ULYSSES, "hybrid": HYBRID[0]}
_RECOMPUTE = r"none|selective|full|block|per_stage|(block|stage) +[1-9][0-9]*"


def _recompute(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not re.fullmatch(_RECOMPUTE, str(item)):
            raise ValueError(f"'{item}' is not none, selective, full, block, block N, stage N or per_stage")
    return tuple(str(item) for item in items)


def _options(value: Any) -> tuple[tuple[str, ...], ...]:
    found = []
    for item in value if isinstance(value, list) else [value]:
        words = tuple(str(item or "").split())
        if words and pairs(words)[0][0] == "":
            raise ValueError(f"has '{item}', which must start with a flag, such as --swap-attention")
        found.append(words)
    return tuple(dict.fromkeys(found))


_RECOMPUTES = {"type": ["string", "array"], "pattern": f"^({_RECOMPUTE})$", "items": {"pattern": f"^({_RECOMPUTE})$"}}


class SpaceSection(UserFile):
    """What is searched; a dimension that is left out takes every value that Megatron accepts."""

    tp: Counts | None = None
    pp: Counts | None = None
    dp: Counts | None = None
    cp: Counts | None = None
    ep: Counts | None = None
    expert_tp: Counts | None = None
    vpp: Counts | None = None
    micro_batch: Counts | None = None
    cp_algorithm: names_of(*_CP_ALGORITHMS) | None = None  # type: ignore[valid-type]
    dispatcher: names_of("allgather", "alltoall", "alltoall_seq") | None = None  # type: ignore[valid-type]
    recompute: Annotated[tuple[str, ...], BeforeValidator(_recompute), WithJsonSchema(_RECOMPUTES)] | None = None
    distributed_optimizer: Switches | None = None
    sequence_parallel: Switches | None = None
    split: names_of("even", "uneven") | None = None  # type: ignore[valid-type]
    schedule: names_of("1f1b", "dualpipev") | None = None  # type: ignore[valid-type]
    options: (
        Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_options), WithJsonSchema({"type": ["string", "array"]})] | None
    ) = Field(default=None, description="sets of trainer arguments that are tried in turn; an empty one is the script as it is")


class LimitsSection(UserFile):
    """The largest sizes."""

    max_tp: Count | None = Field(default=None, description="default: the devices of a node")
    max_pp: Count | None = None


def build_space(section: SpaceSection, limits: LimitsSection, cards_per_node: int, where: str) -> Space:
    """The space that the two sections of the file `where` describe."""
    named = {key: getattr(section, key) for key in type(section).model_fields}
    choices: dict[str, Any] = {"max_tp": limits.max_tp or cards_per_node, "max_pp": limits.max_pp or 1 << 30}
    for key, values in named.items():
        if values is not None:
            choices |= _CHOICES[key](values)
    for key, limit in (("tp", "max_tp"), ("pp", "max_pp")):
        if key in choices and min(choices[key]) > choices[limit]:
            raise UsageError(
                f"{where}: 'space.{key}' starts at {min(choices[key])}, above 'limits.{limit}' {choices[limit]}: "
                "nothing is left to search."
            )
    return Space(**choices)


def _sizes(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda values: {name: tuple(sorted(set(values)))}


def _as_given(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda values: {name: tuple(dict.fromkeys(values))}


def _recomputations(values: tuple[str, ...]) -> dict[str, Any]:
    per_stage = "per_stage" in values
    named = tuple(_named(item) for item in values if item not in ("block", "per_stage"))
    return {"per_stage": per_stage, "blocks": per_stage or "block" in values, "recompute": named}


# Key of the section → what it says about the space.
_CHOICES: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{key: _sizes(key) for key in ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch")},
    "expert_tp": _sizes("etp"),
    "cp_algorithm": lambda names: {"cp_algorithms": tuple(_CP_ALGORITHMS[name] for name in names)},
    "dispatcher": _as_given("dispatchers"),
    "recompute": _recomputations,
    "distributed_optimizer": _as_given("distributed_optimizer"),
    "sequence_parallel": _as_given("sequence_parallel"),
    "split": lambda names: {"uneven": "uneven" in names},
    "schedule": lambda names: {"dualpipe": "dualpipev" in names},
    "options": _as_given("options"),
}


def _named(item: str) -> Recompute:
    kind, _, layers = item.partition(" ")
    return Recompute(kind, int(layers)) if layers else Recompute(kind, 1) if kind == "full" else Recompute(kind)
