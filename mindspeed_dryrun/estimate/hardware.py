"""The hardware of a cluster, from a YAML file: what the time model divides by."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.yaml_file import Section, read_yaml

_TOPOLOGIES = ("full_mesh", "switch")


@dataclass(frozen=True)
class Range:
    """A figure with the interval that it may lie in."""

    low: float
    typical: float
    high: float


@dataclass(frozen=True)
class Hardware:
    """One kind of card and its links. Bandwidths are GB/s (10⁹ bytes) in one direction, as achieved."""

    name: str
    matmul_tflops: Range
    attention_efficiency: Range  # of matmul_tflops
    tile: tuple[int, int]  # rows and columns of the output that one core works on
    cores: int
    memory_gb_s: Range
    kernel_overhead_us: Range
    link_gb_s: Range  # one link of a full mesh, or the card's port into a switch
    topology: str
    network_gb_s: Range  # of one card, between nodes
    latency_us: Range
    exchange_ms: Range  # a synchronous exchange between stages, beside its transfer
    cards_per_node: int
    hbm_mb: int
    calibrated: tuple[str, ...] = ()  # the rows that the efficiencies were fitted to
    error: float | None = None  # relative, of the fit

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

        def times(name: str, factor: float) -> Range:
            spread: Range = getattr(self, name)
            return Range(spread.low * factor, spread.typical * factor, spread.high * factor)

        return dataclasses.replace(
            self,
            matmul_tflops=times("matmul_tflops", compute),
            memory_gb_s=times("memory_gb_s", compute),
            kernel_overhead_us=times("kernel_overhead_us", 1 / compute),
            link_gb_s=times("link_gb_s", communication),
            network_gb_s=times("network_gb_s", communication),
            latency_us=times("latency_us", 1 / communication),
            exchange_ms=times("exchange_ms", 1 / exchange),
        )


RANGES = (
    "matmul_tflops", "attention_efficiency", "memory_gb_s", "kernel_overhead_us", "link_gb_s", "network_gb_s",
    "latency_us", "exchange_ms",
)  # fmt: skip
_KEYS = (
    "name", *RANGES, "tile", "cores", "topology", "cards_per_node", "hbm_gb", "calibrated", "error",
)  # fmt: skip


def read_hardware(path: Path) -> Hardware:
    """A hardware file, or a sentence that says what is wrong with it."""
    return build_hardware(read_yaml(path), str(path))


def build_hardware(data: dict[str, Any], where: str) -> Hardware:
    section = Section(data, where, _KEYS)
    topology = section.text("topology")
    if topology not in _TOPOLOGIES:
        raise UsageError(f"{where}: topology '{topology}' is not one of {', '.join(_TOPOLOGIES)}.")
    tile = section.items("tile")
    if len(tile) != 2 or not all(isinstance(side, int) and side > 0 for side in tile):
        raise UsageError(f"{where}: 'tile' must be two whole numbers, rows and columns.")
    return Hardware(
        name=section.text("name"),
        tile=(tile[0], tile[1]),
        cores=section.integer("cores"),
        topology=topology,
        cards_per_node=section.integer("cards_per_node"),
        hbm_mb=int(section.number("hbm_gb") * 1024),
        calibrated=tuple(section.words("calibrated")) if section.has("calibrated") else (),
        error=section.number("error") if section.has("error") else None,
        **{name: _range(section, name) for name in RANGES},
    )


# What a cluster may have differently from the hardware file.
CLUSTER_KEYS = ("hbm_gb", "link_gb_s", "network_gb_s")


def in_cluster(hardware: Hardware, cluster: Section) -> Hardware:
    """The hardware with the memory and the links that the `cluster` section of a search names."""
    changes: dict[str, Any] = {name: _range(cluster, name) for name in CLUSTER_KEYS[1:] if cluster.has(name)}
    if cluster.has("hbm_gb"):
        changes["hbm_mb"] = int(cluster.number("hbm_gb") * 1024)
    return dataclasses.replace(hardware, **changes)


def to_yaml(hardware: Hardware) -> dict[str, Any]:
    """The inverse of `build_hardware`."""
    data: dict[str, Any] = {"name": hardware.name}
    for name in RANGES:
        spread: Range = getattr(hardware, name)
        data[name] = [round(value, 4) for value in (spread.low, spread.typical, spread.high)]
    data |= {
        "tile": list(hardware.tile),
        "cores": hardware.cores,
        "topology": hardware.topology,
        "cards_per_node": hardware.cards_per_node,
        "hbm_gb": hardware.hbm_mb / 1024,
    }
    if hardware.calibrated:
        data["calibrated"] = list(hardware.calibrated)
    if hardware.error is not None:
        data["error"] = hardware.error
    return data


def _range(section: Section, key: str) -> Range:
    values = section.items(key)
    good = all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values)
    if not good or len(values) not in (1, 3) or sorted(values) != values:
        raise UsageError(
            f"{section.where}: '{key}' must be one number above 0, or three in rising order [low, typical, high]."
        )
    low, typical, high = values if len(values) == 3 else (values[0],) * 3
    return Range(float(low), float(typical), float(high))
