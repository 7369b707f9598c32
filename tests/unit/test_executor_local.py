"""Ranks are run, watched, ended as whole trees and judged honestly. Real processes, small programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from report_samples import job_file

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.executors import Event, Interrupted, get_executor, host
from mindspeed_dryrun.launch.executors.local import LocalExecutor, may_start
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, os, sys, time, signal, subprocess
config = json.loads(os.environ["MINDSPEED_DRYRUN"])
def phase(name, **fields):
    with open(config["progress"], "a") as stream:
        stream.write(json.dumps({"phase": name, **fields}) + "\\n")
def train(n=2):
    phase("importing"); phase("building")
    for i in range(n):
        phase("iteration", done=i + 1, total=2, memory_mb=100 * (i + 1))
def block(used=500, actual=600):
    print("Device MOC memory size: 65536M\\nMindSpore Used memory size: 61430M\\nMindSpore memory base address: 0x7f\\n"
          f"Used peak memory usage (without fragments): {used}M\\nActual peak memory usage (with fragments): {actual}M",
          file=sys.stderr, flush=True)
"""


def task(program: str, rank: int = 0, timeout_s: float = 60, iterations: int = 2) -> RankTask:
    activation = {"mode": "rank", "progress": f"{{record}}/ranks/{rank:05d}/progress.jsonl"}
    return RankTask(
        rank=rank,
        represents=(rank,),
        stage=0,
        why="",
        argv=(sys.executable, "-c", PRELUDE + textwrap.dedent(program)),
        env={"PATH": os.environ["PATH"], "MINDSPEED_DRYRUN": json.dumps(activation)},
        timeout_s=timeout_s,
        iterations=iterations,
    )


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Record.create(tmp_path / "out", job_file()).path


