"""A job: an msrun call, understood. What Megatron would refuse is refused here, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.msrun_call import MsrunCall
from mindspeed_dryrun.megatron.arguments import Flags, override_args, read_flags
from mindspeed_dryrun.record.model import JobSummary, Parallel

__all__ = ["Job", "override_args", "understand"]

_NOT_TRAINING = {
    "inference.py": "generates text (inference.py)",
    "evaluation.py": "evaluates a model (evaluation.py)",
    "convert_ckpt.py": "converts a checkpoint (convert_ckpt.py)",
    "convert_ckpt_v2.py": "converts a checkpoint (convert_ckpt_v2.py)",
    "preprocess_data.py": "preprocesses a data set (preprocess_data.py)",
}
_REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size")
# Context parallelism by a ring: what a rank holds at once depends on its place in the ring.
RING_ALGORITHMS = ("megatron_cp_algo", "hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo")


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
    kind: str  # "pretrain", "sft", "lora", "dpo", …; "program" for one that is not Megatron's
    num_layers: int  # no-op layers included; 0 if not Megatron's
    stage_layers: tuple[tuple[tuple[int, ...], ...], ...]  # [stage][chunk] → indices of the layers that are no no-ops
    micro_batch: int
    global_batch: int
    seq_length: int
    recompute: str | None  # "full uniform 1", "selective", None
    distributed_optimizer: bool
    env: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)  # the script's exports
    msrun_options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        """Microbatches of one iteration on one rank."""
        return max(1, self.global_batch // (self.micro_batch * self.parallel.dp))

    @property
    def is_megatron(self) -> bool:
        """Its arguments are Megatron's, so its layout is known."""
        return self.kind != "program"

    @cached_property
    def flags(self) -> Flags:
        """The trainer's arguments by name."""
        return read_flags(self.args)

    def summary(self, trainer: str) -> JobSummary:
        """What a report says of this job."""
        return JobSummary(self.script, self.world_size, self.parallel, trainer, self.args)


def understand(call: MsrunCall, script: str, overrides: Sequence[str] = ()) -> Job:
    """The job behind an msrun call, or a `UsageError` with the numbers and the remedy."""
    args = override_args(call.program_args, overrides)
    flags = read_flags(args)
    name = PurePath(call.program).name
    if name in _NOT_TRAINING:
        raise UsageError(
            f"{script} {_NOT_TRAINING[name]}: it does not train, and a dry run counts the memory of training. "
            "Give it a pretraining or fine-tuning script."
        )
    notes = [*call.notes, *(f"dropped {words}: not an argument" for words in call.dropped)]
    kind = _kind(name, flags)
    world = call.world_size
    if world < call.local_worker_num or world % call.local_worker_num:
        notes.append(f"--worker_num {world} is no multiple of --local_worker_num {call.local_worker_num}")
    if kind == "program":
        return Job(
            script=script, cwd=call.cwd, program=call.program, args=args, world_size=world,
            local_world_size=call.local_worker_num, parallel=Parallel(dp=world), kind=kind, num_layers=0,
            stage_layers=(), micro_batch=1, global_batch=world, seq_length=0, recompute=None,
            distributed_optimizer=False, env=call.env, msrun_options=call.options, notes=tuple(notes),
        )  # fmt: skip
    missing = [flag for flag in _REQUIRED if not flags.has(flag)]
    if missing:
        raise UsageError(f"{script}: the trainer's arguments lack {', '.join(missing)}.")
    parallel = _parallel(flags, world)
    layers = flags.positive("--num-layers", 1)
    stage_layers = _stage_layers(flags, parallel, layers)
    micro = flags.positive("--micro-batch-size", 1)
    batch = flags.positive("--global-batch-size", micro * parallel.dp)
    job = Job(
        script=script, cwd=call.cwd, program=call.program, args=args, world_size=world,
        local_world_size=call.local_worker_num, parallel=parallel, kind=kind, num_layers=layers,
        stage_layers=stage_layers, micro_batch=micro, global_batch=batch,
        seq_length=flags.positive("--seq-length", 1), recompute=_recompute(flags),
        distributed_optimizer=flags.has("--use-distributed-optimizer"), env=call.env, msrun_options=call.options,
        notes=tuple(notes + _warnings(flags)),
    )  # fmt: skip
    _check_batch(job)
    _check_model(job, flags)
    _check_sequence(job, flags)
    _check_experts(job, flags)
    _check_flags(flags)
    return job


