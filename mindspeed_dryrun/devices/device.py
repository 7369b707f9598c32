"""The memory of a card."""

from __future__ import annotations

from dataclasses import dataclass

# What MindSpore believes of its simulated device, in all and usable, whatever the card: logs that say so come from a dry run.
SIMULATED_MB = (65536, 61430)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The card that a verdict is about."""

    name: str  # as `--device` takes it
    title: str  # for people
    total_mb: int  # as the driver reports it
    usable_mb: int  # by the framework's memory pool
    source: str  # of the two figures: published, derived, measured
