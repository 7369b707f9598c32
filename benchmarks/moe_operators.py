"""Operator by operator: the tensors of one iteration, of the embedded trainer and of MindSpeed-LLM itself.

    MINDSPEED_CORE_MS_PATH=… python benchmarks/moe_operators.py --out DIR [--only MLA] [--markdown docs/moe_operators.md]

Both trainers run cases of moe_accuracy.py with every allocation recorded. Of the second iteration, forward and backward passes,
all tensors above 2 KB are compared in the order in which they are made: by operator, size and lifetime, which is how many others
are made before a tensor is gone. Smaller ones are counts and scalars. What each trainer reads as data is left out. Names of one
operator (`SAME`) count as equal; sizes are compared all the same.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import os
import shutil
import sys
from bisect import bisect, bisect_left
from dataclasses import dataclass
from pathlib import Path

from moe_accuracy import CASES, job_of

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.releases import release_of
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.record.run_spec import RunSpec

SMALLEST = 2048
SHOWN = 6  # differences of a case that its row names; the records name all
# One operator under two names: with counts as a list of numbers, or as a tensor; with a number, or a tensor of one element.
SAME = {
    "GmmV2": "Gmm",
    "GmmV2Backward": "GmmBackward",
    "GmmV2BackwardFusion": "GmmBackwardFusion",
    "SubScalar": "SubExt",
}
CHOSEN = (
    "alltoall_seq, EP 4",
    "alltoall_seq, EP 2, PP 2, recomputed",
    "alltoall_seq, TP 2, EP 2",
    "alltoall, EP 2",
    "allgather, TP 2, EP 2",
    "experts one by one",
    "shared experts with a gate",
    "sigmoid, expert bias, groups",
    "groups of experts, three losses",
    "capacity, dropped",
    "MLA, experts, PP 2",
    "multi-token prediction",
    "TP extends EP, shared experts, PP 2",
    "DeepSeek-V3 in small",
    "overlapped EP 4, PP 2, shared experts",
    "GLM-4.5 in small",
    "SFT, PP 2",
    "LoRA, TP 2, fused",
    "DPO, TP 2",
)


@dataclass(frozen=True)
class Tensor:
    """What one operator made."""

    operator: str
    size: int
    end: int  # tensors made before this one was gone
    line: str  # where the trainer called the operator

    def __str__(self) -> str:
        return f"{self.operator} {self.size} {self.line}"


def tensors(path: Path) -> list[Tensor]:
    """The forward and backward passes after the first optimizer step, as a `memory_block.csv` has them."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["size"]) > SMALLEST]
    rows.sort(key=lambda row: int(row["start_time_stamp"]))
    stepped = max(int(row["start_time_stamp"]) for row in rows if _is_in(row, "step") and row["node_name"] == "ZerosLikeExt")
    rows = [row for row in rows if int(row["start_time_stamp"]) > stepped and _is_in_pass(row)]
    starts = [int(row["start_time_stamp"]) for row in rows]
    return [
        Tensor(
            operator=SAME.get(row["node_name"], row["node_name"]),
            size=int(row["size"]),
            end=bisect(starts, int(row["end_time_stamp"])),
            line=_line(row),
        )
        for row in rows
    ]


def _is_in(row: dict[str, str], function: str) -> bool:
    return f"Function:{function}|" in row["python_stack"]


def _is_in_pass(row: dict[str, str]) -> bool:
    return "Function:forward_backward_" in row["python_stack"] and not (_is_in(row, "get_batch") or _is_in(row, "__next__"))


