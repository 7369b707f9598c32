"""The one environment variable that carries an activation, as JSON, to every process below."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VARIABLE = "MINDSPEED_DRYRUN"
# In `lib64` of the stand-in, and of no real CANN.
STAND_IN_LIBRARY = "libstandin.so"
# Before a sentence of ours in a rank's log; what reads logs knows a line with `: error: ` for an error.
ERROR_PREFIX = "mindspeed-dryrun: error: "
# First on the PATH of an activated shell: the folder of our msrun.
SHIM = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "launch", "shim")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What a process below is to do; all defaults where nothing is activated."""

    mode: str = ""  # "capture", "rank" or "activate"
    python: str = ""  # the interpreter that the shims start
    # of a capture
    file: str = ""  # where the launchers' calls are written
    # of a rank
    rank: int = 0
    world_size: int = 1
    engine: str = "mindspore"
    trainer: str = "script"
    progress: str = ""
    patches: str = ""
    scratch: str = ""
    iterations: int = 0
    moe_load: str = "even"
    release: str = ""  # of MindSpeed-LLM, which the embedded trainer stands for; empty where none is known
    keeps_checkpoints: bool = False  # that MindSpeed-LLM frees what recomputed layers save only when the collector runs
    hooks_blocks_only: bool = False  # with LoRA it makes embeddings ask for a gradient under --recompute-method block only
    sample_length: int = 0  # tokens of an instruction sample; 0: the sequence length
    nodes: tuple[int, ...] = ()  # ranks of each node, where they were called for one by one
    late_streams: bool = False  # what a stream was given is done when the host waits for it, not at once
    cube_cores: int = 24  # of the card, which decide what some operators of CANN ask for; an Ascend 910B3 has 20
    # of an activated shell
    script: str = ""
    options: tuple[str, ...] = ()
    saved: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Activation:
        """The activation of an environment; `Activation()` where there is none or it cannot be read."""
        return _read(environ.get(VARIABLE) or "{}")

    def to_env(self) -> dict[str, str]:
        """The variable; fields at their defaults are left out. Not escaped: the shims, in shell, read `python` from it."""
        names, default = [field.name for field in dataclasses.fields(self)], Activation()
        told = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}
        return {VARIABLE: json.dumps(told, ensure_ascii=False)}


@functools.lru_cache(maxsize=8)  # handlers ask at every call
def _read(text: str) -> Activation:
    default = Activation()
    try:
        data = json.loads(text)
    except ValueError:
        return default
    if not isinstance(data, dict):
        return default
    told: dict[str, Any] = {field.name: data[field.name] for field in dataclasses.fields(Activation) if field.name in data}
    for name, value in told.items():
        if not isinstance(value, list if name in ("options", "nodes") else type(getattr(default, name))):
            return default
    nodes = told.get("nodes", ())
    if not all(isinstance(size, int) for size in nodes):
        return default
    return Activation(**{**told, "options": tuple(map(str, told.get("options", ()))), "nodes": tuple(nodes)})


def current() -> Activation:
    """The activation of this process."""
    return Activation.from_env(os.environ)
