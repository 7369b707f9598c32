"""A search as its file describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.devices.hardware import CLUSTER_KEYS, Hardware, in_cluster, read_hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.search.space_file import read_space
from mindspeed_dryrun.units import parse_size_mb
from mindspeed_dryrun.yaml_file import Section, read_yaml

_KEYS = ("script", "set", "args", "cluster", "hardware", "budget", "limits", "space", "winners")


@dataclass(frozen=True)
class SearchFile:
    """Script, cluster, budget and space of one search."""

    script: Path
    sets: Mapping[str, str]
    args: tuple[str, ...]
    nodes: int
    cards_per_node: int
    hardware: Hardware
    device: str  # its name, or its file
    budget_mb: int
    space: Space
    winners: int

    @property
    def world(self) -> int:
        return self.nodes * self.cards_per_node


def _device(text: str, folder: Path) -> str:
    file = folder / text
    return str(file.absolute()) if file.is_file() else text


def read_search(path: Path) -> SearchFile:
    """A search file, or a `UsageError` that names the key."""
    section = Section(read_yaml(path), str(path), _KEYS)
    hardware = read_hardware(section.text("hardware"), path.parent)
    keys = ("nodes", "cards_per_node", *CLUSTER_KEYS)
    cluster = Section(section.data.get("cluster") or {}, f"{path}: 'cluster'", keys)
    hardware = in_cluster(hardware, cluster)
    cards = cluster.integer("cards_per_node", hardware.cards_per_node)
    if cards > hardware.cards_per_node:
        raise UsageError(
            f"{path}: 'cluster: cards_per_node' is {cards}, but a node of {hardware.name} has {hardware.cards_per_node}."
        )
    budget = parse_size_mb(section.text("budget")) if section.has("budget") else hardware.usable_mb
    if budget > hardware.hbm_mb:
        raise UsageError(f"{path}: the budget of {budget}M is more than the {hardware.hbm_mb}M of one {hardware.name}.")
    return SearchFile(
        script=path.parent / section.text("script"),
        sets=section.variables("set"),
        args=section.words("args"),
        nodes=cluster.integer("nodes", 1),
        cards_per_node=cards,
        hardware=hardware.in_nodes_of(cards),
        device=_device(section.text("hardware"), path.parent),
        budget_mb=budget,
        space=read_space(section.data.get("space"), section.data.get("limits"), cards, str(path)),
        winners=section.integer("winners", 3),
    )
