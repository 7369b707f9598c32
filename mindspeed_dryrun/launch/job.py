"""A job: an msrun call, understood. What Megatron would refuse is refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_dryrun.launch.msrun_call import MsrunCall
from mindspeed_dryrun.record.model import JobSummary, Parallel


@dataclass(frozen=True)
class Job:
    """World size, layout, batch and trainer of one training job."""

    script: str
    cwd: str
    program: str  # as the msrun call names it
    args: tuple[str, ...]  # the trainer's, after overrides
    world_size: int
    local_world_size: int  # ranks of one node
    parallel: Parallel
    kind: str  # "pretrain", "sft", "lora", "dpo", …
    num_layers: int  # no-op layers included
    stage_layers: tuple[tuple[tuple[int, ...], ...], ...]  # [stage][chunk] → global indices of the layers, without no-ops
    micro_batch: int
    global_batch: int
    seq_length: int
    recompute: str | None  # "full uniform 1", "selective", None
    distributed_optimizer: bool
    env: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    msrun_argv: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        """Microbatches of one iteration on one rank."""
        return self.global_batch // (self.micro_batch * self.parallel.dp)

    def summary(self, trainer: str) -> JobSummary:
        """What a report says of this job."""
        return JobSummary(self.script, self.world_size, self.parallel, trainer, self.args)


def understand(call: MsrunCall, script: str, overrides: Sequence[str] = ()) -> Job:
    """The job behind an msrun call, or a `UsageError` with the numbers and the remedy."""
    raise NotImplementedError
