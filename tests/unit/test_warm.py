"""Ranks forked from a warm server: they see what cold ones see, and end as they do. Real processes, a toy trainer."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import job_file
from test_executor_local import eventually, processes_of

from mindspeed_dryrun.launch.executors import Event, SharedPlaces
from mindspeed_dryrun.launch.executors.local import LocalExecutor
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.launch.executors.warm import Servers
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report

ROOT = Path(__file__).resolve().parents[2]

# A trainer whose arguments are a program. It prints the block as MindSpore does, when the process ends.
TRAINER = """
import atexit, fcntl, json, os, resource, signal, subprocess, sys, threading, time
from mindspeed_dryrun.rank import progress
import toy.imports
def train(n=2):
    progress.phase("building")
    for done in range(1, n + 1):
        progress.phase("iteration", done=done, total=2, memory_mb=100 * done)
def block(used=500, actual=600):
    print("Device MOC memory size: 65536M\\nMindSpore Used memory size: 61430M\\nMindSpore memory base address: 0x7f\\n"
          f"Used peak memory usage (without fragments): {used}M\\nActual peak memory usage (with fragments): {actual}M",
          file=sys.stderr, flush=True)
exec(sys.argv[1])
"""
GOOD = "atexit.register(block); train()"


class Toy:
    """Makes tasks of the toy trainer in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.imports("")
        (folder / "toy" / "__init__.py").touch()
        (folder / "toy" / "__main__.py").write_text(TRAINER)

    def imports(self, program: str) -> None:
        """What the trainer does when it is imported."""
        text = "import os, sys\nprint('the toy is imported')\n" + textwrap.dedent(program) + "\ndef load(): pass\n"
        (self.folder / "toy").mkdir(exist_ok=True)
        (self.folder / "toy" / "imports.py").write_text(text)

    def task(self, program: str = GOOD, rank: int = 0, timeout_s: float = 60, **env: str) -> RankTask:
        activation = {
            "mode": "rank",
            "rank": rank,
            "progress": f"{{record}}/ranks/{rank:05d}/progress.jsonl",
            "patches": "{record}/patches.json",
        }
        return RankTask(
            rank=rank,
            represents=(rank,),
            stage=0,
            why="",
            argv=(sys.executable, "-m", "mindspeed_dryrun.rank", "toy", textwrap.dedent(program)),
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{self.folder}:{ROOT}",
                "MS_SIMULATION_LEVEL": "1",
                "RANK_ID": str(rank),
                "MINDSPEED_DRYRUN": json.dumps(activation),
                **env,
            },
            timeout_s=timeout_s,
            iterations=2,
        )


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return a_record(tmp_path / "out")


def a_record(folder: Path) -> Path:
    made = Record.create(folder, job_file())
    made.write_json("patches.json", [])
    return made.path


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as made:
        yield made


def start_of(record: Path, rank: int = 0) -> str:
    return str(json.loads((record / "ranks" / f"{rank:05d}" / "result.json").read_text())["start"])


def log_of(record: Path, rank: int = 0) -> str:
    return (record / "ranks" / f"{rank:05d}" / "worker.log").read_text()


def server_pids() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"mindspeed_dryrun.rank.warm_server" in words and parent == os.getpid():
            found.append(int(entry.name))
    return found


SEEN = textwrap.dedent("""
    found = {
        "environment": {name: value for name, value in os.environ.items() if name != "MINDSPEED_DRYRUN_TASK"},
        "of children": subprocess.run(["env"], capture_output=True, text=True).stdout.count("RANK_ID=" + os.environ["RANK_ID"]),
        "folder": os.getcwd(), "arguments": sys.argv[:1], "path": sys.path, "python": sys.executable, "main": __name__,
        "session leader": os.getsid(0) == os.getpid(), "stdin": os.read(0, 1).decode(), "umask": os.umask(0o22),
        "same file": os.fstat(1).st_ino == os.fstat(2).st_ino, "appends": bool(fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND),
        "open": sorted(os.listdir("/proc/self/fd"))[:3], "others open": [
            os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
            if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}") and not os.readlink(f"/proc/self/fd/{n}").startswith("/proc")],
        "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in (2, 15, 1, 13, 17, 25)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": threading.active_count(),
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    }
    print("FOUND " + json.dumps(found), flush=True)
""")


