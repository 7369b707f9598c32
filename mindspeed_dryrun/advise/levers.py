"""What each lever would do to the worst rank, computed from the blocks of its peak.

A lever's figure follows from the measured parts (bytes of a layer's weights, of a layer's activations, microbatches in
flight) and from what the lever does to each part; no constant is fitted. Where the rank's blocks do not tell (it gets the
head of another stage, say), search's memory model does: its difference between both jobs is added to the measured peak.
A figure speaks of the used peak of the rank that is explained; another rank may be the worst one after the change,
which is what `--try` is for.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.job import Job, changed
from mindspeed_dryrun.megatron.layout import Parallel, held_microbatches
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report.explain import STATIC, Explanation

_SELECTIVE = message("selective recomputation")
# How far search's memory model may be off the measured peak before it is not asked what a change would do.
_MODEL_HOLDS = 0.05
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A change to try. `used_peak_mb` is computed for the explained rank; None where its parts do not tell."""

    name: str
    flags: tuple[str, ...]
    used_peak_mb: int | None
    saves_mb: int | None
    why: str
    command: str


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The explained peak in the terms that levers work on, in bytes."""

    peak: int
    static: int
    optimizer: int
    layer_weight: float  # of one layer
    outside_weight: int  # embedding or head
    static_per_weight: float  # bytes of weights, gradients and optimizer per byte of weights
    in_layers: int  # activations
    outside: int
    layer_activation: int  # one layer, one microbatch
    temporary: int
    step_peak: int
    layers: int
    in_flight: int
    core_attention: int
    flash_attention: bool
    activation_function: int
    norm: int


def levers(report: Report, job: Job | None, found: Explanation | None) -> list[Lever]:
    """Levers that the job allows, the one that saves most first. Empty without a job or an explained worst rank."""
    if found is None or report.job is None or job is None or not job.is_megatron:
        return []
    rank = next((item for item in report.ranks if item.rank == found.rank), None)
    if rank is None or rank.stage is None:
        return []
    parts = _measure(found, job, rank.stage)
    if parts is None:
        return []
    result = []
    for name, flags, new_peak, why in _changes(job, parts, rank.stage, report):
        pulled = _changed(job, flags)
        if pulled is None:
            continue
        if new_peak is None:
            new_peak = _by_model(job, pulled, rank.stage, parts.peak)
        saves = None if new_peak is None else (parts.peak - int(new_peak)) // 2**20
        if saves is None or saves > 0 or name == _SELECTIVE:  # who asks for it should see that it does not help
            mb = None if new_peak is None else int(new_peak) // 2**20
            result.append(
                Lever(name=name, flags=flags, used_peak_mb=mb, saves_mb=saves, why=why, command=command(report.job.script, flags))
            )
    return sorted(result, key=lambda lever: (lever.saves_mb is None, -(lever.saves_mb or 0)))


def command(script: str, flags: Sequence[str]) -> str:
    """What to type to try it."""
    return f"mindspeed-dryrun launch {shlex.quote(script)} -- {shlex.join(flags)}"


def _changed(job: Job, flags: Sequence[str]) -> Job | None:
    """The job with the lever pulled; None where Megatron would refuse it."""
    try:
        return changed(job, flags)
    except UsageError:
        return None


def _by_model(job: Job, changed: Job, stage: int, peak: int) -> float | None:
    """The peak that search's memory model gives the rank's place after the change; None for a job it does not describe."""
    from mindspeed_dryrun.estimate.memory_model import MemoryModel
    from mindspeed_dryrun.estimate.strategy import read_strategy
    from mindspeed_dryrun.megatron.model_shape import read_shape

    try:
        shape = read_shape(job.args)
        now, new = (read_strategy(one.args, one.world_size) for one in (job, changed))
    except UsageError:
        return None
    model = MemoryModel(shape)
    there = new.pp - 1 if stage == now.pp - 1 and stage > 0 else min(stage, new.pp - 1)
    before = model.stage(now, stage)[0] * 2**20
    if abs(before / peak - 1) > _MODEL_HOLDS:
        return None
    return peak + model.stage(new, there)[0] * 2**20 - before


def _measure(found: Explanation, job: Job, stage: int) -> _Parts | None:
    sizes = {part.name: part.size_bytes for part in found.categories}
    weights = {part.name: part.size_bytes for part in found.layer_weights}
    in_layers = sum(part.size_bytes for part in found.layers if part.name.isdigit())
    layers = sum(len(chunk) for chunk in job.stage_layers[stage])
    if not layers or not sizes["weights"]:
        return None
    layer_weights = [size for name, size in weights.items() if name.isdigit()]
    modules = {part.name: part.size_bytes for part in found.modules}
    busy = found.peak_segment.phase in ("forward", "backward", "recompute")
    return _Parts(
        peak=found.peak_bytes,
        static=found.static_bytes,
        optimizer=sizes["optimizer"],
        layer_weight=sum(layer_weights) / len(layer_weights) if layer_weights else 0.0,
        outside_weight=sizes["weights"] - sum(layer_weights),
        static_per_weight=sum(sizes[name] for name in STATIC) / sizes["weights"],
        in_layers=in_layers,
        outside=sum(part.size_bytes for part in found.layers) - in_layers,
        layer_activation=found.layer_activation_bytes,
        temporary=sizes["temporary"] if busy else 0,
        step_peak=max((segment.peak_bytes for segment in found.iteration.segments if segment.phase == "step"), default=0),
        layers=layers,
        in_flight=max(1, sum(part.name.isdigit() and part.size_bytes > 2**20 for part in found.microbatches)),
        core_attention=modules["core attention"],
        flash_attention=any("FlashAttention" in part.name for part in found.operators),
        activation_function=modules["activation function"],
        norm=modules["norm"],
    )


_Change = tuple[str, tuple[str, ...], "float | None", str]


def _changes(job: Job, parts: _Parts, stage: int, report: Report) -> Iterator[_Change]:
    yield from _recomputations(job, parts)
    yield from _sharings(job, parts)
    yield from _layouts(job, parts, stage)
    if split := _uneven_split(job, parts, stage, report):
        yield split


def _recomputations(job: Job, parts: _Parts) -> Iterator[_Change]:
    flags = job.arguments
    held = parts.layers * parts.in_flight  # layers whose activations are held at once
    if not parts.in_layers or (job.recompute or "").startswith("full"):
        return
    layer_input = _hidden_bytes(job)
    full = parts.peak - parts.in_layers + held * layer_input + parts.layer_activation
    yield (
        "full recomputation",
        _FULL,
        max(full, parts.step_peak),
        f"{held} layers in flight keep their input ({layer_input / 2**20:.0f}M each) and one layer is recomputed at a time",
    )
    if job.recompute is None and parts.core_attention and not parts.flash_attention:
        output = job.seq_length * job.micro_batch * flags.positive("--hidden-size", 1) * 2
        output = output // (job.parallel.tp * job.parallel.cp)
        saved = max(0, parts.core_attention - held * output) * (1 - 1 / held)
        yield (
            _SELECTIVE,
            ("--recompute-granularity", "selective"),
            max(parts.peak - saved, parts.step_peak),
            "core attention keeps its output only",
        )
    elif job.recompute is None and parts.flash_attention:
        yield (
            _SELECTIVE,
            ("--recompute-granularity", "selective"),
            None,
            "flash attention keeps no scores that could be dropped, and its inputs are kept once more",
        )
    for name, flag, size in (
        (message("recompute the activation function"), "--recompute-activation-function", parts.activation_function),
        (message("recompute the norms"), "--recompute-norm", parts.norm),
    ):
        if size and not flags.has(flag):
            saved = size * (1 - 1 / held)
            yield name, (flag,), max(parts.peak - saved, parts.step_peak), "its output is kept for one layer at a time"


def _sharings(job: Job, parts: _Parts) -> Iterator[_Change]:
    sharers = job.parallel.dp * job.parallel.cp
    if not job.distributed_optimizer and sharers > 1:
        saved = parts.optimizer * (1 - 1 / sharers)
        yield (
            "distributed optimizer",
            ("--use-distributed-optimizer",),
            parts.peak - saved,
            f"each of {sharers} data-parallel ranks keeps 1/{sharers} of the optimizer states",
        )
    if job.micro_batch > 1:
        smaller = next(size for size in range(job.micro_batch - 1, 0, -1) if job.micro_batch % size == 0)
        moving = parts.in_layers + parts.outside + parts.temporary
        yield (
            f"micro batch {smaller}",
            ("--micro-batch-size", str(smaller)),
            max(parts.peak - moving * (1 - smaller / job.micro_batch), parts.step_peak),
            f"activations shrink to {smaller}/{job.micro_batch}",
        )


def _layouts(job: Job, parts: _Parts, stage: int) -> Iterator[_Change]:
    """Twice the TP, PP or CP, paid for by data parallelism, or by each other where there is none."""
    now = job.parallel
    if now.dp % 2 == 0:
        moves = [
            ("TP", dataclasses.replace(now, tp=2 * now.tp, dp=now.dp // 2)),
            ("PP", dataclasses.replace(now, pp=2 * now.pp, dp=now.dp // 2)),
            ("CP", dataclasses.replace(now, cp=2 * now.cp, dp=now.dp // 2)),
        ]
    else:
        moves = []
        if now.pp % 2 == 0:
            moves.append(("TP", dataclasses.replace(now, tp=2 * now.tp, pp=now.pp // 2)))
        if now.tp % 2 == 0:
            moves.append(("PP", dataclasses.replace(now, tp=now.tp // 2, pp=2 * now.pp)))
            moves.append(("CP", dataclasses.replace(now, tp=now.tp // 2, cp=2 * now.cp)))
    for what, new in moves:
        flags = _layout_flags(job, now, new)
        words = f"TP{new.tp} PP{new.pp} DP{new.dp}" + (f" CP{new.cp}" if new.cp > 1 else "")
        yield f"more {what}: {words}", flags, _with_layout(job, parts, stage, new), _layout_why(what)


def _layout_flags(job: Job, now: Parallel, new: Parallel) -> tuple[str, ...]:
    flags: list[str] = []
    for name, old, wanted in (
        ("--tensor-model-parallel-size", now.tp, new.tp),
        ("--pipeline-model-parallel-size", now.pp, new.pp),
        ("--context-parallel-size", now.cp, new.cp),
    ):
        if old != wanted:
            flags += [name, str(wanted)]
    if new.tp > 1 and now.tp == 1 and not job.arguments.has("--sequence-parallel"):
        flags.append("--sequence-parallel")
    return tuple(flags)


def _layout_why(what: str) -> str:
    return {
        "TP": message("weights, their gradients and states, and activations are cut along the hidden dimension"),
        "PP": message("a stage holds fewer layers, and the first stage more microbatches"),
        "CP": message("activations are cut along the sequence"),
    }[what]


def _with_layout(job: Job, parts: _Parts, stage: int, new: Parallel) -> float | None:
    now = job.parallel
    last = stage == now.pp - 1
    # With one stage the rank gets the other end's embedding or head, with VPP the schedule holds more: not in this
    # rank's blocks, so not computed. The same for sequence-replicated activations under more TP.
    if (new.pp == 1 and now.pp > 1) or now.vpp or not parts.layer_weight or stage not in (0, now.pp - 1):
        return None
    if new.tp != now.tp and now.tp > 1 and not job.arguments.has("--sequence-parallel"):
        return None
    shrink_tp = now.tp / new.tp
    shrink = shrink_tp * now.cp / new.cp
    layers = parts.layers * now.pp / new.pp
    microbatches = job.global_batch // (job.micro_batch * new.dp)
    in_flight = held_microbatches(new.pp, None, new.pp - 1 if last else 0, microbatches)[0]
    weights = (parts.layer_weight * layers + parts.outside_weight) * shrink_tp
    static = weights * parts.static_per_weight
    if job.distributed_optimizer:
        share = parts.optimizer / (parts.layer_weight * parts.layers + parts.outside_weight)
        static += weights * share * (now.dp * now.cp / (new.dp * new.cp) - 1)
    scale = layers / parts.layers * in_flight / parts.in_flight
    in_layers = parts.in_layers * scale * shrink
    outside = parts.outside * in_flight / parts.in_flight * shrink
    rest = parts.peak - parts.static - parts.in_layers - parts.outside - parts.temporary
    step = (parts.step_peak - parts.static) * shrink_tp + static if parts.step_peak else 0
    return max(static + in_layers + outside + parts.temporary * shrink + rest, step)


def _uneven_split(job: Job, parts: _Parts, stage: int, report: Report) -> _Change | None:
    pp = job.parallel.pp
    listed = job.arguments.has_any(("--num-layer-list", "--pipeline-model-parallel-layout"))
    if pp == 1 or job.parallel.vpp or listed or not parts.layer_weight:
        return None
    peaks = {index: peak.used_mb * 2**20 for index, peak in report.stage_peaks.items() if peak.used_mb}
    if len(peaks) != pp:
        return None
    to = min(peaks, key=lambda index: peaks[index])
    if to == stage:
        return None

    def layer_cost(at: int) -> float:
        (in_flight,) = held_microbatches(pp, None, at, job.microbatches)
        held = _hidden_bytes(job) if (job.recompute or "").startswith("full") else parts.layer_activation
        return parts.layer_weight * parts.static_per_weight + held * in_flight

    others = max((peak for index, peak in peaks.items() if index not in (stage, to)), default=0)
    best = None
    for moved in range(1, parts.layers):
        top = max(peaks[stage] - moved * layer_cost(stage), peaks[to] + moved * layer_cost(to), others)
        if best is None or top < best[1]:
            best = (moved, top)
    if best is None or best[1] >= peaks[stage]:
        return None
    counts = [sum(len(chunk) for chunk in chunks) for chunks in job.stage_layers]
    counts[stage] -= best[0]
    counts[to] += best[0]
    return (
        message(f"uneven split: {best[0]} layer{'s' if best[0] > 1 else ''} from stage {stage} to {to}"),
        ("--num-layer-list", ",".join(map(str, counts))),
        best[1],
        message(
            f"a layer costs {layer_cost(stage) / 2**20:.0f}M on stage {stage} and {layer_cost(to) / 2**20:.0f}M on stage {to}; "
            "the figure is the larger of the two stages"
        ),
    )


def _hidden_bytes(job: Job) -> int:
    """The hidden states between two layers on one rank: 2 bytes each, 4 without --bf16 and --fp16."""
    flags = job.arguments
    width = 2 if flags.has_any(("--bf16", "--fp16")) else 4
    size = job.seq_length * job.micro_batch * flags.positive("--hidden-size", 1) * width // job.parallel.cp
    return size // job.parallel.tp if flags.has("--sequence-parallel") else size
