"""Dry-runs upstream's CI jobs on torch_npu and compares each rank with the real NPU that upstream's CI measured.

    python benchmarks/real_npu.py real_npu_ranks.csv --stacks DIR --records DIR --markdown docs/real_npu.md
    python benchmarks/real_npu.py … --only 'qwen3_*' --only 'tune_*' --classes 1
    python benchmarks/real_npu.py all.csv --stacks DIR --collect     # writes the CSV, from the baselines in the checkouts
    python benchmarks/real_npu.py real_npu_ranks.csv … --blind all.csv   # what the first CSV lacks gets a table of its own
    python benchmarks/real_npu.py real_npu_ranks.csv … --history DIR     # says since when each baseline stands, by DIR's commits

The CSV holds a row for each real rank: job, script, branches, allocated and max allocated (MB) after the first iteration. DIR of
`--stacks` holds checkouts BRANCH/{MindSpeed-LLM,MindSpeed,Megatron-LM}; a job runs on the newest of its branches that is there.
Started again, jobs that are done are not run again.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from textwrap import shorten
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.plan import choose_ranks
from mindspeed_dryrun.launch.releases import RELEASES
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.launch.trainers import CORE_MS
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.store import rank_folder

# Megatron's own line (megatron/training/utils.py, report_memory): what upstream's CI reads on the real NPU, too.
_LINE = re.compile(r"\(after 1 iterations\) memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+)")
# Where a script does not pad its samples, their length is the data set's. An estimate for Alpaca, by a card of a copy of it: 47764738 bytes in 52002 samples, in
# which a text stands twice, once in a template of about 190 characters; so 364 bytes, at four a token 91 tokens.
# https://huggingface.co/datasets/disham993/alpaca-train-validation-test-split; the original's file is the second name below.
# The template's length and four bytes a token are rules of thumb. 64 and 128 tokens had been tried before: both are close, too.
ALPACA = ("alpaca", "train-00000-of-00001-a09b74b3ef9c3b56")
ALPACA_TOKENS = 91
# Of another data set of CI's by that name. Two of three jobs that read it have `--seq-length 4096`, and without a word about samples, so counted with
# all 4096 tokens, agree with their baselines: its samples fill the sequence. Upstream's own test packs Alpaca so, with `--pack --seq-length 4096`
# (tests/pipeline/ut/process_data), after which every sample has that length. The third job has `--seq-length 32768` and is told 4096.
PACKED_ALPACA = re.compile(r"/tune_dataset/alpaca[\"\s]")
PACKED_TOKENS = 4096
# A job of several nodes: upstream's script starts those that are named here, each with a torchrun call, after it has converted a checkpoint.
_SCRIPTS_OF_NODES = re.compile(r"^TRAIN_SCRIPTS=\(\n(.*?)^\)", re.MULTILINE | re.DOTALL)
ALLOCATED_MB, MAX_PERCENT, SHORT_PERCENT = 1.0, 1.0, -3.0  # the aims
_ROUNDED = 0.1  # MB
_OLDEST = next(iter(RELEASES))


@dataclass(frozen=True, kw_only=True)
class RealRank:
    """One rank of one job: what the NPU had, and what the dry run says."""

    job: str
    branch: str  # that it ran on, or the newest that is named
    current: bool  # its baseline was made for today's releases (26.x), not kept from an older one
    rank: int
    real_allocated: float
    real_max: float
    allocated: float | None = None
    maximum: float | None = None
    error: str = ""
    samples_told: bool = False  # the length of its samples is the data set's mean, not the script's
    blind: bool = False  # not in the CSV that the engine was developed against
    since: str = ""  # the day of the first commit that has these figures

    @property
    def difference(self) -> float | None:
        """Of allocated, in MB."""
        return None if self.allocated is None else self.allocated - self.real_allocated

    @property
    def percent(self) -> float | None:
        """Of max allocated."""
        return None if self.maximum is None else 100 * (self.maximum / self.real_max - 1)


@dataclass(frozen=True)
class RealJob:
    """The rows of one job on one set of branches."""

    name: str
    branches: tuple[str, ...]
    script: str
    ranks: tuple[RealRank, ...]

    @property
    def key(self) -> str:
        """Unique, and safe as a folder's name."""
        return f"{self.name}@{self.branches[-1]}"


