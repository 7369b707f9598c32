"""Dry-runs every training script of a release through the product, and writes the table of several releases side by side.

    export MINDSPEED_CORE_MS_PATH=DIR                     # MindSpeed-LLM, MindSpeed and Megatron-LM of one release
    python benchmarks/support_table.py run --records RECORDS/26.1.0
    python benchmarks/support_table.py run --records RECORDS/26.1.0 --only 'qwen25/*' --ranks 0
    python benchmarks/support_table.py run DIR/MindSpeed-LLM/examples/mcore --records RECORDS/torch     # with torch_npu
    python benchmarks/support_table.py keep RECORDS/26.1.0                     # its rows go into docs/support/26.1.0.json
    python benchmarks/support_table.py page > docs/support.md                  # of the rows that are kept
    python benchmarks/support_table.py page docs/support_torch/{mcore,fsdp2}.json # the tables of docs/support_torch.md
    python benchmarks/support_table.py calls DIR-OF-2.3.0 DIR-OF-26.1.0        # which arguments of scripts changed
    python benchmarks/support_table.py run DIR/MindSpeed-LLM/examples/fsdp2 --records RECORDS/fsdp2 --shapes SHAPES

`run` needs the packages that upstream imports (`mindspeed-dryrun doctor` names them). Each script has a record of its own;
started again, ranks that are done are not run again. Scripts run as they are: nothing is set, nothing is changed. Where a
script fails by an error of upstream's own for which the tool names a flag, it is run once more with that flag.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import fsdp2
from mindspeed_dryrun.launch.executors import SharedPlaces
from mindspeed_dryrun.launch.releases import RELEASES, release_of
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec

EXAMPLES = "examples/mindspore"
KEPT = Path(__file__).resolve().parents[1] / "docs" / "support"
_TRAINER = re.compile(r"\b(?:(?:pre|post)train_\w+|train_fsdp2)\.py")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script of one release."""

    script: str
    layout: str = ""
    ranks: str = ""  # used peak by simulated rank
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    worst: str = ""
    seconds: float | None = None
    result: str = ""
    flag: str = ""  # that had to be added: the script fails without it, on an NPU too
    call: str = ""  # digest of the trainer's arguments, as the script makes them
    earlier: bool = False  # counted by an earlier state of this package

    @property
    def of_rank_0(self) -> int | None:
        """Used peak of rank 0, which every table has: what releases are compared by."""
        figures = dict(pair.split(":") for pair in self.ranks.split())
        return int(figures["0"]) if self.used_peak_mb is not None and figures.get("0", "-").isdigit() else None


