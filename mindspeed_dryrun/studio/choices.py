"""What the page may change about a job: flags of the registry, variables of the script, the card. Never a command.

A `Choice` is one state of the page, checked. `controls` are what the page shows for it, each option with the reason why
Megatron would refuse it, if it would.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices import hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.launch.script_text import assignments
from mindspeed_dryrun.megatron.arguments import override_args, pairs, without
from mindspeed_dryrun.megatron.flags import FLAGS, Flag
from mindspeed_dryrun.units import parse_size_mb

Patch = dict[str, str | None]  # flag → value; "" for a switch, None takes the flag out of the script's arguments

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_VALUE = re.compile(r"[A-Za-z0-9._,:+=/@-]{0,200}")
_FLAG_VALUE = re.compile(r"[A-Za-z0-9._,+-]{1,100}")
_MOST = 64  # changes of one state
_LARGEST = 10**9
# Flags with these tags name files, or make the trainer write some.
_NOT_HERE = {"input", "tokenizer", "output"}
_LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")


@dataclass(frozen=True)
class Choice:
    """What the page asks for, checked: see `read_choice`."""

    sets: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str | None] = field(default_factory=dict)
    device: str | None = None
    budget: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As the page has it, and as its address keeps it."""
        return dataclasses.asdict(self)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Trainer arguments that are put in."""
        return tuple(
            word for name, value in self.flags.items() if value is not None for word in ([name, value] if value else [name])
        )

    @property
    def removed(self) -> tuple[str, ...]:
        """Flags that are taken out of the script's arguments."""
        return tuple(name for name, value in self.flags.items() if value is None)

    def changed(self, patch: Mapping[str, str | None]) -> Choice:
        """The same with other flags."""
        return dataclasses.replace(self, flags={**self.flags, **patch})


@dataclass(frozen=True)
class Option:
    """One value of a control; `refused` is why Megatron would not take it."""

    value: str
    label: str
    patch: Patch
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Control:
    """A select (with options), a number or a text of the page."""

    key: str
    kind: str  # "select", "number", "device", "budget" or "variable"
    value: str
    flag: str | None = None
    options: tuple[Option, ...] = ()


class Subject:
    """The script that the studio was started with. Its launcher call is captured once for each set of variables."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.text = script.read_text(encoding="utf-8", errors="surrogateescape")
        values = {item.name: self.text[item.start : item.end].strip("\"'") for item in assignments(self.text)}
        # What is computed from others stays as it is written.
        self.variables = {name: value for name, value in values.items() if value and _VALUE.fullmatch(value)}
        self._call = functools.lru_cache(maxsize=64)(self._capture)

    @property
    def launcher(self) -> str:
        """`msrun` or `torchrun`."""
        return self._call(()).launcher

    def _capture(self, sets: tuple[tuple[str, str], ...]) -> CapturedCall:
        return capture(self.script, dict(sets))

    def job(self, choice: Choice) -> Job:
        """The job of a choice; `UsageError` where Megatron would refuse it."""
        call = self._call(tuple(sorted(choice.sets.items())))
        words = override_args(without(call.program_args, choice.removed), choice.overrides)
        return understand(dataclasses.replace(call, program_args=words), str(self.script))

    def refusal(self, choice: Choice) -> str | None:
        """Why Megatron would not take it, without the script's name in front."""
        try:
            self.job(choice)
        except UsageError as error:
            return str(error).removeprefix(f"{self.script}: ")
        return None


def as_patch(words: Sequence[str]) -> Patch:
    """Trainer arguments as the page changes them."""
    return {name: values[0] if values else "" for name, values in pairs(words)}


def read_choice(data: Any, subject: Subject) -> Choice:
    """A state of the page; `UsageError` for anything that is neither a flag of the registry nor a variable of the script."""
    if not isinstance(data, dict) or set(data) - {"sets", "flags", "device", "budget"}:
        raise UsageError("A choice has sets, flags, device and budget.")
    sets, flags = ({} if data.get(name) is None else data[name] for name in ("sets", "flags"))
    if not isinstance(sets, dict) or not isinstance(flags, dict) or len(sets) + len(flags) > _MOST:
        raise UsageError(f"A choice changes at most {_MOST} things.")
    for name, value in sets.items():
        if name not in subject.variables or not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise UsageError(f"The variable {str(name)[:64]!r} cannot be set to that: letters, digits and . , : + = / @ - only.")
    for name, value in flags.items():
        _check_flag(FLAGS.get(name), name, value)
    return Choice(dict(sets), dict(flags), *_read_card(data.get("device") or None, data.get("budget") or None))


def _read_card(device: Any, budget: Any) -> tuple[str | None, str | None]:
    if device is not None and device not in hardware.names():
        raise UsageError(f"There is no device of that name; choose one of {', '.join(hardware.names())}.")
    if budget is not None and (not isinstance(budget, str) or len(budget) > 12 or not 1 <= parse_size_mb(budget) <= _LARGEST):
        raise UsageError("The budget is a size such as 58G.")
    return device, budget


