"""Executors with the real MindSpore: this machine and a Ray cluster count the same megabytes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import job_file

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine, choose_engine
from mindspeed_dryrun.launch.executors.local import LocalExecutor
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.launch.executors.ray import RayExecutor
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report, report_from_logs

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os
from mindspeed_dryrun.rank import progress
progress.phase("importing")
import mindspore
from mindspore import mint
progress.phase("building")
weights = mint.zeros((1024, 1024, 16 * (1 + int(os.environ["RANK_ID"]))), dtype=mindspore.float32)
for done in (1, 2):
    doubled = weights * 2  # the second time the first result is still there: three times the weights
    progress.iteration(done, 2)
"""


def task(engine: MindSporeEngine, rank: int = 0, program: str = PROGRAM, **env: str) -> RankTask:
    environment = engine.environment({**os.environ, "PYTHONPATH": str(ROOT)})
    activation = {"mode": "rank", "rank": rank, "progress": f"{{record}}/ranks/{rank:05d}/progress.jsonl"}
    environment |= {"RANK_ID": str(rank), "RANK_SIZE": "2", "MINDSPEED_DRYRUN": json.dumps(activation), **env}
    argv = (sys.executable, "-c", program)
    return RankTask(rank=rank, represents=(rank,), stage=rank, why="", argv=argv, env=environment, timeout_s=300, iterations=2)


def a_record(path: Path) -> Path:
    return Record.create(path, job_file(plan=((0, (0,)),))).path


def test_a_rank_of_the_real_engine(engine: MindSporeEngine, tmp_path: Path) -> None:
    record = a_record(tmp_path / "out")
    memory = []
    report = run_rank(task(engine), record, lambda event: memory.append(event.memory_mb))
    assert report and report.status == "ok", report
    assert (report.used_peak_mb, report.device_total_mb, report.usable_mb) == (3 * 64, 65536, 61430)
    assert report.host_rss_mb and 200 < report.host_rss_mb < 2000
    assert 3 * 64 in memory
    # the same figures from the log alone
    log = record / "ranks" / "00000" / "worker.log"
    log.rename(log.with_name("worker_0.log"))
    assert report_from_logs(log.parent).ranks[0].used_peak_mb == 3 * 64


def test_an_error_of_the_real_engine_is_named(engine: MindSporeEngine, tmp_path: Path) -> None:
    report = run_rank(task(engine, program=PROGRAM + "mint.matmul(weights, mint.zeros((3, 3)))"), a_record(tmp_path / "out"))
    assert report and report.status == "failed"
    assert report.error and report.error.startswith("RuntimeError: For 'MatMulExt'")
    assert report.used_peak_mb, "the block is printed all the same, which is why it decides nothing"


def test_a_log_with_info_lines_gives_the_same_figures(engine: MindSporeEngine, tmp_path: Path) -> None:
    report = run_rank(task(engine, GLOG_v="1"), a_record(tmp_path / "out"))
    assert report and (report.status, report.used_peak_mb, report.error) == ("ok", 3 * 64, None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mindspeed-dryrun[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_cluster_counts_the_same(cluster: Any, tmp_path: Path) -> None:
    engine = choose_engine()
    tasks = [task(engine, rank) for rank in (0, 1)]
    local, far = a_record(tmp_path / "local"), a_record(tmp_path / "far")
    LocalExecutor(1).run(tasks, local, lambda event: None)
    RayExecutor().run(tasks, far, lambda event: None)
    figures = [
        [(rank.rank, rank.status, rank.used_peak_mb, rank.actual_peak_mb, rank.iterations) for rank in build_report(record).ranks]
        for record in (local, far)
    ]
    assert figures[0] == figures[1]
    assert [(rank, status, used) for rank, status, used, *_ in figures[1]] == [(0, "ok", 3 * 64), (1, "ok", 3 * 128)]


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_sweep_fans_out_over_a_cluster(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Variants and their ranks run on the cluster's machines; the table is the local one's."""
    script, plan = tmp_path / "train.sh", tmp_path / "sweep.yaml"
    (tmp_path / "trainer.py").write_text(PROGRAM.replace("RANK_ID", "N"))
    script.write_text("N=0\nexport N\nmsrun --worker_num 1 --local_worker_num 1 trainer.py\n")
    plan.write_text(json.dumps({"script": "train.sh", "variants": [{"name": f"N={n}", "set": {"N": n}} for n in (1, 2)]}))
    found = {}
    for executor in ("local", "ray"):
        assert main(["sweep", str(plan), "--out", str(tmp_path / executor), "--executor", executor, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["variants"]
        found[executor] = [(row["name"], row["status"], row["used_peak_mb"]) for row in rows]
    assert found["local"] == found["ray"] == [("N=1", "ok", 3 * 128), ("N=2", "ok", 3 * 192)]
