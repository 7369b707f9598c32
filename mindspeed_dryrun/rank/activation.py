"""The one environment variable that carries an activation, as JSON, to every process below."""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "MINDSPEED_DRYRUN"
# In `lib64` of the stand-in, and of no real CANN.
STAND_IN_LIBRARY = "libstandin.so"
# Before a sentence of ours in a rank's log; what reads logs knows a line with `: error: ` for an error.
ERROR_PREFIX = "mindspeed-dryrun: error: "
# First on the PATH of an activated shell: the folder of our msrun.
SHIM = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "launch", "shim")


def current() -> dict[str, Any]:
    """The activation of this process; empty where there is none or it cannot be read."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
