"""Reports for the tests of every view: one that fits, one that does not, one with failures and hostile text."""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.devices.real_runs import Excess
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.criteria import Criteria
from mindspeed_dryrun.record.model import Communicator, EngineSummary, JobSummary, RankReport, Report, Status
from mindspeed_dryrun.record.run_spec import JobDetails, JobFile, PlannedRank
from mindspeed_dryrun.record.summary import summarise

ARGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 28 "
    "--hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 "
    "--seq-length 10240 --max-position-embeddings 10240 --micro-batch-size 1 --global-batch-size 64 --swiglu --bf16 "
    "--use-flash-attn --padded-vocab-size 152064"
)
HOSTILE = "RuntimeError: <script>document.title='owned'</script> a|b `c` \x1b[31m\x07 ]]> &amp; \"'"
CARD = Device(name="ascend910b-64g", title="Ascend 910B (64 GB)", total_mb=62420, usable_mb=58166, source="published")
CRITERIA = Criteria(device=CARD, budget_mb=58166, excess=Excess(0.0127, 2, "published"))
ENGINE = EngineSummary("mindspore", "2.7.1", "stand-in", 1)


def rank(number: int, represents: tuple[int, ...], stage: int | None, status: str, **more: Any) -> RankReport:
    simulated = {"device_total_mb": 65536, "usable_mb": 61430} if status in ("ok", "oom") else {}
    return RankReport(rank=number, represents=represents, stage=stage, status=Status(status), **{**simulated, **more})


def job(script: str, world: int, parallel: Parallel, trainer: str, *words: str) -> JobSummary:
    return JobSummary(script=script, world_size=world, parallel=parallel, trainer=trainer, trainer_args=words)


def fits() -> Report:
    groups = (Communicator("16", "world", 4, 400), Communicator("18", "tp", 2, 400), Communicator("22", "pp", 2, 400))
    ranks = (
        rank(0, (0, 1), 0, "ok", used_peak_mb=55389, actual_peak_mb=57341, seconds=41.0, host_rss_mb=510, iterations=2,
             why="first stage: embedding and 14 layers", communicators=groups),
        rank(2, (2, 3), 1, "ok", used_peak_mb=48436, actual_peak_mb=50052, seconds=40.0, host_rss_mb=512, iterations=2,
             why="last stage: 14 layers and head", communicators=groups),
    )  # fmt: skip
    not_counted = ("operator workspace (level 1 does not ask CANN for it)",)
    described = job("examples/pretrain_qwen25_7b_32k_ms.sh", 4, Parallel(tp=2, pp=2), "embedded", *ARGS.split())
    notes = ("dropped # a comment: not an argument",)
    return summarise(described, ENGINE, ranks, CRITERIA, not_counted=not_counted, notes=notes)


def does_not_fit() -> Report:
    ranks = (
        rank(0, (0,), 0, "ok", used_peak_mb=109542, actual_peak_mb=111903, seconds=12.0, host_rss_mb=500, iterations=2),
        rank(1, (1,), 1, "ok", used_peak_mb=48436, actual_peak_mb=50052, seconds=12.0, host_rss_mb=500, iterations=2),
    )
    described = job("train.sh", 2, Parallel(pp=2, vpp=2), "script", "--bf16")
    return summarise(described, EngineSummary("mindspore", "2.7.1", "8.3.RC1", 1), ranks, CRITERIA)


def hostile() -> Report:
    ranks = (
        rank(0, (0, 2, 4, 6), 0, "ok", used_peak_mb=1000, actual_peak_mb=1100),
        rank(1, (1, 3, 5, 7), 1, "failed", error=HOSTILE, used_peak_mb=900, actual_peak_mb=950),
        rank(8, (8,), None, "timeout"),
    )
    described = job("<img src=x onerror=alert(1)>.sh", 9, Parallel(dp=9), "script", "--x", "</style><script>1</script>")
    return summarise(
        described,
        EngineSummary("mindspore", "<b>2.7.1</b>", None, 1),
        ranks,
        CRITERIA,
        not_counted=("<i>workspace</i>",),
        notes=("</pre><script>alert(2)</script>",),
    )


def logs(ranks: int) -> Report:
    """A folder of real logs: no job, every rank its own, fragments that wander."""
    found = [
        rank(number, (number,), None, "ok", used_peak_mb=50000, actual_peak_mb=51000 + number % 7, device_total_mb=62420,
             usable_mb=58178)
        for number in range(ranks)
    ]  # fmt: skip
    card = Device(name="from-logs", title="the card of these logs", total_mb=62420, usable_mb=58178, source="measured")
    return summarise(None, EngineSummary(), found, Criteria(device=card, budget_mb=58178))


SAMPLES = {"fits": fits, "does_not_fit": does_not_fit, "hostile": hostile}


def job_file(fingerprint: str = "1", plan: tuple[tuple[int, tuple[int, ...]], ...] = (), **fields: Any) -> JobFile:
    """A small job.json: `plan` is (rank, whom it stands for)."""
    tasks = tuple(PlannedRank(rank=number, represents=others, stage=number // 2, why="w") for number, others in plan)
    world = len({number for _, others in plan for number in others}) or 1
    known: dict[str, Any] = {"job": job("train.sh", world, Parallel(dp=world), "script"), "engine": ENGINE}
    known |= {"version": "0", "details": JobDetails(), "fingerprint": fingerprint, "plan": tasks}
    return JobFile(**{**known, **fields})
