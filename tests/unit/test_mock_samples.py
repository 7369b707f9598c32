"""Mock samples of fine-tuning carry what upstream's collators ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.rank.handlers.data import InstructionSamples, padded_length, sample_length

pytest.importorskip("numpy")


def arguments(**flags: bool | int) -> SimpleNamespace:
    """Upstream's arguments, as far as samples depend on them."""
    plain = {"is_pairwise_dataset": False, "reset_position_ids": False, "reset_attention_mask": False}
    return SimpleNamespace(**{"seq_length": 8, "variable_seq_lengths": False, **plain, **flags})


def given(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    for name, value in Activation(mode="rank", sample_length=tokens).to_env().items():
        monkeypatch.setenv(name, value)


def test_packed_samples_are_one_document_of_full_length() -> None:
    args = arguments(reset_attention_mask=True)
    sample = InstructionSamples(args, 1)[0]
    assert sample["position_ids"].tolist() == list(range(8))
    assert sample["actual_seq_len"].tolist() == [8] + [-1] * 7


def test_samples_are_as_long_as_the_sequence_unless_a_length_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = arguments(seq_length=64, no_pad_to_seq_lengths=True, pad_to_multiple_of=8)
    assert (sample_length(variable), padded_length(variable)) == (64, 64)
    given(monkeypatch, 13)
    assert (sample_length(variable), padded_length(variable)) == (13, 16)
    assert len(InstructionSamples(variable, 1)[0]["input_ids"]) == 13
    given(monkeypatch, 100)
    assert (sample_length(variable), padded_length(variable)) == (64, 64)


def test_a_given_length_does_not_matter_where_samples_are_padded_or_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 13)
    assert sample_length(arguments(seq_length=64, no_pad_to_seq_lengths=False)) == 64
    assert sample_length(arguments(seq_length=64, no_pad_to_seq_lengths=True, reset_attention_mask=True)) == 64
    assert sample_length(arguments(seq_length=64, no_pad_to_seq_lengths=True, neat_pack=True)) == 64