def processes_of(record: Path) -> list[int]:
    """Processes that work in the record, or were told of it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.name != str(os.getpid()) and (
                str(record).encode() in (entry / "environ").read_bytes()
                or str(entry.joinpath("cwd").readlink()).startswith(str(record))
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def eventually(condition, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_good_rank_is_ok_with_its_figures_and_measured(record: Path) -> None:
    events: list[Event] = []
    report = run_rank(task("train(); block(); hog = b'x' * (80 << 20); time.sleep(1.3)"), record, events.append)
    assert report and (report.status, report.error) == ("ok", None)
    assert (report.used_peak_mb, report.actual_peak_mb, report.device_total_mb, report.usable_mb) == (
        500,
        600,
        65536,
        61430,
    )
    assert report.iterations == 2 and report.seconds and report.seconds > 1.2
    assert report.host_rss_mb and 80 < report.host_rss_mb < 200
    folder = record / "ranks" / "00000"
    result = json.loads((folder / "result.json").read_text())
    assert result["exit_status"] == 0 and result["signal"] is None and result["cpu_seconds"] > 0
    assert "Actual peak" in (folder / "worker.log").read_text()
    assert [event.kind for event in (events[0], events[-1])] == ["started", "finished"]
    assert any(event.phase == "iteration" and event.done == 2 and event.memory_mb == 200 for event in events)
    assert any(event.host_rss_mb for event in events)


def test_stdout_and_stderr_share_the_log_and_the_folder_is_the_ranks_own(record: Path) -> None:
    run_rank(task("print('on stdout'); print(os.getcwd(), file=sys.stderr); print(os.getsid(0) == os.getpid())"), record)
    text = (record / "ranks" / "00000" / "worker.log").read_text()
    assert "on stdout" in text and str(record / "ranks" / "00000") in text and "True" in text


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("train(); raise ValueError('no such thing')", "ValueError: no such thing"),
        ("train(); block(); raise ValueError('after the block')", "ValueError: after the block"),
        ("train(1); block()", "ended without an error after 1 of 2 iterations"),
        ("train(0); block()", "after 0 of 2 iterations"),
        ("train()", "printed no memory block"),
        ("train(); print('Device MOC memory size: 65536M')", "ends inside the memory block"),
        ("train(); block(); sys.exit(3)", "exit status 3"),
        ("train(1); block(); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("train(); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("train(); block(); os.kill(os.getpid(), signal.SIGKILL)", "killed by the system"),
        ("train(); print('[ERROR] ME(1,2,python): it broke'); sys.exit(1)", "[ERROR] ME(1,2,python): it broke"),
        (
            "train(); print('Traceback (most recent call last):\\n  File\\nOSError: first', flush=True); block(); "
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "OSError: first",
        ),
    ],
)
def test_what_is_not_a_finished_run_is_failed_and_says_why(record: Path, program: str, error: str) -> None:
    report = run_rank(task(program), record)
    assert report and report.status == "failed"
    assert report.error and error in report.error


@pytest.mark.parametrize("crash", ["os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(139)", "os.abort()"])
def test_a_crash_in_the_tear_down_is_ok_with_a_note(record: Path, crash: str) -> None:
    report = run_rank(task(f"train(); block(); {crash}"), record)
    assert report and report.status == "ok" and report.used_peak_mb == 500
    assert any("tear-down" in note for note in build_report(record).notes)


def test_a_command_that_is_not_there_is_failed(record: Path) -> None:
    missing = dataclasses.replace(task(""), argv=("/no/such/python",))
    report = run_rank(missing, record)
    assert report and report.status == "failed" and "cannot run /no/such/python" in (report.error or "")


def test_a_rank_that_hangs_is_ended_with_its_whole_tree(record: Path) -> None:
    program = """
        train(1)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:                      # forks twice, changes its session, drops its environment
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """
    report = run_rank(task(program, timeout_s=2.5), record)
    assert report and report.status == "timeout"
    assert report.error == "timed out after 2.5 s in phase 'iteration', 1 of 2 iterations done"
    assert processes_of(record) == []


def test_what_a_good_rank_leaves_running_is_ended(record: Path) -> None:
    report = run_rank(task("train(); subprocess.Popen(['sleep', '600'], start_new_session=True); block()"), record)
    assert report and report.status == "ok" and report.seconds and report.seconds < 30
    assert processes_of(record) == []


def test_a_killed_guard_leaves_nothing_behind(record: Path) -> None:
    program = "train(1); subprocess.Popen(['sleep', '600'], start_new_session=True); phase('ready'); time.sleep(600)"

    def kill_guard(event: Event) -> None:
        if event.phase == "ready":
            children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)

    report = run_rank(task(program), record, kill_guard)
    assert report and report.status == "failed" and "guards this rank was killed" in (report.error or "")
    assert eventually(lambda: processes_of(record) == [])


def test_stopping_a_rank_records_nothing(record: Path) -> None:
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    assert run_rank(task("train(); block(); time.sleep(600)"), record, stop=stop) is None
    assert not (record / "ranks" / "00000" / "result.json").exists()
    assert processes_of(record) == []


def test_a_record_path_with_odd_characters_reaches_the_rank(tmp_path: Path) -> None:
    record = Record.create(tmp_path / 'a "quoted" {path} \\ ü', job_file()).path
    report = run_rank(task("train(); block()"), record)
    assert report and report.status == "ok"


def test_one_that_fails_does_not_stop_the_others(record: Path) -> None:
    programs = ["train(); block()", "raise ValueError('x')", "time.sleep(600)", "train(); block(700, 62000)"]
    tasks = [task(program, rank, timeout_s=60 if rank != 2 else 2) for rank, program in enumerate(programs)]
    events: list[Event] = []
    LocalExecutor(jobs=4).run(tasks, record, events.append)
    report = build_report(record)
    assert [rank.status for rank in report.ranks] == ["ok", "failed", "timeout", "oom"]
    assert (report.worst_rank, report.actual_peak_mb, report.fits) == (3, 62000, False)
    assert sorted(event.rank for event in events if event.kind == "finished") == [0, 1, 2, 3]


def test_jobs_bounds_how_many_run_at_once(record: Path) -> None:
    running, most = set(), 0

    def count(event: Event) -> None:
        nonlocal most
        (running.discard if event.kind == "finished" else running.add)(event.rank)
        most = max(most, len(running))

    LocalExecutor(jobs=2).run([task("train(); block(); time.sleep(.3)", rank) for rank in range(5)], record, count)
    assert most == 2
    assert len(build_report(record).ranks) == 5


def test_memory_bounds_how_many_run_at_once() -> None:
    assert may_start({}, expected_mb=600, available_mb=100)  # one always runs
    assert may_start({0: 600}, expected_mb=600, available_mb=600)
    assert not may_start({0: 100}, expected_mb=600, available_mb=1000)  # rank 0 will take 500 more
    assert may_start({0: 100, 1: 500}, expected_mb=600, available_mb=1200)
    assert not may_start({0: 100, 1: 500}, expected_mb=600, available_mb=1199)


def test_little_memory_means_one_rank_after_the_other(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_mb", lambda: 20)
    running, most = set(), 0

    def count(event: Event) -> None:
        nonlocal most
        (running.discard if event.kind == "finished" else running.add)(event.rank)
        most = max(most, len(running))

    LocalExecutor(jobs=8).run([task("train(); block(); hog = b'x' * (50 << 20)", rank) for rank in range(3)], record, count)
    assert most == 1


def test_the_machine_has_cores_and_memory() -> None:
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < host.available_mb() < 1 << 30


def test_wrong_executors_are_refused() -> None:
    with pytest.raises(UsageError, match="no executor 'slurm'"):
        get_executor("slurm", None)
    with pytest.raises(UsageError, match="--jobs 0"):
        get_executor("local", 0)


def test_two_launches_do_not_run_the_same_rank(record: Path) -> None:
    with Record(record).claimed([3]):
        LocalExecutor(jobs=1).run([task("train(); block()", 1)], record, lambda event: None)
        with pytest.raises(DryRunError, match="Another launch is running rank 3"):
            LocalExecutor(jobs=1).run([task("train(); block()", 3)], record, lambda event: None)
    assert [rank.rank for rank in build_report(record).ranks] == [1]


@pytest.mark.parametrize("killed", [False, True])
def test_a_temporary_record_does_not_outlive_its_launcher(tmp_path: Path, killed: bool) -> None:
    file = tmp_path / "task"
    file.write_bytes(pickle.dumps(task("phase('ready'); time.sleep(600)" if killed else "train(); block()")))
    program = """
        import os, pickle, sys
        from pathlib import Path
        from mindspeed_dryrun.launch.executors.rank import run_rank
        from mindspeed_dryrun.temporary import temporary_folder
        os.environ["TMPDIR"] = sys.argv[1]
        with temporary_folder() as folder:
            task = pickle.loads(Path(sys.argv[2]).read_bytes())
            report = run_rank(task, folder, lambda event: print(event.phase, flush=True), leave=True)
            print(report.status, (folder / "ranks/00000/result.json").exists(), flush=True)
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert launcher.stdout
    if killed:
        for line in launcher.stdout:
            if line == "ready\n":
                break
        launcher.kill()
    else:
        assert "ok True" in launcher.stdout.read()
    launcher.wait(30)
    assert eventually(lambda: not list(tmp_path.glob("mindspeed-dryrun-*")) and not processes_of(tmp_path))


