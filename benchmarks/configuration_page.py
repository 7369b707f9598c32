"""The tables of docs/configuration.md from the JSON Schemas.

python benchmarks/configuration_page.py        # writes the part of the page below its marker
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_dryrun.commands.schema import schemas

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARKER = "<!-- made by benchmarks/configuration_page.py; do not edit below -->\n"
TITLES = {
    "sweep": "A sweep file (`sweep FILE`)",
    "search": "A search file (`search FILE`)",
    "calibration": "Measured rows (`calibrate`)",
    "hardware": "A hardware file (`--device`, `--hardware`)",
    "real_runs": "Real runs (`compare --save`)",
    "report": "`report.json`",
    "job": "`job.json`",
}
WRITTEN_BY_USERS = ("hardware", "sweep", "search", "calibration")


def kind(schema: dict[str, Any]) -> str:
    """A property's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].removesuffix("Section").lower()
    if "anyOf" in schema:
        return " or ".join(kind(part) for part in schema["anyOf"] if part != {"type": "null"})
    if "anyOf" not in schema and "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
        return f"mapping to {kind(schema['additionalProperties'])}"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    found = schema.get("type", "anything")
    if found == "array" and isinstance(schema.get("items"), dict):
        return f"list of {kind(schema['items'])}"
    if isinstance(found, list):
        return "text" if set(found) == {"string", "number", "boolean"} else " or ".join(found)
    return str(found)


def table(body: dict[str, Any]) -> list[str]:
    """One row for each key."""
    required = set(body.get("required", ()))
    rows = [
        f"| `{key}` | {kind(value)} | {'yes' if key in required else ''} | {value.get('description', '')} |"
        for key, value in body["properties"].items()
    ]
    return ["| key | type | required | |", "|---|---|---|---|", *rows]


def tables() -> str:
    """One section for each schema."""
    parts = []
    for name, title in TITLES.items():
        schema = schemas()[name]
        body = schema if "properties" in schema else schema["$defs"][str(schema["items"]["$ref"]).rpartition("/")[2]]
        parts.append("\n".join([f"## {title}", "", *table(body)]))
        if name in WRITTEN_BY_USERS:
            inner = {key: part for key, part in schema.get("$defs", {}).items() if "properties" in part}
            parts += [
                "\n".join(
                    [f"### {key.removesuffix('Section').lower()} ({name})", "", part.get("description", ""), "", *table(part)]
                )
                for key, part in inner.items()
            ]
    return "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    above = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    PAGE.write_text(above + MARKER + tables(), encoding="utf-8")
