"""The hardware of a cluster, from a YAML file: what the time model divides by, and the memory that a device has."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.schema import read_as
from mindspeed_dryrun.user_file import Count, Figure, Number, UserFile
from mindspeed_dryrun.yaml_file import read_yaml


@dataclass(frozen=True)
class Range:
    """A figure with the interval that it may lie in."""

    low: float
    typical: float
    high: float

    def times(self, factor: float) -> Range:
        """All three ends, scaled."""
        return Range(self.low * factor, self.typical * factor, self.high * factor)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of card and its links. Bandwidths are GB/s (10⁹ bytes) in one direction, as achieved."""

    key: str  # the file's name: what `--device` and `--hardware` take
    name: str
    matmul_tflops: Range
    attention_gscores_s: Range  # 10⁹ scores (a query times a key) a second of fused attention, forward
    tile: tuple[int, int]  # rows and columns of the output that one core works on
    cores: int
    hbm_gb_s: Range  # what a product reads and writes at
    memory_gb_s: Range  # what element-wise operators read and write at
    kernel_overhead_us: Range
    link_gb_s: Range  # one link of a full mesh, or the card's port into a switch
    topology: str
    network_gb_s: Range  # of one card, between nodes
    latency_us: Range
    exchange_ms: Range  # a synchronous exchange between stages, beside its transfer
    overlap: Range  # share of a collective that a fused product (MC2) hides
    cards_per_node: int
    link_cards: int  # cards that the fast links join; the network begins beyond them
    hbm_mb: int
    total_mb: int  # as the driver reports it
    usable_mb: int  # by MindSpore
    memory_source: str  # published, derived or measured
    fitted: tuple[str, ...] = ()  # figures fitted to published throughput
    calibrated: tuple[str, ...] = ()  # the rows that the efficiencies were fitted to
    error: float | None = None  # relative; nine of ten jobs like the fitted ones stay within it
    mixture_error: float | None = None  # the same of mixtures of experts, to which nothing was fitted

    @property
    def device(self) -> Device:
        """Its memory: what a verdict is about."""
        return Device(name=self.key, title=self.name, total_mb=self.total_mb, usable_mb=self.usable_mb, source=self.memory_source)

    @property
    def trust(self) -> str:
        """How far predicted times can be trusted, in a few words."""
        if self.error is None:
            return message("not calibrated")
        error = f"±{100 * self.error:.0f}%"
        return message(f"calibrated, {error}") if self.calibrated else message(f"fitted to published throughput, {error}")

    def in_nodes_of(self, cards: int) -> Hardware:
        """The same cards in smaller nodes: links that end with a node join fewer of them."""
        cards = min(cards, self.cards_per_node)
        links = cards if self.link_cards <= self.cards_per_node else self.link_cards
        return dataclasses.replace(self, cards_per_node=cards, link_cards=links)

    def at(self, end: str) -> Hardware:
        """All figures at the `low` (slow) or `high` (fast) end of their intervals."""

        def move(name: str) -> Range:
            spread: Range = getattr(self, name)
            slow_is_high = name.endswith(("_us", "_ms"))
            value = getattr(spread, {"low": "high", "high": "low"}[end] if slow_is_high else end)
            return Range(value, value, value)

        changes: dict[str, Any] = {name: move(name) for name in RANGES}
        return dataclasses.replace(self, **changes)

    def scaled(self, compute: float, communication: float, exchange: float = 1.0) -> Hardware:
        """The same card with its computing, its communicating and its exchanges made faster by these factors."""
        return dataclasses.replace(
            self,
            matmul_tflops=self.matmul_tflops.times(compute),
            attention_gscores_s=self.attention_gscores_s.times(compute),
            hbm_gb_s=self.hbm_gb_s.times(compute),
            memory_gb_s=self.memory_gb_s.times(compute),
            kernel_overhead_us=self.kernel_overhead_us.times(1 / compute),
            link_gb_s=self.link_gb_s.times(communication),
            network_gb_s=self.network_gb_s.times(communication),
            latency_us=self.latency_us.times(1 / communication),
            exchange_ms=self.exchange_ms.times(1 / exchange),
        )


