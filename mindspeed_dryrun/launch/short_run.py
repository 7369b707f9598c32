"""Short runs: the fewest iterations and microbatches that reach the peak of the full run.

Two iterations: the optimizer's states appear in the first step, so only the second has all that a training step holds.
Microbatches: as many as fill the pipeline and let it turn over once.
"""

from __future__ import annotations

from mindspeed_dryrun.launch import fsdp2
from mindspeed_dryrun.launch.job import Job, ShortRun
from mindspeed_dryrun.megatron.arguments import override_args, without
from mindspeed_dryrun.megatron.flags import with_tag

ITERATIONS = 2


def short_run(job: Job, microbatches: str = "auto") -> ShortRun:
    """How the job is run short. `all` keeps its own number of microbatches."""
    if job.is_fsdp2:
        return fsdp2.short_run(job, microbatches)
    if not job.is_megatron:
        return ShortRun(args=job.args, iterations=0, microbatches=0)
    count = job.microbatches if microbatches == "all" else min(job.microbatches, peak_microbatches(job))
    batch = count * job.micro_batch * job.parallel.dp
    args = override_args(
        without(job.args, with_tag("length")),
        ["--train-iters", str(ITERATIONS), "--global-batch-size", str(batch), "--eval-iters", "0"],
    )
    return ShortRun(args=args, iterations=ITERATIONS, microbatches=count)


def peak_microbatches(job: Job) -> int:
    """How many microbatches reach the peak on every stage.

    1F1B: stage 0 holds PP microbatches at once; one more turns the pipeline over, so that the buffers of a backward pass
    and of the next forward pass meet as they do in a long iteration. Without a pipeline the second microbatch finds the
    gradients of the first in place. Interleaved: warm-up runs 2(PP-1) + (VPP-1)PP chunks ahead, and the count must be a
    multiple of PP; with PP alone everything would be warm-up and the peak too high. Measured on middle stages: 2 PP
    (VPP 2) and 3 PP (VPP 4) stay one buffer below the full run, 4 PP reaches it.
    """
    pp = job.parallel.pp
    if job.arguments.has_any(with_tag("filling")):
        return job.microbatches
    if job.parallel.vpp:
        return 4 * pp
    return pp + 1
