"""A Ray cluster fills the same record as this machine does, and a machine that is lost loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import job_file

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.executors import Event
from mindspeed_dryrun.launch.executors.local import LocalExecutor
from mindspeed_dryrun.launch.executors.ray import RayExecutor, bring_home, pack
from mindspeed_dryrun.launch.executors.relocate import Machine, check_same, relocated
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report

ROOT = Path(__file__).resolve().parents[2]

HERE = Machine(
    python="/here/venv/bin/python",
    package="/here/venv/lib/site-packages",
    packages="/here/cache/packages",
    version="0.1.0",
    framework="2.7.1",
    cann="stand-in",
    engine={
        "LD_LIBRARY_PATH": "/here/cann/latest/lib64",
        "PYTHONPATH": "/here/cann/latest/py",
        "ASCEND_OPP_PATH": "/here/cann/latest/opp",
        "GLOG_v": "2",
        "ONLY_HERE": "1",
    },
)
THERE = Machine(
    python="/there/bin/python3",
    package="/there/lib",
    packages="/there/packages",
    version="0.1.0",
    framework="2.7.1",
    cann="stand-in",
    engine={
        "LD_LIBRARY_PATH": "/there/cann/latest/lib64:/there/more",
        "PYTHONPATH": "/there/cann/latest/py",
        "ASCEND_OPP_PATH": "/there/cann/latest/opp",
        "GLOG_v": "2",
        "ONLY_THERE": "1",
    },
)


def test_what_belongs_to_a_machine_is_exchanged_and_the_rest_stays() -> None:
    task = RankTask(
        rank=1,
        represents=(1,),
        stage=0,
        why="",
        argv=(
            "/here/venv/bin/python",
            "-m",
            "x",
            "/shared/MindSpeed-LLM/pretrain_gpt.py",
            "/here/venv/lib/site-packages/y",
        ),
        env={
            "PATH": "/here/venv/bin:/opt/tool",
            "LD_LIBRARY_PATH": "/mine:/here/cann/latest/lib64:/last",
            "PYTHONPATH": "/shared/MindSpeed-LLM:/here/cache/packages/msa_thirdparty:/here/cache/packages:"
            "/here/venv/lib/site-packages:/here/cann/latest/py",
            "ASCEND_OPP_PATH": "/here/cann/latest/opp",
            "GLOG_v": "1",
            "ONLY_HERE": "1",
            "HOME": "/home/me",
            "OLDPWD": "/x",
            "RANK_ID": "1",
            "MINDSPEED_DRYRUN": '{"progress": "{record}/x"}',
        },
        timeout_s=1,
        iterations=2,
    )
    moved = relocated(task, HERE, THERE, {"PATH": "/usr/bin:/opt/tool", "HOME": "/home/ray", "RAY_SECRET": "x"})
    assert moved.argv == ("/there/bin/python3", "-m", "x", "/shared/MindSpeed-LLM/pretrain_gpt.py", "/there/lib/y")
    assert moved.env == {
        "PATH": "/there/bin:/opt/tool:/usr/bin",
        "LD_LIBRARY_PATH": "/mine:/there/cann/latest/lib64:/there/more:/last",
        "PYTHONPATH": "/shared/MindSpeed-LLM:/there/packages/msa_thirdparty:/there/packages:/there/lib:/there/cann/latest/py",
        "ASCEND_OPP_PATH": "/there/cann/latest/opp",
        "GLOG_v": "1",  # the plan's own choice
        "ONLY_THERE": "1",
        "HOME": "/home/ray",
        "RANK_ID": "1",
        "MINDSPEED_DRYRUN": '{"progress": "{record}/x"}',
    }


def test_a_machine_with_another_engine_is_named() -> None:
    check_same(HERE, THERE, "node7")
    other = Machine(**{**vars(THERE), "framework": "MindSpore 2.8.0"})
    with pytest.raises(DryRunError, match=r"node7 has the framework MindSpore 2\.8\.0, the launching machine"):
        check_same(HERE, other, "node7")


def test_a_folder_comes_home_whole_and_nowhere_else(tmp_path: Path) -> None:
    far, home = tmp_path / "far", tmp_path / "ranks" / "00003"
    (far / "rank_3").mkdir(parents=True)
    (far / "worker.log").write_bytes(b"\x00log" * 1000)
    (far / "rank_3" / "order.csv").write_text("a,b")
    (far / "link").symlink_to("/etc/passwd")
    home.mkdir(parents=True)
    (home / "old").write_text("of an earlier try")
    bring_home(pack(far), home)
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*")) == [
        "rank_3",
        "rank_3/order.csv",
        "worker.log",
    ]
    assert (home / "worker.log").read_bytes() == b"\x00log" * 1000
    for name in ("../evil", "/evil"):
        with pytest.raises(DryRunError, match="takes none outside"):
            bring_home({name: b""}, home)
    assert [path.name for path in home.parent.iterdir() if path.name != ".00003.incoming"] == ["00003"]


PROGRAM = """
import json, os, sys, time
config = json.loads(os.environ["MINDSPEED_DRYRUN"])
def phase(name, **fields):
    with open(config["progress"], "a") as stream:
        stream.write(json.dumps({"phase": name, **fields}) + "\\n")
