"""How far dry runs on torch_npu were from real NPUs: what `benchmarks/real_npu.py` measured, kept beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_dryrun.language import message

FILE = Path(__file__).with_name("margin.json")


def margin_sentence() -> str:
    """A warning with the margin that was seen: by baselines made for today's releases, and by older ones that upstream keeps."""
    seen = json.loads(FILE.read_text(encoding="utf-8"))
    now, then = seen["current"], seen["older"]
    return message(
        f"the torch_npu engine is EXPERIMENTAL. On {now['ranks']} ranks of {now['jobs']} jobs that upstream's CI ran on real "
        f"NPUs with 26.x, its max allocated after the first iteration was between {now['lowest_percent']:+.1f} % and "
        f"{now['highest_percent']:+.1f} % of the real one, within 1 % on {now['within_1_percent']}; on {then['ranks']} ranks "
        f"of baselines of an older CANN and MindSpeed it was as low as {then['lowest_percent']:+.1f} %. It may be too LOW "
        "(docs/real_npu.md)"
    )
