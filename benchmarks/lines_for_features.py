"""How many lines of the package the same commands reach, in an old checkout and in this one. Prints a Markdown table.

    git worktree add ../old f9278d1                              before the layers, the typed record and mixtures of experts
    python benchmarks/lines_for_features.py ../old               this checkout against it
    python benchmarks/lines_for_features.py ../old --by module   which modules it is

A total of lines says little where features were added. Here both trees run commands that both know, and only what they
reach is counted: every imported module, less the functions and methods that no command entered. Lines are whole source
lines, with their docstrings, comments and blank lines. Processes of ranks count too; all but those of the first command are
started cold, because a rank that a warm server has forked cannot say where it has been.

Needs coverage.py with its .pth file, as `pip install coverage` leaves it.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from coverage import CoverageData

from mindspeed_dryrun.cache import VARIABLE, cache_root

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "examples/pretrain_qwen25_7b_32k_ms.sh"
EMBEDDED = ["--trainer", "embedded", "{cold}"]
LAUNCH = ["launch", SCRIPT, *EMBEDDED, "--budget", "58G", "--out", "{out}"]
RECOMPUTED = ["--", "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SPACE = """
script: {tree}/examples/lab/qwen25_7b_8p.sh
hardware: {hardware}
cluster: {{nodes: 1, cards_per_node: 8}}
budget: 58G
winners: 1
space: {{tp: [2, 4], pp: [2, 4], micro_batch: [1], recompute: [none, full], distributed_optimizer: [true], split: [even]}}
"""
# name → words; `{out}` is the command's own folder, `{work}` that of all of them, `{cold}` is --cold in a tree that knows it
COMMANDS: dict[str, list[str]] = {
    "launch": [word for word in LAUNCH if word != "{cold}"],
    "launch, cold": LAUNCH,
    "launch --explain": [*LAUNCH, "--explain"],
    "launch, recomputed": [*LAUNCH, *RECOMPUTED],
    "launch --plan-only": [*LAUNCH, "--plan-only"],
    **{f"report, {kind}": ["report", "{work}/launch", "--format", kind] for kind in ("table", "json", "csv", "markdown", "html")},
    "compare": ["compare", "{work}/launch", "{work}/launch, recomputed"],
    "explain": ["explain", "{work}/launch --explain"],
    "sweep": ["sweep", "examples/sweeps/qwen25_7b_lab.yaml", *EMBEDDED, "--budget", "58G", "--out", "{out}"],
    "search": ["search", "{work}/space.yaml", *EMBEDDED, "--out", "{out}"],
    "doctor": ["doctor"],
    "patches": ["patches"],
    "activate": ["activate"],
}
USUAL = (0, 3)  # exit status of a command that did its work: it fits, or something does not
# Folders of the old tree under their later names, and later ones that were one folder then.
ROWS = {
    "trainer": "rank", "patches": "rank", "bootstrap": "rank", "cann": "engines",
    **dict.fromkeys(("strategy", "estimate", "search", "sweep"), "estimate, search, sweep"),
}  # fmt: skip
Lines = dict[str, set[int]]  # file, relative to the package → lines that ran


def run_all(tree: Path, work: Path) -> Lines:
    """Runs the commands in one tree and gives the lines of its package that ran, of all processes together."""
    shutil.copytree(cache_root() / "packages", work / "cache" / "packages")  # what `setup` installed; the rest is made anew
    hardware = next(tree.glob("examples/hardware/ascend910b.yaml"), "ascend910b-64g")
    (work / "space.yaml").write_text(SPACE.format(tree=tree, hardware=hardware))
    cold = ["--cold"] if "--cold" in (tree / "mindspeed_dryrun" / "commands" / "launch.py").read_text() else []
    reached: Lines = {}
    for name, words in COMMANDS.items():
        print(f"{tree.name}: {name} …", file=sys.stderr, flush=True)
        spelled = [part for word in words for part in (cold if word == "{cold}" else [word.format(out=work / name, work=work)])]
        done = run(tree, spelled, work)
        if done.returncode not in USUAL:
            raise SystemExit(f"{name} ended with {done.returncode} in {tree}:\n{done.stdout}{done.stderr}")
        for file in work.rglob(".coverage.*"):
            add(reached, tree / "mindspeed_dryrun", file)
            file.unlink()
    return reached


def run(tree: Path, words: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    """One command. A rank may write in its own folder only, where it runs: the name of its data has no folder."""
    settings = work / "coverage.ini"
    settings.write_text(f"[run]\nparallel = true\npatch = _exit\nsource = {tree}/mindspeed_dryrun\n")
    environment = os.environ | {"PYTHONPATH": str(tree), VARIABLE: str(work / "cache"), "COVERAGE_PROCESS_START": str(settings)}
    command = [sys.executable, "-P", "-m", "coverage", "run", "--rcfile", str(settings), "--data-file", str(work / ".coverage")]
    command += ["-m", "mindspeed_dryrun", *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1800)


def add(reached: Lines, package: Path, file: Path) -> None:
    """What one process has left."""
    data = CoverageData(basename=str(file))
    data.read()
    for name in data.measured_files():
        if name.endswith(".py"):  # a template is measured under its own name
            reached.setdefault(str(Path(name).relative_to(package)), set()).update(data.lines(name) or ())


def reached_lines(file: Path, ran: set[int]) -> int:
    """Lines of a module, less those of the functions in it that were not entered."""
    text = file.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            end = node.end_lineno or node.lineno
            if ran.isdisjoint(range(node.body[0].lineno, end + 1)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                left_out.update(range(first, end + 1))
    return len(text.splitlines()) - len(left_out)


def by_row(tree: Path, reached: Lines, row: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, ran in reached.items():
        if ran:  # else it is only named by `source`
            folder = name.split("/")[0] if "/" in name else "(top)"
            found[name if row == "module" else ROWS.get(folder, folder)] += reached_lines(tree / "mindspeed_dryrun" / name, ran)
    return found


def all_lines(tree: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (tree / "mindspeed_dryrun").rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("--by", choices=("folder", "module"), default="folder")
    args = parser.parse_args()
    counted = []
    for tree in (args.old.resolve(), ROOT):
        work = Path(tempfile.mkdtemp(prefix="lines-"))
        try:
            counted.append(by_row(tree, run_all(tree, work), args.by))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    before, now = counted
    print(f"| {args.by} | before | now |\n|---|--:|--:|")
    for row in sorted(before.keys() | now.keys()):
        print(f"| {row} | {before[row] or ''} | {now[row] or ''} |")
    print(f"| **reached** | **{before.total()}** | **{now.total()}** |")
    print(f"| the whole package | {all_lines(args.old)} | {all_lines(ROOT)} |")


if __name__ == "__main__":
    main()
