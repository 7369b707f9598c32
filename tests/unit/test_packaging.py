"""What the wheel holds: every package, the patch catalogue, the shims and the templates."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_listed() -> None:
    """The list is written out because the catalogue is mapped in from the top of the repository."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(mindspeed_dryrun[\w.]*)"', text[text.index("packages = [") : text.index("[tool.setuptools.package-dir]")]))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "mindspeed_dryrun").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not any(part.startswith(".") for part in path.parts)
    }
    assert listed == found | {"mindspeed_dryrun.catalogue"}
