"""Print shell commands that undo `activate`: eval "$(mindspeed-dryrun deactivate)", or `dryrun_off` for short.

Every variable is what it was before: its value, or unset.
"""

from __future__ import annotations

import argparse
import os
import sys

from mindspeed_dryrun.commands.activate import write_commands
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch import shell_activation as activation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> int:
    """Prints the commands; nothing where nothing is activated."""
    if not activation.is_activated(os.environ):
        print("mindspeed-dryrun: " + t("this shell is not activated."), file=sys.stderr)
        return 0
    write_commands(activation.deactivate_commands(os.environ))
    return 0
