"""Makes the stand-in from the wheels of several torch_npu releases, and checks that each finds all it asks for.

    python benchmarks/torch_npu_versions.py [VERSION…]
    python benchmarks/torch_npu_versions.py --run 2.7.1=DIR/bin/python     # an environment with torch and torch_npu 2.7.1

Without `--run` nothing of torch is needed: the wheels (25 to 40 MB each) are downloaded, unpacked and read. A name that only one
release asks for is no gap by itself: a function without an answer returns 0, as most do; it is listed to be looked at.
With `--run` the trial of `doctor` runs in that environment: three matrices, whose size the release's own allocator must count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from mindspeed_dryrun.engines.cann.required_symbols import RequiredSymbols
from mindspeed_dryrun.engines.torch_npu.required_symbols import find_torch_npu_symbols
from mindspeed_dryrun.engines.torch_npu.stand_in import torch_npu_library
from mindspeed_dryrun.rank.torch_npu import answers
from mindspeed_dryrun.rank.torch_npu.slots import QUESTION

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.6.0", "2.7.1", "2.8.0", "2.13.0")
_HEAD = ("torch_npu", "symbols of CANN", "of them operators", "missing in the stand-in", "answered", "trial")
_TRIAL = "from mindspeed_dryrun.doctor.trial import torch_trial; print(torch_trial().found)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--run", action="append", default=[], metavar="VERSION=PYTHON", help="try it in this environment too")
    parser.add_argument("--wheels", type=Path, help="folder to keep the wheels in")
    args = parser.parse_args()
    environments = dict(item.split("=", 1) for item in args.run)
    asked: dict[str, RequiredSymbols] = {}
    print("| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|", sep="\n", flush=True)
    failed = False
    for version in args.versions:
        with tempfile.TemporaryDirectory() as temporary:
            package = unpacked(version, args.wheels or Path(temporary), Path(temporary))
            asked[version] = find_torch_npu_symbols(package)
            absent = missing(package, asked[version])
        failed |= bool(absent)
        operators = sum(name.endswith(QUESTION) for name in asked[version].symbols)
        answered = sum(name in answers.names() for name in asked[version].symbols)
        trial = tried(environments[version]) if version in environments else "–"
        cells = (version, len(asked[version].symbols), operators, ", ".join(absent) or "none", answered, trial)
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    newest = set(asked[args.versions[-1]].symbols)
    for version, found in asked.items():
        own = sorted(name for name in set(found.symbols) - newest if not name.startswith("aclnn"))
        print(f"\nAsked for by {version} and not by {args.versions[-1]}, operators aside: {', '.join(own) or 'nothing'}.")
    return int(failed)


def unpacked(version: str, wheels: Path, folder: Path) -> Path:
    """The package folder of a release, from its wheel."""
    pattern = f"torch_npu-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            f"torch-npu=={version}",
            "--dest",
            str(wheels),
        ]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if ".so" in name])
    return folder / "torch_npu"


def missing(package: Path, lacks: RequiredSymbols) -> list[str]:
    """Symbols that this release asks for and the stand-in made from it does not define."""
    path = package / "libstandin.so"
    path.write_bytes(torch_npu_library(find_torch_npu_symbols(package)))
    with path.open("rb") as stream:
        defined = {symbol.name for symbol in ELFFile(stream).get_section_by_name(".dynsym").iter_symbols()}
    return sorted(set(lacks.symbols) - defined)


def tried(python: str) -> str:
    """What the trial says in this environment."""
    done = subprocess.run(
        [python, "-c", _TRIAL], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
