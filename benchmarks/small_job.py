"""A job small enough to run hundreds of times, in a home folder that is watched: what a dry run leaves there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "reliability"
MODEL = (
    "--hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --padded-vocab-size 8000 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --use-flash-attn "
    "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 "
    "--no-gradient-accumulation-fusion --lr 1e-5 --use-mcore-models --train-iters 5"
)
# A benchmark that was started in the background ignores these two, and so would every command it starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
SCRIPT = """#!/bin/bash
NPUS={world}
TP={tp}
PP={pp}
LAYERS={layers}
mkdir -p logs ckpt
msrun --worker_num $NPUS --local_worker_num $NPUS --log_dir logs --join True pretrain_gpt.py --num-layers $LAYERS \\
    --global-batch-size {batch} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP {extra} \\
    {model} --save ckpt | tee logs/train.log
"""

SEARCH_FILE = """script: train.sh
hardware: ascend910b-64g
cluster: {nodes: 1, cards_per_node: 4}
budget: 58G
winners: 2
space: {micro_batch: [1, 2], recompute: [none, full]}
"""


def script(
    *, world: int = 4, tp: int = 2, pp: int = 2, layers: int = 4, batch: int = 16, extra: str = "--sequence-parallel"
) -> str:
    return SCRIPT.format(world=world, tp=tp, pp=pp, layers=layers, batch=batch, extra=extra, model=MODEL)


@dataclass(kw_only=True)
class Home:
    """A user's folder: what is in it, and which processes were started from it, at any moment."""

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tmp", "ckpt", "records"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "ckpt" / "model.ckpt").write_text("the user's weights")
        (self.folder / "train.sh").write_text(script())
        (self.folder / "sweep.yaml").write_text("script: train.sh\nproduct:\n  set:\n    TP: [1, 2]\n    PP: [1, 2]\n")
        (self.folder / "search.yaml").write_text(SEARCH_FILE)
        self.before = self.files()

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """`mindspeed-dryrun WORDS` in this folder."""
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(self.folder / "tmp"),
            "DRYRUN_HOME_TOKEN": self.token,
        }
        environ |= options.pop("environ", {})
        command = [sys.executable, "-m", "mindspeed_dryrun", *words]
        return subprocess.Popen(command, cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, errors="replace", start_new_session=True, **options)  # fmt: skip

    def run(self, *words: str, **options: Any) -> tuple[int, str]:
        """Exit status and what was said."""
        process = self.start(*words, **options)
        said = process.communicate(timeout=600)[0]
        return process.returncode, said

    def processes(self) -> list[int]:
        """Processes that carry this home's mark, wherever they have moved."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.token.encode() in (entry / "environ").read_bytes() and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file outside the records, with size and time of change."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            with contextlib.suppress(OSError):
                if name.parts[0] != "records" and not path.is_dir():
                    state = path.stat()
                    found[str(name)] = (state.st_size, state.st_mtime_ns)
        return found

    def left(self, seconds: float = 30) -> list[str]:
        """What a command that is over should not have left: processes (after a moment to end), and files."""
        end = time.monotonic() + seconds
        while (
            self.processes() or self.files() != self.before or any((self.folder / "tmp").iterdir())
        ) and time.monotonic() < end:
            time.sleep(0.2)
        wrong = [f"process {pid} is left" for pid in self.processes()]
        now = self.files()
        wrong += [f"{name} was written" for name in now if now[name] != self.before.get(name)]
        wrong += [f"{name} is gone" for name in self.before if name not in now]
        return wrong + [f"tmp/{path.name} is left" for path in (self.folder / "tmp").iterdir()]


def half_files(record: Path) -> list[str]:
    """JSON files of a record that cannot be read."""
    wrong = []
    for path in record.rglob("*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            wrong.append(f"{path.relative_to(record)}: {error}")
    return wrong


def merged(name: str, lines: list[dict[str, Any]], wanted: list[tuple[str, ...]], *keys: str) -> list[dict[str, Any]]:
    """The lines that were saved before with these in their places, in the order of `wanted`: a part can be run again."""
    path = FIGURES / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {tuple(line[key] for key in keys): line for line in [*before, *lines]}
    return [found[key] for key in wanted if key in found]


def save_figures(name: str, data: Any) -> None:
    """What `fault_matrix.py --page` puts into docs/reliability.md."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / f"{name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
