"""Where tokens go, without values: upstream's own functions, once with an even routing and once as a dry run runs them.

With values they run on MindSpore's CPU device, unpatched; in a simulated rank they read zeros, and the handlers put known counts
in place. Both list every tensor that the functions hold: name, shape and type. Counts are left out: they are on the host, or
smaller than a block.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_rank import ROOT, Rank

from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.launch import patch_catalogue as catalogue

pytestmark = pytest.mark.stack
STACK = Path(os.environ.get("MINDSPEED_CORE_MS_PATH", "/nowhere"))
TREES = [STACK / name for name in ("Megatron-LM", "MindSpeed", "MindSpeed-LLM", "python")]

if not (STACK / "MindSpeed-LLM").is_dir():
    pytest.skip("MINDSPEED_CORE_MS_PATH does not name a folder with MindSpeed-LLM", allow_module_level=True)

# The class of the dispatcher, the flags of its configuration, and the patches that it runs with.
SEQUENCE = "megatron.core.transformer.moe.legacy_a2a_token_dispatcher:MoEAlltoAllSEQTokenDispatcher"
TOKENS = "megatron.core.transformer.moe.token_dispatcher"
EXTENDED = "mindspeed.core.transformer.moe.moe_feature.adaptor:MindSpeedMOEAlltoAllSEQTptoEpTokenDispatcher"
DISPATCHERS = {
    "alltoall_seq": (SEQUENCE, {}, "megatron-moe-alltoall-seq"),
    "alltoall_seq, padded to a capacity": (
        SEQUENCE,
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
        "megatron-moe-alltoall-seq",
    ),
    "alltoall_seq, dropped above a capacity": (SEQUENCE, {"moe_expert_capacity_factor": 1.5}, "megatron-moe-alltoall-seq"),
    "alltoall": (f"{TOKENS}:MoEAlltoAllTokenDispatcher", {}, "megatron-moe-alltoall"),
    "allgather": (f"{TOKENS}:MoEAllGatherTokenDispatcher", {}, "megatron-moe-allgather"),
    "TP extends EP": (EXTENDED, {"moe_tp_extend_ep": True}, "mindspeed-moe-tp-extend-ep"),
}
PROGRAM = """
import contextlib, importlib, json, os, sys
from types import ModuleType, SimpleNamespace
named, flags, stack = json.loads(sys.argv.pop(1)) if len(sys.argv) > 1 else json.loads(os.environ["CASE"])
sys.argv[1:] = ["--moe-router-topk", "2", "--num-experts", "4"]
simulated = "MINDSPEED_DRYRUN" in os.environ
if not simulated:
    import mindspore
    mindspore.set_device("CPU")
    sys.modules["acl"] = ModuleType("acl")
from mindspeed_dryrun.rank.trainer import compatibility
compatibility.before_import()
import torch
compatibility.after_import()
from megatron.core import parallel_state, tensor_parallel

# Two ranks of experts, which route alike. What they exchange has the sizes that the dispatcher computes.
ranks = 2
def gather(x, *args, **kwargs):
    return torch.cat((x, x))
def scatter(x, *args, **kwargs):
    return x[: x.shape[0] // ranks] * 1
def exchange(group, x, output_splits=None, input_splits=None):
    assert output_splits is None or sum(int(size) for size in input_splits) == x.shape[0]
    assert output_splits is None or sum(int(size) for size in output_splits) == x.shape[0]
    return x * 1  # a copy with its gradient, which `clone` loses there
collectives = {
    "gather_from_sequence_parallel_region": gather, "reduce_scatter_to_sequence_parallel_region": scatter, "all_to_all": exchange,
}
for name in dir(parallel_state):
    if name.startswith("get_"):
        value = None if name.endswith("group") else 1 if name.endswith("world_size") else 0
        setattr(parallel_state, name, lambda *_, value=value, **__: value)
# From 26.0.0 on MindSpeed's layers name classes of this module when they are imported; its own start-up puts stand-ins in place
# of transformer_engine, too. No dispatcher uses one.
extension = ModuleType("megatron.core.extensions.transformer_engine")
for name in ("TEDelayedScaling", "TENorm"):
    setattr(extension, name, type(name, (), {}))
sys.modules[extension.__name__] = extension
module_name, class_name = named.split(":")
dispatcher_class = getattr(importlib.import_module(module_name), class_name)
for name, module in list(sys.modules.items()):
    if name.startswith(("megatron.core.t", "mindspeed.core.transformer.moe")):
        for function, stand_in in collectives.items():
            if hasattr(module, function):
                setattr(module, function, stand_in)
        for function in [name for name in vars(module) if name.startswith("get_") and hasattr(parallel_state, name)]:
            setattr(module, function, getattr(parallel_state, function))
# In place, so it allocates nothing; MindSpore's CPU device does not have it. Nor does it have streams.
torch.Tensor.scatter_add_ = lambda self, *_: self
stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda *_: None, wait_event=lambda *_: None)
if not simulated:  # nor this operator
    torch.repeat_interleave = lambda x, repeats: torch.tensor(
        [value for value, count in zip(x.tolist(), repeats.tolist()) for _ in range(count)], dtype=x.dtype
    )
