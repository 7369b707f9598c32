"""The cache folder under the umask of ordinary users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed_dryrun import cache


def test_a_umask_of_002_makes_a_cache_that_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "new" / "cache"))
    before = os.umask(0o002)
    try:
        for _ in range(2):
            made = cache.make_once(
                cache.cache_root() / "kind" / "made", lambda folder: (folder / "lib.so").write_text("x") and None
            )
    finally:
        os.umask(before)
    assert (made / "lib.so").stat().st_mode & 0o022 == 0
