"""What runs inside a rank needs nothing but the standard library, and what the trainer itself imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mindspeed_dryrun

PACKAGE = Path(mindspeed_dryrun.__file__).parent
# Modules that are the trainer's side themselves: they import torch, megatron or mindspore when they are imported.
TRAINER = ("rank.trainer.", "rank.torch_npu.")
PROGRAM = """
import importlib, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "torch_npu", "megatron", "mindspore", "numpy", "mindspeed"):
            failed[name] = error.name
        elif not any(part in name for part in %r):
            failed[name] = error.name
foreign = sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"mindspeed_dryrun", "__mp_main__"})
print(failed, [name for name in foreign if not name.startswith("_")])
"""


def test_a_bare_interpreter_imports_everything_of_a_rank() -> None:
    files = [file for folder in ("megatron", "rank") for file in sorted((PACKAGE / folder).rglob("*.py"))]
    modules = [
        "mindspeed_dryrun." + str(file.relative_to(PACKAGE).with_suffix("")).replace(os.sep, ".").removesuffix(".__init__")
        for file in files
        if file.name not in ("__main__.py", "sitecustomize.py") and "site" not in file.relative_to(PACKAGE).parts
    ]
    assert len(modules) > 40
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM % (TRAINER,), *modules],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("{} []", 0), done.stdout + done.stderr