assert json.load(open(config["patches"])) == ["a patch"]
phase("building")
mark = os.path.join(os.environ["SHARED"], "tries-" + os.environ["RANK_ID"])
with open(mark, "a") as stream: stream.write(os.environ["RANK_ID"] + " ")
time.sleep(float(os.environ["SECONDS_EACH"]))
for i in (1, 2): phase("iteration", done=i, total=2, memory_mb=7)
if os.environ["RANK_ID"] == "2": raise ValueError("rank 2 is no good")
open("memory_block.csv", "w").write("a,b,c")
print("Device MOC memory size: 65536M\\nMindSpore Used memory size: 61430M\\nMindSpore memory base address: 0x7f\\n"
      "Used peak memory usage (without fragments): 500M\\nActual peak memory usage (with fragments): 600M")
"""


def tasks(shared: Path, count: int = 4, seconds: float = 0.2) -> list[RankTask]:
    result = []
    for rank in range(count):
        folder = f"{{record}}/ranks/{rank:05d}"
        activation = {"mode": "rank", "progress": f"{folder}/progress.jsonl", "patches": "{record}/patches.json"}
        env = {
            "PATH": os.environ["PATH"],
            "MINDSPEED_DRYRUN": json.dumps(activation),
            "RANK_ID": str(rank),
            "SHARED": str(shared),
            "SECONDS_EACH": str(seconds),
        }
        argv = (sys.executable, "-c", PROGRAM)
        result.append(RankTask(rank=rank, represents=(rank,), stage=0, why="", argv=argv, env=env, timeout_s=120, iterations=2))
    return result


def a_record(path: Path) -> Path:
    record = Record.create(path, job_file(plan=tuple((rank, (rank,)) for rank in range(4))))
    record.write_json("patches.json", ["a patch"])
    return record.path


def seen(record: Path) -> list[tuple[Any, ...]]:
    return [(r.rank, r.status, r.error, r.used_peak_mb, r.actual_peak_mb, r.iterations) for r in build_report(record).ranks]


def names(record: Path) -> set[str]:
    return {str(path.relative_to(record)) for path in record.rglob("*") if path.is_file()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Three raylets on loopback, as Ray's own tests have them. The launcher's own has no CPUs for ranks."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mindspeed-dryrun[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / "folders").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "folders"))
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the path of a socket must be short
    monkeypatch.setenv("RAY_TMPDIR", sockets)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.machines = [made.add_node(num_cpus=2), made.add_node(num_cpus=2)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")  # one cluster at a time
def test_the_same_record_as_a_local_run(cluster: Any, tmp_path: Path) -> None:
    local, far = a_record(tmp_path / "local"), a_record(tmp_path / "far")
    LocalExecutor(jobs=2).run(tasks(tmp_path), local, lambda event: None)
    events: list[Event] = []
    RayExecutor().run(tasks(tmp_path), far, events.append)
    assert seen(far) == seen(local)
    assert seen(far)[2][1:3] == ("failed", "ValueError: rank 2 is no good")
    assert names(far) == names(local)
    assert "ranks/00000/memory_block.csv" in names(far)
    assert sorted(event.rank for event in events if event.kind == "finished") == [0, 1, 2, 3]
    assert {event.phase for event in events} >= {"building"}
    assert not list((tmp_path / "folders").glob("mindspeed-dryrun-*"))


@pytest.mark.ray
@pytest.mark.xdist_group("ray")  # one cluster at a time
def test_a_raylet_killed_in_the_middle_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    record = a_record(tmp_path / "out")
    shared = tmp_path / "shared"
    shared.mkdir()
    lost = False

    def lose_one(event: Event) -> None:
        nonlocal lost
        started = len(list(shared.glob("tries-*")))
        if not lost and event.phase == "building" and started >= 3:
            lost = True
            cluster.remove_node(cluster.machines[0], allow_graceful=False)

    RayExecutor().run(tasks(shared, seconds=4), record, lose_one)
    assert lost
    assert [(rank, status) for rank, status, *_ in seen(record)] == [(0, "ok"), (1, "ok"), (2, "failed"), (3, "ok")]
    tries = {path.name: len(path.read_text().split()) for path in shared.glob("tries-*")}
    assert eventually_no_folder(tmp_path / "folders")
    assert max(tries.values()) == 2, f"a rank of the lost machine should have been run again: {tries}"


LAUNCHER = """
import pickle, sys
from pathlib import Path
from mindspeed_dryrun.launch.executors import Interrupted
from mindspeed_dryrun.launch.executors.ray import RayExecutor
tasks = pickle.loads(Path(sys.argv[2]).read_bytes())
try:
    RayExecutor().run(tasks, Path(sys.argv[1]), lambda event: print(event.kind, event.rank, event.phase, flush=True))
