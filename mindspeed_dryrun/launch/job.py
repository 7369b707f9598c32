"""A job: a launcher call, understood. What Megatron would refuse is refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.captured_call import MSRUN, TORCHRUN, CapturedCall
from mindspeed_dryrun.megatron.arguments import Arguments, override_args
from mindspeed_dryrun.megatron.checks import read_checked
from mindspeed_dryrun.megatron.flags import with_tag
from mindspeed_dryrun.megatron.layout import Batch, Layout, Parallel, StageLayers
from mindspeed_dryrun.megatron.sizes import recompute_words
from mindspeed_dryrun.record.model import JobSummary

_NOT_TRAINING = {
    "inference.py": "generates text (inference.py)",
    "evaluation.py": "evaluates a model (evaluation.py)",
    "convert_ckpt.py": "converts a checkpoint (convert_ckpt.py)",
    "convert_ckpt_v2.py": "converts a checkpoint (convert_ckpt_v2.py)",
    "preprocess_data.py": "preprocesses a data set (preprocess_data.py)",
}


FSDP2_PROGRAM = "train_fsdp2.py"


@dataclass(frozen=True, kw_only=True)
class Job:
    """World size, layout, batch and trainer of one training job."""

    script: str
    cwd: str
    program: str  # as the launcher call names it
    arguments: Arguments  # the trainer's, after overrides
    local_world_size: int  # ranks of one node
    node_sizes: tuple[int, ...] = ()  # ranks of each node, where they were called for one by one
    kind: str  # "pretrain", "sft", "lora", "dpo", …; "program" for one that is not Megatron's
    layout: Layout
    batch: Batch
    env: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)  # the script's exports
    launcher: str = MSRUN
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def back_end(self) -> str:
        """What the trainer runs on: `mindspore` below msrun, `torch` below torchrun."""
        return "torch" if self.launcher == TORCHRUN else "mindspore"

    @property
    def args(self) -> tuple[str, ...]:
        """The trainer's arguments as words."""
        return self.arguments.words

    @property
    def world_size(self) -> int:
        """All ranks of all nodes."""
        return self.layout.world_size

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        whole, rest = divmod(self.world_size, self.local_world_size)
        return self.node_sizes or (*(self.local_world_size,) * whole, *(rest,) * bool(rest))

    @property
    def parallel(self) -> Parallel:
        """The parallel sizes."""
        return self.layout.parallel

    @property
    def num_layers(self) -> int:
        """No-op layers included; 0 if the program is not Megatron's."""
        return sum(len(chunk) for stage in self.layout.stages for chunk in stage)

    @property
    def stage_layers(self) -> StageLayers:
        """[stage][chunk] → indices of the layers that are not no-ops."""
        return tuple(self.layout.real_layers(stage) for stage in range(len(self.layout.stages)))

    @property
    def micro_batch(self) -> int:
        """Samples of one microbatch."""
        return self.batch.micro

    @property
    def global_batch(self) -> int:
        """Samples of one iteration, of all ranks."""
        return self.batch.whole

    @property
    def microbatches(self) -> int:
        """Microbatches of one iteration on one rank."""
        return self.batch.microbatches

    @property
    def seq_length(self) -> int:
        """Tokens of one sample; 0 if the program is not Megatron's."""
        return self.arguments.positive("--seq-length", 1) if self.is_megatron else 0

    @property
    def recompute(self) -> str | None:
        """`full uniform 1`, `selective`, or None."""
        return recompute_words(self.arguments) if self.is_megatron else None

    @property
    def distributed_optimizer(self) -> bool:
        """Whether data-parallel ranks share out the optimizer's states."""
        return self.is_megatron and self.arguments.has("--use-distributed-optimizer")

    @property
    def is_megatron(self) -> bool:
        """Its arguments are Megatron's, so its layout is known."""
        return self.kind != "program"

    @property
    def is_fsdp2(self) -> bool:
        """It is MindSpeed-LLM's trainer for FSDP2, which takes a YAML file (`fsdp2.py`)."""
        return PurePath(self.program).name == FSDP2_PROGRAM and self.back_end == "torch"

    def summary(self, trainer: str) -> JobSummary:
        """What a report says of this job."""
        return JobSummary(
            script=self.script,
            world_size=self.world_size,
            parallel=self.parallel,
            trainer=trainer,
            trainer_args=self.args,
            back_end=self.back_end,
        )


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """A job cut short: the fewest iterations and microbatches that reach the peak of the whole one."""

    args: tuple[str, ...]  # the trainer's
    iterations: int
    microbatches: int  # per iteration


