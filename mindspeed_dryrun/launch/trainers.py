"""Which trainer the ranks run: the script's own where it and what it imports can be found, else the embedded one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch import fsdp2
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.mock_inputs import dry_args
from mindspeed_dryrun.launch.stack import CORE_MS, PYTHON, missing_packages
from mindspeed_dryrun.megatron import settings
from mindspeed_dryrun.rank import installed, upstream_errors
from mindspeed_dryrun.rank.confinement import kernel_confines

EMBEDDED = "mindspeed_dryrun.rank.trainer"
# Where MindSpeed-Core-MS's auto_convert.sh puts the projects, and what shows that one is there.
_PROJECTS = {"MindSpeed": "mindspeed/__init__.py", "Megatron-LM": "megatron/training/__init__.py"}
_ADAPTERS = ("MSAdapter", "msadapter")
_PACKAGES = ("transformers", "peft")
# `get_model`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/posttrain/lora/qlora.py#L101
_QLORA = (
    "--qlora keeps weights on the host until a checkpoint is loaded in 4 bits (bitsandbytes), which a dry run does not do: "
    "what it counted would be far too low. With --overlap-param-gather it fails on an NPU too (AssertionError)"
)
_COLLECTOR = (
    "this MindSpeed-LLM keeps what a recomputed layer saves until Python's garbage collector runs, on an NPU too: the peak "
    "depends on when that is, and grows with microbatches and iterations (--microbatches all comes closer). 2.3.0 and the "
    "branch 26.1.0 since 11 August 2026 free it at once"
)
_NOT_CONFINED = (
    "what its Python code writes outside the record is refused, what its libraries and other programs write is not, "
    "because this kernel has no Landlock (Linux 5.13 and later)"
)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """`program` is a file, or a module for the embedded trainer; `path` goes first on PYTHONPATH."""

    kind: str  # "script" or "embedded"
    program: str
    path: tuple[str, ...]
    problem: str | None = None  # why it cannot run here; a plan can still be shown
    notes: tuple[str, ...] = ()
    release: str = ""  # of the MindSpeed-LLM whose place the embedded trainer takes, where it is known
    keeps_checkpoints: bool = False  # of recomputed layers, until the collector runs: a longer run may need more than a short one
    hooks_blocks_only: bool = False  # of a first stage with LoRA, layers learn only under --recompute-method block


def choose_trainer(job: Job, wanted: str = "auto") -> Trainer:
    """`script`, `embedded`, or the script's own where it works (`auto`)."""
    if wanted == "embedded":
        return _embedded(job)
    own = _script_trainer(job)
    if wanted == "script" or own.problem is None or not job.is_megatron or job.back_end != "mindspore":
        return own
    embedded = _embedded(job)
    notes = (f"the script's own trainer cannot run here ({own.problem}): the embedded trainer takes its place",)
    return replace(embedded, notes=notes + embedded.notes)


def code_digest(folders: Sequence[str]) -> str:
    """Changes when a Python file below these folders does. Names, sizes and times are looked at, not contents."""
    seen = hashlib.sha256()
    for folder in folders:
        for parent, inner, files in os.walk(folder):
            inner[:] = sorted(name for name in inner if not name.startswith((".", "__pycache__", "tests", "docs")))
            for name in sorted(files):
                if name.endswith((".py", ".yaml")):
                    with contextlib.suppress(OSError):
                        found = Path(parent, name).stat()
                        seen.update(f"{parent}/{name} {found.st_size} {found.st_mtime_ns}\n".encode(errors="replace"))
    return seen.hexdigest()


def _script_trainer(job: Job) -> Trainer:
    program = _find_program(job)
    if program is None:
        absent_problem = f"{job.program} is neither in {job.cwd} nor in ${CORE_MS}/MindSpeed-LLM"
        return Trainer(kind="script", program=job.program, path=(), problem=absent_problem)
    folder = program.parent
    if not (job.is_megatron or job.is_fsdp2) or not (folder / "mindspeed_llm").is_dir():
        notes = () if kernel_confines() else (f"{program.name} is not Megatron's: {_NOT_CONFINED}",)
        return Trainer(kind="script", program=str(program), path=(str(folder),), notes=notes)
    found = {project: _find_project(job, folder, project, sign) for project, sign in _PROJECTS.items()}
    missing = [project for project, place in found.items() if place is None]
    path = [str(folder), *filter(None, found.values())]
    problem = f"{' and '.join(missing)} not found: set {CORE_MS} to the folder that holds them" if missing else None
    problem = problem or _not_counted(job, folder)
    if job.back_end == "mindspore":
        try:
            path += _find_adapter(job, folder) or engine_path()
        except DryRunError as error:
            problem = problem or str(error)
    root = _core_ms(job.env)
    if root and (root / PYTHON).is_dir():
        path.append(str(root / PYTHON))
    problem = problem or _lacks_packages(root)
    keeps = _keeps_checkpoints(job, folder)
    notes = (_COLLECTOR,) if keeps else ()
    return Trainer(kind="script", program=str(program), path=tuple(path), problem=problem, notes=notes, keeps_checkpoints=keeps)


