"""explain: what fills the peak, on files whose contents are known."""

from __future__ import annotations

import json
import random
import re

import pytest
from tracker_file import HEADER, Program, frames

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record import memory_rows
from mindspeed_dryrun.record.call_stack import movement, read_stack
from mindspeed_dryrun.record.memory_block import replay
from mindspeed_dryrun.record.tracker_graph import Shape, read_shapes
from mindspeed_dryrun.report.explain import CATEGORIES, explain, tracker_files
from mindspeed_dryrun.report.explain_view import render_json, render_text

PROGRAMS = {
    "plain": {},
    "recompute": {"recompute": True},
    "distributed optimizer": {"distributed_optimizer": True},
    "one layer, one microbatch": {"layers": 1, "microbatches": 1, "in_flight": 1},
    "deep pipeline": {"layers": 5, "microbatches": 9, "in_flight": 4},
}


@pytest.mark.parametrize("settings", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_peak_is_the_sorted_replays_and_every_block_is_what_the_program_meant(tmp_path, settings):
    program = Program(**settings).run()
    peak, time, expected = program.peak()
    found = explain(program.write(tmp_path / "memory_block.csv"))
    assert (found.peak_bytes, found.peak_time) == (peak, time)
    assert {part.name: part.size_bytes for part in found.categories} == {name: expected[name] for name in CATEGORIES}
    assert sum(part.size_bytes for part in found.categories) == peak
    assert found.difference_mb == 0


def test_activations_are_told_by_layer_and_microbatch(tmp_path):
    program = Program(layers=3, microbatches=4, in_flight=2).run()
    found = explain(program.write(tmp_path / "memory_block.csv"))
    assert found.when == "in the backward of microbatch 1, iteration 2"
    layers = {part.name: part.size_bytes for part in found.layers}
    whole = 4 * program.activation
    assert layers == {"1": 2 * whole, "2": 2 * whole, "3": 2 * whole, "outside the layers": 2 * program.activation // 8}
    microbatches = {part.name: part.size_bytes for part in found.microbatches}
    assert microbatches == {"1": 3 * whole + program.activation // 8, "2": 3 * whole + program.activation // 8}
    assert {part.name for part in found.operators} == {
        "RmsNorm",
        "FlashAttentionScore",
        "MatMulExt",
        "Swiglu",
        "Embedding",
    }


def test_the_curve_covers_one_iteration_and_holds_its_peak(tmp_path):
    program = Program(layers=4, microbatches=60, in_flight=3).run(iterations=3)
    found = explain(program.write(tmp_path / "memory_block.csv"))
    points = found.iteration.points
    assert 500 < len(points) < 1200
    assert max(high for _, _, high in points) == found.peak_bytes
    assert all(low <= high for _, low, high in points)
    forwards = [segment.microbatch for segment in found.iteration.segments if segment.phase == "forward"]
    assert forwards == list(range(1, 61))


def test_weights_gradients_and_states_are_found_as_bytes_per_parameter(tmp_path):
    program = Program().run()
    path = program.write(tmp_path / "memory_block.csv")
    lines = []
    for tensor in program.tensors:
        if tensor.category == "weights":
            lines += [
                f"(%{tensor.start}) = Empty(), task_info: {tensor.start - 2}, attrs {{stream_id=0}} \n",
                f"    (BFloat16:[{tensor.size // 2 // 1024}, 1024]) <- ()\n",
            ]
    (tmp_path / "tracker_graph.ir").write_text("".join(lines))
    found = explain(path)
    weights = sum(tensor.size for tensor in program.tensors if tensor.category == "weights")
    assert found.parameters == weights // 2
    assert found.bytes_per_parameter == pytest.approx(18, abs=1e-6)


def test_the_engines_figure_and_a_difference_are_lines_of_their_own(tmp_path):
    program = Program().run()
    path = program.write(tmp_path / "memory_block.csv")
    whole = program.peak()[0] // 2**20
    same = render_text(explain(path, 0, whole, whole + 7))
    assert re.search(r"difference from the engine's figure +\+0M\n", same) and re.search(r"\nfragments +7.0M\n", same)
    more = explain(path, 0, whole + 12, whole + 20)
    assert more.difference_mb == 12
    assert re.search(r"difference from the engine's figure +\+12M\n", render_text(more))
    assert all(len(line) <= 80 for line in render_text(more).splitlines())
    assert json.loads(render_json([more]))["ranks"][0]["difference_mb"] == 12


def test_what_a_graph_mode_file_of_a_user_holds(tmp_path):
    row = "{start},{end},0x1,0,Pool,{size},{size},{size},x.cc,1,{kind},1,Graph,{node},kernel_graph_0,{{}},1,,0,0,\n"
    rows = [
        row.format(start=1, end=2**63 - 1, size=100 << 20, kind="Weight", node="layers.0.wq"),
        row.format(start=2, end=9, size=30 << 20, kind="Kernel", node="Default/network/layers-CellList/3-Layer/MatMul-op7"),
        row.format(start=3, end=5, size=20 << 20, kind="WorkSpace", node="Default/MatMul-op7"),
        row.format(start=6, end=8, size=10 << 20, kind="Kernel", node="AllReduce-op9"),
    ]
    path = tmp_path / "rank_5" / "memory_block.csv"
    path.parent.mkdir()
    path.write_text(HEADER + "".join(rows))
    assert tracker_files(tmp_path) == {5: path}
    found = explain(path)
    sizes = {part.name: part.size_bytes >> 20 for part in found.categories}
    assert (sizes["weights"], sizes["activations"], sizes["workspace"]) == (100, 30, 20)
    assert [part.name for part in found.layers] == ["4"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is not a memory_block.csv"),
        ("a,b,c\n1,2,3\n", "no column start_time_stamp"),
        (HEADER, "contains no memory blocks"),
    ],
)
def test_a_file_that_is_none_is_refused_with_a_sentence(tmp_path, text, words):
    path = tmp_path / "memory_block.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        replay(path)


def test_a_file_in_another_order_gives_the_same(tmp_path):
    program = Program().run()
    path = program.write(tmp_path / "memory_block.csv")
    straight = render_json([explain(path)])
    header, *rows = path.read_text().splitlines(keepends=True)
    random.Random(1).shuffle(rows)
    path.write_text(header + "".join(rows))
    assert render_json([explain(path)]) == straight


def test_damaged_and_cut_off_rows_are_counted_not_hidden(tmp_path):
    program = Program().run()
    path = program.write(tmp_path / "memory_block.csv")
    text = path.read_text().splitlines(keepends=True)
    text.insert(5, "rubbish\n")
    path.write_text("".join(text) + "99999,12")
    found = explain(path)
    assert found.damaged_rows == 2 and found.peak_bytes == program.peak()[0]
    assert "2 damaged rows" in render_text(found)


def test_a_missing_end_of_columns_is_read_too(tmp_path):
    """Older MindSpore has no is_persistent and is_small."""
    program = Program().run()
    text = "".join([HEADER, *program.lines()]).replace(",is_persistent,is_small,\n", ",\n").replace(",0,0,\n", ",\n")
    path = tmp_path / "memory_block.csv"
    path.write_text(text)
    assert explain(path).peak_bytes == program.peak()[0]


def test_host_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Twenty times the rows, the same live blocks: the pass must not keep rows."""
    import tracemalloc

    monkeypatch.setattr(memory_rows, "_PART", 2**17)
    program = Program(layers=6, microbatches=8).run()
    used = []
    for repeat in (0, 40):
        path = program.write(tmp_path / "memory_block.csv", repeat_last=repeat)
        tracemalloc.start()
        found = replay(path)
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.peak_bytes == program.peak()[0]
    assert used[1] < 1.3 * used[0] + 200_000


@pytest.fixture
def many_parts(monkeypatch):
    monkeypatch.setattr(memory_rows, "_PART", 2**14)


def test_parts_do_not_show(tmp_path, monkeypatch):
    program = Program(layers=4, microbatches=12, in_flight=3).run(iterations=3)
    path = program.write(tmp_path / "memory_block.csv")

    def told():
        found = replay(path)
        blocks = [(block.start, block.size, block.layer, block.segment.start, block.stack.frames) for block in found.blocks]
        return found.rows, found.peak_bytes, found.peak_time, found.counted_peak_bytes, blocks, found.iteration

    whole = repr(told())
    monkeypatch.setattr(memory_rows, "_PART", 5_001)  # borders fall anywhere in a row
    assert repr(told()) == whole


@pytest.mark.parametrize("lines_off", [1, 40, 120])
def test_a_file_without_its_beginning_is_added_up_instead(tmp_path, many_parts, lines_off):
    """The engine's count then holds blocks that are not in the file: the sum of those that are is what can be told."""
    program = Program(layers=4, microbatches=6, in_flight=2).run()
    header, *rows = [HEADER, *program.lines()]
    path = tmp_path / "memory_block.csv"
    path.write_text("".join([header, *rows[lines_off:]]))
    found = replay(path)
    events = []
    for row in rows[lines_off:]:
        start, end, size = (int(row.split(",")[column]) for column in (0, 1, 5))
        events += [(start, 1, size), (end, 0, -size)]
    used = most = 0
    for _, _, size in sorted(events):
        used += size
        most = max(most, used)
    assert found.peak_bytes == most == sum(block.size for block in found.blocks)
    assert found.counted_used_bytes == program.peak()[0] > most


def test_a_file_without_the_engines_count(tmp_path):
    program = Program().run()
    path = tmp_path / "memory_block.csv"
    path.write_text("".join([HEADER, *program.lines()]).replace("actual_used_memory", "x").replace("actual_peak_", "y"))
    found = replay(path)
    assert found.peak_bytes == program.peak()[0] and found.counted_used_bytes is None


def test_movement_between_stacks():
    block, layer = ("/m/transformer_block.py", 9, "forward"), "/m/transformer_layer.py"
    step = ("/m/schedules.py", 7, "forward_step")
    user = "/job/pretrain_gpt.py"

    def stack(*calls):
        return read_stack(frames(*calls).encode())

    first = stack(step, (user, 95, "forward_step"), block, (layer, 389, "forward"))
    second = stack(step, (user, 95, "forward_step"), block, (layer, 390, "forward"))
    batch = stack(step, (user, 94, "forward_step"), ("/job/data.py", 3, "get_batch"))
    assert movement(first, second) == ""
    assert movement(second, first) == "layer"
    assert movement(second, batch) == "microbatch"
    assert movement(batch, first) == "layer"
    assert (first.phase, batch.phase) == ("forward", "forward")
    assert read_stack(b"\xff|;;File:;Line:x|").frames == ()


def test_shapes_come_from_the_first_line_that_names_a_block(tmp_path):
    path = tmp_path / "tracker_graph.ir"
    path.write_text(
        "(%4, %6) = Two(%1), task_info: 2, attrs {}\n    (BFloat16:[8, 4], Bool:[3]) <- (Float32:[1])\n"
        "(%4) = View(%4), task_info: 3\n    (BFloat16:[2]) <- (BFloat16:[8, 4])\n"
    )
    found = read_shapes(path, {4, 6, 9})
    assert found == {4: Shape("BFloat16", (8, 4)), 6: Shape("Bool", (3,))}
    assert (found[4].bytes, found[6].bytes) == (64, 3)
    assert read_shapes(tmp_path / "none.ir", {4}) == {}
