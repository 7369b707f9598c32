"""The torch_npu engine itself: the real wheel on the stand-in CANN. Skipped where torch_npu is not installed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from torch_npu_tests import MARKS

from mindspeed_dryrun.doctor.trial import torch_trial
from mindspeed_dryrun.rank.torch_npu import rank as torch_rank
from mindspeed_dryrun.report.explain import explain, tracker_files

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, torch, torch_npu, torch.distributed as dist
from mindspeed_dryrun.rank import progress
torch.use_deterministic_algorithms(True)
assert not torch.utils.deterministic.fill_uninitialized_memory  # gigabytes on the host
dist.init_process_group("hccl")
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
weight = torch.zeros(1024, 1024, device="npu", requires_grad=True)
optimizer = torch.optim.AdamW([weight], fused=True)
for step in range(2):
    loss = (torch.ones(1024, 1024, device="npu") @ weight).sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    progress.iteration(step + 1, 2)
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, dist.get_rank())
assert everybody == [dist.get_rank()] * dist.get_world_size()
assert torch.npu.get_device_capability() == (9, 0)  # torch's broadcast looks at the first of them
values = torch.ones(8, device="npu")
assert values[values > 0].shape == (8,)  # the largest that it can be
torch.distributions.Uniform(values[0] * 0.5, values[0]).rsample((4,))  # bounds that read as zeros
"""
COMPILED = """
import torch, torch_npu
from mindspeed_dryrun.rank import progress
from mindspeed_dryrun.rank.torch_npu import compiled
class Builder:
    def __init__(self, name): self.name = name
    load = compiled.load(lambda self: "compiled as ever")
def grown(call):
    before = torch.npu.memory_allocated()
    kept = call()
    return (torch.npu.memory_allocated() - before) >> 20, kept
torch.npu.set_device(0)
like = dict(device="npu", dtype=torch.bfloat16)
x, cos = torch.empty(1024, 1, 32, 128, requires_grad=True, **like), torch.empty(1024, 1, 1, 128, **like)
rope = Builder("npu_rotary_position_embedding").load().npu_rotary_position_embedding
size, y = grown(lambda: rope(x.clone(), cos, cos, 0))
assert size == 8, size  # its output; the input is not saved, so the copy has gone
y.sum().backward()
tokens, choice = torch.empty(1024, 4096, **like), torch.zeros(1024, 8, dtype=torch.int64, device="npu")
size, (permuted, order) = grown(lambda: Builder("npu_moe_token_permute").load().npu_moe_token_permute(tokens, choice))
assert size == 64 and permuted.shape == (8192, 4096) and order.shape == (8192,), size
probs = torch.ones(1024, 8, **like)
back = Builder("npu_moe_token_unpermute").load().npu_moe_token_unpermute(permuted, order, probs)
assert back.shape == tokens.shape
weight = torch.empty(8, 4096, 512, **like)
gmm = Builder("grouped_matmul").load()
(product,) = gmm.npu_gmm([permuted], [weight], [], [1024 * n for n in range(1, 9)], 0, 0)
dx, dw, _ = gmm.npu_gmm_backward([product], [permuted], [weight], [1024 * n for n in range(1, 9)], 0)
assert product.shape == (8192, 512) and dx[0].shape == permuted.shape and dw[0].shape == weight.shape
update = Builder("npu_ring_attention_update").load().npu_ring_attention_update
assert [one.shape for one in update(x, cos, cos)] == [x.shape, cos.shape, cos.shape]
assert Builder("adaptive_cp").load() == "compiled as ever"
reuse = Builder("algorithm").load().reuse_data_ptr
source = torch.empty(16 << 20, **like)
def looking_in():
    target = torch.empty(4 << 20, dtype=torch.float32, device="npu")
    view = target.view(2, -1)
    reuse(target, source, 2 << 20)
    return target, view
size, (target, view) = grown(looking_in)
assert size == 0, size  # its own memory has been freed, and views look where it looks
assert target.data_ptr() == view.data_ptr() == source.data_ptr() + (8 << 20) and target.shape == (4 << 20,)
del source  # the memory is the source's
assert torch.empty(4 << 20, device="npu") is not None
try:
    reuse(target, view, 4 << 20)
    raise SystemExit("an offset beyond the end was taken")
except RuntimeError:
    pass
progress.iteration(1, 1)
"""

