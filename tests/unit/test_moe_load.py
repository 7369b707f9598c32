"""The load of experts: what a user can say, and how many tokens follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron import moe_load


def test_an_even_load_is_the_same_for_every_expert() -> None:
    assert moe_load.parse("even").counts(128, 8, [4, 5]) == [16, 16]


def test_hot_experts_receive_a_multiple_of_their_share() -> None:
    assert moe_load.parse("hot:1.5").counts(128, 8, [0]) == [24]


def test_a_count_is_never_rounded_down() -> None:
    assert moe_load.parse("hot:1.1").counts(10, 4, [0]) == [3]


@pytest.mark.parametrize("text", ["[10, 30, 40, 20]", "[[4, 10, 20, 6], [6, 20, 20, 14]]"])
def test_a_file_gives_each_expert_its_observed_share(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    assert moe_load.parse(str(file)).counts(1000, 4, [2, 3]) == [400, 200]


def test_a_file_for_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text("[1, 2]")
    with pytest.raises(UsageError, match="names 2 experts, and the model has 4"):
        moe_load.parse(str(file)).counts(8, 4, [0])


@pytest.mark.parametrize("value", ["hot:", "hot:0.5", "hot:nan", "hot:inf", "nowhere.json"])
def test_a_load_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(UsageError):
        moe_load.parse(value)


@pytest.mark.parametrize("text", ["{}", "[]", "[0, 0]", "[1, -1]", "[[1], [1, 2]]", "[1.5]", "[[1], 2]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="tokens per expert"):
        moe_load.parse(str(file))


def test_an_even_load_that_does_not_divide_loses_no_token() -> None:
    even = moe_load.parse("even")
    assert sum(even.counts(10, 4, range(4))) == 10


def test_the_busiest_rank_is_the_one_that_is_counted() -> None:
    load = moe_load.parse("[10, 30, 5, 5]")
    assert load.busiest(100, 4, 2) == [20, 60]
    assert moe_load.parse("hot:2").busiest(100, 4, 2) == [50, 50]


@pytest.mark.parametrize("text", ["even", "hot:1.5", "[3, 1, 2]"])
def test_a_load_is_kept_in_a_record_as_it_is_read(text: str) -> None:
    assert str(moe_load.parse(text)) == text