torch.cuda.stream = lambda *_: contextlib.nullcontext()
torch.cuda.current_stream = torch.cuda.Stream = lambda *_: stream

listed = []

def note(frame, event, _):
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.Tensor) and value.numel() > ranks * experts and not any(value is one for one in known):
            known.append(value)
            listed.append([frame.f_code.co_name, name, list(value.shape), str(value.dtype)])
    return note

def enter(frame, event, argument):
    return note if frame.f_code.co_filename.startswith(stack) and "/moe/" in frame.f_code.co_filename else None

tokens, experts, hidden = 8, 4, 16
config = SimpleNamespace(**{
    "num_moe_experts": experts, "moe_router_topk": 2, "expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 1, "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_permute_fusion": False, "moe_tp_extend_ep": False, "add_bias_linear": False, "moe_unperm2_mem_optim": False,
    "enable_a2avc": 0, "num_experts": experts, "seq_length": tokens, "moe_bmm_mc2": False, "fix_router": False, **flags,
})
dispatcher = dispatcher_class(2, [0, 1], config)
# Two experts for each token and four tokens for each expert; a dry run reads zeros.
even = [[expert in (token % 4, (token + 1) % 4) for expert in range(experts)] for token in range(tokens)]
if config.moe_pad_expert_input_to_capacity:
    # The router lets each expert have as many tokens as it has room for: 1.5 x 4.
    even = [[(token + 2 * expert) % tokens < 6 for expert in range(experts)] for token in range(tokens)]
chosen = torch.tensor([[False] * experts] * tokens if simulated else even)
x = torch.ones(tokens, 1, hidden).requires_grad_(True)
probs = torch.ones(tokens, experts).requires_grad_(True)
known = [x, probs, chosen]
sys.settrace(enter)
received, counts, received_probs = dispatcher.token_permutation(x, probs, chosen)
output, _ = dispatcher.token_unpermutation(received)
sys.settrace(None)
(received.sum() + received_probs.sum()).backward()
ends = {"received": received, "received_probs": received_probs, "output": output, "x": x.grad, "probs": probs.grad}
result = {
    "tensors": listed,
    "counts": [int(count) for count in counts.tolist()],
    "ends": {name: [list(value.shape), str(value.dtype)] for name, value in ends.items()},
    "splits": {
        name: [int(size) for size in getattr(dispatcher, name)]
        for name in ("input_splits", "output_splits") if getattr(dispatcher, name, None) is not None
    },
    "places": list(getattr(dispatcher, "global_input_tokens_local_experts_indices", x).shape),
    "sent": int(dispatcher.num_out_tokens) if hasattr(dispatcher, "num_out_tokens") else None,
}
print("TENSORS", json.dumps(result), flush=True)
os._exit(0)
"""


@pytest.fixture
def rank(engine: MindSporeEngine, tmp_path: Path) -> Rank:
    return Rank(engine, [str(tree) for tree in TREES] + engine_path(), tmp_path)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dispatcher_makes_the_tensors_of_an_even_routing(rank: Rank, name: str) -> None:
    named, flags, patch = DISPATCHERS[name]
    case = json.dumps([named, flags, str(STACK)])
    patches = {entry["name"]: entry for entry in catalogue.compile()}
    used = [patches[key] for key in ("megatron-moe-permute", "megatron-moe-unpermute", patch)]
    simulated = rank.run(PROGRAM, used, CASE=case, PYTHONDONTWRITEBYTECODE="1", settings=json.dumps({"trainer": "script"}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*rank.packages, str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(rank.folder / "program.py"), case]
    real = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    expected, found = result(real), result(simulated)
    lists = [[" ".join(map(str, tensor)) for tensor in one.pop("tensors")] for one in (expected, found)]
    assert [line for line in difflib.ndiff(*lists) if not line.startswith(" ")] == []
    assert found == expected
    assert len(lists[0]) > 10


def result(done: subprocess.CompletedProcess[str]) -> Any:
    lines = [line for line in done.stdout.splitlines() if line.startswith("TENSORS ")]
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("TENSORS "))
