"""How far dry runs on torch_npu were from real NPUs: what `benchmarks/real_npu.py` measured, kept beside this file."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).with_name("margin.json")


def margin_sentence() -> str:
    """A warning with the margin that was seen."""
    seen = json.loads(FILE.read_text(encoding="utf-8"))
    return (
        f"the torch_npu engine is EXPERIMENTAL: on {seen['ranks']} ranks of {seen['jobs']} jobs that upstream's CI ran on real "
        f"NPUs its max allocated after the first iteration was between {seen['lowest_percent']:+.1f} % and "
        f"{seen['highest_percent']:+.1f} % of the real one, within 1 % on {seen['within_1_percent']}: it may be too LOW "
        "(docs/real_npu.md)"
    )
