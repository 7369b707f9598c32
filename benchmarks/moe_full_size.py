"""Full-size jobs on the embedded trainer: every mixture of experts, latent attention and fine-tuning script of some releases.

    python benchmarks/moe_full_size.py --out DIR --markdown docs/moe_full_size.md STACK [STACK …]

A STACK holds MindSpeed-LLM of one release; its scripts are read, its trainer is not run. Of each script the first rank and the
first rank of the last stage run, one after the other, each in a process of its own. Records stay in DIR and are used again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.releases import release_of
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.record.model import RankReport
from mindspeed_dryrun.record.run_spec import RunSpec

EXAMPLES = "MindSpeed-LLM/examples/mindspore"
MIXTURES = ("deepseek2", "deepseek3", "glm45", "grok", "mixtral", "moe", "phi35")
# Their scripts leave the vocabulary to the tokenizer; these are the sizes of those models' own.
VOCABULARIES = {"llama2": "32000", "llama3": "128256", "yi": "64000", "yi15": "64000"}


@dataclass(frozen=True, kw_only=True)
class FullSize:
    """One script."""

    release: str
    script: str
    layout: str = ""
    ranks: str = ""
    seconds: float | None = None
    host_mb: int | None = None
    problem: str = ""

    def markdown(self) -> str:
        costs = f"{self.seconds:.0f} | {self.host_mb}" if self.seconds is not None else "— | —"
        return f"| {self.release} | {self.script} | {self.layout} | {self.ranks or self.problem} | {costs} |"


def scripts(root: Path) -> Iterator[Path]:
    """Scripts that train a mixture or fine-tune; mixtures first."""
    folder = root / EXAMPLES
    found = [path for path in sorted(folder.rglob("*.sh")) if "train_gpt.py" in path.read_text("utf-8", errors="replace")]
    mixtures = [path for path in found if any(word in path.parent.name for word in MIXTURES)]
    tuning = [path for path in found if path not in mixtures and path.name.startswith(("tune_", "dpo_", "train_prm"))]
    yield from mixtures + tuning


def overrides_of(path: Path) -> tuple[str, ...]:
    """The vocabulary, where a script has none of its own."""
    vocabulary = VOCABULARIES.get(path.parent.name)
    return ("--vocab-size", vocabulary) if vocabulary else ()


def measure(root: Path, path: Path, release: str, out: Path) -> FullSize:
    """Runs the two ranks of one script."""
    name = str(path.relative_to(root / EXAMPLES))
    overrides = overrides_of(path)
    layout = ""
    try:
        job = read_job(path, RunSpec(overrides=overrides))
        parallel = job.parallel
        sizes = (("TP", parallel.tp), ("PP", parallel.pp), ("CP", parallel.cp), ("EP", parallel.ep), ("VPP", parallel.vpp or 1))
        layout = f"{job.world_size}: {' '.join(f'{word}{size}' for word, size in sizes if size > 1) or 'DP only'}"
        last = job.world_size - job.world_size // parallel.pp
        wanted = "0" if parallel.pp == 1 else f"0,{last}"
        spec = RunSpec(trainer="embedded", overrides=overrides, ranks=wanted)
        report = dry_run_job(job, out / release / path.stem, spec, Execution(jobs=1))
    except DryRunError as error:
        return FullSize(release=release, script=name, layout=layout, problem=str(error))
    return FullSize(
        release=release,
        script=name,
        layout=layout,
        ranks=", ".join(f"{rank.rank}: {_figure(rank)}" for rank in report.ranks),
        seconds=max(rank.seconds or 0 for rank in report.ranks),
        host_mb=max(rank.host_rss_mb or 0 for rank in report.ranks),
    )


def _figure(rank: RankReport) -> str:
    return str(rank.used_peak_mb) if rank.status in ("ok", "oom") else f"{rank.status}: {rank.error}"


HEADER = """# Mixtures of experts, latent attention and fine-tuning at full size, without MindSpeed-LLM

Made by `benchmarks/moe_full_size.py`. Every mixture, latent attention and fine-tuning script of the releases, unmodified, on the
embedded trainer: used peak in MB of the first rank and of the first rank of the last stage, the wall time of the slower one in
seconds, and the most host memory that one of them took in MB. {ran} of {count} scripts run; the others name what stops them.
Scripts that leave the vocabulary to their tokenizer got `--vocab-size`. Other work shared the machine's two cores, so the
seconds are upper bounds.

| release | script | ranks and layout | rank: used peak | s | host MB |
|---|---|---|---|---|---|
"""


def page(lines: list[FullSize]) -> str:
    """The table as a page."""
    ran = sum(line.seconds is not None and ":" in line.ranks and "failed" not in line.ranks for line in lines)
    return HEADER.format(ran=ran, count=len(lines)) + "".join(f"{line.markdown()}\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--markdown", type=Path, required=True, help="file to write the table to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[FullSize] = []
    for root in options.stacks:
        release = release_of(root) or root.name
        for path in scripts(root):
            lines.append(measure(root, path, release, options.out))
            print(lines[-1].markdown(), file=sys.stderr, flush=True)
            # After each script, so that a run that is stopped leaves a table.
            options.markdown.write_text(page(lines), "utf-8")
            (options.out / "rows.json").write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=1), "utf-8")


if __name__ == "__main__":
    main()
