"""The fault matrix: what goes wrong, what is expected, what happened; on launch, sweep, search, warm ranks and the studio.

    python benchmarks/fault_matrix.py [--only sweep] [--save]     runs it
    python benchmarks/fault_matrix.py --fuzz-minutes 60           runs the fuzz test and keeps its figures
    python benchmarks/fault_matrix.py --page                      writes docs/reliability.md from the figures that were saved

After every fault: no process is left, no file outside the records was written, every JSON file of the records is whole, and nobody
saw a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

from small_job import FIGURES, ROOT, SEARCH_FILE, Home, half_files, merged, save_figures, script

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
Got = tuple[int, str]  # exit status, what was said
LAUNCH = ("launch", "train.sh", "--no-cache", "--out", "records/r")
SWEEP = ("sweep", "sweep.yaml", "--out", "records/r")
SEARCH = ("search", "search.yaml", "--out", "records/r")


@dataclass(frozen=True)
class Fault:
    """`does` injects it and returns what came of it; the exit status must be one of `status`, and the text must hold `says`."""

    verb: str
    what: str
    status: tuple[int, ...]
    says: str
    does: Callable[[Home], Got]

    @property
    def expected(self) -> str:
        text = f", says “{self.says}”" if self.says else ""
        return f"exit status {' or '.join(map(str, self.status))}{text}"


def run(*words: str) -> Callable[[Home], Got]:
    return lambda home: home.run(*words)


def stopped(number: signal.Signals, words: tuple[str, ...], until: Callable[[Home], bool]) -> Callable[[Home], Got]:
    """The command, and a signal once `until` holds."""

    def does(home: Home) -> Got:
        process = home.start(*words)
        wait_for(lambda: until(home) or process.poll() is not None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return finished(process)

    return does


def finished(process: subprocess.Popen[str]) -> Got:
    said = process.communicate(timeout=300)[0]
    return process.returncode, said


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def a_rank_runs(home: Home) -> bool:
    return any((home.folder / "records").rglob("worker.log"))


def killed_below(name: str, *more: str) -> Callable[[Home], Got]:
    """A launch whose process with `name` in its command line is killed once a rank runs."""

    def does(home: Home) -> Got:
        process = home.start(*LAUNCH, *more)
        wait_for(lambda: (a_rank_runs(home) and bool(named(home, name))) or process.poll() is not None)
        victims = named(home, name)[:1]
        for pid in victims:
            os.kill(pid, KILL)
        status, said = finished(process)
        return status, f"{said}\n{len(victims)} killed"

    return does


def named(home: Home, name: str) -> list[int]:
    found = []
    for pid in home.processes():
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                found.append(pid)
    return found


def then(first: Callable[[Home], Got], change: Callable[[Home], None], second: Callable[[Home], Got]) -> Callable[[Home], Got]:
    def does(home: Home) -> Got:
        first(home)
        change(home)
        return second(home)

    return does


def cut(name: str) -> Callable[[Home], None]:
    """The file loses its second half."""

    def change(home: Home) -> None:
        path = home.folder / "records" / "r" / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def piped_into(program: str, *words: str) -> Callable[[Home], Got]:
    def does(home: Home) -> Got:
        line = f"{program.format(command='$PYTHON -m mindspeed_dryrun ' + ' '.join(words))}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home.folder / "tmp"), "PYTHON": sys.executable}
        done = subprocess.run(["bash", "-c", line], cwd=home.folder, env=environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return does


def nothing(home: Home) -> None:
    """No change."""


def studio(number: signal.Signals, ask: bool = False) -> Callable[[Home], Got]:
    """The studio, up; with `ask`, a stranger without the token; then a signal."""

    def does(home: Home) -> Got:
        process = home.start("studio", "train.sh", "--no-browser", "--out", "records/r")
        assert process.stdout
        line = process.stdout.readline()
        answer = ""
        if ask and (found := re.search(r"http://[^/]+/", line)):
            try:
                answer = f"HTTP {urllib.request.urlopen(found[0], timeout=20).status}"
            except urllib.error.HTTPError as error:
                answer = f"HTTP {error.code}"
        process.send_signal(number)
        status, said = finished(process)
        return status, line + said + answer

    return does


def busy_studio(number: signal.Signals, path: str) -> Callable[[Home], Got]:
    """The studio with a rank that runs for a try or for a search; then a signal."""

    def does(home: Home) -> Got:
        process = home.start(
            "studio", "train.sh", "--no-browser", "--out", "records/r", environ={"MINDSPEED_DRYRUN_NO_CACHE": "1"}
        )
        assert process.stdout
        line = process.stdout.readline()
        address = urlparse(re.findall(r"http://\S+", line)[0])
        asked = urllib.request.Request(
            f"http://{address.netloc}/api/{path}?{address.query}", b"{}", {"Content-Type": "application/json"}
        )
        answer = urllib.request.urlopen(asked, timeout=60).status
        wait_for(lambda: a_rank_runs(home))
        ranks = len(list((home.folder / "records").rglob("worker.log")))
        process.send_signal(number)
        status, said = finished(process)
        return status, f"{line}{said}HTTP {answer}, {min(ranks, 1)} running"

    return does


def studio_on_a_taken_port(home: Home) -> Got:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        return home.run("studio", "train.sh", "--no-browser", "--out", "records/r", "--port", str(other.getsockname()[1]))


def soon(_: Home) -> bool:
    time.sleep(0.4)
    return True


def signals(verb: str, words: tuple[str, ...]) -> list[Fault]:
    """Every signal while ranks run."""
    return [
        Fault(verb, f"{number.name} while ranks run", (-number,) if number == KILL else (128 + number,), "",
              stopped(number, words, a_rank_runs))
        for number in (INT, TERM, HUP, KILL)
    ]  # fmt: skip


FAULTS = [
    Fault("launch", "none", (0,), "FITS", run(*LAUNCH)),
    *(Fault("launch", f"{number.name} at the start", (128 + number, -number), "", stopped(number, LAUNCH, soon)) for number in (INT, TERM, KILL)),
    *signals("launch", LAUNCH),
    *signals("launch, cold ranks", (*LAUNCH, "--cold")),
    Fault("launch", "SIGKILL, then the same launch", (0,), "FITS", then(stopped(KILL, LAUNCH, a_rank_runs), nothing, run(*LAUNCH))),
    Fault("launch", "a rank takes too long", (1,), "", run(*LAUNCH, "--cold", "--timeout", "0.5")),
    Fault("launch", "the trainer fails: heads cannot be divided", (1, 2), "", run(*LAUNCH, "--", "--num-attention-heads", "7")),
    Fault("launch", "a record that cannot be made", (1, 2), "", run("launch", "train.sh", "--out", "/proc/record")),
    Fault("launch", "a script that does not exist", (2,), "missing.sh", run("launch", "missing.sh")),
    Fault("launch", "a job that does not fit, read by head", (3,), "",
          piped_into("{command} | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}", *LAUNCH, "--budget", "10M")),
    Fault("launch", "output onto a full disk", (1, 2), "", piped_into("{command} > /dev/full", *LAUNCH)),
    Fault("launch", "some ranks only", (1,), "", run(*LAUNCH, "--ranks", "0")),
    Fault("report", "result.json cut in half", (1,), "", then(run(*LAUNCH), cut("ranks/00000/result.json"), run("report", "records/r"))),
    Fault("report", "job.json cut in half", (1, 2), "", then(run(*LAUNCH), cut("job.json"), run("report", "records/r"))),
    Fault("launch", "a cold rank is killed", (1,), "1 killed", killed_below("mindspeed_dryrun.rank", "--cold")),
    Fault("warm ranks", "the process that forks ranks is killed", (0, 1), "1 killed", killed_below("warm_server")),
    *signals("sweep", SWEEP),
    Fault("sweep", "SIGKILL, then the same sweep", (0,), "", then(stopped(KILL, SWEEP, a_rank_runs), nothing, run(*SWEEP))),
    Fault("sweep", "a variant that cannot be run", (1,), "", run("sweep", "impossible.yaml", "--out", "records/r")),
    Fault("sweep", "a file that is not YAML", (2,), "is not YAML", run("sweep", "broken.yaml", "--out", "records/r")),
    *signals("search", SEARCH),
    Fault("search", "a key that does not exist", (2,), "unknown key", run("search", "unknown.yaml", "--out", "records/r")),
    *(Fault("studio", f"{number.name}", ((-number if number == KILL else 128 + number),), "The studio is at", studio(number)) for number in (INT, TERM, HUP, KILL)),
    *(Fault("studio", f"{number.name} while {what}", ((-number if number == KILL else 128 + number),), "HTTP 200, 1 running",
            busy_studio(number, path))
      for path, what in (("tries", "a try's ranks run"), ("search", "a search's ranks run")) for number in (INT, TERM, HUP, KILL)),
    Fault("studio", "a stranger without the token", (130,), "HTTP 403", studio(INT, ask=True)),
    Fault("studio", "its port is taken", (1, 2), "", studio_on_a_taken_port),
]  # fmt: skip


def prepare(home: Home) -> None:
    (home.folder / "unknown.yaml").write_text(SEARCH_FILE + "bugdet: 58G\n")
    (home.folder / "broken.yaml").write_text("script: [a\n")
    (home.folder / "impossible.yaml").write_text("script: train.sh\nproduct:\n  set:\n    TP: [2, 3]\n")
    (home.folder / "train.sh").write_text(script())
    home.before = home.files()


def inject(fault: Fault) -> dict[str, object]:
    """One line of the matrix."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(folder=Path(folder, "home"))
        prepare(home)
        status, said = fault.does(home)
        wrong = [] if status in fault.status else [f"exit status {status}: {said.strip()[-300:]}"]
        wrong += [] if fault.says in said else [f"did not say “{fault.says}”: {said.strip()[-300:]}"]
        wrong += ["a traceback"] if "Traceback (most recent" in said else []
        wrong += home.left()
        if "cut in half" not in fault.what:
            wrong += half_files(home.folder / "records")
    got = "; ".join(wrong) or f"exit status {status}, nothing left"
    return {"verb": fault.verb, "what": fault.what, "expected": fault.expected, "got": got, "held": not wrong}


