"""The report as `report.json`: the shape that docs/schema/report.json describes."""

from __future__ import annotations

import json

from mindspeed_dryrun.record.model import Report


def render(report: Report) -> str:
    """Indented JSON, ending in a newline."""
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"
