"""Reports for the tests of every view: one that fits, one that does not, one with failures and hostile text."""

from __future__ import annotations

from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.model import EngineSummary, JobSummary, RankReport, Report

ARGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 28 "
    "--hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 "
    "--seq-length 10240 --max-position-embeddings 10240 --micro-batch-size 1 --global-batch-size 64 --swiglu --bf16 "
    "--use-flash-attn --padded-vocab-size 152064"
)
HOSTILE = "RuntimeError: <script>document.title='owned'</script> a|b `c` \x1b[31m\x07 ]]> &amp; \"'"


def fits() -> Report:
    return Report(
        job=JobSummary(
            "examples/pretrain_qwen25_7b_32k_ms.sh", 4, Parallel(tp=2, pp=2), "embedded", tuple(ARGS.split())
        ),
        engine=EngineSummary("2.7.1", "stand-in", 1),
        device_total_mb=65536,
        device_usable_mb=61430,
        budget_mb=61430,
        ranks=(
            RankReport(
                0,
                (0, 1),
                0,
                "ok",
                None,
                55389,
                57341,
                41.0,
                510,
                65536,
                61430,
                2,
                "first stage: embedding and 14 layers",
            ),
            RankReport(
                2, (2, 3), 1, "ok", None, 48436, 50052, 40.0, 512, 65536, 61430, 2, "last stage: 14 layers and head"
            ),
        ),
        worst_rank=0,
        used_peak_mb=55389,
        actual_peak_mb=57341,
        fits=True,
        not_counted=(
            "operator workspace (level 1 does not ask CANN for it)",
            "HCCL buffers beyond the engine's reserve",
        ),
        notes=("dropped # a comment: not an argument",),
    )


def does_not_fit() -> Report:
    ranks = (
        RankReport(0, (0,), 0, "oom", None, 109542, 111903, 12.0, 500, 65536, 61430, 2),
        RankReport(1, (1,), 1, "ok", None, 48436, 50052, 12.0, 500, 65536, 61430, 2),
    )
    job = JobSummary("train.sh", 2, Parallel(pp=2, vpp=2), "script", ("--bf16",))
    return Report(
        job=job,
        engine=EngineSummary("2.7.1", "8.3.RC1", 1),
        device_total_mb=65536,
        device_usable_mb=61430,
        budget_mb=61430,
        ranks=ranks,
        worst_rank=0,
        used_peak_mb=109542,
        actual_peak_mb=111903,
        fits=False,
    )


def hostile() -> Report:
    ranks = (
        RankReport(0, (0, 2, 4, 6), 0, "ok", None, 1000, 1100),
        RankReport(1, (1, 3, 5, 7), 1, "failed", HOSTILE, 900, 950),
        RankReport(8, (8,), None, "timeout", None),
    )
    job = JobSummary(
        "<img src=x onerror=alert(1)>.sh", 9, Parallel(dp=9), "script", ("--x", "</style><script>1</script>")
    )
    return Report(
        job=job,
        engine=EngineSummary("<b>2.7.1</b>", None, 1),
        device_total_mb=65536,
        device_usable_mb=61430,
        budget_mb=61430,
        ranks=ranks,
        worst_rank=0,
        used_peak_mb=1000,
        actual_peak_mb=1100,
        fits=None,
        not_counted=("<i>workspace</i>",),
        notes=("</pre><script>alert(2)</script>",),
    )


def logs(ranks: int) -> Report:
    """A folder of real logs: no job, every rank its own, fragments that wander."""
    found = tuple(RankReport(rank, (rank,), None, "ok", None, 50000, 51000 + rank % 7) for rank in range(ranks))
    return Report(
        job=None,
        engine=EngineSummary(None, None, None),
        device_total_mb=62420,
        device_usable_mb=58178,
        budget_mb=58178,
        ranks=found,
        worst_rank=6,
        used_peak_mb=50000,
        actual_peak_mb=51006,
        fits=True,
    )


SAMPLES = {"fits": fits, "does_not_fit": does_not_fit, "hostile": hostile}