def understand(call: CapturedCall, script: str, overrides: Sequence[str] = ()) -> Job:
    """The job behind a launcher call, or a `UsageError` with the numbers and the remedy."""
    arguments = Arguments(override_args(call.program_args, overrides))
    name = PurePath(call.program).name
    if name in _NOT_TRAINING:
        raise UsageError(
            f"{script} {_NOT_TRAINING[name]}: it does not train, and a dry run counts the memory of training. "
            "Give it a pretraining or fine-tuning script."
        )
    world, kind = call.world_size, _kind(name, arguments)
    notes = [*call.notes, *(f"dropped {words}: not an argument" for words in call.dropped)]
    if not call.node_sizes and (world < call.local_world_size or world % call.local_world_size):
        notes.append(f"{world} ranks are not a multiple of the {call.local_world_size} of one node")
    if kind == "program":
        layout = Layout(world_size=world, parallel=Parallel(dp=world), stages=(), noop=frozenset())
        batch = Batch(micro=1, whole=world, microbatches=1)
    else:
        try:
            layout, batch = read_checked(arguments, world, call.node_sizes)
        except UsageError as error:
            raise UsageError(f"{script}: {error}") from None
        notes += _warnings(arguments)
    return Job(
        script=script,
        cwd=call.cwd,
        program=call.program,
        arguments=arguments,
        local_world_size=call.local_world_size,
        node_sizes=call.node_sizes,
        kind=kind,
        layout=layout,
        batch=batch,
        env=call.env,
        launcher=call.launcher,
        launcher_options=call.options,
        notes=tuple(notes),
    )


def changed(job: Job, overrides: Sequence[str]) -> Job:
    """The same job with other trainer arguments; `UsageError` where Megatron would refuse them."""
    call = CapturedCall(
        launcher=job.launcher,
        argv=(),
        cwd=job.cwd,
        options=job.launcher_options,
        world_size=job.world_size,
        local_world_size=job.local_world_size,
        node_sizes=job.node_sizes,
        program=job.program,
        program_args=job.args,
        env=job.env,
    )
    return understand(call, job.script, overrides)


def _kind(program: str, arguments: Arguments) -> str:
    if arguments.has("--qlora"):
        return "qlora"
    if arguments.has("--lora-r"):
        return "lora"
    stage = arguments.text("--stage")
    if stage:
        return stage
    if program.startswith(("posttrain", "finetune", "tune", "sft")):
        return "sft"
    if program.startswith("pretrain"):
        return "pretrain"
    return "train" if all(arguments.has(flag) for flag in with_tag("required")) else "program"


def _warnings(arguments: Arguments) -> list[str]:
    """What a careful reader of the arguments would point out."""
    notes = []
    if arguments.has("--num-experts") and not arguments.has("--moe-ffn-hidden-size"):
        ffn = arguments.text("--ffn-hidden-size")
        notes.append(f"there is no --moe-ffn-hidden-size: each expert gets the full --ffn-hidden-size {ffn}")
    if arguments.has("--num-experts"):
        notes.append(
            "experts are counted with balanced routing: every expert gets the same number of tokens. The peak is too LOW for a "
            "rank whose experts get more (--moe-load hot:2 counts twice as many)"
        )
    if arguments.has("--rampup-batch-size"):
        notes.append("--rampup-batch-size is left out: the full batch is counted")
    return notes
