"""What fills the memory at the peak: weights, gradients, optimizer, activations, communication, temporary, workspace.

Every block alive at the peak falls into exactly one category, by when it was made, by which code, and how long it
lives. Nothing is estimated: the categories add up to the peak, byte for byte.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message, t
from mindspeed_dryrun.record.call_stack import Frame
from mindspeed_dryrun.record.memory_block import NEVER, Block, Iteration, Replay, Segment, replay
from mindspeed_dryrun.record.model import RankReport
from mindspeed_dryrun.record.tracker_graph import Shape, read_shapes

CATEGORY_SENTENCES = CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporary",
    "workspace",
    "other",
)
MODULES = ("core attention", "activation function", "norm", "rest")
STATIC = ("weights", "gradients", "optimizer")
_COMMUNICATION_NODE = re.compile(
    r"^(DistComm|InnerComm|Comm)?(AllReduce|AllGather|ReduceScatter|Broadcast|AllToAll|AlltoAll|Send|Receive|Recv|Isend|Irecv"
    r"|Gather|Scatter|Reduce|BatchISendIRecv)\w*(-op\d+)?$"
)
_PHASE_SENTENCES = {
    "build": "while the model is built",
    "grad_buffer": "while the gradient buffers are made",
    "optimizer_build": "while the optimizer is built",
    "forward": "in the forward",
    "recompute": "in a recomputed forward",
    "backward": "in the backward",
    "step": "in the optimizer step",
    "communicate": "in communication between stages",
    "other": "between the phases",
}
_MOST_TENSORS = 20


@dataclass(frozen=True)
class Part:
    """A share of the peak under a name."""

    name: str
    size_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Equal tensors of the peak: same size, operator, category and source line."""

    size_bytes: int  # of all of them
    blocks: int
    category: str
    operator: str
    layers: tuple[int, ...]
    microbatches: tuple[int, ...]
    place: str  # file:line function
    shape: Shape | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The peak of one rank, taken apart. `difference_bytes` is the engine's figure minus the sum."""

    path: Path
    rank: int | None
    peak_bytes: int
    peak_time: int
    peak_segment: Segment
    categories: tuple[Part, ...]
    engine_used_mb: int | None
    engine_actual_mb: int | None
    counted_used_bytes: int | None
    fragments_bytes: int | None
    microbatches: tuple[Part, ...]
    layers: tuple[Part, ...]
    operators: tuple[Part, ...]
    modules: tuple[Part, ...]
    layer_weights: tuple[Part, ...]
    layer_activation_bytes: int  # one layer of one microbatch, the largest
    temporaries: tuple[Part, ...]
    others: tuple[Part, ...]
    tensors: tuple[Tensor, ...]
    parameters: int | None
    bytes_per_parameter: float | None
    iteration: Iteration
    rows: int
    damaged_rows: int

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and optimizer states together."""
        return sum(part.size_bytes for part in self.categories if part.name in STATIC)

    @property
    def difference_mb(self) -> int:
        """What the engine counted and the tracker file does not show, in whole MB; 0 where they agree."""
        if self.engine_used_mb is not None:
            return self.engine_used_mb - self.peak_bytes // 2**20
        if self.counted_used_bytes is not None:
            return (self.counted_used_bytes - self.peak_bytes) // 2**20
        return 0

    @property
    def when(self) -> str:
        """'in the backward of microbatch 1, iteration 2'."""
        segment = self.peak_segment
        words = t(_PHASE_SENTENCES[segment.phase])
        if segment.microbatch is not None:
            words = t("{phase} of microbatch {number}", phase=words, number=segment.microbatch)
        return t("{phase}, iteration {number}", phase=words, number=segment.iteration) if segment.iteration else words


def explain(
    path: Path, rank: int | None = None, engine_used_mb: int | None = None, engine_actual_mb: int | None = None
) -> Explanation:
    """Takes the peak of one `memory_block.csv` apart; the engine's own figures come from the rank's log, if there is one."""
    played = replay(path)
    named = list(zip(categorise(played), played.blocks, strict=True))

    def blocks(*names: str) -> list[Block]:
        return [block for name, block in named if name in names]

    activations, weights = blocks("activations"), blocks("weights")
    large = sorted(played.blocks, key=lambda block: -block.size)[: 20 * _MOST_TENSORS]
    shapes = read_shapes(path.with_name("tracker_graph.ir"), {block.start for block in (*weights, *large)})
    parameters = count_parameters(weights, shapes)
    static = sum(block.size for block in blocks(*STATIC))
    return Explanation(
        path=path,
        rank=rank,
        peak_bytes=played.peak_bytes,
        peak_time=played.peak_time,
        peak_segment=played.peak_segment,
        categories=_parts(((name, block) for name, block in named), CATEGORIES),
        engine_used_mb=engine_used_mb,
        engine_actual_mb=engine_actual_mb,
        counted_used_bytes=played.counted_used_bytes,
        fragments_bytes=_fragments(played, engine_used_mb, engine_actual_mb),
        microbatches=_parts(((_microbatch(block), block) for block in activations), numbered=True),
        layers=_parts(((_layer(block), block) for block in activations), numbered=True),
        operators=_parts((block.node or block.kind, block) for block in activations),
        modules=_parts(((_module(block), block) for block in activations), MODULES),
        layer_weights=_parts(((_layer(block), block) for block in weights), numbered=True),
        layer_activation_bytes=_largest_layer(activations),
        temporaries=_parts((_operator_at(block), block) for block in blocks("temporary")),
        others=_parts((_operator_at(block), block) for block in blocks("other", "communication")),
        tensors=_tensors(named, shapes),
        parameters=parameters,
        bytes_per_parameter=static / parameters if parameters else None,
        iteration=played.iteration,
        rows=played.rows,
        damaged_rows=played.damaged_rows,
    )


def _fragments(played: Replay, used_mb: int | None, actual_mb: int | None) -> int | None:
    if actual_mb is not None and used_mb is not None:
        return (actual_mb - used_mb) * 2**20
    return None if played.counted_peak_bytes is None else played.counted_peak_bytes - played.peak_bytes


def categorise(played: Replay) -> list[str]:
    """The category of each block of the peak, in order."""
    lines = {line for block in played.blocks if block.stack.phase == "grad_buffer" and (line := _buffer_line(block)) is not None}
    # Megatron's buffer makes the parameters' buffer (with a distributed optimizer) above the gradients' buffer.
    weight_line = min(lines) if len(lines) > 1 else None
    return [_category(block, played.peak_segment, weight_line) for block in played.blocks]


def count_parameters(weights: Sequence[Block], shapes: dict[int, Shape]) -> int | None:
    """The elements of the weights; None where the shapes of more than a thousandth of them are not known."""
    known = [shapes[block.start] for block in weights if block.start in shapes]
    size = sum(block.size for block in weights)
    if not known or sum(shape.bytes for shape in known) < 0.999 * size - 1024 * len(weights):
        return None
    return sum(shape.elements for shape in known)


def _category(block: Block, peak: Segment, weight_line: int | None) -> str:
    """By what the engine calls the block, else by the phase of training that its call stack shows."""
    if block.kind in _BY_KIND:
        return _BY_KIND[block.kind]
    communicates = block.stack.communicates or bool(_COMMUNICATION_NODE.match(block.node.rsplit("/", 1)[-1]))
    if not block.stack.frames and block.kind in ("Kernel", "GraphOutput", "Somas", "SomasOutput"):  # graph mode
        return "communication" if communicates else "activations"
    if block.stack.phase == "grad_buffer":
        return "weights" if weight_line is not None and _buffer_line(block) == weight_line else "gradients"
    stays = block.end >= NEVER or block.segment.iteration < peak.iteration
    rule = _BY_PHASE.get(block.stack.phase)
    return rule(block, peak, stays, communicates) if rule else "other"


_BY_KIND = {"WorkSpace": "workspace", "Weight": "weights", "ConstantValue": "other", "GeConst": "other"}


def _in_step(block: Block, peak: Segment, stays: bool, communicates: bool) -> str:
    return "optimizer" if stays else "communication" if communicates else "temporary"


def _in_build(block: Block, peak: Segment, stays: bool, communicates: bool) -> str:
    constant = any("rotary" in frame.file or "rope" in frame.file for frame in block.stack.frames)
    return "temporary" if not stays else "other" if constant else "weights"


def _in_backward(block: Block, peak: Segment, stays: bool, communicates: bool) -> str:
    if communicates:
        return "communication"
    return "gradients" if stays else "activations" if block.stack.phase == "recompute" else "temporary"


def _in_forward(block: Block, peak: Segment, stays: bool, communicates: bool) -> str:
    if stays:
        return "communication" if communicates else "other"
    if block.segment is peak and block.end <= peak.end:  # gone before this forward ends: nothing saved
        return "communication" if communicates else "temporary"
    return "activations"


def _elsewhere(block: Block, peak: Segment, stays: bool, communicates: bool) -> str:
    if communicates:
        return "communication"
    return _in_build(block, peak, stays, communicates) if block.segment.iteration == 0 else "other"


_BY_PHASE: dict[str, Callable[[Block, Segment, bool, bool], str]] = {
    "optimizer_build": _in_step,
    "step": _in_step,
    "communicate": lambda block, peak, stays, communicates: "communication",
    "build": _in_build,
    "backward": _in_backward,
    "recompute": _in_backward,
    "forward": _in_forward,
    "other": _elsewhere,
}


def _buffer_line(block: Block) -> int | None:
    for frame in block.stack.frames:
        if "param_and_grad_buffer" in frame.file and frame.function == "__init__":
            return frame.line
    return None


def _layer(block: Block) -> int | str:
    if block.stack.phase == "recompute":
        return "recomputed layers"
    if block.layer is not None:
        return block.layer
    scope = re.search(r"(?:^|[-./_])layers?[-./_](?:\w*List[-./])?(\d+)", block.node)  # graph mode names its layers
    return int(scope[1]) + 1 if scope else message("outside the layers")


def _microbatch(block: Block) -> int | str:
    return "recomputed" if block.stack.phase == "recompute" else block.segment.microbatch or "no microbatch"


def _module(block: Block) -> str:
    if re.search(r"FlashAttention|Softmax|npu_fusion_attention", block.node) or any(
        "dot_product_attention" in frame.file for frame in block.stack.frames
    ):
        return "core attention"
    if re.search(r"RmsNorm|LayerNorm|npu_rms_norm", block.node):
        return "norm"
    return (
        "activation function"
        if re.match(r"(Fast|npu_)?(swiglu|Swiglu|SwiGlu|SiLU|Silu|Gelu|GeLU|Relu|ReLU)", block.node)
        else "rest"
    )


def _largest_layer(activations: Iterable[Block]) -> int:
    sizes: Counter[tuple[Segment, int]] = Counter()
    for block in activations:
        if block.layer is not None and block.stack.phase == "forward":
            sizes[block.segment, block.layer] += block.size
    return max(sizes.values(), default=0)


def _operator_at(block: Block) -> str:
    source = block.stack.source
    return f"{block.node or block.kind}" + (f" at {source.place}" if source else "")


def _parts(pairs: Iterable[tuple[Hashable, Block]], names: Sequence[str] = (), numbered: bool = False) -> tuple[Part, ...]:
    sizes: Counter[Hashable] = Counter(dict.fromkeys(names, 0))
    counts: Counter[Hashable] = Counter()
    for name, block in pairs:
        sizes[name] += block.size
        counts[name] += 1
    if names:
        order: list[Hashable] = list(names)
    elif numbered:
        order = sorted(sizes, key=lambda name: (0, name, "") if isinstance(name, int) else (1, 0, str(name)))
    else:
        order = sorted(sizes, key=lambda name: (-sizes[name], str(name)))
    return tuple(Part(str(name), sizes[name], counts[name]) for name in order)


def _tensors(named: Sequence[tuple[str, Block]], shapes: dict[int, Shape]) -> tuple[Tensor, ...]:
    groups: dict[tuple[str, int, str, Frame | None], list[Block]] = {}
    for name, block in named:
        groups.setdefault((name, block.size, block.node, block.stack.source), []).append(block)
    largest = sorted(groups.items(), key=lambda item: -item[0][1] * len(item[1]))[:_MOST_TENSORS]
    return tuple(
        Tensor(
            size_bytes=size * len(blocks),
            blocks=len(blocks),
            category=name,
            operator=node or blocks[0].kind,
            layers=tuple(sorted({block.layer for block in blocks if block.layer is not None})),
            microbatches=_microbatches(blocks) if name in ("activations", "temporary") else (),
            place=source.place if source else "",
            shape=next((shapes[block.start] for block in blocks if block.start in shapes), None),
        )
        for (name, size, node, source), blocks in largest
    )


def _microbatches(blocks: Sequence[Block]) -> tuple[int, ...]:
    return tuple(sorted({block.segment.microbatch for block in blocks if block.segment.microbatch is not None}))


def tracker_files(directory: Path) -> dict[int | None, Path]:
    """Rank → memory_block.csv of a record, or of what MindSpore leaves behind (`rank_0/`), or of a single file."""
    if directory.is_file():
        return {_rank_of(directory): directory}
    found: dict[int | None, Path] = {}
    ranks = directory / "ranks"  # of a record; beside it lie the records of changes that were tried
    for path in sorted((ranks if ranks.is_dir() else directory).rglob("memory_block.csv")):
        found.setdefault(_rank_of(path), path)
    return found


def _rank_of(path: Path) -> int | None:
    """From the folder names: ours (`ranks/00003/…`) before MindSpore's (`rank_3/…`)."""
    parts = path.absolute().parts
    for above, name in zip(parts[-5:], parts[-4:], strict=False):
        if above == "ranks" and name.isdigit():
            return int(name)
    match = re.fullmatch(r"rank_(\d+)", parts[-2])
    return int(match[1]) if match else None


def explain_ranks(directory: Path, ranks: Sequence[RankReport]) -> dict[int, Explanation]:
    """Every tracked rank of a record; a file that cannot be read is left out, the page then has no such chart."""
    figures = {rank.rank: rank for rank in ranks}
    found = {}
    for rank, path in tracker_files(directory).items():
        known = figures.get(rank) if rank is not None else None
        if known is not None and rank is not None and known.status in ("ok", "oom"):
            with contextlib.suppress(DryRunError, OSError):
                found[rank] = explain(path, rank, known.used_peak_mb, known.actual_peak_mb)
    return found