def test_a_warm_rank_sees_what_a_cold_one_sees(toy: Toy, record: Path, servers: Servers) -> None:
    toy.imports("os.environ['SET_BY_IMPORTS'] = 'yes'")
    seen: list[dict[str, Any]] = []
    for rank, warm in ((0, False), (0, True), (5, True)):
        report = run_rank(toy.task(SEEN + GOOD, rank, OF_THE_RECORD="{record}"), record, servers=servers if warm else None)
        assert report and (report.status, report.used_peak_mb, report.actual_peak_mb) == ("ok", 500, 600), log_of(record, rank)
        assert start_of(record, rank) == ("warm" if warm else "cold")
        assert "the toy is imported" in log_of(record, rank)
        line = next(line for line in log_of(record, rank).splitlines() if line.startswith("FOUND "))
        seen.append(json.loads(line.removeprefix("FOUND ")))
    cold, warm_0, warm_5 = seen
    assert cold["environment"]["SET_BY_IMPORTS"] == "yes" and cold["environment"]["OF_THE_RECORD"] == str(record)
    assert cold == warm_0
    assert warm_5["environment"]["RANK_ID"] == "5" and warm_5["of children"] == 1
    assert warm_5["folder"] == str(record / "ranks" / "00005")


def test_one_server_imports_for_all_ranks(toy: Toy, record: Path) -> None:
    counter = toy.folder / "imported"
    toy.imports(f"open({str(counter)!r}, 'a').write('x')")
    LocalExecutor(jobs=2).run([toy.task(rank=rank) for rank in range(6)], record, lambda event: None)
    assert [rank.status for rank in build_report(record).ranks] == ["ok"] * 6
    assert counter.read_text() == "x" and {start_of(record, rank) for rank in range(6)} == {"warm"}
    assert eventually(lambda: not server_pids()), "the executor ends its server"


@pytest.mark.parametrize(("tasks", "cold"), [(1, False), (3, True)])
def test_cold_on_request_and_for_a_single_rank(toy: Toy, record: Path, tasks: int, cold: bool) -> None:
    LocalExecutor(jobs=2, cold=cold).run([toy.task(rank=rank) for rank in range(tasks)], record, lambda event: None)
    assert {start_of(record, rank) for rank in range(tasks)} == {"cold"}


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("train(); block(); raise ValueError('no such thing')", "ValueError: no such thing"),
        ("train(1); block()", "ended without an error after 1 of 2 iterations"),
        ("train()", "printed no memory block"),
        ("train(); block(); sys.exit(3)", "exit status 3"),
        ("train(); block(); sys.exit('a reason')", "a reason"),
        ("train(); import ctypes; ctypes.CDLL(None).puts(b'printed by C'); block(); sys.exit(2)", "printed by C"),
        ("train(1); block(); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("train(); block(); os.kill(os.getpid(), signal.SIGKILL)", "killed by the system"),
        ("train(); block(); os.abort() if len(sys.argv) > 5 else os._exit(7)", "exit status 7"),
    ],
)
def test_what_is_not_a_finished_run_is_failed(toy: Toy, record: Path, servers: Servers, program: str, error: str) -> None:
    reports = []
    for warm in (None, servers):
        reports.append(run_rank(toy.task(program), record, servers=warm))
    cold, warmed = reports
    assert start_of(record) == "warm"
    assert cold and warmed and warmed.status == "failed" and error in (warmed.error or "") + log_of(record)
    assert (cold.status, cold.error) == (warmed.status, warmed.error)


def test_threads_are_joined_and_exit_functions_called(toy: Toy, record: Path, servers: Servers) -> None:
    program = "train(); threading.Thread(target=lambda: (time.sleep(0.3), block())).start()"
    report = run_rank(toy.task(program), record, servers=servers)
    assert report and report.status == "ok" and start_of(record) == "warm"


def test_a_crash_in_the_tear_down_keeps_its_figures(toy: Toy, record: Path, servers: Servers) -> None:
    program = "atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV)); atexit.register(block); train()"
    report = run_rank(toy.task(program), record, servers=servers)
    assert report and report.status == "ok" and start_of(record) == "warm"


