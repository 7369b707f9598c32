"""The time model: physics that can be checked, the lab's order, calibration, Galvatron's recurrence."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_models import EXAMPLES, MODELS, hardware

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.devices.hardware import Hardware, Range, build_hardware, read_hardware, to_yaml
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.calibration import MeasuredRun, fit, read_log, row_of_log
from mindspeed_dryrun.estimate.layer_time import Case, exchange_seconds, gather_seconds, layer_time, matmul_seconds
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.estimate.time_model import (
    USUAL,
    estimate,
    iteration_seconds,
    logged_flops,
)
from mindspeed_dryrun.megatron.model_shape import ModelShape

HARDWARE = hardware()
QWEN = MODELS["qwen2.5-7b"]
LAB = {
    "TP2PP4": Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((7,),) * 4),
    "TP2PP4+VPP": Strategy(
        tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((2, 1, 2, 2), (0, 2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2)), noop=(2, 3, 5, 8)
    ),
    "TP4PP2": Strategy(tp=4, pp=2, dp=1, cp=1, micro_batch=1, stages=((14,), (14,))),
    "TP4PP2+recompute": Strategy(tp=4, pp=2, dp=1, cp=1, micro_batch=1, stages=((14,), (14,)), recompute=Recompute("full", 1)),
}


def test_operations_are_megatrons() -> None:
    """Megatron's own formula: 12 B s L h² (1 + g/a + s/2h + 1.5 f/h) + 6 B s h V."""
    b, s, h, layers = 64, 4096, 3584, 28
    expected = 12 * b * s * layers * h * h * (1 + 4 / 28 + s / h / 2 + 1.5 * 18944 / h) + 6 * b * s * h * 152064
    assert QWEN.iteration_flops() == pytest.approx(expected)


def test_a_product_is_never_faster_than_the_card() -> None:
    for rows, columns, inner in itertools.product((128, 1000, 4096), (64, 1152, 9472), (512, 3584)):
        seconds = matmul_seconds(rows, columns, inner, HARDWARE)
        assert seconds > 2 * rows * columns * inner / (HARDWARE.matmul_tflops.typical * 1e12)


