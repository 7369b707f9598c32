"""Mock samples of fine-tuning carry what upstream's collators ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dryrun.rank.handlers.data import InstructionSamples

pytest.importorskip("numpy")


def test_packed_samples_are_one_document_of_full_length() -> None:
    args = SimpleNamespace(seq_length=8, is_pairwise_dataset=False, reset_position_ids=False, reset_attention_mask=True)
    sample = InstructionSamples(args, 1)[0]
    assert sample["position_ids"].tolist() == list(range(8))
    assert sample["actual_seq_len"].tolist() == [8] + [-1] * 7