BESIDE_CANN = """
import torch, torch_npu
import cann_ops_transformer.ops as ops
from mindspeed_dryrun.rank import progress
def grown(call):
    before = torch.npu.memory_allocated()
    kept = call()
    return (torch.npu.memory_allocated() - before) / 2**20, kept
torch.npu.set_device(0)
like, full = dict(device="npu", dtype=torch.bfloat16), dict(device="npu", dtype=torch.float32)
x = torch.empty(1, 4096, 4, 1024, requires_grad=True, **like)
phi, alpha, bias = torch.empty(24, 4096, requires_grad=True, **full), torch.empty(3, **full), torch.empty(24, **full)
size, (h_in, h_post, h_res) = grown(lambda: ops.mhc_pre_sinkhorn(x, phi, alpha, bias, 4, 20, 1e-6, 1e-6))
assert h_in.shape == (1, 4096, 1024) and h_in.dtype == x.dtype and h_res.shape == (1, 4096, 16) and h_res.dtype == phi.dtype
# 8 for what goes in; in float32 for each of 4096 tokens 4 + 16 weights, and kept 4 + 24 + 1 and 20 times two steps of 4 + 16
assert abs(size - (8 + 4096 * 4 * (20 + 29 + 40 * 20) / 2**20)) < 0.1, size
y = ops.mhc_post(x, h_res.view(1, 4096, 4, 4), h_in, h_post)
assert y.shape == x.shape
(y.sum() + h_res.sum()).backward()
assert x.grad.shape == x.shape and phi.grad.shape == phi.shape
q, kv, cmp = torch.empty(1, 4096, 64, 128, **like), torch.empty(1, 4096, 1, 128, **like), torch.empty(1, 1024, 1, 128, **like)
chosen, values = ops.lightning_indexer(q, cmp, torch.empty(1, 4096, 64, **full), 512, return_value=1)
assert chosen.shape == values.shape == (1, 4096, 1, 512) and chosen.dtype == torch.int32
out, lse = ops.sparse_flash_mla(q, ori_kv=kv, cmp_kv=cmp, cmp_sparse_indices=chosen, return_softmax_lse=True)
assert out.shape == q.shape and lse.shape == (1, 1, 4096, 64) and lse.dtype == torch.float32
grads = ops.sparse_flash_mla_grad(q, out, out, lse, ori_kv=kv, cmp_kv=cmp, cmp_sparse_indices=chosen)
assert [None if one is None else tuple(one.shape) for one in grads] == [q.shape, kv.shape, cmp.shape, None, None, chosen.shape]
dq, dk, dw, softmax = ops.sparse_lightning_indexer_kl_loss_grad(q, cmp, torch.empty(1, 4096, 64, **full), chosen, grads[-1])
assert dk.shape == cmp.shape and softmax.shape == chosen.shape
progress.iteration(1, 1)
ops.flash_attn
"""

COUNTS_OF_TOKENS = """
import torch, torch_npu
from types import SimpleNamespace
from mindspeed_dryrun.rank import progress
from mindspeed_dryrun.rank.handlers import moe
def own(self, routing_map):
    self.num_global_tokens_per_local_expert_cpu = routing_map.sum(dim=0).to(torch.int64).reshape(2, 4).cpu()
dispatcher = SimpleNamespace(
    num_experts=8, num_local_experts=4, local_expert_indices=[4, 5, 6, 7], drop_and_pad=False,
    config=SimpleNamespace(moe_router_topk=2, moe_expert_capacity_factor=None),
)
torch.npu.set_device(0)
moe.preprocess(own)(dispatcher, torch.zeros(64, 8, dtype=torch.bool, device="npu"))
counts = dispatcher.num_global_tokens_per_local_expert_cpu
assert counts.device.type == "cpu" and counts.dtype == torch.int64 and counts.tolist() == [[16] * 4] * 2, counts
counts.untyped_storage().resize_(0)  # MindSpeed, fb_overlap/overlap_funcs/fwdbwd.py: what a layer's backward pass was given
assert counts.untyped_storage().size() == 0
progress.iteration(1, 1)
"""

ATTENTION = """
import sys, torch, torch_npu
from mindspeed_dryrun.rank import progress
torch.use_deterministic_algorithms(DETERMINISTIC)
torch.npu.set_device(0)
query, key, value = (torch.empty(4096, 1, 1024, device="npu", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch_npu.npu_fusion_attention(query, key, value, 8, "SBH")[0].sum().backward()
torch.npu.synchronize()
progress.iteration(1, 1)
"""