def test_efficiency_depends_on_the_shape() -> None:
    """A product whose tiles fill the cores runs better than one with a tile too many, and a thin one waits for memory."""
    rows, columns = HARDWARE.tile[0] * 24, HARDWARE.tile[1]

    def rate(m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k / matmul_seconds(m, n, k, HARDWARE)

    assert rate(rows, columns, 8192) > 1.1 * rate(rows + 1, columns, 8192)
    assert rate(4096, 4096, 4096) > 3 * rate(4096, 64, 64)


@pytest.mark.parametrize(("cards", "measured_gb_s"), [(2, 38), (4, 64), (8, 149)])
def test_a_full_mesh_gathers_as_measured(cards: int, measured_gb_s: float) -> None:
    """The public measurement that the hardware file cites: gathered bytes over time, within 15 %."""
    volume = 1e9
    assert volume / gather_seconds(volume, cards, 1, HARDWARE) / 1e9 == pytest.approx(measured_gb_s, rel=0.15)


def test_groups_across_nodes_use_the_network() -> None:
    inside = gather_seconds(1e9, 8, 1, HARDWARE)
    assert gather_seconds(1e9, 8, 8, HARDWARE) > 3 * inside
    assert gather_seconds(1e9, 1, 1, HARDWARE) == 0


def test_nodes_hand_on_what_others_have_sent() -> None:
    """Across two nodes every card sends its own piece; a group of one card a node sends everything over the network."""
    apart = gather_seconds(1e9, 2, 8, HARDWARE)
    assert gather_seconds(1e9, 16, 1, HARDWARE) < apart / 3
    network = HARDWARE.network_gb_s.typical * 1e9
    assert apart == pytest.approx(0.5e9 / network, rel=0.01)


def test_an_exchange_across_nodes_crosses_the_network_with_what_must() -> None:
    inside, across = exchange_seconds(1e9, 8, 1, HARDWARE), exchange_seconds(1e9, 16, 1, HARDWARE)
    network = HARDWARE.network_gb_s.typical * 1e9
    assert across == pytest.approx(0.5 * inside + 0.5e9 / network, rel=0.01)
    assert exchange_seconds(1e9, 16, 8, HARDWARE) == pytest.approx(15 / 16 * 1e9 / network, rel=0.01)
    assert exchange_seconds(1e9, 1, 1, HARDWARE) == 0


def _simulate(forward: list[float], backward: list[float], microbatches: int) -> float:
    """1F1B event by event: each stage does its passes in Megatron's order, each as soon as what it needs is there."""
    stages = len(forward)
    orders = []
    for stage in range(stages):
        warm = min(microbatches, stages - stage - 1)
        order = [("F", index) for index in range(warm)]
        for index in range(microbatches - warm):
            order += [("F", warm + index), ("B", index)]
        orders.append(order + [("B", index) for index in range(microbatches - warm, microbatches)])
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    while any(position[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, index = orders[stage][position[stage]]
                need = ("F", index, stage - 1) if kind == "F" else ("B", index, stage + 1)
                if kind == "B" and stage == stages - 1:
                    need = ("F", index, stage)
                if ((kind == "F" and stage > 0) or kind == "B") and need not in done:
                    break
                start = max(clock[stage], done.get(need, 0.0))
                clock[stage] = start + (forward if kind == "F" else backward)[stage]
                done[(kind, index, stage)] = clock[stage]
                position[stage] += 1
    return max(clock)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6),
    st.integers(2, 6),
)
def test_the_formula_of_the_pipeline_is_the_simulated_one(times: list[float], per_stage: int) -> None:
    """`m · slowest + the others once` is never below 1F1B event by event, and at most 15 % above it."""
    microbatches = per_stage * len(times)
    simulated = _simulate(times, [2 * time for time in times], microbatches)
    stages = [3 * time for time in times]
    formula = microbatches * max(stages) + sum(stages) - max(stages)
    assert simulated * (1 - 1e-9) <= formula <= 1.15 * simulated


def test_the_parts_add_up_and_the_band_is_around() -> None:
    for strategy in LAB.values():
        guess = estimate(QWEN, strategy, HARDWARE)
        parts = guess.compute_s + guess.communication_s + guess.bubble_s + guess.optimizer_s
        assert parts == pytest.approx(guess.iteration_s)
        assert guess.low_s < guess.iteration_s < guess.high_s
        wide = estimate(QWEN, strategy, dataclasses.replace(HARDWARE, error=None))
        assert wide.high_s / wide.low_s > 1.5  # honestly wide where no rows were seen
        assert guess.tokens_per_s == pytest.approx(64 * 4096 / guess.iteration_s)


def test_recomputation_adds_a_forward_pass() -> None:
    plain, again = LAB["TP4PP2"], LAB["TP4PP2+recompute"]
    more = iteration_seconds(QWEN, again, HARDWARE) - iteration_seconds(QWEN, plain, HARDWARE)
    forward = layer_time(Case(QWEN, plain, HARDWARE, USUAL), mixture=False).forward.total
    assert more == pytest.approx((64 + 1) * 14 * forward)
    half = dataclasses.replace(plain, recompute=Recompute("block", 7))
    assert iteration_seconds(QWEN, half, HARDWARE) - iteration_seconds(QWEN, plain, HARDWARE) == pytest.approx(more / 2)


def test_interleaving_shrinks_the_bubble() -> None:
    even = ModelShape(**{**dataclasses.asdict(QWEN), "layers": 32})
    plain = estimate(even, Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((8,),) * 4), HARDWARE)
    chunks = estimate(even, Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((4, 4),) * 4), HARDWARE)
    assert chunks.bubble_s == pytest.approx(plain.bubble_s / 2, rel=0.05)
    assert chunks.iteration_s < plain.iteration_s


MEASURED = {"TP2PP4": 119, "TP2PP4+VPP": 126, "TP4PP2": 126, "TP4PP2+recompute": 99}  # TFLOP/s a card
LAB_RELEASE = (2, 1)  # see examples/sweeps/qwen25_7b_lab.yaml