def test_memory_is_measured_and_the_limit_of_a_rank_holds(toy: Toy, record: Path, servers: Servers) -> None:
    hog = "hog = b'x' * (300 << 20); time.sleep(1.3);"
    report = run_rank(toy.task(hog + GOOD), record, servers=servers)
    assert report and report.status == "ok" and report.host_rss_mb and 300 < report.host_rss_mb < 500
    limited = "resource.setrlimit(resource.RLIMIT_AS, (250 << 20, 250 << 20));" + hog + GOOD
    report = run_rank(toy.task(limited), record, servers=servers)
    assert report and report.status == "failed" and "MemoryError" in (report.error or "")
    report = run_rank(toy.task(), record, servers=servers)
    assert report and report.status == "ok", "another rank's limit is not this one's"


TREE = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    subprocess.Popen(["sleep", "600"]); progress.phase("ready"); time.sleep(600)
"""


def test_time_runs_out_for_the_whole_tree(toy: Toy, record: Path, servers: Servers) -> None:
    report = run_rank(toy.task(TREE, timeout_s=1), record, servers=servers)
    assert report and report.status == "timeout" and start_of(record) == "warm"
    servers.close()
    assert eventually(lambda: processes_of(record) == [])


def test_stop_ends_the_whole_tree(toy: Toy, record: Path, servers: Servers) -> None:
    stop = threading.Event()

    def on_event(event: Event) -> None:
        if event.phase == "ready":
            stop.set()

    assert run_rank(toy.task(TREE), record, on_event, stop, servers=servers) is None
    servers.close()
    assert eventually(lambda: processes_of(record) == [])


def test_a_killed_guard_leaves_nothing_behind(toy: Toy, record: Path, servers: Servers) -> None:
    def kill_guard(event: Event) -> None:
        if event.phase == "ready" and event.kind == "progress":
            ranks = [pid for pid in processes_of(record) if Path(f"/proc/{pid}/cwd").readlink().name == "00000"]
            os.kill(min(ranks), signal.SIGKILL)  # the guard was there first

    report = run_rank(toy.task(TREE), record, kill_guard, servers=servers)
    assert report and report.status == "failed" and "guards this rank was killed" in (report.error or "")
    servers.close()
    assert eventually(lambda: processes_of(record) == [])


def test_a_rank_outlives_its_server_and_the_next_gets_another(toy: Toy, record: Path, servers: Servers) -> None:
    def kill_server(event: Event) -> None:
        if event.phase == "ready":
            for pid in server_pids():
                os.kill(pid, signal.SIGKILL)

    slow = "progress.phase('ready'); time.sleep(1.0);"
    report = run_rank(toy.task(slow + GOOD), record, kill_server, servers=servers)
    assert report and report.status == "ok" and start_of(record) == "warm"
    report = run_rank(toy.task(rank=1), record, servers=servers)
    assert report and report.status == "ok" and start_of(record, 1) == "warm" and len(server_pids()) == 1


def test_a_server_that_dies_again_and_again_is_given_up(toy: Toy, record: Path, servers: Servers) -> None:
    toy.imports("os.kill(os.getpid(), 9) if 'warm_server' in str(sys.orig_argv) else None")
    report = run_rank(toy.task(), record, servers=servers)
    assert report and report.status == "ok" and start_of(record) == "cold: its warm server ended twice without a word"


@pytest.mark.parametrize(
    ("imports", "reason"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, name='busy', daemon=True).start()", "thread 'busy'"),
        ("import _thread, time; _thread.start_new_thread(lambda: time.sleep(600), ())", "Python thread"),
        ("os.environ.get('RANK_ID')", "toy.imports reads RANK_ID"),
        ("rank = os.environ['LOCAL_RANK'] if 'LOCAL_RANK' in os.environ else 0", "toy.imports reads LOCAL_RANK"),
        ("if 'warm_server' in str(sys.orig_argv): raise ImportError('not here')", "not here"),
        (
            """
            import ctypes, mmap, platform
            loop = mmap.mmap(-1, 4096, prot=7)
            loop.write(b"\\xeb\\xfe" if platform.machine() == "x86_64" else b"\\x00\\x00\\x00\\x14")
            at = ctypes.addressof(ctypes.c_char.from_buffer(loop))
            ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_void_p()), None, ctypes.c_void_p(at), None)
            """,
            "does not come to rest",
        ),
    ],
)
def test_what_cannot_be_forked_is_started_cold_and_says_so(
    toy: Toy, record: Path, servers: Servers, imports: str, reason: str
) -> None:
    toy.imports(imports)
    events: list[Event] = []
    program = "os._exit(0) if False else None;" + GOOD.replace("train()", "train(); block(); os._exit(0)")
    report = run_rank(toy.task(program), record, events.append, servers=servers)
    assert report and report.status == "ok"
    assert start_of(record).startswith("cold: ") and reason in start_of(record)
    assert events[0].start == start_of(record)


def test_a_native_thread_that_sleeps_is_no_obstacle(toy: Toy, record: Path, servers: Servers) -> None:
    toy.imports(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.pthread_create(ctypes.byref(ctypes.c_void_p()), None, libc.pause, None)
        """
    )
    report = run_rank(toy.task("assert len(os.listdir('/proc/self/task')) == 1;" + GOOD), record, servers=servers)
    assert report and report.status == "ok" and start_of(record) == "warm", (report, start_of(record))