def _tile(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(isinstance(x, int) and x > 0 for x in value):
        raise ValueError("must be two whole numbers, rows and columns")
    return tuple(value)


class HardwareFile(UserFile):
    """A hardware file: one device and the links between devices."""

    name: str
    also_called: tuple[str, ...] = Field(default=(), description="other names that `--device` takes")
    matmul_tflops: Figure = Field(description="bf16 products as a training run gets them, 10^12 operations a second")
    attention_gscores_s: Figure = Field(description="fused attention, 10^9 scores a second, forward")
    hbm_gb_s: Figure = Field(description="memory as a matrix product reads it, 10^9 bytes a second")
    memory_gb_s: Figure = Field(description="reads and writes of element-wise operators, 10^9 bytes a second")
    kernel_overhead_us: Figure = Field(description="starting one operator")
    link_gb_s: Figure = Field(description="one link of a full mesh, or the port into a switch; one direction")
    network_gb_s: Figure = Field(description="of one device, beyond the fast links; one direction")
    latency_us: Figure = Field(description="starting a collective")
    exchange_ms: Figure = Field(description="an exchange between pipeline stages beside its transfer")
    overlap: Figure = Field(description="share of a collective that a product fused with it (MC2) hides")
    tile: Annotated[tuple[int, int], BeforeValidator(_tile)] = Field(description="output of one core at a time")
    cores: Count
    topology: Literal["full_mesh", "switch"]
    cards_per_node: Count
    link_cards: Count | None = Field(default=None, description="devices that the fast links join; default: a node")
    hbm_gb: float = Field(gt=0, allow_inf_nan=False, description="nominal size")
    total_mb: Count = Field(description="memory as the driver reports it")
    usable_mb: Count = Field(description="what of it MindSpore uses")
    memory_source: Literal["published", "derived", "measured"]
    fitted: tuple[str, ...] = Field(default=(), description="figures fitted to published throughput")
    calibrated: tuple[str, ...] = ()
    error: float | None = Field(default=None, gt=0)
    mixture_error: float | None = Field(default=None, gt=0, description="of mixtures whose experts stay within the fast links")


RANGES = (
    "matmul_tflops", "attention_gscores_s", "hbm_gb_s", "memory_gb_s", "kernel_overhead_us", "link_gb_s",
    "network_gb_s", "latency_us", "exchange_ms", "overlap",
)  # fmt: skip


_FOLDER = Path(__file__).parent
DEFAULT = "ascend910b-64g"


def names() -> tuple[str, ...]:
    """The devices that come with the program, the default first."""
    return tuple(sorted((file.stem for file in _FOLDER.glob("ascend*.yaml")), key=lambda name: (name != DEFAULT, name)))


def read_hardware(text: str | Path, beside: Path = Path()) -> Hardware:
    """The device of this name, or a file of the user's own (relative to `beside`); a `UsageError` says what is wrong."""
    if isinstance(text, Path) or text.endswith((".yaml", ".yml")) or os.sep in text:
        return build_hardware(read_yaml(beside / text), str(beside / text))
    for name in names():
        file = _FOLDER / f"{name}.yaml"
        data = read_yaml(file)
        if _letters(text) in {_letters(alias) for alias in (name, *data.get("also_called", ()))}:
            return build_hardware(data, str(file))
    near = difflib.get_close_matches(text.lower(), names(), 1, 0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"There is no device '{text}'. {hint}Known are {', '.join(names())}, or a YAML file of your own.")


def _letters(name: str) -> str:
    """Spelling does not matter: `Ascend 910B (64 GB)` is `ascend910b-64g` is `910b-64g`."""
    return re.sub(r"[^a-z0-9]|(?<=\dg)b", "", name.lower().replace(" ", "")).removeprefix("ascend")


def build_hardware(data: dict[str, Any], where: str) -> Hardware:
    """The hardware that a file's content describes."""
    file = read_as(HardwareFile, data, where)
    own = HardwareFile.model_fields.keys() - {"hbm_gb", "also_called"}
    values: dict[str, Any] = {name: getattr(file, name) for name in own}
    values |= {name: Range(*values[name]) for name in RANGES}
    values |= {"key": Path(where).stem}
    values |= {"link_cards": file.link_cards or file.cards_per_node, "hbm_mb": int(file.hbm_gb * 1024)}
    return Hardware(**values)


class ClusterSection(UserFile):
    """The `cluster` of a search: its size, and what it has differently from the hardware file."""

    nodes: Count = 1
    cards_per_node: Count | None = Field(default=None, description="default: as many as the hardware file says")
    hbm_gb: Number | None = Field(default=None, description="memory of a device")
    link_gb_s: Figure | None = None
    network_gb_s: Figure | None = None


def in_cluster(hardware: Hardware, cluster: ClusterSection) -> Hardware:
    """The hardware with the memory and the links that the `cluster` section of a search names."""
    changes: dict[str, Any] = {}
    if cluster.link_gb_s:
        changes["link_gb_s"] = Range(*cluster.link_gb_s)
    if cluster.network_gb_s:
        changes["network_gb_s"] = Range(*cluster.network_gb_s)
    if cluster.hbm_gb:
        changes["hbm_mb"] = int(cluster.hbm_gb * 1024)
    return dataclasses.replace(hardware, **changes)


def to_yaml(hardware: Hardware) -> dict[str, Any]:
    """The inverse of `build_hardware`."""
    data: dict[str, Any] = {}
    for name in HardwareFile.model_fields:
        if name == "also_called":
            continue
        value = hardware.hbm_mb / 1024 if name == "hbm_gb" else getattr(hardware, name)
        if isinstance(value, Range):
            value = [round(end, 4) for end in (value.low, value.typical, value.high)]
        if value not in (None, ()):
            data[name] = list(value) if isinstance(value, tuple) else value
    return data
