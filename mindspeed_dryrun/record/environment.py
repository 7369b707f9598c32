"""The part of an environment that belongs into a record: what decides the figures, and nothing that may be a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DECIDES = re.compile(r"^(MS_|ASCEND_|HCCL_|GLOG_|NPU_|PYTORCH_NPU|CUDA_DEVICE_MAX|TASK_QUEUE|CLOSE_MATMUL|MULTI_STREAM)")
_NOT_SHOWN = re.compile(r"^(MS_NODE_ID|MS_NODE_RANK)$|TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide what the engine counts, without those that differ from rank to rank by nature."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _DECIDES.match(name) and not _NOT_SHOWN.search(name) and "{record}" not in value
    }