def training_scripts(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Shell scripts that call msrun, torchrun or torch.distributed.launch with a trainer of MindSpeed-LLM."""
    for script in sorted(folder.rglob("*.sh")):
        text = script.read_text(encoding="utf-8", errors="replace")
        starts = any(launcher in text for launcher in ("msrun", "torchrun", "torch.distributed."))
        trains = starts and bool(_TRAINER.search(text))
        if trains and (not patterns or any(fnmatch(str(script.relative_to(folder)), pattern) for pattern in patterns)):
            yield script


def row_of(script: Path, folder: Path, spec: RunSpec, execution: Execution, records: Path) -> Row:
    """Runs one script; what goes wrong is the row's result."""
    name = str(script.relative_to(folder))
    record = records / name.removesuffix(".sh").replace("/", "_")
    row = _run(name, script, spec, execution, record)
    sentence, _, flag = row.result.partition("Add it to the command: -- ")
    if not flag:
        return row
    with_flag = dataclasses.replace(spec, overrides=tuple(flag.split()))
    again = _run(name, script, with_flag, execution, record.with_name(f"{record.name}_with_flag"))
    result = f"{sentence.removeprefix('failed: ').strip()} With it: {again.result}"
    return dataclasses.replace(again, flag=flag, result=result, call=row.call)


def _run(name: str, script: Path, spec: RunSpec, execution: Execution, record: Path) -> Row:
    start = time.monotonic()
    row = Row(script=name)
    try:
        job = read_job(script, spec)
        row = dataclasses.replace(row, layout=_layout(job.parallel, job.world_size), call=digest(job.args))
        report = dry_run_job(job, record, spec, execution)
    except DryRunError as error:
        sentence = str(error).replace(f"{script}: ", "").replace(str(Path.cwd()), "MindSpeed-LLM")
        return dataclasses.replace(row, result=f"not run: {sentence}")
    return _row(row, report, time.monotonic() - start)


def digest(args: Sequence[str]) -> str:
    """Differs when the arguments do; not by the folder that the trees lie in."""
    root = os.environ.get("MINDSPEED_CORE_MS_PATH") or "\0"
    text = "\n".join(args).replace(root, "")
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _row(row: Row, report: Report, seconds: float) -> Row:
    failed = [rank for rank in report.ranks if rank.status in ("failed", "timeout")]
    counted = sum(rank.seconds or 0 for rank in report.ranks) or seconds
    ranks = " ".join(f"{rank.rank}:{rank.used_peak_mb or '-'}" for rank in report.ranks)
    row = dataclasses.replace(row, ranks=ranks, seconds=round(counted, 1))
    if failed:
        return dataclasses.replace(row, result=f"{failed[0].status}: {failed[0].error}")
    stage = next((rank.stage for rank in report.ranks if rank.rank == report.worst_rank), None)
    return dataclasses.replace(
        row,
        used_peak_mb=report.used_peak_mb,
        actual_peak_mb=report.actual_peak_mb,
        worst=f"{report.worst_rank} (stage {stage})",
        result=report.verdict.value.replace("_", " "),
    )


def _layout(parallel: object, world_size: int) -> str:
    sizes = dataclasses.asdict(parallel)  # type: ignore[call-overload]
    parts = [f"{name.upper()}{size}" for name, size in sizes.items() if size and (size > 1 or name in ("tp", "pp"))]
    return f"{world_size}: {' '.join(parts)}"


# -- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows of one release, and what they were run with."""

    release: str
    versions: str
    ranks: str
    rows: tuple[Row, ...]
    folder: str = EXAMPLES
    scripts: int = 0  # that train, in that folder

    @classmethod
    def read(cls, file: Path) -> Table:
        """Of a file, or of a folder of records."""
        file = file / "rows.json" if file.is_dir() else file
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})

    def write(self, file: Path) -> None:
        """One row a line, and of each what is not as it is in every row."""
        rows = [json.dumps(_told(row), ensure_ascii=False) for row in self.rows]
        head = {name: value for name, value in dataclasses.asdict(self).items() if name != "rows"}
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
        file.write_text(text, encoding="utf-8")

    def updated(self, other: Table) -> Table:
        """With the rows of another run in the place of those of the same scripts."""
        rows = self.by_script | other.by_script
        return dataclasses.replace(other, rows=tuple(rows[name] for name in sorted(rows)))

    @property
    def by_script(self) -> dict[str, Row]:
        return {row.script: row for row in self.rows}

    def counts(self) -> str:
        alone = sum(row.used_peak_mb is not None and not row.flag for row in self.rows)
        helped = sum(row.used_peak_mb is not None and bool(row.flag) for row in self.rows)
        more = f"; {helped} more with the flag that the tool names" if helped else ""
        left = self.scripts - len(self.rows)
        return f"{alone} of {len(self.rows)} run to their end{more}" + (f"; {left} were not tried" if left > 0 else "")


def kept() -> list[Path]:
    """The files of rows that the page is made from."""
    return sorted(KEPT.glob("*.json"))


def _told(row: Row) -> dict[str, object]:
    return {field.name: value for field in dataclasses.fields(row) if (value := getattr(row, field.name)) != field.default}


def page(tables: Sequence[Table]) -> str:
    """A section for each folder of scripts."""
    folders = list(dict.fromkeys(table.folder for table in tables))
    lines = ["# Support: upstream's own scripts", ""]
    for folder in folders:
        lines += [f"## `{folder}`", ""] if len(folders) > 1 else []
        lines += _section([table for table in tables if table.folder == folder])
    return "\n".join(lines)


def _section(tables: Sequence[Table]) -> list[str]:
    """Releases side by side, then what differs between them, then why scripts do not run, then all ranks where they were run."""
    whole = [table for table in tables if table.ranks == "auto"]
    tables = _one_each(tables)
    lines = [*(line.format(folder=tables[0].folder) for line in _INTRODUCTION), *_daggers(tables), ""]
    lines += [f"- **{table.release}** ({table.versions}): {table.counts()}." for table in tables]
    lines += ["", "## Used peak of rank 0 in M, and seconds for all ranks that were run", ""]
    names = sorted({row.script for table in tables for row in table.rows})
    lines += _markdown(
        ["script", "ranks: layout", *(table.release for table in tables)],
        [[name, _layout_of(name, tables), *(_cell(table.by_script.get(name)) for table in tables)] for name in names],
    )
    if len(tables) > 1:
        lines += ["", "## Figures that differ between releases", "", *_differences(names, tables)]
    lines += ["", "## Why scripts do not run as they are", "", *_reasons(tables)]
    for table in whole:
        lines += ["", f"## {table.release}, every rank class", "", *_every_class(table)]
    return [*lines, ""]