def _check_flag(flag: Flag | None, name: Any, value: Any) -> None:
    if flag is None or flag.tags & _NOT_HERE or flag.takes == -1:
        raise UsageError(f"{str(name)[:80]!r} is not a flag that can be changed here.")
    if value is None:
        return
    if not isinstance(value, str) or (value and not _FLAG_VALUE.fullmatch(value)) or bool(value) != bool(flag.takes):
        raise UsageError(f"{flag.name} cannot have that value.")
    if flag.takes and flag.convert in (int, float):
        try:
            number = flag.convert(value)
        except ValueError:
            raise UsageError(f"{flag.name} expects a number.") from None
        if not -_LARGEST <= number <= _LARGEST:
            raise UsageError(f"{flag.name} {value} is out of bounds.")
    if value and flag.allowed and flag.convert(value) not in flag.allowed:
        raise UsageError(f"{flag.name} can be {', '.join(map(str, flag.allowed))}.")


def controls(subject: Subject, choice: Choice, job: Job) -> list[Control]:
    """The controls of a job, at the values that it has."""
    parallel = job.parallel
    sizes = _powers(job.world_size)
    shown = [
        _select(subject, choice, "tp", "--tensor-model-parallel-size", parallel.tp, sizes),
        _select(subject, choice, "pp", "--pipeline-model-parallel-size", parallel.pp, sizes),
        _chunks(subject, choice, job),
        _select(subject, choice, "cp", "--context-parallel-size", parallel.cp, sizes),
    ]
    if job.arguments.has("--num-experts"):
        shown.append(_select(subject, choice, "ep", "--expert-model-parallel-size", parallel.ep, sizes))
    micro = sorted({1, 2, 4, 8, job.micro_batch})
    shown += [
        _select(subject, choice, "mbs", "--micro-batch-size", job.micro_batch, micro),
        Control(key="gbs", kind="number", value=str(job.global_batch), flag="--global-batch-size"),
        Control(key="seq", kind="number", value=str(job.seq_length), flag="--seq-length"),
        Control(key="layers", kind="number", value=str(job.num_layers), flag="--num-layers"),
        _recompute(subject, choice, job),
        _switch(subject, choice, "do", "--use-distributed-optimizer", job),
        _switch(subject, choice, "sp", "--sequence-parallel", job),
    ]
    shown += [Control(key=name, kind="variable", value=choice.sets.get(name, value)) for name, value in subject.variables.items()]
    return shown


def _powers(world: int) -> list[int]:
    return [2**n for n in range(12) if 2**n <= world and world % 2**n == 0]


def _select(subject: Subject, choice: Choice, key: str, flag: str, now: int, values: list[int]) -> Control:
    options = []
    for value in sorted({*values, now}):
        patch: Patch = {flag: str(value)}
        refused = None if value == now else subject.refusal(choice.changed(patch))
        options.append(Option(str(value), str(value), patch, refused))
    return Control(key=key, kind="select", value=str(now), flag=flag, options=tuple(options))


def _switch(subject: Subject, choice: Choice, key: str, flag: str, job: Job) -> Control:
    on = job.arguments.has(flag)
    options = []
    for value, patch in (("off", {flag: None}), ("on", {flag: ""})):
        refused = None if (value == "on") == on else subject.refusal(choice.changed(patch))
        options.append(Option(value, value, dict(patch), refused))
    return Control(key=key, kind="select", value="on" if on else "off", flag=flag, options=tuple(options))


def _chunks(subject: Subject, choice: Choice, job: Job) -> Control:
    """VPP: chunks of a stage."""
    now = job.parallel.vpp or 1
    options = [Option("1", "1", {_LAYERS_PER_CHUNK: None, _CHUNKS: None})]
    for chunks in sorted({2, 4, now} - {1}):
        layers, rest = divmod(job.num_layers, job.parallel.pp * chunks)
        patch: Patch = {_LAYERS_PER_CHUNK: str(max(1, layers)), _CHUNKS: None}
        if chunks == now:
            refused = None
        elif job.parallel.pp == 1:
            refused = message("VPP needs more than one stage (PP).")
        elif rest or not layers:
            refused = message(f"{job.num_layers} layers cannot be cut into PP {job.parallel.pp} × {chunks} equal chunks.")
        else:
            refused = subject.refusal(choice.changed(patch))
        options.append(Option(str(chunks), str(chunks), {} if chunks == now else patch, refused))
    return Control(key="vpp", kind="select", value=str(now), flag=_LAYERS_PER_CHUNK, options=tuple(options))


def _recompute(subject: Subject, choice: Choice, job: Job) -> Control:
    now = job.recompute or "none"
    options = []
    for value, words in _recomputations(job):
        patch: Patch = dict.fromkeys(_RECOMPUTE)
        patch |= dict(zip(_RECOMPUTE, words, strict=False))
        refused = None if value == now else subject.refusal(choice.changed(patch))
        options.append(Option(value, value, patch, refused))
    if now not in {option.value for option in options}:
        options.append(Option(now, now, {}))
    return Control(key="recompute", kind="select", value=now, flag=_RECOMPUTE[0], options=tuple(options))


def _recomputations(job: Job) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "none", ()
    yield "selective", ("selective",)
    yield "full uniform 1", ("full", "uniform", "1")
    layers = max(len(chunk) for stage in job.stage_layers for chunk in stage) if job.stage_layers else 0
    for count in sorted({1, layers // 4, layers // 2, 3 * layers // 4} - {0}):
        yield f"full block {count}", ("full", "block", str(count))