def _lacks_packages(root: Path | None) -> str | None:
    lacking = [name for name in missing_packages(root) if name.split("==")[0] in _PACKAGES]
    problem = f"it imports {' and '.join(lacking)}, not installed: pip install {' '.join(lacking)}"
    return problem if lacking else None


def _not_counted(job: Job, folder: Path) -> str | None:
    """Why this trainer cannot be counted with these arguments, or in this release, whatever is installed."""
    if job.is_fsdp2 and (problem := fsdp2.problem(job)):
        return problem
    if job.arguments.has_any(("--qlora", "--qlora-nf4")):
        return _QLORA
    broken = upstream_errors.broken_tree(folder) if job.back_end == "mindspore" else None
    return broken and broken.rstrip(".")


def _keeps_checkpoints(job: Job, folder: Path) -> bool:
    full = job.arguments.values.get("--recompute-granularity") == ("full",)
    return full and installed.keeps_checkpoints(folder)


def _embedded(job: Job) -> Trainer:
    if job.back_end != "mindspore":
        reason = "the embedded trainer runs on MindSpore, and this is a torchrun script: leave out --trainer embedded"
        return Trainer(kind="embedded", program=EMBEDDED, path=(), problem=reason)
    try:
        path = tuple(engine_path())
        problem = None
    except DryRunError as error:
        path, problem = (), str(error)
    own = _find_program(job)
    # Of the MindSpeed-LLM that the script belongs to: releases allocate differently in a few places.
    release = (own and installed.mindspeed_llm_release(own.parent)) or ""
    notes = upstream_errors.foreseen(job.args, release) if release and job.is_megatron else ()
    keeps = bool(own and _keeps_checkpoints(job, own.parent))
    return Trainer(
        kind="embedded",
        program=EMBEDDED,
        path=path,
        problem=embedded_refusal(job) or problem,
        notes=(*notes, _COLLECTOR) if keeps else notes,
        release=release,
        keeps_checkpoints=keeps,
        hooks_blocks_only=bool(own and installed.hooks_blocks_only(own.parent)),
    )


def embedded_refusal(job: Job) -> str | None:
    """What the embedded trainer would say to these arguments when a rank starts: better said before."""
    if not job.is_megatron:
        return f"the embedded trainer takes Megatron's arguments, and {job.program} has others"
    found = settings.problem(job.args)
    if found:
        return found
    try:
        settings.read(dry_args(job, job.args)[0], 0, job.world_size)
    except UsageError as error:
        return str(error)
    return None


def _find_program(job: Job) -> Path | None:
    name = Path(job.program).name
    script = Path(job.cwd, job.script).absolute()
    places = [Path(job.cwd, job.program), *(folder / name for folder in script.parents)]
    root = _core_ms(job.env)
    if root:
        places.append(root / "MindSpeed-LLM" / name)
    for path in places:
        if path.is_file():
            return path.absolute()
    return None


def _find_project(job: Job, folder: Path, project: str, sign: str) -> str | None:
    """Its folder, '' if it is importable as it is, None if it is nowhere."""
    root = _core_ms(job.env)
    beside = [folder, folder.parent / project, *([root / project] if root else [])]
    on_path = [Path(item) for item in job.env.get("PYTHONPATH", "").split(os.pathsep) if item]
    for place in (*on_path, *beside):
        if (place / sign).is_file():
            return str(place)
    spec = importlib.util.find_spec(sign.split("/")[0])
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return "" if any(Path(place, *sign.split("/")[1:]).is_file() for place in locations) else None


def _find_adapter(job: Job, folder: Path) -> list[str] | None:
    root = _core_ms(job.env)
    for parent in (folder.parent, *([root] if root else [])):
        for name in _ADAPTERS:
            if (parent / name / "msa_thirdparty").is_dir():
                return [str(parent / name), str(parent / name / "msa_thirdparty")]
    return None


def _core_ms(env: Mapping[str, str]) -> Path | None:
    value = env.get(CORE_MS) or os.environ.get(CORE_MS)
    return Path(value) if value else None
