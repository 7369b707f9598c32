"""The `space` and `limits` sections of a search file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import HYBRID, Recompute
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.megatron.layout import RING, ULYSSES
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.yaml_file import Section, whole

_CP_ALGORITHMS = {"ring": RING, "ulysses": ULYSSES, "hybrid": HYBRID[0]}
_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq")
_SCHEDULES = ("1f1b", "dualpipev")
_SIZES = ("tp", "pp", "dp", "cp", "ep", "expert_tp", "vpp", "micro_batch")
_KEYS = (
    *_SIZES, "cp_algorithm", "dispatcher", "recompute", "distributed_optimizer", "sequence_parallel", "split", "schedule",
    "options",
)  # fmt: skip


def read_space(space: Any, limits: Any, cards_per_node: int, where: str) -> Space:
    """The `space` and `limits` sections of a search file."""
    section = Section(space or {}, f"{where}: 'space'", _KEYS)
    bounds = Section(limits or {}, f"{where}: 'limits'", ("max_tp", "max_pp"))
    choices: dict[str, Any] = {
        "max_tp": bounds.integer("max_tp", cards_per_node),
        "max_pp": bounds.integer("max_pp", 1 << 30),
    }
    for key in _SIZES:
        if section.has(key):
            choices["etp" if key == "expert_tp" else key] = section.integers(key)
    for key, limit in (("tp", "max_tp"), ("pp", "max_pp")):
        if key in choices and min(choices[key]) > choices[limit]:
            raise UsageError(
                f"{where}: 'space: {key}' starts at {min(choices[key])}, above 'limits: {limit}' {choices[limit]}: "
                "nothing is left to search."
            )
    if section.has("cp_algorithm"):
        choices["cp_algorithms"] = tuple(_CP_ALGORITHMS[name] for name in _names(section, "cp_algorithm", _CP_ALGORITHMS))
    if section.has("dispatcher"):
        choices["dispatchers"] = _names(section, "dispatcher", _DISPATCHERS)
    if section.has("schedule"):
        choices["dualpipe"] = "dualpipev" in _names(section, "schedule", _SCHEDULES)
    if section.has("options"):
        choices["options"] = _options(section)
    for key in ("distributed_optimizer", "sequence_parallel"):
        if section.has(key):
            choices[key] = section.booleans(key)
    if section.has("recompute"):
        choices["recompute"], choices["blocks"], choices["per_stage"] = _recomputes(section)
    if section.has("split"):
        names = [str(item) for item in section.items("split")]
        if not set(names) <= {"even", "uneven"}:
            raise UsageError(f"{section.where}: 'split' takes even, uneven or both, not {', '.join(names)}.")
        choices["uneven"] = "uneven" in names
    return Space(**choices)


def _names(section: Section, key: str, known: Iterable[str]) -> tuple[str, ...]:
    names = [str(item) for item in section.items(key)]
    for name in names:
        if name not in known:
            raise UsageError(f"{section.where}: {key} '{name}' is not one of {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def _options(section: Section) -> tuple[tuple[str, ...], ...]:
    """Sets of trainer arguments that are tried in turn; an empty one is the script as it is."""
    found = []
    for item in section.items("options"):
        words = tuple(str(item or "").split())
        if words and pairs(words)[0][0] == "":
            raise UsageError(f"{section.where}: option '{item}' must start with a flag, such as --swap-attention.")
        found.append(words)
    return tuple(dict.fromkeys(found))


def _recomputes(section: Section) -> tuple[tuple[Recompute, ...], bool, bool]:
    found, blocks, per_stage = [], False, False
    for item in section.items("recompute"):
        words = str(item).split()
        if words == ["block"]:
            blocks = True
        elif words == ["per_stage"]:
            per_stage = True
        elif len(words) == 2 and words[0] in ("block", "stage") and words[1].isdigit():
            found.append(Recompute(words[0], whole(int(words[1]), f"{section.where}: 'recompute: {words[0]}'")))
        elif words in (["none"], ["selective"]):
            found.append(Recompute(words[0]))
        elif words == ["full"]:
            found.append(Recompute("full", 1))
        else:
            raise UsageError(
                f"{section.where}: recompute '{item}' is not none, selective, full, block, block N, stage N or per_stage."
            )
    return tuple(found), blocks or per_stage, per_stage
