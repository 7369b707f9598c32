"""The `python_stack` column of MindSpore's memory tracker, understood.

The stack is written outermost frame first, `File:/a/b.py;Line:7;Function:forward|File:…|`. It does not say which
layer, microbatch or iteration a block belongs to; the order of the blocks does. Two stacks in a row tell whether the
program moved on, started the next layer or started the next microbatch: a frame of the same function whose line went
back has been entered again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_FRAME = re.compile(rb"File:([^|;]*);Line:(\d+);Function:([^|;]*)")

# Files of the framework: never the source line a person is looking for.
_LIBRARY = re.compile(
    r"/(mindspore|msadapter|mindtorch|torch_npu|torch|torchair|site-packages/[^/]*torch[^/]*)/|<frozen|^mindspore/|importlib"
)
_BLOCK_FILE = re.compile(r"(transformer|mamba)_block\w*\.py$")
_LAYER_FILE = re.compile(r"(transformer|mamba)_layer\w*\.py$")
_MODEL_FILE = re.compile(r"_model\w*\.py$")
_BACKWARD = {"backward_step", "backward", "_engine_run_backward", "backward_custom", "run_backward"}
_FORWARD_BELOW = {"forward", "construct", "custom_forward"}
_OPTIMIZER_FILE = re.compile(r"(^|/)(optim|optimizer|optimizers)/([^/]*/)?[^/]*$|[^/]*(optim|adam)[^/]*\.py$", re.IGNORECASE)
_COMMUNICATION_FILE = re.compile(r"p2p_communication|distributed_c10d|/mappings\w*\.py$|finalize_model_grads|all_to_all")
_COMMUNICATION_FUNCTION = re.compile(
    r"^(_?communicate\w*|create_tensor_recv_\w+|(send|recv)_\w+|all_?reduce\w*|_?all_?gather\w*|_?reduce_?scatter\w*"
    r"|all_?to_?all\w*|_gather_along\w*|_reduce_scatter_along\w*|broadcast\w*)$"
)


@dataclass(frozen=True)
class Frame:
    """One call: file, line, function."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """'megatron/core/transformer/mlp.py:120 forward' with at most the last three parts of the path."""
        return f"{'/'.join(self.file.split('/')[-3:])}:{self.line} {self.function}"


@dataclass(frozen=True, eq=False, kw_only=True)
class CallStack:
    """A stack with what it says of the program: its phase and how to number layers and microbatches.

    `phase`: build, grad_buffer, optimizer_build, forward, recompute, backward, step, communicate or other.
    """

    frames: tuple[Frame, ...]
    phase: str
    communicates: bool
    # Depths: the schedule's forward_step and the model below it (a step back there is a new microbatch); the
    # transformer block and the last frame of the layer's own file (a step back there is a new layer). -1 = not in it.
    microbatch_zone: tuple[int, int]
    layer_zone: tuple[int, int]
    in_layer: bool

    @property
    def source(self) -> Frame | None:
        """The innermost frame that belongs to the training program and not to the framework."""
        for frame in reversed(self.frames):
            if not _LIBRARY.search(frame.file):
                return frame
        return self.frames[-1] if self.frames else None


def read_stack(text: bytes) -> CallStack:
    """Pure; any bytes. What is not a frame is left out."""
    frames = tuple(
        Frame(file.decode(errors="replace"), int(line), function.decode(errors="replace"))
        for file, line, function in _FRAME.findall(text)
    )
    zone = _layer_zone(frames)
    return CallStack(
        frames=frames,
        phase=_phase(frames),
        communicates=any(
            _COMMUNICATION_FUNCTION.match(frame.function)
            or _COMMUNICATION_FILE.search(frame.file)
            # Megatron's GlobalMemoryBuffer: the buffers that gathers and scatters write to, kept for good.
            or (frame.function == "get_tensor" and frame.file.endswith("core/utils.py"))
            for frame in frames
        ),
        microbatch_zone=_microbatch_zone(frames),
        layer_zone=zone,
        in_layer=zone[1] >= 0,
    )


def movement(before: CallStack, after: CallStack) -> str:
    """'microbatch' or 'layer' where `after` entered the next one, else ''."""
    depth = 0
    for old, new in zip(before.frames, after.frames, strict=False):
        if old != new:
            break
        depth += 1
    else:
        return ""
    if depth < after.microbatch_zone[0] and before.microbatch_zone[0] >= 0:
        return "microbatch"  # another call of forward_step from elsewhere in the schedule
    old, new = before.frames[depth], after.frames[depth]
    if (old.file, old.function) != (new.file, new.function) or new.line >= old.line:
        # Entering the first layer from the code before it also starts a layer.
        return "layer" if after.in_layer and not before.in_layer else ""
    first, last = after.microbatch_zone
    if 0 <= first <= depth <= last:
        return "microbatch"
    first, last = after.layer_zone
    return "layer" if 0 <= first <= depth <= last else ""


def _phase(frames: tuple[Frame, ...]) -> str:
    """The phase of training that a call stack belongs to: the first rule that knows it."""
    for depth, frame in enumerate(frames):
        if frame.function in _BACKWARD:
            return "recompute" if any(map(_computes_again, frames[depth + 1 :])) else "backward"
        if frame.function == "forward_step":
            return "forward"
    functions = {frame.function for frame in frames}
    for phase, rule in _PHASES:
        if any(map(rule, frames)):
            clears = bool({"reset", "zero_grad_buffer", "zero_grad"} & functions) or any(
                name.startswith("zero_grad") for name in functions
            )
            return "other" if clears and phase in ("communicate", "optimizer_build") else phase
    return "other"


def _computes_again(frame: Frame) -> bool:
    return frame.function == "custom_forward" or bool(_LAYER_FILE.search(frame.file) and frame.function == "forward")


def _steps(frame: Frame) -> bool:
    return frame.function.startswith("step") or frame.function in ("prepare_grads", "clip_grad_norm", "get_grad_norm")


def _makes_buffers(frame: Frame) -> bool:
    return ("param_and_grad_buffer" in frame.file and frame.function == "__init__") or "_allocate_buffers" in frame.function


def _synchronises(frame: Frame) -> bool:
    return (
        "p2p_communication" in frame.file
        or "param_and_grad_buffer" in frame.file
        or frame.function in ("finalize_model_grads", "start_grad_sync", "finish_grad_sync")
    )


_PHASES: tuple[tuple[str, Callable[[Frame], bool]], ...] = (
    ("step", _steps),
    ("grad_buffer", _makes_buffers),
    ("communicate", _synchronises),
    ("optimizer_build", lambda frame: bool(_OPTIMIZER_FILE.search(frame.file))),
    ("build", lambda frame: frame.function == "__init__"),
    ("forward", lambda frame: frame.function in _FORWARD_BELOW),
)


def _microbatch_zone(frames: tuple[Frame, ...]) -> tuple[int, int]:
    for depth, frame in enumerate(frames):
        if frame.function == "forward_step":
            models = [
                index
                for index, below in enumerate(frames[depth + 1 :], start=depth + 1)
                if _MODEL_FILE.search(below.file) and below.function == "forward"
            ]
            return depth, models[0] if models else depth + 1
    return -1, -1


def _layer_zone(frames: tuple[Frame, ...]) -> tuple[int, int]:
    first = next((i for i, frame in enumerate(frames) if _BLOCK_FILE.search(frame.file)), -1)
    layers = [i for i, frame in enumerate(frames) if _LAYER_FILE.search(frame.file)]
    if not layers:
        return -1, -1
    return (first if first >= 0 else layers[0]), layers[-1]