def _kind(program: str, flags: Flags) -> str:
    if flags.has("--qlora"):
        return "qlora"
    if flags.has("--lora-r"):
        return "lora"
    stage = flags.text("--stage") if flags.values.get("--stage") else None
    if stage:
        return stage
    if program.startswith(("posttrain", "finetune", "tune", "sft")):
        return "sft"
    if program.startswith("pretrain"):
        return "pretrain"
    return "train" if all(flags.has(flag) for flag in _REQUIRED) else "program"


def _parallel(flags: Flags, world: int) -> Parallel:
    tp = flags.positive("--tensor-model-parallel-size", 1)
    pp = flags.positive("--pipeline-model-parallel-size", 1)
    cp = flags.positive("--context-parallel-size", 1)
    ep = flags.positive("--expert-model-parallel-size", 1)
    size = tp * pp * cp
    if world % size:
        more = f"use a multiple of {size} ranks" if world > size else f"it needs at least {size} ranks"
        raise UsageError(f"world size {world} is not divisible by TP {tp} × PP {pp} × CP {cp} = {size}: {more}.")
    return Parallel(tp=tp, pp=pp, dp=world // size, cp=cp, ep=ep, vpp=_virtual_stages(flags, pp))


def _virtual_stages(flags: Flags, pp: int) -> int | None:
    if flags.text("--schedules-method") == "dualpipev":
        return 2
    each = flags.number("--num-layers-per-virtual-pipeline-stage")
    stages = flags.number("--num-virtual-stages-per-pipeline-rank")
    if each is None and stages is None:
        return None
    if pp == 1:
        raise UsageError("virtual pipeline stages (VPP) need a pipeline: --pipeline-model-parallel-size is 1.")
    if each is not None and stages is not None:
        raise UsageError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other."
        )
    if stages is not None:
        return max(1, stages)
    layers, each = flags.positive("--num-layers", 1), max(1, each or 1)
    if layers % pp or layers // pp % each:
        raise UsageError(_uneven(layers, pp, each, flags))
    return layers // pp // each


def _uneven(layers: int, pp: int, each: int, flags: Flags) -> str:
    """28 layers over PP 4 with 2 layers a chunk, and the way out: no-op layers."""
    multiple = pp * each
    target = math.ceil(layers / multiple) * multiple
    lacking = target - layers
    chunks = f" with chunks of {each} layers (multiples of {multiple})" if _wants_chunks(flags) else ""
    old = [int(item) for item in (flags.text("--noop-layers") or "").split(",") if item.strip().isdigit()]
    indices = ",".join(str(index) for index in old + list(range(layers, target)))
    sentence = (
        f"{layers} layers cannot be divided over PP {pp}{chunks}: add {lacking} no-op layer{'s' if lacking > 1 else ''} "
        f"to reach {target} (-- --num-layers {target} --noop-layers {indices}; any {len(old) + lacking} indices will do)"
    )
    if not _wants_chunks(flags):
        base, extra = divmod(layers, pp)
        split = ",".join(str(base + (1 if stage >= pp - extra else 0)) for stage in range(pp))
        sentence += f", or split them unevenly (-- --num-layer-list {split})"
    return sentence + "."


def _wants_chunks(flags: Flags) -> bool:
    return flags.has("--num-layers-per-virtual-pipeline-stage") or flags.has("--num-virtual-stages-per-pipeline-rank")