def _daggers(tables: Sequence[Table]) -> list[str]:
    """What the mark means, where there is one."""
    earlier = {table.release: sum(row.earlier for row in table.rows if row.used_peak_mb is not None) for table in tables}
    counts = ", ".join(f"{count} in {release}" for release, count in earlier.items() if count)
    return [_DAGGERS.format(counts=counts)] if counts else []


def _one_each(tables: Sequence[Table]) -> list[Table]:
    """One table a release: rows of rank 0 in the place of those of a run of every rank class."""
    found: dict[str, Table] = {}
    for table in sorted(tables, key=lambda table: table.ranks != "auto"):
        known = found.get(table.release)
        found[table.release] = known.updated(table) if known else table
    order = list(RELEASES)
    return sorted(found.values(), key=lambda table: order.index(table.release) if table.release in order else len(order))


_MANY = 8  # scripts with one reason are counted, not listed


def _reasons(tables: Sequence[Table]) -> list[str]:
    releases: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        for row in filter(_stuck, table.rows):
            reason = _short(row.result).partition(" With it: ")[0]
            releases.setdefault((row.script, reason), []).append(table.release)
    scripts: dict[tuple[str, str], list[str]] = {}
    for (script, reason), names in sorted(releases.items()):
        scripts.setdefault((", ".join(names), reason), []).append(script)
    rows = [
        [script, names, reason]
        for (names, reason), found in scripts.items()
        for script in (found if len(found) <= _MANY else [f"{len(found)} scripts"])
    ]
    return _markdown(["script", "releases", "reason"], sorted(rows)) if rows else ["All run."]


def _every_class(table: Table) -> list[str]:
    header = [
        "script",
        "ranks: layout",
        "used peak",
        "with fragments",
        "worst rank",
        "used peak by simulated rank",
        "s",
        "result",
    ]
    lines = _markdown(header, [_in_full(row) for row in table.rows])
    earlier = any(row.earlier for row in table.rows)
    notes = [*(_EARLIER.get(table.release, ()) if earlier else ()), *_NOTES.get(table.release, ())]
    return [*lines, "", *notes] if notes else lines


# To tables of every rank class.
_EARLIER = {
    "2.2.0": (
        "Rows with a dagger were counted by an earlier state of this package, on the branches 2.2.0 of MindSpeed-LLM and MindSpeed, which",
        "have fixes that the tags lack: see above for what the tags do.",
    ),
}
_NOTES = {
    "2.2.0": (
        "Some DeepSeek scripts ask for far more than a card has because they lack `--moe-ffn-hidden-size`: the report says so.",
    ),
}


def _in_full(row: Row) -> list[str]:
    mark = "†" if row.earlier else ""
    figures = ["" if figure is None else f"{figure}M{mark}" for figure in (row.used_peak_mb, row.actual_peak_mb)]
    return [row.script, row.layout, *figures, row.worst, row.ranks, f"{row.seconds or 0:.0f}", _short(row.result)]


_INTRODUCTION = (
    "The training scripts of `{folder}`, unmodified, with the real MindSpeed-LLM, MindSpeed and Megatron-LM of each release:",
    "the tags v2.2.0, v2.3.0, v26.0.0 and v26.1.0 (the branches of these names, which `setup --stack` fetches, have fixes), and master. Made by",
    "`benchmarks/support_table.py`; the seconds were measured on a busy machine with two cores. A figure with a star is of a",
    "script that fails on an NPU too, run with the flag that the tool names. Scripts that were not tried were left out for lack of",
    "machine time, none for its result.",
)
_DAGGERS = "A figure with a dagger was counted earlier, by an earlier state of this package: {counts}."


def _stuck(row: Row) -> bool:
    return row.used_peak_mb is None or bool(row.flag)


def _layout_of(name: str, tables: Sequence[Table]) -> str:
    layouts = [table.by_script[name].layout for table in tables if name in table.by_script]
    return next((layout for layout in layouts if layout), "")


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.used_peak_mb is None:
        return "does not run"
    marks = ("*" if row.flag else "") + ("†" if row.earlier else "")
    return f"{row.of_rank_0 or row.used_peak_mb}{marks} ({row.seconds or 0:.0f} s)"