def _throughput(name: str, hardware: Hardware = HARDWARE) -> float:
    return estimate(QWEN, LAB[name], hardware, LAB_RELEASE).tflops_per_card


def _row(name: str) -> MeasuredRun:
    return MeasuredRun(
        name=name, shape=QWEN, strategy=LAB[name], seconds=logged_flops(QWEN, LAB[name], LAB_RELEASE) / MEASURED[name] / 8 / 1e12
    )


def test_throughput_lines_of_old_releases_count_more() -> None:
    """Read off ranks of both releases (throughput x time x cards, 16 samples): 2.1 counts the four no-op layers and the
    whole attention matrix, 2.2 neither."""
    batch = dataclasses.replace(QWEN, global_batch=16)
    for name, old, new in (("TP2PP4", 3104, 2942), ("TP2PP4+VPP", 3515, 2942)):
        assert logged_flops(batch, LAB[name], (2, 1)) / 1e12 == pytest.approx(old, rel=2e-3)
        assert logged_flops(batch, LAB[name], (2, 2)) / 1e12 == pytest.approx(new, rel=2e-3)


def test_the_lab_without_calibration() -> None:
    """Rows that nothing was fitted to, of another lab and the other back end: inside the band, the slowest first."""
    assert sorted(LAB, key=_throughput)[:2] == ["TP4PP2+recompute", "TP2PP4"]
    for name, measured in MEASURED.items():
        guess = estimate(QWEN, LAB[name], HARDWARE, LAB_RELEASE)
        assert guess.low_s < _row(name).seconds < guess.high_s
        assert guess.tflops_per_card == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("pair", [*itertools.combinations(LAB, 2)], ids=" and ".join)
def test_two_rows_of_the_lab_predict_the_other_two(pair: tuple[str, str]) -> None:
    """Whichever two: the remaining two come out within 8 %, in the measured order."""
    done = fit([_row(name) for name in pair], HARDWARE).hardware
    for name, measured in MEASURED.items():
        assert _throughput(name, done) == pytest.approx(measured, rel=0.08)
    assert sorted(LAB, key=lambda name: _throughput(name, done))[:2] == ["TP4PP2+recompute", "TP2PP4"]


def test_calibration_finds_the_truth() -> None:
    """Times made with cards that compute 0.8 and communicate 1.3 times as fast are recognised."""
    truth = HARDWARE.scaled(0.8, 1.3)
    more = {
        **LAB,
        "TP1": Strategy(
            tp=1,
            pp=2,
            dp=4,
            cp=1,
            micro_batch=1,
            stages=((14,), (14,)),
            recompute=Recompute(),
            sequence_parallel=False,
            distributed_optimizer=True,
        ),
    }
    rows = [
        MeasuredRun(name=name, shape=QWEN, strategy=strategy, seconds=iteration_seconds(QWEN, strategy, truth))
        for name, strategy in more.items()
    ]
    done = fit(rows, HARDWARE)
    assert done.compute == pytest.approx(0.8, rel=0.03) and done.communication == pytest.approx(1.3, rel=0.10)
    assert max(abs(error) for _, error in done.residuals) < 0.02
    assert done.hardware.error is not None and 0.05 <= done.hardware.error < 0.1  # never claimed to be better than 5 %
    assert done.hardware.calibrated == tuple(more)
    again = build_hardware(to_yaml(done.hardware), "here")
    assert again.matmul_tflops.typical == pytest.approx(done.hardware.matmul_tflops.typical, rel=1e-3)
    assert again.error == done.hardware.error


def test_one_row_leaves_a_wide_band() -> None:
    done = fit([MeasuredRun(name="only", shape=QWEN, strategy=LAB["TP2PP4"], seconds=12.0)], HARDWARE)
    assert done.hardware.error is not None and done.hardware.error > 0.2
    with pytest.raises(UsageError, match="nothing to calibrate"):
        fit([], HARDWARE)