def collect(stacks: Path) -> list[dict[str, object]]:
    """A row for each rank of every baseline below `tests/` of the checkouts; a job that says the same in several branches is one."""
    found: dict[tuple[str, tuple[tuple[int, float, float], ...]], list[tuple[str, str]]] = {}
    trees = sorted(stacks.glob("*/MindSpeed-LLM"), key=lambda tree: _number(tree.parent.name))
    for tree in trees:
        for file in sorted((tree / "tests").rglob("*.json")):
            if not any("baseline" in part for part in file.parent.parts):
                continue
            memory = _memory_rows(file)
            ranks = tuple((of["rank"], of["allocated memory"], of["max allocated memory"]) for of in memory if "rank" in of)
            scripts = sorted((tree / "tests").rglob(f"{file.stem}.sh"))
            place = (tree.parent.name, str(scripts[0].relative_to(tree)) if scripts else "")
            if ranks and place not in (places := found.setdefault((file.stem, ranks), [])):
                places.append(place)
    return [
        {"job": job, "rank": rank, "allocated_mb": allocated, "max_allocated_mb": maximum, "script": places[-1][1],
             "branches": " ".join(dict.fromkeys(branch for branch, _ in places))}
        for (job, ranks), places in found.items()
        for rank, allocated, maximum in ranks
    ]  # fmt: skip


def _memory_rows(file: Path) -> list[dict[str, Any]]:
    return _rows_of(file.read_text(encoding="utf-8"))


