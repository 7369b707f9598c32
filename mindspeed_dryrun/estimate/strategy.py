"""One parallel strategy: what search chooses, how Megatron spells it, and where it puts layers and microbatches."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_dryrun.estimate.operators import sequence_pieces
from mindspeed_dryrun.megatron.arguments import Arguments, pairs, without
from mindspeed_dryrun.megatron.flags import with_tag
from mindspeed_dryrun.megatron.layout import RING, ULYSSES, Layout, held_microbatches, read_layout
from mindspeed_dryrun.megatron.sizes import recompute_granularity

HYBRID = ("hybrid_cp_algo", "hybrid_adaptive_cp_algo")
# Megatron's own default (core/transformer/transformer_config.py, moe_token_dispatcher_type).
# `moe_token_dispatcher_type`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/transformer_config.py#L421
DEFAULT_DISPATCHER = "allgather"
# MindSpeed's first dispatcher by exchange: experts are spread over data- and context-parallel ranks.
# `MoEAlltoAllSEQTokenDispatcher`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/moe/legacy_a2a_token_dispatcher.py#L22
OLD_DISPATCHER = "alltoall_seq"


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


_NOTHING = Recompute()


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A layout of the model and the batch over `world` cards. `stages[s][c]` counts the real layers of chunk c."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    stages: tuple[tuple[int, ...], ...]
    recompute: Recompute = _NOTHING
    sequence_parallel: bool = True
    distributed_optimizer: bool = False
    cp_algorithm: str = RING
    noop: tuple[int, ...] | None = None  # where the no-op layers are; None: behind the real layers of their chunk
    ulysses: int = 1  # of a hybrid: ranks of a context-parallel group that exchange heads; the rest is a ring
    ep: int = 1  # ranks that the experts are spread over
    etp: int = 0  # ranks that share one expert; 0: there are no experts
    dispatcher: str = ""  # how tokens reach their experts
    options: tuple[str, ...] = ()  # more trainer arguments, chosen with the rest
    dualpipe: bool = False  # two chunks a stage, the second one back: DualPipeV

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * max(1, self.etp)))

    @property
    def heads_exchanged(self) -> int:
        """Ranks that exchange heads (Ulysses)."""
        return self.cp if self.cp_algorithm == ULYSSES else self.ulysses if self.cp_algorithm in HYBRID else 1

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
        return self if self.recompute == _NOTHING else replace(self, recompute=_NOTHING)

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
                first = self.position(stage, chunk) * self.slots
                empty += range(first, first + front)
                empty += range(first + front + real, first + self.slots)
        return tuple(sorted(empty))

    def position(self, stage: int, chunk: int) -> int:
        """Which piece of the model a chunk is, from the embedding on."""
        return chunk * self.pp + (self.pp - 1 - stage if self.dualpipe and chunk else stage)

    @property
    def head_stage(self) -> int:
        """The stage with the output layer: where a V comes back, it is the first."""
        return 0 if self.dualpipe else self.pp - 1

    def positions(self) -> list[tuple[int, int]]:
        """(stage, chunk) from the embedding to the output layer."""
        pieces = ((stage, chunk) for stage in range(self.pp) for chunk in range(self.chunks))
        return sorted(pieces, key=lambda piece: self.position(*piece))

    def microbatches(self, global_batch: int) -> int:
        return global_batch // (self.micro_batch * self.dp)

    def tokens(self, seq: int) -> float:
        """Of one microbatch on a rank of the context-parallel group, before tensor parallelism."""
        return self.micro_batch * seq / self.cp

    @functools.cached_property
    def _pieces(self) -> int:
        return sequence_pieces(Arguments(self.options))

    def in_flight(self, stage: int, microbatches: int) -> tuple[float, ...]:
        """For each chunk of a stage, the microbatches whose activations are held when the warm-up is over."""
        if self._pieces > 1 and self.chunks == 1:
            return (min(microbatches, (self._pieces + self.pp - stage - 1) / self._pieces),)
        if self.dualpipe:
            # Before the first backward pass: 2 (pp - stage - 1) passes of the first chunk, then stage + 1 of both
            # (MindSpeed, core/pipeline_parallel/dualpipev/dualpipev_schedules.py).
            # `forward_backward_pipelining_with_cutinhalf`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/pipeline_parallel/dualpipev/dualpipev_schedules.py#L734
            return min(microbatches, 2 * self.pp - stage - 1), min(microbatches, stage + 1)
        return held_microbatches(self.pp, self.chunks if self.chunks > 1 else None, stage, microbatches)

    @property
    def name(self) -> str:
        """Short and unique within a search: `TP2 PP4 DP1 MBS1 VPP2 full DO`."""
        words = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        if self.cp > 1:
            hybrid = f"h{self.ulysses}" if self.cp_algorithm in HYBRID else ""
            words.append(f"CP{self.cp}" + ("u" if self.cp_algorithm == ULYSSES else hybrid))
        if self.ep > 1:
            words.append(f"EP{self.ep}")
        if self.etp > 1:
            words.append(f"ETP{self.etp}")
        if self.dispatcher:
            words.append(self.dispatcher)
        words.append(f"MBS{self.micro_batch}")
        if self.chunks > 1:
            words.append("DualPipeV" if self.dualpipe else f"VPP{self.chunks}")
        counts = [sum(stage) for stage in self.stages]
        if len(set(counts)) > 1:
            words.append("[" + ",".join(map(str, counts)) + "]")
        if self.recompute.kind != "none":
            words.append(str(self.recompute).replace(" ", "-"))
        if self.distributed_optimizer:
            words.append("DO")
        if self.tp > 1 and not self.sequence_parallel:
            words.append("noSP")
        words += [word.removeprefix("--") for word in self.options]
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
        if self.dualpipe:
            add("--schedules-method", "dualpipev")
        elif self.chunks > 1:
            add("--num-layers-per-virtual-pipeline-stage", self.slots)
        if self.cp > 1:
            add("--context-parallel-size", self.cp)
            add("--context-parallel-algo", self.cp_algorithm)
        if self.cp > 1 and self.cp_algorithm in HYBRID:
            add("--ulysses-degree-in-cp", self.ulysses)
        words += self._expert_arguments()
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
        return (*words, *self.options)

    def _expert_arguments(self) -> list[str]:
        """EP and expert TP. The older dispatcher has `--moe-tp-extend-ep` for experts that no ranks share: its EP counts
        without TP (MindSpeed, core/parallel_state.py)."""
        # `initialize_context_parallel_group_for_hybrid_cp`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/parallel_state.py#L531
        words: list[str] = []
        if not self.etp:
            return words
        extended = self.dispatcher == OLD_DISPATCHER and self.etp < self.tp
        if self.ep > 1:
            words += ["--expert-model-parallel-size", str(self.ep // self.tp if extended else self.ep)]
        if extended:
            words.append("--moe-tp-extend-ep")
        elif self.etp < self.tp:
            words += ["--expert-tensor-parallel-size", str(self.etp)]
        return [*words, *(["--moe-token-dispatcher-type", self.dispatcher] if self.dispatcher else [])]

    def conversion_arguments(self) -> tuple[str, ...]:
        """What the weight conversion must be given so that the checkpoint has this layout."""
        words = [f"--target-tensor-parallel-size {self.tp}", f"--target-pipeline-parallel-size {self.pp}"]
        if self.chunks > 1:
            words.append(f"--num-layers-per-virtual-pipeline-stage {self.slots}")
        if self.noop_layers:
            words.append("--noop-layers " + ",".join(map(str, self.noop_layers)))
        if self.ep > 1:
            words.append(f"--target-expert-parallel-size {self.ep}")
        return tuple(" ".join(words).split())


def decided_flags(strategy: Strategy) -> tuple[str, ...]:
    """The flags that a strategy takes out of a script's arguments, to put its own in."""
    own = strategy.arguments()
    return tuple(dict.fromkeys((*with_tag("strategy"), *(name for name, _ in pairs(own)))))


