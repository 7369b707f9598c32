"""`launch --check-classes` over layouts of every parallel dimension and mapping flag: used peaks must be equal in every class.

    python benchmarks/class_table.py [--only PP] [--save]

Every rank of each job is simulated by the embedded trainer; the classes are those of `--plan-only`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from small_job import Home, merged, save_figures, script

MOE = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permutation-async-comm"
SP, DO = "--sequence-parallel", "--use-distributed-optimizer"
VPP = "--num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2 --context-parallel-algo"
# With tensor parallelism MSAdapter cannot run alltoall.
GATHERED = f"{MOE.replace('alltoall', 'allgather')} --expert-model-parallel-size 2"
EP2 = f"{MOE} --expert-model-parallel-size 2"
# name → world size, TP, PP, layers, what else
LAYOUTS: dict[str, tuple[int, int, int, int, str]] = {
    "DP 4": (4, 1, 1, 2, ""),
    "DP 4, distributed optimizer": (4, 1, 1, 2, DO),
    "DP 5, distributed optimizer": (5, 1, 1, 2, DO),
    "DP 4, distributed optimizer, overlapped": (4, 1, 1, 2, f"{DO} --overlap-grad-reduce --overlap-param-gather"),
    "TP 4": (4, 4, 1, 2, ""),
    "TP 4, sequence parallel": (4, 4, 1, 2, SP),
    "TP 2 DP 2, distributed optimizer": (4, 2, 1, 2, f"{SP} {DO}"),
    "PP 4": (4, 1, 4, 4, ""),
    "PP 2 DP 2": (4, 1, 2, 4, DO),
    "PP 2 DP 2, TP-PP-DP mapping": (4, 1, 2, 4, f"{DO} --use-tp-pp-dp-mapping"),
    "TP 2 PP 2 DP 2": (8, 2, 2, 4, f"{SP} {DO}"),
    "TP 2 PP 2 DP 2, TP-PP-DP mapping": (8, 2, 2, 4, f"{SP} {DO} --use-tp-pp-dp-mapping"),
    "PP 2 VPP 2": (2, 1, 2, 4, VPP),
    "PP 4 VPP 2": (4, 1, 4, 8, VPP),
    "TP 2 PP 2 VPP 2": (4, 2, 2, 4, f"{SP} {VPP}"),
    "PP 2 VPP 2, no-op layer": (4, 1, 2, 4, f"{VPP} --noop-layers 3"),
    "PP 2, uneven by a list": (4, 1, 2, 5, f"--num-layer-list 2,3 {DO}"),
    "PP 4, first and last stage shorter": (4, 1, 4, 6, "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"),
    "CP 2, ring": (4, 1, 1, 2, f"{CP2} megatron_cp_algo"),
    "CP 4, ring": (4, 1, 1, 2, "--context-parallel-size 4 --context-parallel-algo megatron_cp_algo"),
    "CP 2, Ulysses": (4, 1, 1, 2, f"{CP2} ulysses_cp_algo"),
    "TP 2 CP 2 PP 2, ring": (8, 2, 2, 4, f"{SP} {CP2} megatron_cp_algo"),
    "CP 2 PP 2 DP 2, distributed optimizer": (8, 1, 2, 4, f"{CP2} ulysses_cp_algo {DO}"),
    "EP 2 DP 4": (4, 1, 1, 2, EP2),
    "EP 2 DP 4, distributed optimizer": (4, 1, 1, 2, f"{EP2} {DO}"),
    "TP 2 EP 2": (4, 2, 1, 2, f"{SP} {GATHERED}"),
    "TP 2 EP 2, expert TP 1": (8, 2, 1, 2, f"{SP} {GATHERED} --expert-tensor-parallel-size 1"),
    # Megatron refuses this mapping unless attention and experts have the same DP: expert TP × EP = TP × CP.
    "TP 2 PP 2 EP 2, expert TP 1, TP-PP-DP mapping": (8, 2, 2, 4, f"{SP} {GATHERED} {DO} --expert-tensor-parallel-size 1 --use-tp-pp-dp-mapping"),
    "PP 2 EP 2, first layer dense": (4, 1, 2, 4, f"{EP2} --first-k-dense-replace 1 --moe-layer-freq 1"),
}  # fmt: skip


def measured(home: Home, name: str) -> dict[str, object]:
    """One line of the table; `problem` is empty where the promise holds."""
    world, tp, pp, layers, extra = LAYOUTS[name]
    batch = 8 * world
    (home.folder / "train.sh").write_text(script(world=world, tp=tp, pp=pp, layers=layers, batch=batch, extra=extra))
    line: dict[str, object] = {"layout": name, "ranks": world}
    status, said = home.run("launch", "train.sh", "--plan-only", "--json")
    if status:
        return line | {"problem": said.strip()[-300:]}
    classes = [item["represents"] for item in json.loads(said[said.index("{") :])["ranks"]]
    out = home.folder / "records" / f"{time.time_ns()}"
    status, said = home.run("launch", "train.sh", "--check-classes", str(world), "--json", "--no-cache", "--out", str(out))
    try:
        ranks = {item["rank"]: item for item in json.loads((out / "report.json").read_text())["ranks"]}
    except OSError:
        return line | {"problem": said.strip()[-300:]}
    line |= {"classes": len(classes), "simulated": len(ranks)}
    used = [{ranks[rank]["used_peak_mb"] for rank in item} for item in classes]
    actual = [[ranks[rank]["actual_peak_mb"] or 0 for rank in item] for item in classes]
    line |= {"used_mb": [sorted(map(str, item)) for item in used], "fragments_mb": max(max(item) - min(item) for item in actual)}
    equal = status == 0 and all(len(item) == 1 and None not in item for item in used) and len(ranks) == world
    return line | {"problem": "" if equal else said.strip()[-300:] or f"exit status {status}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose name holds this")
    parser.add_argument("--save", action="store_true", help="keep the figures for docs/reliability.md")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        home = Home(folder=Path(folder, "home"))
        for name in LAYOUTS:
            if options.only in name:
                lines.append(measured(home, name))
                print(json.dumps(lines[-1]), flush=True)
    if options.save:
        save_figures("classes", merged("classes", lines, [(name,) for name in LAYOUTS], "layout"))
    return 1 if any(line["problem"] for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