def _rows_of(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError:  # upstream keeps an empty file or two
        return []
    return found.get("memo info") or [] if isinstance(found, dict) else []


def with_dates(job: RealJob, history: Path) -> RealJob:
    """The job with the day on which its figures were first committed, on any branch of this clone of MindSpeed-LLM.

    A baseline that is too high is not renewed: upstream's test of memory passes with any figure below it (tests/test_tools/test_ci_st.py).
    """
    real = {rank.rank: (rank.real_allocated, rank.real_max) for rank in job.ranks}
    log = _git(history, "log", "--all", "--format=%cs %H", "--name-only", "--", f"*baseline*/{job.name}.json")
    day = commit = since = ""
    for line in log.splitlines():  # the newest first
        if line.endswith(".json"):
            found = _rows_of(_git(history, "show", f"{commit}:{line}"))
            same = {row.get("rank"): (row.get("allocated memory"), row.get("max allocated memory")) for row in found}
            if all(_same(figures, same.get(number)) for number, figures in real.items()):
                since = min(since or day, day)
        elif line:
            day, commit = line.split()
    return dataclasses.replace(job, ranks=tuple(dataclasses.replace(rank, since=since) for rank in job.ranks))


def _same(figures: tuple[float, float], found: tuple[float | None, float | None] | None) -> bool:
    return found is not None and all(
        there is not None and abs(here - there) < _ROUNDED for here, there in zip(figures, found, strict=True)
    )


def _git(tree: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, check=False).stdout


def read_jobs(file: Path) -> list[RealJob]:
    """The CSV's rows by job and branches, newest branches last."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            groups.setdefault((row["job"], row["branches"]), []).append(row)
    jobs = []
    for (name, branches), rows in groups.items():
        names = tuple(branches.split())
        current = names[0].removeprefix("v").startswith("26.") or names[0] == "master"
        ranks = tuple(
            RealRank(
                job=name,
                branch=names[-1],
                current=current,
                rank=int(row["rank"]),
                real_allocated=float(row["allocated_mb"]),
                real_max=float(row["max_allocated_mb"]),
            )
            for row in rows
        )
        jobs.append(RealJob(name, names, rows[0]["script"], ranks))
    return jobs


def without_known(jobs: Iterable[RealJob], known: Iterable[RealJob]) -> list[RealJob]:
    """The jobs that have other figures than every known job of their name; a CSV may round them."""
    seen: dict[tuple[str, int], list[RealRank]] = {}
    for job in known:
        for rank in job.ranks:
            seen.setdefault((rank.job, rank.rank), []).append(rank)

    def new(rank: RealRank) -> bool:
        return not any(
            abs(one.real_allocated - rank.real_allocated) < _ROUNDED and abs(one.real_max - rank.real_max) < _ROUNDED
            for one in seen.get((rank.job, rank.rank), [])
        )

    kept = [
        dataclasses.replace(job, ranks=tuple(dataclasses.replace(rank, blind=True) for rank in job.ranks if new(rank)))
        for job in jobs
    ]
    return [job for job in kept if job.ranks]


def find_scripts(job: RealJob, stacks: Path) -> list[tuple[str, Path]]:
    """The branches that are here and have the script, newest first; upstream moves its tests, so it is looked for by name as well."""
    places = []
    for branch in reversed(job.branches):
        tests = stacks / branch / "MindSpeed-LLM" / "tests"
        named = tests.parent / job.script if job.script else None
        found = [named] if named and named.is_file() else sorted(tests.rglob(f"{job.name}.sh"))
        places += [(branch, found[0])] if found else []
    return places


def run_job(job: RealJob, stacks: Path, records: Path, execution: Execution, classes: int = 0) -> list[RealRank]:
    """Every real rank with the figures of the simulated rank that stands for it, on the newest branch that runs.

    `classes`: how many rank classes are simulated; 0 for all.
    """
    places = find_scripts(job, stacks)
    if not places:
        return [dataclasses.replace(rank, error=_absent(job, stacks)) for rank in job.ranks]
    first: list[RealRank] = []
    for branch, script in places:
        ranks = _run_on(job, branch, script, stacks, records, execution, classes)
        first = first or ranks
        if any(rank.allocated is not None for rank in ranks):
            return ranks
    return first


def _absent(job: RealJob, stacks: Path) -> str:
    here = [branch for branch in job.branches if (stacks / branch).is_dir()]
    missing = [branch for branch in job.branches if branch not in here]
    if not here and all(_number(branch) < _number(_OLDEST) for branch in missing):
        return f"its baseline is of branches before {_OLDEST} only, which a dry run does not know: {', '.join(missing)}"
    named = "; ".join(f"{what} {', '.join(names)}" for what, names in (("looked in", here), ("not set up:", missing)) if names)
    return f"no branch that is here has its script ({named})"


def _number(branch: str) -> tuple[int, ...]:
    return installed.number(re.sub(r"RC\d+", "", branch))  # a tag has a v in front


def _run_on(
    job: RealJob, branch: str, script: Path, stacks: Path, records: Path, execution: Execution, classes: int
) -> list[RealRank]:
    os.environ[CORE_MS] = str(stacks / branch)  # its siblings and its Python packages
    out = records / f"{job.name}@{branch}"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier start, perhaps of other code; finished ranks are in the cache
    try:
        spec = RunSpec(trainer="script", sample_length=_sample_length(script))
        understood = read_job(_of_all_nodes(script, stacks / branch / "MindSpeed-LLM", records), spec)
        every = choose_ranks(understood, "auto")
        chosen = every[: classes or None]
        spec = dataclasses.replace(spec, ranks=",".join(str(one.rank) for one in chosen) if classes else spec.ranks)
        report = dry_run_job(understood, out, spec, execution)
    except DryRunError as error:
        return [dataclasses.replace(rank, branch=branch, error=str(error)) for rank in job.ranks]
    simulated = {rank.rank: rank for rank in report.ranks}
    standing = {real: simulated[one.rank] for one in chosen for real in one.represents}
    left_out = {real for one in every[len(chosen) :] for real in one.represents}
    result = []
    for real in job.ranks:
        rank = standing.get(real.rank)
        if rank is None:
            error = "not tried" if real.rank in left_out else "this job has no such rank"
            result.append(dataclasses.replace(real, branch=branch, error=error))
            continue
        log = (rank_folder(out, rank.rank) / "worker.log").read_text(errors="replace")
        line = _LINE.search(log)
        if rank.status.broken or not line:
            error = rank.error or "it prints no memory line after the first iteration"
            result.append(dataclasses.replace(real, branch=branch, error=shorten(error, 200, placeholder=" …")))
            continue
        result.append(dataclasses.replace(real, branch=branch, allocated=float(line[1]), maximum=float(line[2])))
    return result


def _scripts_of_nodes(text: str) -> list[str]:
    """The scripts of a job's nodes, as upstream's script names them; none where the script calls torchrun itself."""
    found = _SCRIPTS_OF_NODES.search(text)
    return re.findall(r'"([^"]+)"', found[1]) if found else []


def _of_all_nodes(script: Path, tree: Path, folder: Path) -> Path:
    """The script, or for a job of several nodes one that starts the scripts of all of them and nothing else."""
    nodes = _scripts_of_nodes(script.read_text(errors="replace"))
    if not nodes:
        return script
    own = folder / script.name
    starts = "".join(f"bash {shlex.quote(node)} &\n" for node in nodes)
    own.write_text(f"cd {shlex.quote(str(tree.absolute()))}\n{starts}wait\n", encoding="utf-8")
    return own


def _sample_length(script: Path) -> int:
    text = script.read_text(errors="replace")
    tree = next((parent.parent for parent in script.parents if parent.name == "tests"), script.parent)
    text += "".join((tree / node).read_text(errors="replace") for node in _scripts_of_nodes(text))
    variable = any(flag in text for flag in ("--no-pad-to-seq-lengths", "--variable-seq-lengths"))
    packed = any(flag in text for flag in ("--neat-pack", "--reset-attention-mask", "--reset-position-ids"))
    if not variable or packed or not any(f"/{name}" in text for name in ALPACA):
        return 0
    return PACKED_TOKENS if PACKED_ALPACA.search(text) else ALPACA_TOKENS


def summary(ranks: Sequence[RealRank]) -> str:
    """How far the aims are met, for these ranks."""
    ran = [rank for rank in ranks if rank.allocated is not None]
    if not ran:
        return f"{len(ranks)} real ranks, none of which ran."
    close = sum(abs(rank.difference or 0) <= ALLOCATED_MB for rank in ran)
    within = sum(abs(rank.percent or 0) <= MAX_PERCENT for rank in ran)
    short = sum((rank.percent or 0) < SHORT_PERCENT for rank in ran)
    worst = min(rank.percent or 0 for rank in ran)
    return (
        f"{len(ranks)} real ranks, {len(ran)} ran. Allocated within {ALLOCATED_MB:g} MB on {close} of {len(ran)}; max allocated "
        f"within {MAX_PERCENT:g} % on {within} of {len(ran)}; more than {-SHORT_PERCENT:g} % below on {short} of {len(ran)} "
        f"(lowest: {worst:+.1f} %)."
    )


WHY, BLIND = "## Why they differ", "## Not in the development set"
_WHAT_BLIND_IS = (
    "Baselines of upstream's branches 2.2.0 and newer that the engine was not developed against. Where a gap was found here and a\n"
    "formula from CANN's public host code closed it, the section below says so; none was fitted to a figure."
)


def kept(file: Path) -> str:
    """What people wrote at the end of the page, which no program can find out: it stays when the page is written again."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return text[text.index(WHY) :] if WHY in text else ""


def markdown(ranks: Iterable[RealRank], versions: str, why: str = "") -> str:
    """Every row, the bad ones too, and what people wrote about them."""
    ordered = sorted(ranks, key=lambda rank: (not rank.current, rank.job, rank.branch, rank.rank))
    known, blind = [rank for rank in ordered if not rank.blind], [rank for rank in ordered if rank.blind]
    lines = [
        "# Dry runs on torch_npu against real NPUs",
        "",
        "Real: the baselines of upstream's own CI (Ascend/MindSpeed-LLM, `tests/**/baseline*/*.json`), read on Ascend NPUs after the",
        "first iteration; the card and the versions of torch_npu and CANN are not stated, and some baselines are older than the",
        "branch they stand in: *since* is the day on which their figures were first committed. Upstream's test passes with any memory",
        "below its baseline, so that one that is too high is not renewed (`tests/test_tools/test_ci_st.py`). Ours: the same script,",
        f"{versions}, no NPU, no CANN. One thing is told that",
        f"CI's files would tell: the length of Alpaca's samples where a script does not pad them (`--sample-length {ALPACA_TOKENS}`, an estimate of",
        f"the mean from its size in bytes; {PACKED_TOKENS} for a data set that looks packed; the jobs are marked with *). The longest sample of a batch decides the maximum: there ours may be below.",
        "The estimate was made after 64 and 128 tokens had been tried against these baselines, so the marked rows are not a blind test.",
        "Figures are megabytes (2^20 bytes) of torch_npu's allocator. Adam's states are made at the end of the first iteration: these maxima",
        "are not the peaks of a run. Made by `benchmarks/real_npu.py`.",
        "",
        *_table(known),
        *(["", BLIND, "", _WHAT_BLIND_IS, "", *_table(blind)] if blind else []),
    ]
    return "\n".join([*lines, "", *([why.rstrip(), ""] if why else [])])


def _table(ordered: Sequence[RealRank]) -> list[str]:
    """What the aims say of these ranks, and a row for each."""
    current = [rank for rank in ordered if rank.current]
    lines = [
        f"- Baselines made for 26.x: {summary(current)}",
        f"- Of these, without the marked jobs: {summary([rank for rank in current if not rank.samples_told])}",
        f"- Older baselines, of which some still stand in 26.x: {summary([rank for rank in ordered if not rank.current])}",
        "",
        "| job | branch | since | rank | allocated: real | ours | difference | max allocated: real | ours | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rank in ordered:
        head = f"| {rank.job}{'*' if rank.samples_told else ''} | {rank.branch} | {rank.since} | {rank.rank} | {rank.real_allocated:.1f} "
        if rank.allocated is None or rank.maximum is None:
            lines.append(head + f"| – | – | {rank.real_max:.1f} | – | did not run: {rank.error.replace('|', '/')} |")
            continue
        lines.append(
            head + f"| {rank.allocated:.1f} | {rank.difference:+.3f} | {rank.real_max:.1f} | {rank.maximum:.1f} | "
            f"{rank.maximum - rank.real_max:+.1f} ({rank.percent:+.2f} %) |"
        )
    return lines


def main() -> None:
    """Runs the jobs one after the other; the table is written again after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--stacks", type=Path, required=True, help="folder of checkouts, BRANCH/MindSpeed-LLM and its siblings")
    parser.add_argument("--records", type=Path, help="folder for the records")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--margin", type=Path, help="file for the margin (mindspeed_dryrun/engines/torch_npu/margin.json)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="jobs by name")
    parser.add_argument("--blind", type=Path, metavar="CSV", help="baselines; those that the first CSV lacks are run, too")
    parser.add_argument("--history", type=Path, metavar="DIR", help="a clone of MindSpeed-LLM with all its commits")
    parser.add_argument("--classes", type=int, default=0, metavar="N", help="rank classes of each job; 0: all")
    parser.add_argument("--jobs", type=int, default=1, help="ranks at a time")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each rank")
    parser.add_argument("--again", action="store_true", help="run jobs that are done once more")
    parser.add_argument("--collect", action="store_true", help="write the CSV instead")
    args = parser.parse_args()
    if args.collect:
        rows = collect(args.stacks)
        with args.csv.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return
    if not args.records or not args.markdown:
        parser.error("--records and --markdown are needed")
    args.records.mkdir(parents=True, exist_ok=True)
    file = args.records / "rows.json"
    done: dict[str, list[dict[str, object]]] = json.loads(file.read_text()) if file.is_file() else {}
    execution = Execution(jobs=args.jobs, timeout_s=args.timeout)
    jobs = read_jobs(args.csv)
    jobs += without_known(read_jobs(args.blind), jobs) if args.blind else []
    jobs = [with_dates(job, args.history) for job in jobs] if args.history else jobs
    for job in jobs:
        wanted = not args.only or any(fnmatch(job.key, pattern) for pattern in args.only)
        if not wanted or (job.key in done and not args.again):
            continue
        rows = run_job(job, args.stacks, args.records, execution, args.classes)
        done[job.key] = [dataclasses.asdict(row) for row in rows]
        file.write_text(json.dumps(done, indent=1))
        for row in rows:
            print(row.job, row.branch, row.rank, row.difference, row.percent, row.error, flush=True)
        args.markdown.write_text(markdown(_all(jobs, done, args.stacks), _versions(), kept(args.markdown)), encoding="utf-8")
    ranks = _all(jobs, done, args.stacks)
    args.markdown.write_text(markdown(ranks, _versions(), kept(args.markdown)), encoding="utf-8")
    if args.margin:
        args.margin.write_text(json.dumps(margin(ranks), indent=2) + "\n", encoding="utf-8")


def margin(ranks: Sequence[RealRank]) -> dict[str, dict[str, float]]:
    """What the engine prints beside a verdict: how far max allocated was from the real one, on every job that ran.

    Not of jobs whose samples have a length that was told: a verdict counts the longest.
    """
    ran = [rank for rank in ranks if rank.percent is not None and not rank.samples_told]
    return {
        name: _seen([rank for rank in ran if rank.current == current]) for name, current in (("current", True), ("older", False))
    }


def _seen(ran: Sequence[RealRank]) -> dict[str, float]:
    percents = [rank.percent or 0.0 for rank in ran]
    return {
        "jobs": len({(rank.job, rank.branch) for rank in ran}),
        "ranks": len(ran),
        "lowest_percent": round(min(percents, default=0.0), 2),
        "highest_percent": round(max(percents, default=0.0), 2) + 0.0,  # not -0.0
        "within_1_percent": sum(abs(percent) <= MAX_PERCENT for percent in percents),
    }


def _all(jobs: Iterable[RealJob], done: dict[str, list[dict[str, object]]], stacks: Path) -> list[RealRank]:
    result = []
    for job in jobs:
        rows, places = done.get(job.key), find_scripts(job, stacks)
        if rows:
            script = dict(places).get(str(rows[0]["branch"]))
            known = {
                "current": job.ranks[0].current,
                "blind": job.ranks[0].blind,
                "since": job.ranks[0].since,
                "samples_told": bool(script and _sample_length(script)),
            }
            made = [RealRank(**{**row, **known}) for row in rows]  # type: ignore[arg-type]
            result += [dataclasses.replace(rank, error=_plain(rank.error, stacks)) for rank in made]
        else:
            result += [dataclasses.replace(rank, error="not tried") for rank in job.ranks]
    return result


def _plain(error: str, stacks: Path) -> str:
    """An error without colours and without the folders of this machine."""
    text = re.sub(r"\x1b\[[\d;]*m", "", error).replace(f"{stacks}/", "")
    return text if len(text) <= 200 else text.split(". ", 1)[0] + "."


def _versions() -> str:
    from importlib.metadata import version

    return f"torch_npu {version('torch_npu')} with torch {version('torch')} on the stand-in CANN"


if __name__ == "__main__":
    main()
