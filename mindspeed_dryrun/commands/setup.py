"""Installs MSAdapter and megatron-core into a private folder, and makes the stand-in CANN where no CANN is installed.

Nothing of the environment changes: a PyTorch that is installed stays what it is. `launch` names this command where
the packages are missing, and makes the stand-in by itself.
"""

from __future__ import annotations

import argparse

from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.engines.mindspore.engine import choose_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Prepares everything a dry run needs."""
    engine = choose_engine()
    print(f"Engine: MindSpore {engine.mindspore} on {'the ' if engine.cann == 'stand-in' else ''}{engine.cann} CANN")
    print(f"Engine packages: {packages.install()}")
    return 0
