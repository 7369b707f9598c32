"""Print shell commands that make every later msrun of this shell a dry run:

    eval "$(mindspeed-dryrun activate)"
    bash my_training_script.sh            # unmodified
    dryrun_off                            # the shell is as it was

Options after `--` are those of `launch`, for every dry run of this shell: activate -- --budget 40G --jobs 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from mindspeed_dryrun.cache import cache_root
from mindspeed_dryrun.engines.mindspore.engine import choose_engine
from mindspeed_dryrun.files import write_text
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch import shell_activation as activation
from mindspeed_dryrun.rank.activation import Activation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--patches", action="append", default=[], type=Path, metavar="FILE", help="a patch file of your own")


def run(args: argparse.Namespace) -> int:
    """Writes the compiled catalogue to the cache and prints the commands."""
    from mindspeed_dryrun.commands import launch

    options = [*args.after_dashes, *(word for file in args.patches for word in ("--patches", str(file.absolute())))]
    wanted = launch.parser().parse_args(["-", *options])
    base = activation.before_activation(os.environ)
    engine = choose_engine(wanted.level)
    settings = Activation(options=tuple(options), patches=str(_compiled(args.patches)), python=sys.executable)
    changes = activation.activated(base, engine.environment(base), settings)
    write_commands(activation.activate_commands(changes, base))
    if sys.stdout.isatty():
        print("mindspeed-dryrun: " + t('nothing is activated yet. Run: eval "$(mindspeed-dryrun activate)"'), file=sys.stderr)
    return 0


def write_commands(lines: list[str]) -> None:
    """As bytes: values are the environment's, whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode("\n".join(lines) + "\n"))
    sys.stdout.buffer.flush()


def _compiled(files: list[Path]) -> Path:
    text = json.dumps(catalogue.compile(extra=files))
    path = cache_root() / "patches" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path
