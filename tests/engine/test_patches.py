"""The patches against the real MindSpore, MSAdapter and megatron-core from PyPI, each on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_rank import Rank

from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.rank import mindspore_rank

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
HIDDEN = "msadapter-stale-transformer-engine"
CONTEXT = "msadapter-setup-context"  # from MindSpore 2.10 on, every function with a backward of its own needs it
PATCHES = {patch["name"]: patch for patch in catalogue.compile()}


@pytest.fixture(scope="session")
def packages() -> list[str]:
    try:
        return engine_path()
    except DryRunError as error:
        pytest.skip(str(error))


@pytest.fixture
def rank(engine: MindSporeEngine, packages: list[str], tmp_path: Path) -> Rank:
    return Rank(engine, packages, tmp_path)


GROUP = """
import os, torch
torch.distributed.init_process_group(backend="nccl", world_size=2, rank=0)
from msadapter.distributed import distributed_c10d
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
print("GROUP", rank, world_size, distributed_c10d._default_pg_init_method, os.environ.get("MS_ROLE"))
"""


def test_a_process_group_without_scheduler(rank: Rank) -> None:
    done = rank.run(GROUP, [PATCHES["msadapter-init-process-group"]])
    assert done.returncode == 0, done.stderr[-2000:]
    word = next(line for line in done.stdout.splitlines() if line.startswith("GROUP")).split()
    assert word[1:3] == ["0", "2"] and word[3].startswith("tcp://127.0.0.1:") and word[4] == "None"
    assert not (rank.folder / "schedule.log").exists()
    assert [phase["phase"] for phase in rank.phases()] == ["importing", "finished"]


def test_without_the_patch_the_process_group_fails_as_the_catalogue_says(rank: Rank) -> None:
    done = rank.run(GROUP, [])
    assert done.returncode != 0
    assert "Cannot get host and port information from None" in done.stderr + done.stdout


def test_devices_are_counted_where_there_are_none(rank: Rank) -> None:
    done = rank.run("import torch; print('COUNT', torch.cuda.device_count())", [PATCHES["msadapter-device-count"]])
    assert "COUNT 8" in done.stdout, done.stderr[-2000:]


INIT = """
import time, torch
weight = torch.empty(8192, 8192)
start = time.monotonic()
for name in ("normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"):
    assert getattr(torch.nn.init, name)(weight) is weight, name
print("SECONDS", time.monotonic() - start)
"""


def test_weights_are_not_drawn(rank: Rank) -> None:
    done = rank.run(
        INIT, [patch for name, patch in PATCHES.items() if name.startswith("msadapter-init-") and "group" not in name]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split("SECONDS")[1].split()[0]) < 1.0


MOE = """
import torch
from megatron.core.transformer.moe import moe_utils
tokens = torch.zeros(64, 16)
routing_map = torch.zeros(64, 8, dtype=torch.bool)
probs = torch.zeros(64, 8)
permuted, chosen, order = moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=128)
print("PERMUTED", tuple(permuted.shape), tuple(chosen.shape), tuple(order.shape))
restored = moe_utils.unpermute(permuted, order, restore_shape=tokens.shape, probs=probs, routing_map=routing_map)
print("RESTORED", tuple(restored.shape))
"""


def test_tokens_are_spread_evenly_over_experts(rank: Rank) -> None:
    done = rank.run(MOE, [PATCHES[name] for name in (HIDDEN, "megatron-moe-permute", "megatron-moe-unpermute")])
    assert "PERMUTED (128, 16) (128,) (128,)" in done.stdout, done.stderr[-2000:]
    assert "RESTORED (64, 16)" in done.stdout, done.stderr[-2000:]


def test_counts_are_read_without_waiting(rank: Rank) -> None:
    """`_numpy_non_blocking`, which MindSpeed's and MindSpeed-LLM's dispatchers call, is not MSAdapter's: MindSpore's own tensors have it."""
    counts = "torch.ones(4, 2).to(torch.device('cpu'), non_blocking=True)._numpy_non_blocking()"
    done = rank.run(f"import torch; counts = {counts}; print('COUNTS', type(counts).__name__, counts.shape)", [])
    assert "COUNTS ndarray (4, 2)" in done.stdout, done.stderr[-2000:]


def test_without_the_patch_the_shape_of_permuted_tokens_is_unknown(rank: Rank) -> None:
    done = rank.run(MOE, [PATCHES[HIDDEN]])
    assert done.returncode != 0 and "the output shape depends on the actual execution" in done.stderr + done.stdout


SELECTION = """
import torch, mindspore
from mindspeed_dryrun.rank.handlers import moe
allocated, peak = mindspore.runtime.memory_allocated, mindspore.runtime.max_memory_allocated
values = torch.zeros((512, 1024), dtype=torch.float32, device="npu")
mask = values > 0
before = allocated()
mindspore.runtime.reset_peak_memory_stats()
try:
    values.masked_select(mask)
