"""The garbage collector looks once before training begins, in a forked rank as in a process of its own, and what went is told."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from pytest_mock import MockerFixture

from mindspeed_dryrun.rank import collector


class Experts:
    """Refer to themselves, as grouped experts do, and take memory on a device that is only counted."""

    def __init__(self, device: SimpleNamespace, size: int) -> None:
        self.device, self.size = device, size
        self.activation = lambda: self
        device.allocated += size

    def __del__(self) -> None:
        self.device.allocated -= self.size


@pytest.mark.parametrize(("size", "told"), [(192 << 20, {"collected_mb": 192}), (1000, {})])
def test_what_the_trainer_has_dropped_is_freed_and_told(mocker: MockerFixture, size: int, told: dict[str, int]) -> None:
    device = SimpleNamespace(allocated=5 << 30)
    mocker.patch.object(collector, "_freed", 0)
    mocker.patch.object(collector, "rank_engine", lambda: SimpleNamespace(allocated=lambda: device.allocated))
    gc.disable()
    try:
        Experts(device, size)
        gc.freeze()  # as the process that a warm rank is forked from does
        assert device.allocated == (5 << 30) + size, "only the collector finds them"
        collector.collect()
    finally:
        gc.enable()
    assert device.allocated == 5 << 30 and collector.told() == told
    assert gc.get_freeze_count() == 0


def test_what_the_iterations_leave_to_the_collector_is_told(mocker: MockerFixture) -> None:
    device = SimpleNamespace(allocated=5 << 30)
    mocker.patch.object(collector, "_waiting", 0)
    mocker.patch.object(collector, "rank_engine", lambda: SimpleNamespace(allocated=lambda: device.allocated))
    gc.disable()
    try:
        Experts(device, 64 << 20)
        collector.look()
    finally:
        gc.enable()
    assert device.allocated == 5 << 30 and collector.told() == {"uncollected_mb": 64}
