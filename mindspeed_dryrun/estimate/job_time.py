"""How long an iteration of a job takes on a kind of hardware, without a dry run: `launch --hardware`."""

from __future__ import annotations

from pathlib import PurePath

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import read_strategy
from mindspeed_dryrun.estimate.time_model import predict_time, trust
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.mock_inputs import padded_vocabulary
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.record.model import TimeSummary


def predict_job(job: Job, hardware: Hardware) -> TimeSummary:
    """One iteration of a job, with the vocabulary and the nodes that its dry run would have."""
    if not job.is_megatron:
        raise UsageError(
            f"{job.script}: --hardware predicts the time of Megatron's trainers, and {job.program} is not one of them."
        )
    if "mamba" in PurePath(job.program).name:
        raise UsageError(f"{job.script}: the time of state-space layers (Mamba) is not modelled: leave --hardware out.")
    vocabulary, _ = padded_vocabulary(job)
    sizes = ("--padded-vocab-size", str(vocabulary), "--global-batch-size", str(job.global_batch))
    words = override_args(job.args, sizes)
    try:
        time = predict_time(words, job.world_size, hardware.in_nodes_of(job.local_world_size))
        said = trust(read_shape(words), read_strategy(words, job.world_size), hardware)
    except UsageError as error:
        raise UsageError(f"{job.script}: {error} Without --hardware the job can be dry-run all the same.") from None
    return TimeSummary(**time.to_json(), hardware=f"{hardware.name}, {said}")
