"""One parallel strategy: what search chooses, how Megatron spells it, and where it puts layers and microbatches."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.model_shape import ModelShape, value_of

# Flags that a strategy decides. They are taken out of the script's arguments before the strategy's own are added.
VALUED_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers",
    "--noop-layers",
    "--num-layer-list",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--context-parallel-size",
    "--context-parallel-algo",
    "--micro-batch-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
)
SWITCHES = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--recompute-activations",
    "--enable-recompute-layers-per-pp-rank",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_RING, _ULYSSES = "megatron_cp_algo", "ulysses_cp_algo"


@dataclass(frozen=True)
class Recompute:
    """`none`, `selective` (attention only), `full` (every layer), `block` (the first `layers` of each chunk) or `stage`
    (`layers` of a stage, whose chunks take turns).

    `each` is for a `block` whose stages differ: how many layers each of them recomputes. The trainer has one number for
    all stages, so a stage with fewer gets no-op layers in front, which are recomputed in place of its own.
    """

    kind: str = "none"
    layers: int = 0
    each: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.each:
            runs = [(str(number), len(list(group))) for number, group in itertools.groupby(self.each)]
            return "block " + ",".join(f"{one}x{times}" if times > 2 else ",".join([one] * times) for one, times in runs)
        return f"{self.kind} {self.layers}" if self.kind in ("block", "stage") else self.kind


@dataclass(frozen=True)
class Strategy:
    """A layout of the model and the batch over `world` cards. `stages[s][c]` counts the real layers of chunk c."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    stages: tuple[tuple[int, ...], ...]
    recompute: Recompute = Recompute()
    sequence_parallel: bool = True
    distributed_optimizer: bool = False
    cp_algorithm: str = _RING
    noop: tuple[int, ...] | None = None  # where the no-op layers are; None: behind the real layers of their chunk

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def chunks(self) -> int:
        """Chunks of a stage: 1 without virtual pipeline stages."""
        return len(self.stages[0])

    @functools.cached_property
    def slots(self) -> int:
        """Layers of a chunk as Megatron counts them, no-op layers included: the same for every chunk."""
        if self.noop:
            return -(-(self.layers + len(self.noop)) // (self.pp * self.chunks))
        return max(max(chunks) + self._in_front(stage) for stage, chunks in enumerate(self.stages))

    @property
    def layout(self) -> Strategy:
        """The same without recomputation."""
        return replace(self, recompute=Recompute())

    @property
    def layers(self) -> int:
        return sum(sum(stage) for stage in self.stages)

    def recomputed(self, stage: int) -> tuple[int, ...]:
        """How many layers of each chunk of a stage are recomputed in full."""
        if self.recompute.each:
            return (self.recompute.each[stage],)
        return tuple(map(min, self._recomputed_slots, self.stages[stage]))

    def recomputed_noop(self, stage: int) -> tuple[int, ...]:
        """And how many no-op layers of each chunk: they compute nothing, but keep their input as a layer does."""
        return tuple(map(operator.sub, self._recomputed_slots, self.recomputed(stage)))

    @functools.cached_property
    def _recomputed_slots(self) -> tuple[int, ...]:
        kind, number, chunks = self.recompute.kind, self.recompute.layers, self.chunks
        if kind == "full":
            return (self.slots,) * chunks
        if kind == "block":
            return (min(number, self.slots),) * chunks
        if kind == "stage":
            return tuple(min(self.slots, (number - chunk + chunks - 1) // chunks) for chunk in range(chunks))
        return (0,) * chunks

    def _in_front(self, stage: int) -> int:
        """No-op layers in front of a stage's own, so that fewer of its own are recomputed."""
        each = self.recompute.each
        return self.recompute.layers - each[stage] if each and each[stage] < sum(self.stages[stage]) else 0

    @property
    def noop_layers(self) -> tuple[int, ...]:
        """Global indices (from 0) of the no-op layers."""
        if self.noop is not None:
            return self.noop
        empty: list[int] = []
        for stage, chunks in enumerate(self.stages):
            front = self._in_front(stage)
            for chunk, real in enumerate(chunks):
                first = (chunk * self.pp + stage) * self.slots
                empty += range(first, first + front)
                empty += range(first + front + real, first + self.slots)
        return tuple(sorted(empty))

    def microbatches(self, global_batch: int) -> int:
        return global_batch // (self.micro_batch * self.dp)

    def in_flight(self, stage: int, microbatches: int) -> tuple[int, ...]:
        """For each chunk of a stage, the microbatches whose activations are held when the warm-up is over.

        Megatron's schedules: 1F1B holds `pp - stage`; the interleaved one runs `2 (pp - stage - 1) + (chunks - 1) pp`
        passes before the first backward pass, in groups of `pp` microbatches a chunk, and then one more.
        """
        if self.chunks == 1:
            return (min(microbatches, self.pp - stage),)
        passes = min(microbatches * self.chunks, 2 * (self.pp - stage - 1) + (self.chunks - 1) * self.pp + 1)
        held = [0] * self.chunks
        for index in range(passes):
            held[index // self.pp % self.chunks] += 1
        return tuple(held)

    @property
    def name(self) -> str:
        """Short and unique within a search: `TP2 PP4 DP1 MBS1 VPP2 full DO`."""
        words = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        if self.cp > 1:
            words.append(f"CP{self.cp}" + ("u" if self.cp_algorithm == _ULYSSES else ""))
        words.append(f"MBS{self.micro_batch}")
        if self.chunks > 1:
            words.append(f"VPP{self.chunks}")
        counts = [sum(stage) for stage in self.stages]
        if len(set(counts)) > 1:
            words.append("[" + ",".join(map(str, counts)) + "]")
        if self.recompute.kind != "none":
            words.append(str(self.recompute).replace(" ", "-"))
        if self.distributed_optimizer:
            words.append("DO")
        if self.tp > 1 and not self.sequence_parallel:
            words.append("noSP")
        return " ".join(words)

    def arguments(self) -> tuple[str, ...]:
        """The strategy in Megatron's and MindSpeed's flags."""
        words: list[str] = []

        def add(flag: str, value: object) -> None:
            words.extend((flag, str(value)))

        add("--tensor-model-parallel-size", self.tp)
        add("--pipeline-model-parallel-size", self.pp)
        add("--micro-batch-size", self.micro_batch)
        add("--num-layers", self.layers + len(self.noop_layers))
        if self.noop_layers:
            add("--noop-layers", ",".join(map(str, self.noop_layers)))
        if self.chunks > 1:
            add("--num-layers-per-virtual-pipeline-stage", self.slots)
        if self.cp > 1:
            add("--context-parallel-size", self.cp)
            add("--context-parallel-algo", self.cp_algorithm)
        if self.recompute.kind == "selective":
            add("--recompute-granularity", "selective")
        elif self.recompute.kind != "none":
            add("--recompute-granularity", "full")
            add("--recompute-method", "uniform" if self.recompute.kind == "full" else "block")
            add("--recompute-num-layers", max(1, self.recompute.layers))
        if self.recompute.kind == "stage":
            words.append("--enable-recompute-layers-per-pp-rank")
        if self.sequence_parallel and self.tp > 1:
            words.append("--sequence-parallel")
        if self.distributed_optimizer:
            words.append("--use-distributed-optimizer")
        return tuple(words)

    def conversion_arguments(self) -> tuple[str, ...]:
        """What the weight conversion must be given so that the checkpoint has this layout."""
        words = [f"--target-tensor-parallel-size {self.tp}", f"--target-pipeline-parallel-size {self.pp}"]
        if self.chunks > 1:
            words.append(f"--num-layers-per-virtual-pipeline-stage {self.slots}")
        if self.noop_layers:
            words.append("--noop-layers " + ",".join(map(str, self.noop_layers)))
        return tuple(" ".join(words).split())


def apply(args: Sequence[str], strategy: Strategy) -> tuple[str, ...]:
    """The trainer's arguments with the strategy in place of the script's own."""
    return (*without_strategy(args), *strategy.arguments())


def without_strategy(args: Sequence[str]) -> tuple[str, ...]:
    """The trainer's arguments without the flags that a strategy decides."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip:
            skip = False
        elif word in VALUED_FLAGS:
            skip = True
        elif word not in SWITCHES and word.split("=")[0] not in VALUED_FLAGS:
            kept.append(word)
    return tuple(kept)


def read_strategy(args: Sequence[str], world: int, shape: ModelShape) -> Strategy:
    """The strategy that a trainer's arguments spell out."""

    def number(flag: str, default: int = 1) -> int:
        value = value_of(args, flag)
        if value is not None and not re.fullmatch(r"\d+", value):
            raise UsageError(f"{flag} is '{value}': a whole number is needed.")
        return int(value) if value else default

    tp, pp = number("--tensor-model-parallel-size"), number("--pipeline-model-parallel-size")
    cp = number("--context-parallel-size")
    if world % (tp * pp * cp):
        raise UsageError(f"{world} cards cannot be divided into TP {tp} × PP {pp} × CP {cp}.")
    noop = tuple(sorted({int(item) for item in (value_of(args, "--noop-layers") or "").split(",") if item.strip()}))
    total = shape.layers + len(noop)
    if value_of(args, "--num-layers-per-virtual-pipeline-stage"):
        chunks = max(1, total // pp // number("--num-layers-per-virtual-pipeline-stage"))
    else:
        chunks = number("--num-virtual-stages-per-pipeline-rank")
    stages = _stages(args, pp, chunks, total, set(noop))
    return Strategy(
        tp=tp,
        pp=pp,
        dp=world // (tp * pp * cp),
        cp=cp,
        micro_batch=number("--micro-batch-size"),
        stages=stages,
        recompute=_recompute(args, number("--recompute-num-layers"), stages, noop),
        sequence_parallel="--sequence-parallel" in args,
        distributed_optimizer="--use-distributed-optimizer" in args,
        cp_algorithm=value_of(args, "--context-parallel-algo") or _RING,
        noop=noop or None,
    )


def _recompute(
    args: Sequence[str], number: int, stages: tuple[tuple[int, ...], ...], noop: tuple[int, ...]
) -> Recompute:
    granularity = "selective" if "--recompute-activations" in args else value_of(args, "--recompute-granularity")
    if granularity != "full":
        return Recompute(granularity or "none")
    if value_of(args, "--recompute-method") != "block":
        return Recompute("full", number)
    if len(stages[0]) > 1:
        return Recompute("stage" if "--enable-recompute-layers-per-pp-rank" in args else "block", number)
    slots = (sum(map(sum, stages)) + len(noop)) // len(stages)
    firsts = range(0, slots * len(stages), slots)
    each = tuple(sum(index not in noop for index in range(first, first + min(number, slots))) for first in firsts)
    same = all(own == min(number, *layers) for own, layers in zip(each, stages, strict=True))
    return Recompute("block", number, () if same or not noop else each)


def _stages(args: Sequence[str], pp: int, chunks: int, total: int, noop: set[int]) -> tuple[tuple[int, ...], ...]:
    listed = value_of(args, "--num-layer-list")
    if listed:
        return tuple((int(item),) for item in listed.split(","))
    if total % (pp * chunks):
        raise UsageError(f"{total} layers cannot be divided into PP {pp} × {chunks} chunks.")
    slots = total // (pp * chunks)

    def real(stage: int, chunk: int) -> int:
        first = (chunk * pp + stage) * slots
        return sum(index not in noop for index in range(first, first + slots))

    return tuple(tuple(real(stage, chunk) for chunk in range(chunks)) for stage in range(pp))