def _differences(names: Sequence[str], tables: Sequence[Table]) -> list[str]:
    rows, same = [], 0
    for name in names:
        found = {table.release: table.by_script[name] for table in tables if name in table.by_script}
        figures = {release: row.of_rank_0 for release, row in found.items() if row.of_rank_0}
        if len(set(figures.values())) > 1:
            known = [found[release].call for release in figures if found[release].call]
            arguments = "–" if len(known) < 2 else "the same" if len(set(known)) == 1 else "differ"
            reasons = [text for patterns, text in _REASONS if any(fnmatch(name, pattern) for pattern in patterns)]
            rows.append([name, _by_figure(figures), arguments, ". ".join(reasons) or "not looked into yet"])
        elif len(figures) > 1:
            same += 1
    lines = [f"{same} scripts count the same, to the megabyte, in every release in which they run."]
    if any(text.startswith("Recomputed layers") for *_, text in rows):
        lines += ["", *_COLLECTOR]
    header = ["script", "used peak of rank 0", "arguments, where known", "the tensor"]
    return [*lines, "", *_markdown(header, rows)] if rows else lines


def _by_figure(figures: Mapping[str, int]) -> str:
    releases: dict[int, list[str]] = {}
    for release, figure in figures.items():
        releases.setdefault(figure, []).append(release)
    return "; ".join(f"{figure} in {', '.join(names)}" for figure, names in releases.items())


# Scripts and the tensor, found with `launch --explain` on both releases and a look at what fills the memory at the peak.
_COLLECTOR = (
    "**Recomputed layers.** The tags v26.0.0 and v26.1.0, and master at 79afbee2, keep what a recomputed layer saves until Python's",
    "garbage collector runs: `wrapped_run_func` in MindSpeed-LLM's `core/tensor_parallel/layers.py` holds `ctx`, which holds it. 2.3.0 has no",
    "such function, and the branch 26.1.0 and master since 11 August 2026 do not hold `ctx`: master counts what 2.3.0 counts, with the file that",
    "its commit f107818f removed put back (the column *master, file restored*). A longer run",
    "holds more (glm4/tune_glm4_9b_32k_full_ms.sh: 80270M here, 166654M with all its microbatches), and the tool says so beside the verdict.",
    "What waits was told apart with `launch --explain`. That run makes other numbers of Python objects, so the collector runs at another moment,",
    "and its peak may be another one than that of the table.",
    "In no other script does anything wait for the collector at the end of a run: 29 of them were looked at in 26.0.0, the others in 26.1.0.",
)
_HELD = "Recomputed layers, see above: at the peak of 26.1.0 there are {} more than in 2.3.0"
_HELD_AT = f"{_HELD}; with `--explain` the peak of 26.1.0 is {{}}M"
_REASONS = (
    (("deepseek2_lite/*",), _HELD.format("49 hidden states of 16.0M")),
    (("deepseek3/*full_512*",), _HELD.format("8 hidden states of 56.0M and a mask of 16.0M")),
    (("deepseek3/pretrain_deepseek3_1b*",), _HELD.format("8 hidden states of 56.0M")),
    (("glm4/pretrain_glm4_32b*",), _HELD.format("82 hidden states of 48.0M and 10 rotary embeddings of 2.0M")),
    (("glm4/tune*",), _HELD.format("87 hidden states of 256.0M and 4 masks of 2048.0M")),
    (("glm45-moe/*",), _HELD.format("25 hidden states of 32.0M and 2 rotary embeddings of 1.0M")),
    (("qwen3_moe/pretrain_qwen3_30b*",), _HELD.format("61 hidden states of 16.0M and 5 rotary embeddings of 2.0M")),
    (("qwen3_moe/*64K*",), _HELD.format("96 results of RmsNorm of 32.0M")),
    (
        ("deepseek3/pretrain_deepseek3_671b_4k_A3*",),
        _HELD_AT.format("80 hidden states and a gradient of one, 28.0M each, and 10 rotary embeddings of 1.0M", 211844),
    ),
    (
        ("deepseek3/pretrain_deepseek3_671b_4k_ms*",),
        _HELD_AT.format("80 hidden states and a gradient of one, 14.0M each, and 10 rotary embeddings of 1.0M", 185163),
    ),
    (
        ("qwen3_moe/pretrain_qwen3_235b*",),
        _HELD_AT.format("455 hidden states and 35 of their gradients, 32.0M each, and 57 rotary embeddings of 2.0M", 54379),
    ),
    (
        ("qwen3_moe/*256K*",),
        _HELD_AT.format("456 hidden states and 128 of their gradients, 32.0M each, and 154 rotary embeddings of 128.0M", 54326),
    ),
    (
        ("qwen3_moe/*_4K_full*",),
        _HELD_AT.format(
            "473 hidden states and 43 of their gradients, 16.0M each, 61 rotary embeddings of 2.0M and 24 joined batches of 0.16M",
            33379,
        ),
    ),
    (
        ("llama3*/tune*full*",),
        "From 26.0.0 on --transformer-impl is transformer_engine: its norm keeps bfloat16 where the one before kept "
        "Float32[8192, 1, 4096] (MindSpeed's te/pytorch/module/layernorm_column_parallel_linear.py, _rmsnorm)",
    ),
    (
        ("deepseek2_lite/*",),
        "2.2.0 has two Mul of 513M at the peak, in the backward of the experts "
        "(moe_feature/overlap/grouped_mlp_with_comp_and_comm_overlap_all2all.py); from 2.3.0 on there are SwigluGrad of 1026M and "
        "one Mul of 513M",
    ),
    (
        ("deepseek3/pretrain_deepseek3_671b_4k_A3*",),
        "From 2.3.0 on one tensor that the data loader makes of each microbatch (Int64[1, 4096], 32K, MSAdapter's collate.py:272) stays: "
        "eight at the peak instead of one, 0.2M",
    ),
    (
        ("qwen3/pretrain_qwen3_32b_4K_ms_A3*",),
        "From 26.0.0 on there are 136 results of Reshape of 2.0M (MSAdapter's reshape) at the peak instead of 68 Concat "
        "of 2.0M (apply_rotary_pos_emb_bshd): 136.0M",
    ),
    (
        ("llama2/*7B_full_pack*",),
        "Up to 2.3.0 apply_rotary_pos_emb_bshd joins what is rotated with what is not, although nothing is left over, and the result "
        "stays for the backward pass: 64 Concat of 16.0M (Megatron's rotary_pos_embedding.py:265)",
    ),
    (
        ("llama2/*pack_32k*", "internlm25/*1point8b*"),
        "Up to 2.2.0 tokens, labels and masks of a sample are broadcast as one tensor, made by Concat (Megatron's "
        "core/tensor_parallel/data.py:87): Int64[131072], 1.0M, in pack_32k and Int64[65536], 0.5M, in internlm25; from 2.3.0 on "
        "each goes by itself",
    ),
    (
        ("llama2/*pack_32k*",),
        "From 26.0.0 on the batch is joined anew: Concat of 1.25M at sft_trainer.py:103 of MindSpeed-LLM",
    ),
)


