"""Sizes as people write them. MindSpore's `M` is MiB, and so is every `_mb` in this code."""

from __future__ import annotations

import re

from mindspeed_dryrun.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT]?)(?:i?B)?", re.IGNORECASE)
_MB = {"": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


def parse_size_mb(text: str) -> int:
    """`58G`, `58GB`, `59392M` or `59392` (MB) → whole MB. A small bare number is refused: nobody means 58 MB by 58."""
    match = _SIZE.fullmatch(text.strip())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"'{text}' is not a size: write 58G, 59392M or a number of MB.")
    if not match[2] and float(match[1]) < 1024:
        raise UsageError(f"'{text}' has no unit: write {match[1]}G or {match[1]}M.")
    return int(float(match[1]) * _MB[match[2].upper()])


def format_mb(mb: float) -> str:
    """55389 → '55389M (54.1G)'."""
    return f"{mb:.0f}M ({mb / 1024:.1f}G)"
