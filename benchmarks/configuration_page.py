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
    "hardware": "A hardware file (`--device`, `--hardware`)",
    "real_runs": "Real runs (`compare --save`)",
    "report": "`report.json`",
    "job": "`job.json`",
}


def kind(schema: dict[str, Any]) -> str:
    """A property's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(kind(part) for part in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    found = schema.get("type", "anything")
    if found == "array" and isinstance(schema.get("items"), dict):
        return f"list of {kind(schema['items'])}"
    return " or ".join(found) if isinstance(found, list) else str(found)


def tables() -> str:
    """One section for each schema."""
    parts = []
    for name, title in TITLES.items():
        schema = schemas()[name]
        body = schema if "properties" in schema else schema["$defs"][kind(schema["items"])]
        required = set(body.get("required", ()))
        rows = [f"| `{key}` | {kind(value)} | {'yes' if key in required else ''} |" for key, value in body["properties"].items()]
        parts.append("\n".join([f"## {title}", "", "| key | type | required |", "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    above = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    PAGE.write_text(above + MARKER + tables(), encoding="utf-8")