def _short(text: str) -> str:
    return " ".join(text.split())[:400]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


# -- command line ----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Runs the scripts one after the other; the rows are written again after each."""
    root = Path(os.environ.get("MINDSPEED_CORE_MS_PATH") or sys.exit("Set MINDSPEED_CORE_MS_PATH."))
    folder, args.records = (args.folder or root / "MindSpeed-LLM" / EXAMPLES).absolute(), args.records.absolute()
    args.records.mkdir(parents=True, exist_ok=True)
    shapes = args.shapes and args.shapes.absolute()
    os.chdir(root / "MindSpeed-LLM")  # where upstream's pages start its scripts: some read files beside their own
    spec = RunSpec(trainer="script", ranks=args.ranks)
    versions = _versions()
    named = str(folder.relative_to(root / "MindSpeed-LLM")) if folder.is_relative_to(root) else folder.name
    with SharedPlaces(args.jobs) as shared:  # the framework is imported once, not for every script
        execution = Execution(jobs=args.jobs, timeout_s=args.timeout, shared=shared)
        scripts = sum(1 for _ in training_scripts(folder, []))
        for script in training_scripts(folder, args.only):
            if args.missing and str(script.relative_to(folder)) in _known(args.records):
                continue
            row = row_of(script, folder, _with_shapes(script, spec, shapes), execution, args.records)
            print(f"{row.script}: {row.result} {row.ranks}", flush=True)
            known = {**_known(args.records), row.script: row}  # others may write there too
            rows = tuple(known[name] for name in sorted(known))
            release = args.release or release_of(root) or "unknown"
            Table(release, versions, args.ranks, rows, named, scripts).write(args.records / "rows.json")