def fuzz(minutes: float) -> bool:
    """Runs the fuzz test for `minutes` and keeps how many inputs each reader got; whether all held."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "fuzz.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/unit/test_fuzz_readers.py",
            "--fuzz-minutes",
            str(minutes),
            f"--junitxml={table}",
        ]
        done = subprocess.run([*command, "-o", "junit_family=xunit1"], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(table).iter("testcase"))
    inputs = {
        case.attrib["name"].partition("[")[2].rstrip("]"): int(found.attrib["value"])
        for case in cases
        if (found := case.find("properties/property")) is not None
    }
    failures = sum(case.find("failure") is not None for case in cases)
    save_figures("fuzz", {"minutes": minutes, "inputs": inputs, "failures": failures})
    return done.returncode == 0


def page() -> str:
    """docs/reliability.md."""
    read = {
        name: json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("faults", "soak", "fuzz", "classes", "points")
    }
    faults, soak, fuzz, classes = read["faults"], read["soak"], read["fuzz"], read["classes"]
    signals_sent = {name: number for name, number in soak.items() if " to " in name}
    lines = [
        "# Reliability", "",
        "Written by `python benchmarks/fault_matrix.py --page` from the figures in [docs/reliability](reliability/faults.json); do not edit.", "",
        "## Fault matrix", "",
        f"`python benchmarks/fault_matrix.py --save`: {len(faults)} faults, {sum(not item['held'] for item in faults)} failures. After each: no "
        "process left, no file written outside the record, no half-written JSON file, no traceback.", "",
        "| on | what goes wrong | expected | got |", "|---|---|---|---|",
        *(f"| {item['verb']} | {item['what']} | {item['expected']} | {item['got']} |".replace("\n", " ") for item in faults), "",
        "## Soak", "",
        f"`python benchmarks/soak.py --minutes {soak['minutes']:.0f} --save` (seed {soak['seed']}): {soak['runs']} rounds of launches, sweeps and searches in "
        f"{soak['minutes']} minutes, {soak.get('kills', 0)} kills, {len(soak['failures'])} failures.", "",
        "| signal | times |", "|---|---:|", *(f"| {name} | {number} |" for name, number in sorted(signals_sent.items())), "",
        "## Damaged files", "",
        f"`pytest tests/unit/test_fuzz_readers.py --fuzz-minutes {fuzz['minutes']}`: {sum(fuzz['inputs'].values())} inputs, "
        f"{fuzz['failures']} failures. A reader has 10 s and 1 GB for each.", "",
        "| reader | inputs |", "|---|---:|", *(f"| {name} | {number} |" for name, number in fuzz["inputs"].items()), "",
        "## Rank classes", "",
        f"`python benchmarks/class_table.py --save` runs `launch` with `--check-classes` on every rank of {len(classes)} layouts: used peaks must be equal "
        f"inside every class. They are not in {sum(bool(item['problem']) for item in classes)}. Peaks with fragments may differ; the last "
        "column but one says by how much.", "",
        "| layout | ranks | classes | used peak of each class, MB | fragments differ by, MB | equal |", "|---|---:|---:|---|---:|---|",
        *(f"| {item['layout']} | {item['ranks']} | {item.get('classes', '')} | {', '.join('/'.join(peaks) for peaks in item.get('used_mb', []))} | "
          f"{item.get('fragments_mb', '')} | {item['problem'] or 'yes'} |".replace("\n", " ") for item in classes),
        "", "## What a hostile tester found", "", "Each point and the tests that hold it.", "", "| | what | tests |", "|---:|---|---|",
        *(f"| {item['point']} | {item['what']} | {', '.join(f'`{name}`' for name in item['tests'])} |" for item in read["points"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose verb or name holds this")
    parser.add_argument("--save", action="store_true", help="keep the lines for docs/reliability.md")
    parser.add_argument("--page", action="store_true", help="write docs/reliability.md from what was saved, run nothing")
    parser.add_argument("--fuzz-minutes", type=float, default=0, help="run and keep the fuzz test instead of the matrix")
    options = parser.parse_args()
    if options.fuzz_minutes:
        return 0 if fuzz(options.fuzz_minutes) else 1
    if options.page:
        (ROOT / "docs" / "reliability.md").write_text(page(), encoding="utf-8")
        return 0
    lines = []
    for fault in FAULTS:
        if options.only in f"{fault.verb}: {fault.what}":
            lines.append(inject(fault))
            print("ok  " if lines[-1]["held"] else "FAIL", fault.verb, "|", fault.what, "|", lines[-1]["got"], flush=True)
    if options.save:
        save_figures("faults", merged("faults", lines, [(fault.verb, fault.what) for fault in FAULTS], "verb", "what"))
    return 0 if all(line["held"] for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
