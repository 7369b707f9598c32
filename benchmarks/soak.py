"""Launches, sweeps, searches and kills at random, for as long as asked; after each, what must hold is checked.

    python benchmarks/soak.py --minutes 60 [--seed 1] [--save]

A round starts a launch, a sweep or a search, warm or cold, in a fresh record. Two rounds of three are disturbed: a signal at a random moment
to the command, or to one process below it. Then: no process is left, no file outside the record was written, every JSON file of
the record is whole, `report` ends without a traceback; and the same command again, undisturbed, gives the figures of the first round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from small_job import Home, half_files, save_figures

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
ACTIONS = {
    "launch": ("launch", "train.sh", "--no-cache"),
    "launch, cold": ("launch", "train.sh", "--no-cache", "--cold", "--jobs", "2"),
    "launch, all ranks": ("launch", "train.sh", "--no-cache", "--ranks", "all"),
    "launch, with the cache": ("launch", "train.sh"),
    "sweep": ("sweep", "sweep.yaml"),
    "sweep, without the cache": ("sweep", "sweep.yaml", "--no-cache"),
    "search": ("search", "search.yaml", "--no-cache"),
}
Figures = dict[str, object]


def command(action: str, out: Path) -> tuple[str, ...]:
    return (*ACTIONS[action], "--out", str(out), "--json")


def figures(said: str) -> Figures:
    """Used peaks by variant and rank."""
    data = json.loads(said[said.index("{") :])
    if "others" in data:
        return {item["name"]: item["memory"]["used_peak_mb"] for item in (data, *data["others"])}
    if "variants" in data:
        return {item["name"]: item["used_peak_mb"] for item in data["variants"]}
    return {str(rank["rank"]): rank["used_peak_mb"] for rank in data["ranks"]}


def disturb(process: subprocess.Popen[str], home: Home, rng: random.Random, longest: float) -> str:
    """A signal at a random moment; what was done, or nothing where the command was over before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0.05, longest))
        return ""
    number = rng.choice(SIGNALS)
    below = [pid for pid in home.processes() if pid != process.pid]
    target = rng.choice(below) if below and rng.random() < 0.3 else process.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, number)
        return f"{number.name} to {'the command' if target == process.pid else 'a process below it'}"
    return ""


def undisturbed(home: Home, action: str, out: Path, known: dict[str, Figures]) -> list[str]:
    status, said = home.run(*command(action, out))
    try:
        found = figures(said)
    except ValueError:
        return [f"exit status {status}: {said[-300:]}"]
    expected = known.setdefault(action, found)
    wrong = [] if found == expected else [f"figures {found}, first {expected}"]
    return wrong if status in (0, 3) and None not in found.values() else [*wrong, f"exit status {status}: {found}"]


def one_round(home: Home, rng: random.Random, number: int, known: dict[str, Figures], count: Counter[str]) -> list[str]:
    action = rng.choice(list(ACTIONS))
    out = home.folder / "records" / f"{number:05d}"
    wrong = []
    if action in known and rng.random() < 0.67:
        process = home.start(*command(action, out))
        done = disturb(process, home, rng, 12)
        said = process.communicate(timeout=300)[0]
        count["kills"] += bool(done)
        count[done or "over before the signal"] += 1
        if "Traceback" in said and "mindspeed_dryrun" in said:
            wrong.append(f"traceback after {done}: {said[said.index('Traceback') - 200 :][:1500]}")
        wrong += [f"after {done or 'the end'}: {item}" for item in [*home.left(), *half_files(out)]]
        if (out / "job.json").exists() and "Traceback" in (said := home.run("report", str(out))[1]):
            wrong.append(f"report of a stopped run: {said[-600:]}")
    wrong += undisturbed(home, action, out, known)
    wrong += [*home.left(), *half_files(out)]
    count["runs"] += 1
    count[action] += 1
    return [f"round {number}, {action}: {item}" for item in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--save", action="store_true", help="keep the figures for docs/reliability.md")
    options = parser.parse_args()
    rng, count, failures, known = random.Random(options.seed), Counter[str](), [], dict[str, Figures]()
    end, started = time.monotonic() + 60 * options.minutes, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home, number = Home(folder=Path(folder, "home")), 0
        while time.monotonic() < end:
            found = one_round(home, rng, number, known, count)
            failures += found
            number += 1
            print(f"{time.monotonic() - started:6.0f} s  round {number}, {count['kills']} kills, {len(failures)} failures", *found,
                  sep="\n    ", flush=True)  # fmt: skip
    data = {"minutes": round((time.monotonic() - started) / 60, 1), "seed": options.seed, **count, "failures": failures}
    print(json.dumps(data, indent=1))
    if options.save:
        save_figures("soak", data)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
