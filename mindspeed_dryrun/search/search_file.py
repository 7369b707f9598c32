"""A search as its file describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from mindspeed_dryrun.devices.hardware import ClusterSection, Hardware, in_cluster, read_hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.search.space_file import LimitsSection, SpaceSection, build_space
from mindspeed_dryrun.units import parse_size_mb
from mindspeed_dryrun.user_file import Count, Text, UserFile, Variables, Words, read_file


class SearchFile(UserFile):
    """A search file: whose strategies are searched, on what, and which of them."""

    script: Text = Field(description="relative to this file")
    set: Variables = Field(default_factory=dict, description="variables of the script")
    args: Words = Field(default=(), description="trainer arguments")
    cluster: ClusterSection = ClusterSection()
    hardware: Text = Field(description="a device or a hardware file")
    budget: Text | None = Field(default=None, description="memory of a rank, such as 58G; default: what the device leaves")
    limits: LimitsSection = LimitsSection()
    space: SpaceSection = SpaceSection()
    winners: Count = 3


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
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


def read_search(path: Path) -> SearchPlan:
    """A search file, or a `UsageError` that names the key."""
    file = read_file(SearchFile, path)
    hardware = in_cluster(read_hardware(file.hardware, path.parent), file.cluster)
    cards = file.cluster.cards_per_node or hardware.cards_per_node
    if cards > hardware.cards_per_node:
        raise UsageError(
            f"{path}: 'cluster.cards_per_node' is {cards}, but a node of {hardware.name} has {hardware.cards_per_node}."
        )
    budget = parse_size_mb(file.budget) if file.budget else hardware.usable_mb
    if budget > hardware.hbm_mb:
        raise UsageError(f"{path}: the budget of {budget}M is more than the {hardware.hbm_mb}M of one {hardware.name}.")
    return SearchPlan(
        script=path.parent / file.script,
        sets=file.set,
        args=file.args,
        nodes=file.cluster.nodes,
        cards_per_node=cards,
        hardware=hardware.in_nodes_of(cards),
        device=_device(file.hardware, path.parent),
        budget_mb=budget,
        space=build_space(file.space, file.limits, cards, str(path)),
        winners=file.winners,
    )
