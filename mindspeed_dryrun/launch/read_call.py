"""The words that a launcher received, read by the reader of that launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_dryrun.launch.captured_call import MSRUN, TORCHRUN, CapturedCall
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.torchrun_call import read_torchrun_call

_READERS = {MSRUN: read_msrun_call, TORCHRUN: read_torchrun_call}
LAUNCHERS = tuple(_READERS)


def read_call(launcher: str, argv: Sequence[str], cwd: str, env: Mapping[str, str] | None = None) -> CapturedCall:
    """The call of `msrun` or `torchrun`, or a `UsageError` that says what is wrong with it."""
    return _READERS[launcher](argv, cwd, env)
