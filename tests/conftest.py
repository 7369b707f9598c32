"""Fixtures shared by all tests: where shared files are, and how a program is run in simulation."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine, choose_engine
from mindspeed_dryrun.record.worker_log import RankLog, read_worker_log

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


# Tests count; what they counted yesterday is no test of today.
os.environ["MINDSPEED_DRYRUN_NO_CACHE"] = "1"

# A test run that was started in the background ignores these two, and so would every process it starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-minutes", type=float, default=0, help="how long test_fuzz_readers.py tries damaged files")


@dataclass(frozen=True)
class Simulated:
    """A program that ran in simulation."""

    status: int
    text: str
    log: RankLog


@pytest.fixture(scope="session")
def engine() -> MindSporeEngine:
    """The engine that dry runs use on this machine."""
    return choose_engine()


@pytest.fixture
def simulate(engine: MindSporeEngine, tmp_path: Path) -> Callable[..., Simulated]:
    """Runs a Python program as one simulated rank in a folder of its own."""

    def run(program: str, rank: int = 0, world_size: int = 1, **environ: str) -> Simulated:
        environment = engine.environment(os.environ) | {
            "RANK_ID": str(rank),
            "RANK_SIZE": str(world_size),
            "MS_WORKER_NUM": str(world_size),
            "DEVICE_ID": str(rank % 8),
            **environ,
        }
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=300,
        )
        return Simulated(done.returncode, done.stdout.decode(errors="replace"), read_worker_log(io.BytesIO(done.stdout)))

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared documents and corpora beside the project; tests that need it are skipped elsewhere."""
    if not SHARED.is_dir():
        pytest.skip("the shared folder is not beside the project")
    return SHARED
