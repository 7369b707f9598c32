"""The hardware of a cluster, from a YAML file: what the time model divides by, and the memory that a device has."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.yaml_file import Section, read_yaml


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

    @property
    def device(self) -> Device:
        """Its memory: what a verdict is about."""
        return Device(self.key, self.name, self.total_mb, self.usable_mb, self.memory_source)

    @property
    def trust(self) -> str:
        """How far predicted times can be trusted, in a few words."""
        if self.error is None:
            return "not calibrated"
        fitted = "calibrated" if self.calibrated else "fitted to published throughput"
        return f"{fitted}, ±{100 * self.error:.0f}%"

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


_TOO_MUCH = 1e30  # no figure of a device comes near; infinity and figures that are no float end here


def _three(value: Any) -> Any:
    """A figure of the file: one number, or three in rising order."""
    values = value if isinstance(value, (list, tuple)) else [value]
    good = all(isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < _TOO_MUCH for item in values)
    if not good or len(values) not in (1, 3) or sorted(values) != list(values):
        raise ValueError("must be one number above 0, or three in rising order [low, typical, high]")
    return tuple(float(item) for item in (values if len(values) == 3 else [values[0]] * 3))


def _tile(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(isinstance(x, int) and x > 0 for x in value):
        raise ValueError("must be two whole numbers, rows and columns")
    return tuple(value)


def _positive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1, not {value!r}")
    return value


Figure = Annotated[tuple[float, float, float], BeforeValidator(_three)]
Count = Annotated[int, BeforeValidator(_positive)]


class HardwareFile(BaseModel):
    """A hardware file: one device and the links between devices."""

    model_config = ConfigDict(extra="forbid")

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
    try:
        file = HardwareFile.model_validate(data)
    except ValidationError as error:
        raise UsageError(_sentence(error, data, where)) from None
    own = HardwareFile.model_fields.keys() - {"hbm_gb", "also_called"}
    values: dict[str, Any] = {name: getattr(file, name) for name in own}
    values |= {name: Range(*values[name]) for name in RANGES}
    values |= {"key": Path(where).stem}
    values |= {"link_cards": file.link_cards or file.cards_per_node, "hbm_mb": int(file.hbm_gb * 1024)}
    return Hardware(**values)


def _sentence(error: ValidationError, data: dict[str, Any], where: str) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, HardwareFile.model_fields, 1, 0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(HardwareFile.model_fields)}."
        return f"{where}: unknown key '{key}'; {hint}"
    if first["type"] == "missing":
        return f"{where}: '{key}' is missing."
    if first["type"] == "literal_error":
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"{where}: {key} '{data.get(key)}' is not one of {choices}."
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: '{key}' {message[0].lower()}{message[1:]}."


# What a cluster may have differently from the hardware file.
CLUSTER_KEYS = ("hbm_gb", "link_gb_s", "network_gb_s")


def in_cluster(hardware: Hardware, cluster: Section) -> Hardware:
    """The hardware with the memory and the links that the `cluster` section of a search names."""
    changes: dict[str, Any] = {}
    for name in CLUSTER_KEYS[1:]:
        if cluster.has(name):
            try:
                changes[name] = Range(*_three(cluster.data[name]))
            except ValueError as error:
                raise UsageError(f"{cluster.where}: '{name}' {error}.") from None
    if cluster.has("hbm_gb"):
        changes["hbm_mb"] = int(cluster.number("hbm_gb") * 1024)
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
