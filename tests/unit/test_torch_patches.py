"""Patches and handlers of the torch_npu engine that need no torch."""

from __future__ import annotations

import pytest

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import patch_catalogue
from mindspeed_dryrun.rank.handlers.tensor_methods import owner_of, replaced_method
from mindspeed_dryrun.rank.torch_npu import atb


def test_an_engine_may_replace_a_shared_patch() -> None:
    by_engine = {
        engine: {patch["name"]: patch for patch in patch_catalogue.compile(engine=engine)} for engine in ("mindspore", "torch_npu")
    }
    assert by_engine["mindspore"]["mindspeed-atb-builder"].get("skip") is True
    assert by_engine["torch_npu"]["mindspeed-atb-builder"]["handler"] == "mindspeed_dryrun.rank.torch_npu.atb:load"
    assert "mindspeed-llm-do-train" in by_engine["torch_npu"] and "msadapter-device-count" not in by_engine["torch_npu"]


def test_operators_in_place_do_nothing_and_unknown_ones_stop_the_rank() -> None:
    operators = atb.load(lambda self: None)(object())
    assert operators.npu_matmul_add_fp32(1, 2, 3) is None
    with pytest.raises(DryRunError, match="rms_norm of NNAL"):
        operators.rms_norm(1)


def test_a_method_of_a_c_class_is_replaced_in_the_class_above_it() -> None:
    class Tensor(bytearray):  # as torch.Tensor is above torch._C.TensorBase
        pass

    class Parameter(Tensor):
        pass

    assert owner_of(Parameter, "find") is Tensor and owner_of(Tensor, "find") is Tensor
    with replaced_method(Parameter, "find", lambda method: lambda self, what: method(self, what) + 1):
        assert Parameter(b"ab").find(b"b") == Tensor(b"ab").find(b"b") == 2
    assert Tensor(b"ab").find(b"b") == 1 and "find" not in Tensor.__dict__