except Interrupted as error:
    sys.exit(error.exit_status)
"""


@pytest.mark.ray
@pytest.mark.xdist_group("ray")  # one cluster at a time
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_on_other_machines_end_with_the_launcher(cluster: Any, tmp_path: Path, number: signal.Signals) -> None:
    record = a_record(tmp_path / "out")
    folders = tmp_path / "folders"
    file = tmp_path / "tasks"
    file.write_bytes(pickle.dumps(tasks(tmp_path, 2, seconds=600)))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(record), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
    )
    assert launcher.stdout
    for line in launcher.stdout:
        if "building" in line:
            break
    launcher.send_signal(number)
    assert launcher.wait(60) == (130 if number == signal.SIGINT else -9)
    deadline = time.monotonic() + 60
    while (left := ranks_running(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert build_report(record).ranks == ()
    assert eventually_no_folder(folders), "a machine's temporary folder must not outlive the rank"


def eventually_no_folder(folders: Path) -> bool:
    deadline = time.monotonic() + 20
    while list(folders.glob("mindspeed-dryrun-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not list(folders.glob("mindspeed-dryrun-*"))


def ranks_running(shared: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SHARED={shared}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.mark.ray
@pytest.mark.xdist_group("ray")  # one cluster at a time
def test_no_cluster_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mindspeed-dryrun[ray]'")
    assert not ray.is_initialized()
    if ray._private.services.find_gcs_addresses():
        pytest.skip("a Ray cluster of somebody else's runs on this machine")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(UsageError, match="No Ray cluster answers at 'auto'"):
        RayExecutor().run(tasks(tmp_path), a_record(tmp_path / "out"), lambda event: None)


def test_ray_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"mindspeed-dryrun\[ray\]"):
        RayExecutor().run(tasks(tmp_path), a_record(tmp_path / "out"), lambda event: None)