except RuntimeError as error:
    assert "the output shape depends on the actual execution" in str(error)
print("OPERATOR", peak() - before)
before = allocated()
chosen = moe.select(values, mask, 100)
print("HANDLER", allocated() - before, tuple(chosen.shape))
values.requires_grad = True
kept = moe.select(values * 1, mask, 100)
kept.sum().backward()
print("GRADIENT", tuple(values.grad.shape))
"""


def test_selected_tokens_keep_the_block_that_the_real_operator_allocates(rank: Rank) -> None:
    done = rank.run(SELECTION, [PATCHES[HIDDEN], PATCHES[CONTEXT]])
    figures = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.isascii() and " " in line}
    assert int(figures["OPERATOR"]) >= 512 * 1024 * 4, (done.stdout + done.stderr)[-2000:]
    assert figures["HANDLER"] == f"{figures['OPERATOR']} (100,)"
    assert figures["GRADIENT"] == "(512, 1024)", (done.stdout + done.stderr)[-2000:]


DISPATCHER = """
import torch
from types import SimpleNamespace
from megatron.core.transformer.moe.legacy_a2a_token_dispatcher import MoEAlltoAllSEQTokenDispatcher as Dispatcher
import megatron.core.tensor_parallel as tp
tp.gather_from_sequence_parallel_region = lambda x, group=None: torch.cat([x, x])
self = SimpleNamespace(
    config=SimpleNamespace(expert_model_parallel_size=2, moe_router_topk=2, moe_expert_capacity_factor=None),
    num_experts=8, num_local_experts=4, local_expert_indices=[4, 5, 6, 7], drop_and_pad=False, ep_size=2, tp_size=1,
    ep_group=None, input_splits=None, output_splits=None, num_global_tokens_per_local_expert_cpu=None, capacity=None,
)
counts = Dispatcher.preprocess(self, torch.zeros(64, 8, dtype=torch.bool))
print("SPLITS", list(self.input_splits), list(self.output_splits), counts.tolist(), self.num_out_tokens)
print("SOURCES", self.num_global_tokens_per_local_expert_cpu.ravel().tolist())
"""


@pytest.mark.parametrize(("load", "received"), [("even", 16), ("hot:1.5", 24), ("[5, 5, 5, 5, 15, 15, 15, 15]", 24)])
def test_a_dispatcher_gets_the_load_of_the_busiest_rank(rank: Rank, load: str, received: int) -> None:
    settings = json.dumps({"moe_load": load})
    done = rank.run(DISPATCHER, [PATCHES[HIDDEN], PATCHES["megatron-moe-alltoall-seq"]], settings=settings)
    assert f"SPLITS [64, 64] {[4 * received] * 2} {[2 * received] * 4} 128" in done.stdout, (
        done.stdout[-500:] + done.stderr[-2000:]
    )
    assert f"SOURCES {[received] * 8}" in done.stdout


FUSED = """
import torch, torch_npu
x, y = torch.empty((512, 1024), dtype=torch.bfloat16, device="npu"), torch.empty((1024, 256), dtype=torch.bfloat16, device="npu")
product, gathered = torch_npu.npu_all_gather_base_mm(x, y, "group", 8, bias=None, gather_index=0, gather_output=True)
scattered = torch_npu.npu_mm_reduce_scatter_base(x, y, "group", 8, reduce_op="sum", bias=None)
print("SHAPES", tuple(product.shape), tuple(gathered.shape), tuple(scattered.shape), scattered.dtype)
"""


def test_products_fused_with_a_collective_need_no_communicator(rank: Rank) -> None:
    done = rank.run(FUSED, [PATCHES[f"msadapter-fused-{name}"] for name in ("gather-product", "product-scatter")])
    assert "SHAPES (4096, 256) (4096, 1024) (64, 256)" in done.stdout, (done.stdout + done.stderr)[-2000:]


def test_without_the_patch_a_fused_product_fails_as_the_catalogue_says(rank: Rank) -> None:
    done = rank.run(FUSED, [])
    assert done.returncode and "SHAPES" not in done.stdout


UNDO = """
import importlib, inspect, json, sys
from mindspeed_dryrun.rank import patcher as engine
engine.undo()
import torch, torch_npu.atb
sys.modules["transformer_engine"] = None
patches = [p for p in json.load(open("patches.json")) if "hide" not in p and "since" not in p]  # of this version
for patch in patches:
    try:
        importlib.import_module(patch["target"].partition(":")[0])
    except ImportError:
        pass