def _stage_layers(flags: Flags, parallel: Parallel, layers: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[stage][chunk] → indices of real layers."""
    pp, chunks = parallel.pp, parallel.vpp or 1
    noop = _noop_layers(flags, layers)
    listed = flags.text("--num-layer-list") if flags.values.get("--num-layer-list") else None
    uneven = listed and not noop  # no-op layers switch the list off
    counts = _layer_list(listed or "", parallel, layers) if uneven else _even_or_ends(flags, pp, chunks, layers)
    order = [(stage, chunk) for chunk in range(chunks) for stage in range(pp)]
    if flags.text("--schedules-method") == "dualpipev":  # the second chunk runs back: a V
        order = [(stage, 0) for stage in range(pp)] + [(stage, 1) for stage in reversed(range(pp))]
    result: list[list[tuple[int, ...]]] = [[() for _ in range(chunks)] for _ in range(pp)]
    start = 0
    for stage, chunk in order:
        count = counts[stage] // chunks
        result[stage][chunk] = tuple(index for index in range(start, start + count) if index not in noop)
        start += count
    return tuple(tuple(chunk for chunk in stage) for stage in result)


def _noop_layers(flags: Flags, layers: int) -> set[int]:
    text = flags.text("--noop-layers") if flags.values.get("--noop-layers") else ""
    indices = set(_integers(text or "", "--noop-layers"))
    wrong = sorted(index for index in indices if not 0 <= index < layers)
    if wrong:
        raise UsageError(
            f"--noop-layers names layer {wrong[0]}, but there are layers 0 to {layers - 1}: "
            "--num-layers must count the no-op layers too."
        )
    return indices


def _layer_list(text: str, parallel: Parallel, layers: int) -> list[int]:
    counts = _integers(text, "--num-layer-list")
    if len(counts) != parallel.pp:
        raise UsageError(f"--num-layer-list {text} has {len(counts)} stages and PP is {parallel.pp}: they must agree.")
    if sum(counts) != layers:
        raise UsageError(f"--num-layer-list {text} adds up to {sum(counts)} layers and --num-layers is {layers}.")
    if parallel.pp == 1:
        raise UsageError("--num-layer-list needs a pipeline: --pipeline-model-parallel-size is 1.")
    if parallel.vpp:
        raise UsageError("--num-layer-list and virtual pipeline stages (VPP) exclude each other.")
    return counts


def _even_or_ends(flags: Flags, pp: int, chunks: int, layers: int) -> list[int]:
    first = flags.number("--decoder-first-pipeline-num-layers")
    last = flags.number("--decoder-last-pipeline-num-layers")
    if first is not None or last is not None:
        middle = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (middle and rest % middle) or (not middle and rest):
            raise UsageError(f"{rest} layers are left for {middle} stages between the first and the last: uneven.")
        counts = [rest // middle if middle else 0] * pp
        counts[0] = first if first is not None else counts[0]
        counts[-1] = last if last is not None else counts[-1]
    else:
        embedding = int(flags.has("--account-for-embedding-in-pipeline-split"))
        loss = int(flags.has("--account-for-loss-in-pipeline-split"))
        total = layers + embedding + loss
        if total % pp:
            raise UsageError(_uneven(layers, pp, 1, flags))
        counts = [total // pp] * pp
        counts[0] -= embedding
        counts[-1] -= loss
    if any(count % chunks for count in counts):
        raise UsageError(_uneven(layers, pp, chunks, flags))
    return counts


def _integers(text: str, flag: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        raise UsageError(f"{flag} wants whole numbers with commas between and got '{text}'.") from None


def _recompute(flags: Flags) -> str | None:
    granularity = flags.text("--recompute-granularity")
    if flags.has("--recompute-activations"):
        granularity = granularity or "selective"
    if granularity is None:
        return None
    method, number = flags.text("--recompute-method"), flags.text("--recompute-num-layers")
    if granularity == "full" and method is None:
        raise UsageError("--recompute-granularity full needs --recompute-method (uniform or block).")
    if granularity == "selective" and method is not None:
        raise UsageError("--recompute-granularity selective goes without --recompute-method.")
    return " ".join(word for word in (granularity, method, number) if word)


def _check_batch(job: Job) -> None:
    dp, micro, batch = job.parallel.dp, job.micro_batch, job.global_batch
    step = dp * micro
    if batch % step:
        near = [value for value in (batch // step * step, (batch // step + 1) * step) if value]
        raise UsageError(
            f"--global-batch-size {batch} is not divisible by DP {dp} × micro batch {micro} = {step}: "
            f"use {' or '.join(str(value) for value in near)}."
        )
    if job.parallel.vpp and not job.flags.has("--schedules-method"):
        group = job.flags.number("--microbatch-group-size-per-virtual-pipeline-stage", job.parallel.pp) or 1
        rest = job.microbatches % group
        if job.microbatches < group or 0 < rest < job.parallel.pp:
            raise UsageError(
                f"VPP wants the {job.microbatches} microbatches of an iteration to be a multiple of PP {job.parallel.pp}: "
                f"use --global-batch-size {math.ceil(batch / (step * group)) * step * group}."
            )


def _check_model(job: Job, flags: Flags) -> None:
    tp = job.parallel.tp
    heads, hidden = flags.positive("--num-attention-heads", 1), flags.positive("--hidden-size", 1)
    if heads % tp:
        fitting = [value for value in range(1, heads + 1) if heads % value == 0 and value <= 64]
        raise UsageError(
            f"{heads} attention heads are not divisible by TP {tp}: TP can be {', '.join(map(str, fitting))}."
        )
    if not flags.has("--kv-channels") and hidden % heads:
        raise UsageError(f"--hidden-size {hidden} is not divisible by {heads} attention heads: set --kv-channels.")
    groups = flags.number("--num-query-groups") if flags.has("--group-query-attention") else None
    if groups and groups % tp:
        raise UsageError(f"{groups} query groups (--num-query-groups) are not divisible by TP {tp}.")
    ffn = flags.number("--ffn-hidden-size")
    if ffn and ffn % tp:
        raise UsageError(f"--ffn-hidden-size {ffn} is not divisible by TP {tp}.")
    positions = flags.number("--max-position-embeddings")
    if positions is not None and positions < job.seq_length:
        raise UsageError(
            f"--seq-length {job.seq_length} is above --max-position-embeddings {positions}: raise the latter."
        )


def _check_sequence(job: Job, flags: Flags) -> None:
    tp, cp, length = job.parallel.tp, job.parallel.cp, job.seq_length
    algorithm = flags.text("--context-parallel-algo") or "megatron_cp_algo"
    if cp > 1:
        parts = cp if algorithm == "ulysses_cp_algo" else 2 * cp
        if length % parts:
            raise UsageError(f"--seq-length {length} is not divisible by {parts} (CP {cp}, {algorithm}).")
        heads = flags.positive("--num-attention-heads", 1)
        ulysses = cp if algorithm == "ulysses_cp_algo" else flags.positive("--ulysses-degree-in-cp", 1)
        if algorithm in ("ulysses_cp_algo", "hybrid_cp_algo") and heads % (ulysses * tp):
            raise UsageError(
                f"{heads} attention heads are not divisible by Ulysses {ulysses} × TP {tp} = {ulysses * tp}: "
                "lower one of them, or use --context-parallel-algo megatron_cp_algo."
            )
    if flags.has("--sequence-parallel") and tp > 1 and length // cp % tp:
        raise UsageError(f"with --sequence-parallel, --seq-length {length} / CP {cp} must be divisible by TP {tp}.")


def _check_experts(job: Job, flags: Flags) -> None:
    parallel = job.parallel
    experts = flags.number("--num-experts") or 0
    if not experts:
        if parallel.ep > 1:
            raise UsageError(f"--expert-model-parallel-size {parallel.ep} needs --num-experts.")
        return
    spread = parallel.ep * (parallel.tp if flags.has("--moe-tp-extend-ep") else 1)
    if experts % spread:
        raise UsageError(f"{experts} experts are not divisible by EP {spread}.")
    expert_tp = flags.number("--expert-tensor-parallel-size") or parallel.tp
    grid = expert_tp * parallel.ep * parallel.pp
    if flags.has("--moe-tp-extend-ep"):
        grid = parallel.tp * parallel.ep * parallel.pp
    if job.world_size % grid:
        raise UsageError(
            f"world size {job.world_size} is not divisible by expert TP {expert_tp} × EP {parallel.ep} × PP {parallel.pp} "
            f"= {grid}."
        )
    if parallel.tp > 1 and parallel.ep > 1 and not flags.has("--sequence-parallel"):
        raise UsageError("experts with both TP and EP need --sequence-parallel.")


def _check_flags(flags: Flags) -> None:
    if flags.has("--fp16") and flags.has("--bf16"):
        raise UsageError("--fp16 and --bf16 exclude each other.")
    if flags.has("--overlap-param-gather") and not flags.has("--use-distributed-optimizer"):
        raise UsageError("--overlap-param-gather works with --use-distributed-optimizer only.")
    if flags.has("--overlap-param-gather") and not flags.has("--overlap-grad-reduce"):
        raise UsageError("--overlap-param-gather needs --overlap-grad-reduce.")
    if flags.has("--train-iters") and flags.has("--train-samples"):
        raise UsageError("--train-iters and --train-samples exclude each other.")
    if flags.has("--rampup-batch-size") and flags.has("--train-iters"):
        raise UsageError("--rampup-batch-size works with --train-samples, not with --train-iters.")


def _warnings(flags: Flags) -> list[str]:
    """What a careful reader of the arguments would point out."""
    notes = []
    if flags.has("--num-experts") and not flags.has("--moe-ffn-hidden-size"):
        ffn = flags.text("--ffn-hidden-size")
        notes.append(f"there is no --moe-ffn-hidden-size: each expert gets the full --ffn-hidden-size {ffn}")
    if flags.has("--num-experts"):
        notes.append("experts are counted with balanced routing: every expert gets the same number of tokens")
    if flags.has("--rampup-batch-size"):
        notes.append("--rampup-batch-size is left out: the full batch is counted")
    return notes