LATE = """
import json, os, time, torch, torch_npu
from mindspeed_dryrun.rank import activation, progress
from mindspeed_dryrun.rank.torch_npu import streams
torch.npu.set_device(0)
side = torch.npu.Stream()
def taken_by_two():
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    for _ in range(2):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        block.record_stream(side)
        del block
        time.sleep(0.3)  # torch_npu's own queue records the event
    return (torch.npu.memory_reserved() - before) >> 20
one = taken_by_two()
assert 64 <= one < 128, "at once, the second has the first one's block"
told = json.loads(os.environ[activation.VARIABLE])
os.environ[activation.VARIABLE] = json.dumps({**told, "late_streams": True})
streams.late_in.cache_clear()
assert taken_by_two() == 2 * one, "the side stream still has the first one"
block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
block.record_stream(side)
del block
time.sleep(0.3)
side.synchronize()
before = torch.npu.memory_reserved()
block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
assert torch.npu.memory_reserved() == before, "the host has waited for the side stream"
progress.iteration(1, 1)
"""

NODES = """
import os, types, torch, torch_npu, torch.distributed as dist
from mindspeed_dryrun.rank import progress
from mindspeed_dryrun.rank.handlers import disaggregated
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "3" and os.environ["LOCAL_WORLD_SIZE"] == str(1 if rank == 0 else 2)
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
def sizes():
    gathered = [torch.zeros(1, dtype=torch.int64, device="npu") for _ in range(3)]
    torch.distributed.all_gather(gathered, torch.ones(1, dtype=torch.int64, device="npu"))
    return [int(one) for one in gathered]
assert sizes() == [0, 0, 0] and disaggregated.node_sizes(sizes)() == [1, 2, 2]
told = torch.zeros(4, 5, dtype=torch.int64, device="npu")
other = torch.zeros(4, 6, dtype=torch.int64, device="npu")
with disaggregated._sizes_answered([1, 91, 0, 1, 0]):
    told[0] = torch.zeros(5, dtype=torch.int64, device="npu")
    assert [int(told[3, place]) for place in range(5)] == [1, 91, 0, 1, 0] and told[0][1] == 91
    assert int(other[3, 1]) == 0 and told[1:].shape == (3, 5) and told[torch.tensor([0, 2])].shape == (2, 5)
assert int(told[3, 1]) == 0
progress.iteration(1, 1)
"""