LAUNCHER = """
import os, pickle, sys
from pathlib import Path
from mindspeed_dryrun.launch.executors import Interrupted
from mindspeed_dryrun.launch.executors.local import LocalExecutor
tasks = pickle.loads(Path(sys.argv[2]).read_bytes())
try:
    LocalExecutor(jobs=2).run(tasks, Path(sys.argv[1]), lambda event: print(event.kind, event.rank, event.phase, flush=True))
except Interrupted as error:
    print(error)
    sys.exit(error.exit_status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["started 1", "importing", "ready"])
def test_no_process_outlives_the_launcher(record: Path, tmp_path: Path, number: signal.Signals, moment: str) -> None:
    slow = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
        phase("importing"); time.sleep(0.5)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os._exit(0)
        subprocess.Popen(["sleep", "600"]); phase("ready"); block(); time.sleep(600)
    """
    tasks = [task("train(); block()", 0), task(slow, 1), task(slow, 2), task("train(); block()", 3)]
    file = tmp_path / "tasks"
    file.write_bytes(pickle.dumps(tasks))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(record), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert launcher.stdout
    for line in launcher.stdout:
        if moment in line and line.split()[1] == "1":
            break
    time.sleep(0.05)
    os.kill(launcher.pid, number)
    rest = launcher.stdout.read()
    status = launcher.wait(30)
    assert status == (-9 if number == signal.SIGKILL else 128 + number)
    assert eventually(lambda: processes_of(record) == [])
    assert "Interrupted" in rest or number == signal.SIGKILL
    statuses = {rank.rank: rank.status for rank in build_report(record).ranks}
    assert set(statuses) <= {0} and set(statuses.values()) <= {"ok"}, "an interrupted rank must not be recorded"


def test_interrupted_carries_the_shells_exit_status() -> None:
    assert Interrupted(signal.SIGINT).exit_status == 130
    assert Interrupted(signal.SIGTERM).exit_status == 143


def test_resume_runs_what_is_missing(record: Path) -> None:
    tasks = [task("train(); block()", 0), task("raise ValueError('x')", 1)]
    LocalExecutor(1).run(tasks, record, lambda event: None)
    assert Record(record).ranks_done() == {0}
    LocalExecutor(1).run([task("train(); block()", 1)], record, lambda event: None)
    assert Record(record).ranks_done() == {0, 1}


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("raise UsageError('--use-something is not modelled.')", "--use-something is not modelled."),
        (
            "try:\n    patcher._drift({'name': 'p', 'target': 'm:f'}, 'gone')\nfinally:\n    raise KeyError('x')",
            "Patch p: target m:f is gone",
        ),
    ],
)
def test_a_sentence_of_ours_reaches_the_table(record: Path, tmp_path: Path, program: str, sentence: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"from mindspeed_dryrun.errors import UsageError\nfrom mindspeed_dryrun.rank import patcher\n{program}\n")
    activation = {"mode": "rank", "progress": "{record}/ranks/00000/progress.jsonl", "scratch": "{record}/ranks/00000/scratch"}
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "MS_SIMULATION_LEVEL": "1",
        "MINDSPEED_DRYRUN": json.dumps(activation),
    }
    rank = dataclasses.replace(task(""), argv=(sys.executable, "-m", "mindspeed_dryrun.rank", str(file)), env=environ)
    report = run_rank(rank, record)
    assert report and report.status == "failed" and sentence in (report.error or "")
