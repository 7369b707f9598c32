"""torch_npu's memory history becomes the rows that `explain` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_dryrun.rank.torch_npu.history import COLUMNS, described, rows
from mindspeed_dryrun.record.call_stack import read_stack
from mindspeed_dryrun.report.explain import explain


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


ROOT = frame("/job/pretrain_gpt.py", 3, "<module>")


def event(action: str, address: int, size: int = 0, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def test_blocks_live_from_their_allocation_to_their_release_and_have_the_size_of_the_allocator(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", 0, 1 << 21),
        event("alloc", 0, 480, frame("/m/model.py", 5, "__init__"), ROOT),  # 480 + 32 bytes: one block of 512
        event("alloc", 512, 481, frame("/m/transformer_layer.py", 9, "forward"), frame("/m/s.py", 2, "forward_step"), ROOT),
        event("free_requested", 512),
        event("alloc", 2048, 1000),  # not released before the next one: they overlap
        event("free_completed", 512),
        event("alloc", 512, 100, ROOT),
    ]
    found = [line.split(",") for line in rows(events)]
    assert [(line[0], line[1], line[3]) for line in found] == [
        ("2", str(2**63 - 1), "512"), ("3", "6", "1024"), ("5", str(2**63 - 1), "1536"), ("7", str(2**63 - 1), "512")
    ]  # fmt: skip
    file = tmp_path / "memory_block.csv"
    file.write_text("\n".join([",".join(COLUMNS), *rows(events)]) + "\n")
    explanation = explain(file)
    assert explanation.peak_bytes == 512 + 1024 + 1536
    sizes = {part.name: part.size_bytes for part in explanation.categories}
    assert sizes["weights"] == 512


def test_autograds_own_threads_are_the_backward_pass() -> None:
    node, stack = described([])
    assert node == "backward of an operator" and read_stack(stack.encode()).phase == "backward"
    again = [frame("/m/transformer_layer.py", 4, "forward"), frame("/m/random.py", 8, "backward")]
    assert read_stack(described(again)[1].encode()).phase == "recompute"


def test_the_operator_is_what_the_line_of_the_program_calls(tmp_path: Path) -> None:
    program = tmp_path / "norm.py"
    program.write_text("x = 1\ny = keep(torch_npu.npu_rms_norm(x, weight.t()))\nz = torch.matmul(a, b.t())\n")
    wrapper = frame("/site-packages/torch/_ops.py", 7, "__call__")
    assert described([wrapper, frame(str(program), 2, "forward"), ROOT])[0] == "npu_rms_norm"
    assert described([frame(str(program), 3, "forward"), ROOT])[0] == "matmul"
    assert "," not in described([frame("/a,b|c.py", 1, "f;g"), ROOT])[1]