def attribute(target):
    module, _, path = target.partition(":")
    owner = sys.modules[module]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name, None)
present = [p for p in patches if p["target"].partition(":")[0] in sys.modules]
before = {p["target"]: attribute(p["target"]) for p in present}
everything = {name: dict(vars(module)) for name, module in sys.modules.items() if hasattr(module, "__dict__")}
engine.install(present)
changed = [t for t in before if attribute(t) is before[t]]
assert not changed, changed
engine.undo()
assert all(attribute(t) is before[t] for t in before)
for name, names in everything.items():
    for key, value in names.items():
        if callable(value):
            assert vars(sys.modules[name]).get(key) is value, (name, key)
print("UNDONE", len(before))
"""


def test_apply_all_undo_all_and_every_attribute_is_the_object_it_was(rank: Rank) -> None:
    done = rank.run(UNDO, list(PATCHES.values()))
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("UNDONE")[1].split()[0]) >= 15


def test_the_catalogue_knows_what_is_on_pypi(packages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the catalogue has lost its target in the pinned packages; what is not in them is `not installed`."""
    for folder in reversed(packages):
        monkeypatch.syspath_prepend(folder)
    states = {name: catalogue.state(patch) for name, patch in PATCHES.items()}
    assert {name for name, state in states.items() if state == "target missing"} == set()
    assert states["msadapter-init-process-group"] == states["mindspore-grouped-matmul"] == "applies"
    assert states["megatron-moe-permute"] == "applies"


def test_a_patch_without_its_target_stops_the_rank_and_names_it(rank: Rank) -> None:
    gone = {**PATCHES["msadapter-device-count"], "name": "my-patch", "target": "msadapter.cuda:no_such_function"}
    done = rank.run("import torch; print('TRAINED')", [gone])
    assert done.returncode == 1 and "TRAINED" not in done.stdout
    for word in ("my-patch", "msadapter.cuda:no_such_function", "0.5.0b1"):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"MS_SIMULATION_LEVEL": ""}, "Simulation is not on"),
        ({"RANK_TABLE_FILE": "0"}, "RANK_TABLE_FILE is set"),
        ({"MS_ROLE": "MS_WORKER"}, "MS_ROLE is set"),
    ],
)
def test_a_rank_without_simulation_does_not_start_its_trainer(rank: Rank, environ: dict[str, str], sentence: str) -> None:
    done = rank.run("print('TRAINED')", [], **environ)
    assert done.returncode == 1 and "TRAINED" not in done.stdout and sentence in done.stderr


def test_a_rank_asks_the_engine_itself(rank: Rank) -> None:
    program = "import mindspore; from mindspeed_dryrun.rank import mindspore_rank; print('SIMULATES', mindspore_rank.engine_simulates())"
    assert "SIMULATES True" in rank.run(program, []).stdout
    # Level 2 asks the device for operator workspace: only there may the answer be no.
    assert "SIMULATES False" in rank.run(program, [], MS_SIMULATION_LEVEL="2").stdout


def test_a_rank_whose_engine_does_not_simulate_ends_with_the_import_of_mindspore(rank: Rank) -> None:
    program = """
from mindspeed_dryrun.rank import mindspore_rank
mindspore_rank.engine_simulates = lambda: False
import mindspore
print("TRAINED")
"""
    done = rank.run(program, [])
    assert done.returncode == 1 and "TRAINED" not in done.stdout and "MindSpore says that it does not simulate" in done.stderr


def test_a_level_that_asks_the_device_may_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_rank, "engine_simulates", lambda: False)
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "2")
    mindspore_rank.check_engine()
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    with pytest.raises(DryRunError, match=r"does not simulate.*no NPU is touched"):
        mindspore_rank.check_engine()


