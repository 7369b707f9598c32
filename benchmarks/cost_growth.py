"""How the cost of a dry run grows: with ranks, with layers, with microbatches. Prints a Markdown table.

    python benchmarks/cost_growth.py [ranks] [layers] [microbatches]

Ranks at a fixed number of stages should cost nothing more (one rank per class is simulated), layers grow linearly, and
microbatches cost nothing (as many are run as fill the pipeline).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from measuring import measure

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"


def cases(kind: str) -> list[tuple[str, list[str], list[str]]]:
    """(label, --set, trainer arguments)."""
    if kind == "ranks":
        return [
            (f"{8 * nodes} ranks", ["NPUS_PER_NODE=8", f"NNODES={nodes}", f"GBS={8 * nodes // 4 * 16}"], [])
            for nodes in (1, 8, 64, 512)
        ]
    if kind == "layers":
        return [(f"{layers} layers", [], ["--num-layers", str(layers)]) for layers in (28, 56, 84, 112)]
    return [(f"{count} microbatches", [f"GBS={count}"], []) for count in (8, 64, 512)]


def main() -> int:
    print(
        "| job | ranks simulated | CPU time, s | wall time, s | host memory, MB | used peak |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    for kind in sys.argv[1:] or ("ranks", "layers", "microbatches"):
        for label, sets, args in cases(kind):
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    "mindspeed_dryrun.launch",
                    str(SCRIPT),
                    "--trainer",
                    "embedded",
                    "--out",
                    f"{folder}/record",
                ]
                for item in sets:
                    command += ["--set", item]
                command += ["--", *args] if args else []
                wall, cpu, host = measure(command, {**os.environ, "PYTHONPATH": str(ROOT)}, Path(folder))
                report = json.loads(Path(folder, "record", "report.json").read_text())
            print(
                f"| {label} | {len(report['ranks'])} | {cpu:.1f} | {wall:.1f} | {host:.0f} | {report['used_peak_mb']}M |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