def own_trainer(toy: Toy, rank: int, *more: str) -> RankTask:
    """A task that runs a file, as those of a script's own trainer do."""
    (toy.folder / "own.py").write_text(TRAINER)
    task = toy.task(rank=rank)
    return RankTask(**{**task.__dict__, "argv": (*task.argv[:3], str(toy.folder / "own.py"), GOOD, *more)})


def test_the_scripts_own_trainer_is_started_cold(toy: Toy, record: Path, servers: Servers) -> None:
    report = run_rank(own_trainer(toy, 0), record, servers=servers)
    assert report and report.status == "ok" and "depends on its arguments" in start_of(record)


def test_megatrons_trainer_is_forked_with_the_framework_and_imports_the_rest_itself(
    toy: Toy, record: Path, servers: Servers
) -> None:
    imported, megatron = toy.folder / "imported", ["--micro-batch-size", "1"]
    (toy.folder / "torch.py").write_text(f"import os\nopen({str(imported)!r}, 'a').write('x')\n")
    for rank, more in enumerate(([], ["--bf16"])):
        report = run_rank(own_trainer(toy, rank, *megatron, *more), record, servers=servers)
        assert report and report.status == "ok" and start_of(record, rank) == "warm", start_of(record, rank)
        assert "the toy is imported" in log_of(record, rank)
    assert imported.read_text() == "x"


def test_other_variables_and_other_patches_get_another_server(toy: Toy, record: Path, servers: Servers) -> None:
    counter = toy.folder / "imported"
    toy.imports(f"open({str(counter)!r}, 'a').write(os.environ.get('KIND', '-'))")
    for number, kind in enumerate(("a", "a", "b", "a", "c", "b")):
        run_rank(toy.task(rank=number, KIND=kind, SHLVL=str(number)), record, servers=servers)
    assert counter.read_text() == "abcb", "two are kept, the last ones used"
    assert len(server_pids()) == 2


def test_runs_that_follow_one_another_share_a_server(toy: Toy, tmp_path: Path) -> None:
    counter = toy.folder / "imported"
    toy.imports(f"open({str(counter)!r}, 'a').write('x')")
    with SharedPlaces(2) as shared:
        for name in ("one", "two"):
            record = a_record(tmp_path / name)
            LocalExecutor(shared=shared).run([toy.task()], record, lambda event: None)
            assert start_of(record) == "warm"
    assert counter.read_text() == "x" and eventually(lambda: not server_pids())


LAUNCHER = """
import pickle, sys
from pathlib import Path
from mindspeed_dryrun.launch.executors import Interrupted
from mindspeed_dryrun.launch.executors.local import LocalExecutor
tasks = pickle.loads(Path(sys.argv[2]).read_bytes())
print("importing", flush=True)
try:
    LocalExecutor(jobs=2).run(tasks, Path(sys.argv[1]), lambda event: print(event.kind, event.phase, flush=True))
except Interrupted as error:
    sys.exit(error.exit_status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["importing", "started", "ready"])
def test_no_process_outlives_the_launcher(toy: Toy, record: Path, tmp_path: Path, number: signal.Signals, moment: str) -> None:
    toy.imports("import time; time.sleep(1)")
    file = tmp_path / "tasks"
    file.write_bytes(pickle.dumps([toy.task(TREE, rank) for rank in (0, 1)]))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(record), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert launcher.stdout
    for line in launcher.stdout:
        if moment in line:
            break
    time.sleep(0.3 if moment == "importing" else 0.05)
    assert processes_of(record)
    launcher.send_signal(number)
    assert launcher.wait(30) == (-9 if number == signal.SIGKILL else 128 + number)
    assert eventually(lambda: processes_of(record) == [])
    assert not build_report(record).ranks, "an interrupted rank must not be recorded"