def _known(records: Path) -> dict[str, Row]:
    return Table.read(records).by_script if (records / "rows.json").is_file() else {}


def keep(args: argparse.Namespace) -> None:
    """Rows of a run take the place of those of the same scripts among the ones that are kept."""
    table = Table.read(args.records)
    file = KEPT / f"{table.release}{'-every-class' if table.ranks == 'auto' else ''}.json"
    known = Table.read(file) if file.is_file() else table
    known.updated(table).write(file)


def calls(args: argparse.Namespace) -> None:
    """Scripts of both trees whose trainers get other arguments, grouped by what changed."""
    changed: dict[str, list[str]] = {}
    folders = [root / "MindSpeed-LLM" / EXAMPLES for root in (args.old, args.new)]
    for script in training_scripts(folders[0], args.only):
        name = str(script.relative_to(folders[0]))
        if (folders[1] / name).is_file():
            changed.setdefault(_changes([_arguments(folder / name) for folder in folders]), []).append(name)
    for change, names in sorted(changed.items()):
        print(f"{change or 'the same arguments'}: {len(names)}\n  " + "\n  ".join(names))


def _arguments(script: Path) -> Counter[str]:
    """The trainer's arguments, each flag with its values."""
    try:
        given = read_job(script, RunSpec(trainer="script")).arguments.values
    except DryRunError as error:
        return Counter([f"not run: {error}"])
    return Counter(" ".join((name, *values)) for name, values in given.items())


def _changes(arguments: Sequence[Counter[str]]) -> str:
    old, new = arguments
    return ", ".join([*(f"- {word}" for word in sorted(old - new)), *(f"+ {word}" for word in sorted(new - old))])


def _with_shapes(script: Path, spec: RunSpec, shapes: Path | None) -> RunSpec:
    """With the `config.json` of the model, where the script takes it from a folder and `shapes` has one of that name."""
    with contextlib.suppress(DryRunError):
        job = read_job(script, spec)
        named = fsdp2.model_folder(job, fsdp2.Fsdp2Settings.read(job)).name if job.is_fsdp2 and shapes else ""
        if shapes and named and (shapes / named / fsdp2.SHAPES).is_file():
            return dataclasses.replace(spec, overrides=(fsdp2.MODEL, str(shapes / named)))
    return spec


def _versions() -> str:
    """The engine that is installed here: a Python has MindSpore or torch_npu, hardly both."""
    names = {"mindspore": "MindSpore", "torch_npu": "torch_npu"}
    return " and ".join(f"{title} {version}" for name, title in names.items() if (version := installed.version(name)))


def main() -> None:
    """`run` or `page`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="dry-run the scripts of one release")
    runs.add_argument("folder", type=Path, nargs="?", help="default: MindSpeed-LLM's examples/mindspore")
    runs.add_argument("--records", type=Path, required=True, help="folder for the records")
    runs.add_argument("--shapes", type=Path, metavar="DIR", help="for train_fsdp2.py: DIR/NAME/config.json of each model")
    runs.add_argument("--only", action="append", default=[], metavar="PATTERN", help="scripts by their path in the folder")
    runs.add_argument("--release", help="what the page calls these trees; default: the release that they are")
    runs.add_argument("--missing", action="store_true", help="only scripts that have no row yet")
    runs.add_argument("--jobs", type=int, default=1, help="ranks at a time")
    runs.add_argument("--ranks", default="auto", help="as in `launch`: auto (every rank class), all, or a list")
    runs.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each rank")
    runs.set_defaults(call=run)
    keeps = verbs.add_parser("keep", help="keep the rows of a run in docs/support")
    keeps.add_argument("records", type=Path)
    keeps.set_defaults(call=keep)
    pages = verbs.add_parser("page", help="write the page of several releases")
    pages.add_argument("records", type=Path, nargs="*", help="default: the rows in docs/support")
    pages.set_defaults(call=lambda args: print(page([Table.read(file) for file in args.records or kept()]), end=""))
    compare = verbs.add_parser("calls", help="compare the arguments of two releases' scripts")
    compare.add_argument("old", type=Path, help="folder of MindSpeed-LLM, MindSpeed and Megatron-LM")
    compare.add_argument("new", type=Path)
    compare.add_argument("--only", action="append", default=[], metavar="PATTERN", help="scripts by their path in the folder")
    compare.set_defaults(call=calls)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