LOG = """
------------------------ arguments ------------------------
  bf16 ............................................ True
  global_batch_size ............................... 64
  group_query_attention ........................... True
  hidden_size ..................................... 3584
  ffn_hidden_size ................................. 18944
  micro_batch_size ................................ 1
  noop_layers ..................................... None
  num_attention_heads ............................. 28
  num_layers ...................................... 28
  num_query_groups ................................ 4
  padded_vocab_size ............................... 152064
  pipeline_model_parallel_size .................... 4
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  untie_embeddings_and_output_weights ............. True
  world_size ...................................... 8
-------------------- end of arguments ---------------------
 iteration 1/10 | consumed samples: 64 | elapsed time per iteration (ms): 90000.0 | throughput per GPU (TFLOP/s/GPU): 16.0 |
 iteration 2/10 | consumed samples: 128 | elapsed time per iteration (ms): 12400.0 | throughput per GPU (TFLOP/s/GPU): 118.6 |
 iteration 3/10 | consumed samples: 192 | elapsed time per iteration (ms): 12300.0 | throughput per GPU (TFLOP/s/GPU): 119.5 |
"""


def test_a_log_is_read_with_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "worker_0.log"
    path.write_text(LOG)
    row = row_of_log(path)
    assert row.shape == QWEN and row.strategy == LAB["TP2PP4"]
    assert row.seconds == pytest.approx(12.35)  # the first iteration does not count
    assert read_log(path).tflops[-1] == 119.5
    # And the throughput line is ours: operations over time and cards.
    assert QWEN.iteration_flops() / 12.4 / 8 / 1e12 == pytest.approx(118.6, rel=0.01)


def test_a_log_of_another_rank_needs_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "worker_7.log"
    path.write_text("\n".join(line for line in LOG.splitlines() if "....." not in line))
    base = ["calibrate", str(path), "--hardware", "ascend910b-64g"]
    assert main(base) == 2
    assert "worker_0.log" in capsys.readouterr().err
    out = tmp_path / "mine.yaml"
    script = ["--script", str(EXAMPLES / "lab" / "qwen25_7b_8p.sh"), "--set", "TP=2", "--set", "PP=4"]
    assert main([*base, *script, "--out", str(out)]) == 0
    assert read_hardware(out).calibrated == ("worker_7.log",)
    again = ["calibrate", str(path), "--hardware", str(out), *script]
    assert main(again) == 2
    assert "calibrated already" in capsys.readouterr().err


def test_the_rows_of_the_lab_calibrate_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = str(EXAMPLES / "searches" / "lab_rows.yaml")
    out = tmp_path / "lab.yaml"
    assert main(["calibrate", rows, "--hardware", "ascend910b-64g", "--out", str(out)]) == 0
    assert "times as fast as" in capsys.readouterr().out
    assert read_hardware(out).error is not None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rows: []\nscript: x.sh", "must be a list of measured"),
        ("script: x.sh\nrows: [{name: a}]", "needs exactly one of"),
        ("script: x.sh\nrows: [{iteration_ms: 1, tflops_per_card: 2}]", "needs exactly one of"),
        ("script: x.sh\nrow: []", "did you mean 'rows'"),
    ],
)
def test_rows_that_cannot_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    assert main(["calibrate", str(path), "--hardware", "ascend910b-64g"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_log_without_iterations(tmp_path: Path) -> None:
    path = tmp_path / "empty.log"
    path.write_bytes(b"\xff\xfe nothing here")
    with pytest.raises(UsageError, match="no line 'elapsed time per iteration"):
        read_log(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topology": "ring"}, "'topology' must be one of full_mesh, switch, not 'ring'"),
        ({"link_gb_s": [3, 2, 1]}, "rising order"),
        ({"link_gb_s": [1, 2]}, "rising order"),
        ({"matmul_tflops": "fast"}, "one number above 0"),
        ({"tile": 128}, "two whole numbers"),
        ({"cores": 0}, "whole number"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_hardware_that_cannot_be_meant(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build_hardware({**to_yaml(HARDWARE), **change}, "hw.yaml")


def test_the_ends_of_the_band() -> None:
    slow, fast = HARDWARE.at("low"), HARDWARE.at("high")
    assert slow.latency_us == Range(80, 80, 80) and fast.latency_us == Range(10, 10, 10)
    assert slow.link_gb_s.typical < HARDWARE.link_gb_s.typical < fast.link_gb_s.typical
