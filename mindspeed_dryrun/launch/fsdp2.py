"""`train_fsdp2.py` of MindSpeed-LLM: what its settings say, and how it is run short, without data and without weights.

Its arguments are a YAML file of sections and `--section.key value`, which count more (mindspeed_llm/fsdp2/utils/arguments.py).
The shapes of the model are in neither: they are in the `config.json` of the folder that `model.model_name_or_path` names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.job import Job, ShortRun
from mindspeed_dryrun.launch.vocabularies import model_named
from mindspeed_dryrun.megatron.arguments import override_args, pairs
from mindspeed_dryrun.yaml_file import read_yaml

MODEL = "--model.model_name_or_path"
SHAPES = "config.json"
PUBLIC = Path(__file__).with_name("model_shapes")  # a folder for each public model, with figures of its own config.json
ITERATIONS = 2  # the optimizer's states appear in the first
_EXPERTS = re.compile(r"\w*experts")
_ACCUMULATED = 2  # the second microbatch finds the gradients of the first in place


@dataclass(frozen=True)
class Fsdp2Settings:
    """What `train_fsdp2.py` is told, by its file and by its command line."""

    file: Path
    sections: dict[str, Any]
    flags: dict[str, list[str]]

    @classmethod
    def read(cls, job: Job) -> Fsdp2Settings:
        """`UsageError` where the file is not there."""
        words = pairs(job.args)
        first = words[0][1][0] if words and not words[0][0] else ""
        if not first.endswith((".yaml", ".yml")):
            return cls(Path(), {}, dict(words))
        file = Path(job.cwd, first)
        if not file.is_file():
            raise UsageError(
                f"The settings {first} are not in {job.cwd}: the script itself would fail. Start the dry run in the folder in "
                "which the script is started (MindSpeed-LLM), or correct the name in the script."
            )
        return cls(file, read_yaml(file), dict(words))

    def text(self, section: str, key: str, default: str = "") -> str:
        """A value as text; the command line counts more than the file."""
        words = self.flags.get(f"--{section}.{key}")
        inside = self.sections.get(section)
        found = words[0] if words else inside.get(key) if isinstance(inside, dict) else None
        return default if found is None else str(found)

    def number(self, section: str, key: str, default: int) -> int:
        """A value as a whole number."""
        text = self.text(section, key, str(default))
        return int(text) if text.isdigit() else default


def model_folder(job: Job, settings: Fsdp2Settings) -> Path:
    """Where the model's `config.json` should be."""
    return Path(job.cwd, settings.text("model", "model_name_or_path"))


def public_models() -> list[str]:
    """Models whose shapes come with this package."""
    return sorted(folder.name for folder in PUBLIC.iterdir())


def shapes_folder(job: Job, settings: Fsdp2Settings) -> Path | None:
    """The user's folder, else that of the public model that it is named after; None where neither has shapes."""
    own = model_folder(job, settings)
    if (own / SHAPES).is_file():
        return own
    public = model_named(settings.text("model", "model_name_or_path"), public_models())
    return PUBLIC / public if public else None


def problem(job: Job) -> str | None:
    """Why it cannot be run: settings or shapes that are not here."""
    try:
        settings = Fsdp2Settings.read(job)
    except UsageError as error:
        return str(error)
    if shapes_folder(job, settings):
        return None
    named = settings.text("model", "model_name_or_path") or "nothing"
    return message(
        f"The shapes of this model are in the {SHAPES} of the folder that model.model_name_or_path names ({named}), which is not "
        f"here. Put the model's {SHAPES} into a folder, without weights, and name it: -- {MODEL} FOLDER. A folder named after "
        f"one of these need not be there: {', '.join(public_models())}."
    )


def short_run(job: Job, microbatches: str) -> ShortRun:
    """A short run without data and weights."""
    if problem(job):
        return ShortRun(args=job.args, iterations=ITERATIONS, microbatches=1)
    settings = Fsdp2Settings.read(job)
    own = settings.number("training", "gradient_accumulation_steps", 1)
    count = own if microbatches == "all" else min(own, _ACCUMULATED)
    changed = {
        MODEL: str(shapes_folder(job, settings)),
        "--model.init_model_with_meta_device": "true",  # as weights are not read, none are made on the host
        "--training.max_steps": str(ITERATIONS),
        "--training.gradient_accumulation_steps": str(count),
        "--training.save_steps": "0",
        "--training.save_epochs": "0",
        "--training.save_hf_weights": "false",  # it would gather the whole model on the host
        "--training.profile": "false",
    }
    args = override_args(job.args, [word for pair in changed.items() for word in pair])
    args = (str(settings.file), *args[1:]) if settings.sections else args
    return ShortRun(args=args, iterations=ITERATIONS, microbatches=count)


def notes(job: Job) -> tuple[str, ...]:
    """What is assumed."""
    if problem(job):
        return ()
    settings = Fsdp2Settings.read(job)
    length = settings.text("data", "cutoff_len", "the full length")
    result = [message(f"samples are assumed to have the full length, cutoff_len {length}")]
    folder = shapes_folder(job, settings)
    if folder and folder.parent == PUBLIC:
        named, source = model_folder(job, settings), _read(folder).get("source")
        result.append(message(f"{named} is not here: the shapes of {folder.name} are the published ones ({source})"))
    if settings.text("model", "init_model_with_meta_device").lower() != "true":
        result.append(
            message("the model is made on the meta device: what making it on the host would need for a moment is not counted")
        )
    if _one_by_one(job, settings):
        result.append(
            message("experts that are computed one by one (no moe_grouped_gemm) are each counted with every token: too HIGH")
        )
    return tuple(result)


def _one_by_one(job: Job, settings: Fsdp2Settings) -> bool:
    """Whether experts are a loop over those that are chosen, which is known on the device only."""
    grouped = any(settings.text(section, "moe_grouped_gemm").lower() == "true" for section in settings.sections)
    if grouped or settings.number("parallel", "ep_size", 1) > 1:
        return False
    folder = shapes_folder(job, settings)
    return folder is not None and any(_EXPERTS.fullmatch(key) for key in _read(folder))


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / SHAPES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