TENSORS = """
import json, sys
sys.argv[1:] = ["--moe-router-topk", "2", "--num-experts", "4"]
simulated = "MINDSPEED_DRYRUN" in __import__("os").environ
if not simulated:
    import mindspore
    mindspore.set_device("CPU")
from mindspeed_dryrun.rank.trainer import compatibility
compatibility.before_import()
import torch
compatibility.after_import()
from megatron.core.transformer.moe import moe_utils

# In place, so it allocates nothing; MindSpore's CPU device does not have it.
torch.Tensor.scatter_add_ = lambda self, *_: self
listed, last = [], {}

def note(frame, event, _):
    for name, value in frame.f_locals.items():
        key = frame.f_code.co_name, name
        if isinstance(value, torch.Tensor) and last.get(key) is not value:
            last[key] = value
            listed.append([*key, list(value.shape), str(value.dtype)])
    return note

def enter(frame, event, argument):
    return note if frame.f_code.co_filename == moe_utils.__file__ else None

tokens, experts, hidden = 8, 4, 16
# Two experts for each token and four tokens for each expert; a dry run reads zeros.
even = [[not simulated and expert in (token % 4, (token + 1) % 4) for expert in range(experts)] for token in range(tokens)]
chosen = torch.tensor(even)
x = torch.ones(tokens, hidden).requires_grad_(True)
probs = torch.ones(tokens, experts).requires_grad_(True)
sys.settrace(enter)
moved, moved_probs, indices = moe_utils.permute(x, chosen, probs=probs, num_out_tokens=16)
moe_utils.unpermute(moved, indices, torch.Size([tokens, hidden]), probs=probs, routing_map=chosen)
moe_utils.permute(x, chosen[:, 2:].contiguous())
sys.settrace(None)
moved_probs.sum().backward()
listed.append(["backward", "probs", list(probs.grad.shape), str(probs.grad.dtype)])
print("TENSORS", json.dumps(listed))
"""


def test_permutation_makes_the_tensors_that_an_even_routing_makes(rank: Rank) -> None:
    """Megatron's own functions: with values on MindSpore's CPU device, and with the handlers and zeros in a simulated rank."""
    simulated = rank.run(TENSORS, [PATCHES[name] for name in ("megatron-moe-permute", "megatron-moe-unpermute", CONTEXT)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*rank.packages, str(ROOT)])}
    command = [sys.executable, str(rank.folder / "program.py")]
    real = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    expected, found = (_listed_tensors(done) for done in (real, simulated))
    assert found == expected
    assert ["permute", "permuted_input", [16, 16], "Float32"] in expected


def _listed_tensors(done: subprocess.CompletedProcess[str]) -> Any:
    lines = [line for line in done.stdout.splitlines() if line.startswith("TENSORS ")]
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("TENSORS "))


COUNTS = """
import json
from types import SimpleNamespace
import mindspore
mindspore.set_device("CPU")
from mindspeed_dryrun.rank.trainer import compatibility
compatibility.before_import()
import torch
compatibility.after_import()
from megatron.core.transformer.moe import token_dispatcher
from mindspeed_dryrun.rank.handlers import moe

# Both ranks of the expert group route alike.
token_dispatcher.gather_from_sequence_parallel_region = lambda counts, group: torch.cat((counts, counts))
own = token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess
NAMES = ("num_out_tokens", "input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert")

def counts(preprocess, routing):
    dispatcher = SimpleNamespace(
        config=SimpleNamespace(moe_router_topk=2, moe_expert_capacity_factor=None, moe_permute_fusion=False), drop_and_pad=False,
        num_experts=4, num_local_experts=2, local_expert_indices=[0, 1], ep_size=2, tp_size=1, tp_rank=0, tp_ep_group=None,
        _maybe_update_cuda_sync_point=lambda point: None, cuda_sync_point_priority={"no_sync": 0}, cuda_dtoh_point="no_sync",
        cuda_sync_point="no_sync",
    )
    found = {"result": preprocess(dispatcher, torch.tensor(routing))}
    found |= {name: getattr(dispatcher, name) for name in NAMES}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}

even = counts(own, [[expert in (token % 4, (token + 1) % 4) for expert in range(4)] for token in range(8)])
zeros = counts(moe.preprocess(own), [[False] * 4] * 8)
print("TENSORS", json.dumps([even, zeros]))
"""


def test_counts_of_tokens_are_those_of_an_even_routing(packages: list[str], tmp_path: Path) -> None:
    """Megatron's own preparation of the all-to-all with values, and the handler's after it read zeros."""
    (tmp_path / "program.py").write_text(COUNTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, str(ROOT)])}
    command = [sys.executable, str(tmp_path / "program.py")]
    even, zeros = _listed_tensors(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    )
    assert zeros == even
    assert even["input_splits"] == even["output_splits"] == [8, 8]