def apply(args: Sequence[str], strategy: Strategy) -> tuple[str, ...]:
    """The trainer's arguments with the strategy in place of the script's own."""
    return (*without(args, decided_flags(strategy)), *strategy.arguments())


def read_strategy(args: Sequence[str], world: int) -> Strategy:
    """The strategy that a trainer's arguments spell out."""
    arguments = Arguments(tuple(args))
    layout = read_layout(arguments, world)
    sizes = layout.parallel
    stages = tuple(tuple(map(len, layout.real_layers(stage))) for stage in range(sizes.pp))
    ep, etp = _expert_sizes(arguments, sizes.tp, sizes.ep)
    return Strategy(
        tp=sizes.tp,
        pp=sizes.pp,
        dp=sizes.dp,
        cp=sizes.cp,
        micro_batch=arguments.positive("--micro-batch-size", 1),
        stages=stages,
        recompute=_recompute(arguments, layout, stages),
        sequence_parallel=arguments.has("--sequence-parallel"),
        distributed_optimizer=arguments.has("--use-distributed-optimizer"),
        cp_algorithm=arguments.text("--context-parallel-algo") or RING,
        noop=tuple(sorted(layout.noop)) or None,
        ulysses=arguments.positive("--ulysses-degree-in-cp", 1),
        dispatcher=read_dispatcher(args) if etp else "",
        dualpipe=arguments.text("--schedules-method") == "dualpipev",
        ep=ep,
        etp=etp,
    )


def read_dispatcher(args: Sequence[str]) -> str:
    """How a trainer's arguments send tokens to their experts."""
    return Arguments(tuple(args)).text("--moe-token-dispatcher-type") or DEFAULT_DISPATCHER


def _expert_sizes(arguments: Arguments, tp: int, ep: int) -> tuple[int, int]:
    """Ranks that experts are spread over, and ranks that share one."""
    if not arguments.has("--num-experts"):
        return 1, 0
    if arguments.has("--moe-tp-extend-ep"):
        return ep * tp, 1
    return ep, arguments.positive("--expert-tensor-parallel-size", tp)


def _recompute(arguments: Arguments, layout: Layout, stages: tuple[tuple[int, ...], ...]) -> Recompute:
    granularity = recompute_granularity(arguments)
    number = arguments.positive("--recompute-num-layers", 1)
    if granularity != "full":
        return Recompute(granularity or "none")
    if arguments.text("--recompute-method") != "block":
        return Recompute("full", number)
    if len(stages[0]) > 1:
        return Recompute("stage" if arguments.has("--enable-recompute-layers-per-pp-rank") else "block", number)
    each = tuple(sum(layer not in layout.noop for layer in chunks[0][:number]) for chunks in layout.stages)
    same = all(own == min(number, *layers) for own, layers in zip(each, stages, strict=True))
    return Recompute("block", number, () if same or not layout.noop else each)
