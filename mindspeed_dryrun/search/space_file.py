"""The `space` and `limits` sections of a search file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import HYBRID, Recompute
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.megatron.layout import RING, ULYSSES
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.user_file import Count, Counts, Switches, UserFile, names_of

_CP_ALGORITHMS = {"ring": RING, "ulysses": ULYSSES, "hybrid": HYBRID[0]}
_SIZES = ("tp", "pp", "dp", "cp", "ep", "expert_tp", "vpp", "micro_batch")
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
    choices: dict[str, Any] = {"max_tp": limits.max_tp or cards_per_node, "max_pp": limits.max_pp or 1 << 30}
    for key in _SIZES:
        if sizes := getattr(section, key):
            choices["etp" if key == "expert_tp" else key] = tuple(sorted(set(sizes)))
    for key, limit in (("tp", "max_tp"), ("pp", "max_pp")):
        if key in choices and min(choices[key]) > choices[limit]:
            raise UsageError(
                f"{where}: 'space.{key}' starts at {min(choices[key])}, above 'limits.{limit}' {choices[limit]}: "
                "nothing is left to search."
            )
    for key in ("distributed_optimizer", "sequence_parallel"):
        if switches := getattr(section, key):
            choices[key] = tuple(dict.fromkeys(switches))
    if section.cp_algorithm:
        choices["cp_algorithms"] = tuple(_CP_ALGORITHMS[name] for name in section.cp_algorithm)
    if section.dispatcher:
        choices["dispatchers"] = section.dispatcher
    if section.schedule:
        choices["dualpipe"] = "dualpipev" in section.schedule
    if section.options:
        choices["options"] = section.options
    if section.split:
        choices["uneven"] = "uneven" in section.split
    if section.recompute:
        per_stage = "per_stage" in section.recompute
        choices["per_stage"], choices["blocks"] = per_stage, per_stage or "block" in section.recompute
        choices["recompute"] = tuple(_named(item) for item in section.recompute if item not in ("block", "per_stage"))
    return Space(**choices)


def _named(item: str) -> Recompute:
    kind, _, layers = item.partition(" ")
    return Recompute(kind, int(layers)) if layers else Recompute(kind, 1) if kind == "full" else Recompute(kind)
