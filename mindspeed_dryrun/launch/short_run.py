"""Short runs: the fewest iterations and microbatches that reach the peak of the full run.

Two iterations: the optimizer's states appear in the first step, so only the second has all that a training step holds.
Microbatches: as many as fill the pipeline and let it turn over once.
"""

from __future__ import annotations

from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.megatron.arguments import override_args, without

ITERATIONS = 2
# Schedules whose filling is not the 1F1B one: their full count is run.
_OTHER_SCHEDULES = ("--schedules-method", "--microbatch-group-size-per-virtual-pipeline-stage", "--use-nanopipe",
                    "--optimize-send-recv-comm")  # fmt: skip
# Counted in samples or beyond the second iteration, or they end the run early, or write files.
_DROPPED = (
    "--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-warmup-iters", "--lr-decay-iters",
    "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--rampup-batch-size", "--exit-interval", "--exit-duration-in-mins",
    "--iterations-to-skip", "--skip-train", "--train-epochs",
)  # fmt: skip


def short_args(job: Job, microbatches: str = "auto") -> tuple[tuple[str, ...], int, int]:
    """(arguments, iterations, microbatches per iteration). `all` keeps the job's own number of microbatches."""
    if not job.is_megatron:
        return job.args, 0, 0
    count = job.microbatches if microbatches == "all" else min(job.microbatches, peak_microbatches(job))
    batch = count * job.micro_batch * job.parallel.dp
    args = override_args(
        without(job.args, _DROPPED),
        ["--train-iters", str(ITERATIONS), "--global-batch-size", str(batch), "--eval-iters", "0"],
    )
    return args, ITERATIONS, count


def peak_microbatches(job: Job) -> int:
    """How many microbatches reach the peak on every stage.

    1F1B: stage 0 holds PP microbatches at once; one more turns the pipeline over, so that the buffers of a backward pass
    and of the next forward pass meet as they do in a long iteration. Without a pipeline the second microbatch finds the
    gradients of the first in place. Interleaved: warm-up runs 2(PP-1) + (VPP-1)PP chunks ahead, and the count must be a
    multiple of PP; with PP alone everything would be warm-up and the peak too high. Measured on middle stages: 2 PP
    (VPP 2) and 3 PP (VPP 4) stay one buffer below the full run, 4 PP reaches it.
    """
    pp = job.parallel.pp
    if any(job.flags.has(flag) for flag in _OTHER_SCHEDULES):
        return job.microbatches
    if job.parallel.vpp:
        return 4 * pp
    return pp + 1