def _line(row: dict[str, str]) -> str:
    frames = [frame.split(";") for frame in row["python_stack"].split("|") if frame.startswith("File:")]
    own = [frame for frame in frames if "/msadapter/" not in frame[0] and "/mindspore/" not in frame[0]]
    return " ".join(f"{Path(file[5:]).name}:{line[5:]}" for file, line, *_ in own[-2:])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank class of one case."""

    case: str
    rank: int
    embedded: int = 0
    upstream: int = 0
    operators: int = 0
    lifetimes: int = 0
    lines: tuple[str, ...] = ()
    problem: str = ""

    def markdown(self) -> str:
        if self.problem:
            return f"| {self.case} | {self.rank} | {self.problem} | | | |"
        where = "; ".join(self.lines[:SHOWN]) + (f"; {len(self.lines) - SHOWN} more" if len(self.lines) > SHOWN else "")
        return (
            f"| {self.case} | {self.rank} | {self.upstream} | {self.embedded} | {self.operators} | {self.lifetimes} | {where} |"
        )


def compare(case: str, rank: int, ours: list[Tensor], theirs: list[Tensor]) -> Row:
    """How many tensors have no counterpart (another operator or size), and how many live longer or shorter."""
    kinds = [[(tensor.operator, tensor.size) for tensor in tensors] for tensors in (ours, theirs)]
    operators = 0
    lines: dict[str, None] = {}
    pairs: list[tuple[int, int]] = []
    for tag, start, end, other, other_end in difflib.SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += zip(range(start, end), range(other, other_end), strict=True)
            continue
        operators += max(end - start, other_end - other)
        lines |= dict.fromkeys(f"only embedded: {tensor}" for tensor in ours[start:end])
        lines |= dict.fromkeys(f"only MindSpeed-LLM: {tensor}" for tensor in theirs[other:other_end])
    # Counted in pairs: a tensor that only one of them makes is no longer life of those around it.
    places = [[pair[side] for pair in pairs] for side in (0, 1)]
    lifetimes = 0
    for mine, its in pairs:
        longer = bisect_left(places[0], ours[mine].end) - bisect_left(places[1], theirs[its].end)
        if longer:
            lifetimes += 1
            lines[f"{theirs[its]} {longer:+d}"] = None
    sizes = {"embedded": len(ours), "upstream": len(theirs)}
    return Row(case=case, rank=rank, operators=operators, lifetimes=lifetimes, lines=tuple(lines), **sizes)


def run(case: str, out: Path, release: str) -> list[Row]:
    """Both trainers; what they recorded goes once it is compared."""
    job, found = job_of(CASES[case], release), {}
    for trainer in ("embedded", "script"):
        folder = out / release / trainer / "".join(letter if letter.isalnum() else "_" for letter in case)
        try:
            report = dry_run_job(job, folder, RunSpec(trainer=trainer, explain=True), Execution(jobs=1))
        except DryRunError as error:
            return [Row(case=case, rank=0, problem=str(error))]
        failed = [rank for rank in report.ranks if rank.status != "ok"]
        if failed:
            return [Row(case=case, rank=failed[0].rank, problem=f"{trainer}: {failed[0].error}")]
        found[trainer] = {int(path.parents[1].name): tensors(path) for path in sorted(folder.rglob("memory_block.csv"))}
        shutil.rmtree(folder)
    return [compare(case, rank, found["embedded"][rank], found["script"][rank]) for rank in found["script"]]


HEADER = """# Operator by operator: the embedded trainer beside MindSpeed-LLM

Made by `benchmarks/moe_operators.py`. Every tensor above 2 KB that the forward and backward passes of one iteration make, in the
order in which they are made: how many, how many are made by another operator or in another size, and how many live longer or
shorter than upstream's. Where some do, the last column names operators and lines, and by how many tensors the embedded trainer
keeps its own longer.
"""
TABLE = """
## MindSpeed-LLM {release}

{equal} of {tensors} tensors have the same operator, size and place in the order; {lifetimes} of them live longer or shorter.

| case | rank | MindSpeed-LLM | embedded | other operator or size | other lifetime | which |
|---|---|---|---|---|---|---|
"""


def page(tables: dict[str, list[Row]]) -> str:
    """The tables as a page."""
    text = HEADER
    for release, rows in tables.items():
        total = sum(row.upstream for row in rows)
        equal, lifetimes = total - sum(row.operators for row in rows), sum(row.lifetimes for row in rows)
        text += TABLE.format(release=release, equal=equal, tensors=total, lifetimes=lifetimes)
        text += "".join(f"{row.markdown()}\n" for row in rows)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    options = parser.parse_args()
    release = release_of(Path(os.environ["MINDSPEED_CORE_MS_PATH"])) or "unknown"
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"rows-{release}.json"
    done = {row["case"] for row in json.loads(kept.read_text("utf-8"))} if kept.exists() else set()
    for case in CHOSEN:
        if case in done or options.only not in case or release not in CASES[case].releases:
            continue
        rows = run(case, options.out, release)
        print("\n".join(row.markdown() for row in rows), flush=True)
        lines = json.loads(kept.read_text("utf-8")) if kept.exists() else []
        kept.write_text(json.dumps([*lines, *map(vars, rows)], indent=1), "utf-8")
        if options.markdown:
            files = sorted(options.out.glob("rows-*.json"))
            tables = {
                file.stem.removeprefix("rows-"): [Row(**row) for row in json.loads(file.read_text("utf-8"))] for file in files
            }
            options.markdown.write_text(page(tables), "utf-8")


if __name__ == "__main__":
    main()