def test_nodes_of_different_sizes_tell_each_other_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(NODES)
    for number, size in enumerate((1, 2)):
        call = f"torchrun --nnodes 2 --node_rank {number} --nproc_per_node {size} toy.py --width 8\n"
        (tmp_path / f"node{number}").write_text(call)
    (tmp_path / "train.sh").write_text("bash node1 &\nbash node0 &\nwait\n")
    command = [sys.executable, "-m", "mindspeed_dryrun.launch", "train.sh", "--out", "record", "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert [rank["status"] for rank in report["ranks"]] == ["ok"] * 3, done.stdout + done.stderr


def test_the_trial_counts_three_matrices() -> None:
    assert torch_trial().state == "ok", torch_trial()


def launch(folder: Path, *options: str, program: str = PROGRAM, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "toy.py").write_text(program)
    # The flag that every job of Megatron's has: ranks of other programs are not forked.
    (folder / "train.sh").write_text("torchrun --nproc_per_node 4 --nnodes 2 toy.py --width 8 --micro-batch-size 1\n")
    command = [sys.executable, "-m", "mindspeed_dryrun.launch", "train.sh", "--out", "record", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_torchrun_script_from_nothing_to_a_report(tmp_path: Path) -> None:
    done = launch(tmp_path, "--ranks", "5", "--explain")
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert report["ranks"][0]["status"] == "ok", done.stdout + done.stderr  # no verdict: the other ranks were not run
    assert (report["engine"]["name"], report["engine"]["cann"], report["job"]["back_end"]) == ("torch_npu", "stand-in", "torch")
    result = json.loads((tmp_path / "record" / "ranks" / "00005" / "result.json").read_text())
    first, last = result["allocator"][0], result["allocator"][-1]
    assert result["iterations"] == 2 and len(result["allocator"]) == 3
    assert first["allocated"] >= 3 * 4 * 2**20  # the weight and the two states of Adam
    assert report["ranks"][0]["used_peak_mb"] == round(last["max_allocated"] / 2**20)
    assert result["workspace"]["aclnnApplyAdamWV2"] == 16 << 20 and "aclnnNonzeroV2" in result["workspace_unknown"]
    assert [sorted(ranks) for ranks in result["groups"].values()] == [list(range(8))]
    assert any("EXPERIMENTAL" in note for note in report["notes"])
    (tracked,) = tracker_files(tmp_path / "record").values()
    explanation = explain(tracked, 5, report["ranks"][0]["used_peak_mb"])
    assert explanation.difference_mb == 0 and explanation.when.startswith("in the")
    with tracked.with_name("memory_snapshot.pickle").open("rb") as stream:
        assert pickle.load(stream)["device_traces"]  # as torch_npu wrote it, for PyTorch's memory_viz
    assert any("aclnnNonzeroV2" in line for line in report["not_counted"])


def test_operators_that_mindspeed_compiles_allocate_what_their_sources_do(tmp_path: Path) -> None:
    done = launch(tmp_path, "--ranks", "0", program=COMPILED)
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert report["ranks"][0]["status"] == "ok", done.stdout + done.stderr
    formulas = ("aclnnGroupedMatmul", "aclnnMoeToken", "aclnnRotaryPositionEmbedding")
    assert not [line for line in report["not_counted"] if any(name in line for name in formulas)]  # their workspace is counted
    assert any("aclnnRingAttentionUpdate" in line for line in report["not_counted"])  # its is not known, and named


def test_counts_of_tokens_can_be_given_up_as_those_of_a_real_dispatcher(tmp_path: Path) -> None:
    done = launch(tmp_path, "--ranks", "0", program=COUNTS_OF_TOKENS)
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert report["ranks"][0]["status"] == "ok", done.stdout + done.stderr


def test_operators_of_a_package_beside_cann_allocate_what_their_sources_do(tmp_path: Path) -> None:
    done = launch(tmp_path, "--ranks", "0", program=BESIDE_CANN)
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert report["ranks"][0]["error"].startswith("This script uses operators of cann_ops_transformer"), done.stdout + done.stderr
    launch(tmp_path, "--ranks", "0", "--out", "whole", program=BESIDE_CANN.replace("ops.flash_attn\n", ""))
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert report["ranks"][0]["status"] == "ok"
    assert any("aclnnSparseFlashMlaGrad" in line for line in report["not_counted"]), "its workspace is not known"


def test_deterministic_gradients_of_attention_take_more(tmp_path: Path) -> None:
    sizes = []
    for deterministic in (False, True):
        folder = tmp_path / str(deterministic)
        folder.mkdir()
        done = launch(folder, "--ranks", "0", program=ATTENTION.replace("DETERMINISTIC", str(deterministic)))
        result = json.loads((folder / "record" / "ranks" / "00000" / "result.json").read_text())
        found = [size for name, size in result["workspace"].items() if name.startswith("aclnnFlashAttentionScoreGrad")]
        assert len(found) == 1, done.stdout + done.stderr
        sizes += found
    assert sizes[1] == sizes[0] + 3 * 2 * 24 * 512 * 128 * 4  # two blocks of each gradient for each cube core


def test_what_a_stream_was_given_is_done_at_once_or_when_the_host_waits_for_it(tmp_path: Path) -> None:
    done = launch(tmp_path, "--ranks", "0", program=LATE)
    report = json.loads((tmp_path / "record" / "report.json").read_text())
    assert report["ranks"][0]["status"] == "ok", done.stdout + done.stderr


def test_with_the_queue_of_mode_2_workspace_is_outside_the_figure(tmp_path: Path) -> None:
    peaks = []
    for mode in ("1", "2"):
        folder = tmp_path / mode
        folder.mkdir()
        launch(folder, "--ranks", "0", TASK_QUEUE_ENABLE=mode)
        peaks.append(json.loads((folder / "record" / "report.json").read_text())["used_peak_mb"])
    assert peaks[0] > peaks[1]


def test_ranks_are_forked_from_one_process_and_count_what_cold_ones_count(tmp_path: Path) -> None:
    peaks = {}
    for name, options in (("warm", ()), ("cold", ("--cold",))):
        (tmp_path / name).mkdir()
        done = launch(tmp_path / name, "--ranks", "1,6", "--explain", "--no-cache", "--jobs", "1", *options)
        results = [json.loads(file.read_text()) for file in sorted((tmp_path / name / "record/ranks").glob("*/result.json"))]
        assert [result["start"] for result in results] == [name, name], done.stdout + done.stderr
        peaks[name] = [
            (result["used_peak_mb"], result["actual_peak_mb"], result["allocator"][:2], result["groups"]) for result in results
        ]
        for rank, file in tracker_files(tmp_path / name / "record").items():
            assert explain(file, rank, results[0]["used_peak_mb"]).difference_mb == 0
    assert peaks["warm"] == peaks["cold"]


def test_libraries_of_a_real_cann_are_seen_in_the_map() -> None:
    maps = "7f r-xp 0 08:01 12 /usr/local/Ascend/lib64/libascendcl.so\n7f r-xp 0 08:01 12 /cache/lib64/libstandin.so\n7f rw-p 0 00:00 0\n"
    assert torch_rank.foreign_libraries(maps) == {"/usr/local/Ascend/lib64/libascendcl.so"}
