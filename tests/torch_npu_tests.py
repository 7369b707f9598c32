"""What every test that runs ranks on torch_npu is marked with."""

from __future__ import annotations

import importlib.util

import pytest

MARKS = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed: pip install 'mindspeed-dryrun[torch]'"
    ),
]
