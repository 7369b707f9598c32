"""The real MindSpore in simulation on the engine of this machine: peaks that follow from tensor sizes, and clean logs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.engine

MB = 2**20
HEAD = "import mindspore as ms\nfrom mindspore import mint, nn, ops\nms.set_device('Ascend')\n"


def test_matmul_counts_its_three_matrices(simulate: Callable) -> None:
    done = simulate(HEAD + "a = mint.zeros((4096, 8192)); b = mint.zeros((8192, 4096)); c = mint.matmul(a, b)")
    assert done.status == 0
    assert (done.log.device_total_mb, done.log.usable_mb) == (65536, 61430)
    assert done.log.used_peak_mb == (2 * 4096 * 8192 + 4096 * 4096) * 4 // MB


_WAIT = """
import time
a = mint.zeros((1024, 1024)) + 1
before = time.process_time()
time.sleep(2)
print("used", time.process_time() - before, "s of 2")
"""


@pytest.mark.parametrize("load", [True, False])
def test_no_thread_of_a_rank_spins_while_the_program_waits(simulate: Callable, load: bool) -> None:
    """The case without the library shows that it is needed: when MindSpore stops spinning by itself, it can go."""
    head = "from mindspeed_dryrun.rank import callback_pause\nassert callback_pause.load()\n" if load else ""
    done = simulate(head + HEAD + _WAIT)
    assert done.status == 0, done.text
    used = float(re.search(r"used (\S+) s of 2", done.text)[1])
    assert used < 0.2 if load else used > 0.2, used  # 2 s on a quiet machine, 0.36 s beside sixteen other processes


_ACTORS = """
import os, time
def actors():
    used = 0
    for task in os.listdir('/proc/self/task'):
        if 'ActorThread' in open(f'/proc/self/task/{task}/comm').read():
            used += int(open(f'/proc/self/task/{task}/schedstat').read().split()[0])
    return used / 1e9
before = actors()
time.sleep(1)
print('actors used', actors() - before, 's')
"""


@pytest.mark.parametrize("rest", [True, False])
def test_actors_without_work_sleep(simulate: Callable, rest: bool) -> None:
    """The case without the call shows that it is needed: MindSpore's actors ask for work 300,000 times before they sleep.

    A kernel of the CPU starts them, such as the one that makes a random state; from MindSpore 2.8 on it starts none.
    """
    asks = not rest and tuple(int(part) for part in version("mindspore").split(".")[:2]) < (2, 8)
    call = "from mindspeed_dryrun.rank import callback_pause\nassert callback_pause.rest_actors()\n" if rest else ""
    done = simulate(HEAD + call + "ms.manual_seed(1)\n" + _ACTORS)
    assert done.status == 0, done.text
    used = float(re.search(r"actors used (\S+) s", done.text)[1])
    if asks and used <= 0.04 and os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
        pytest.skip("the machine is too busy: who asks in vain gives way to other processes")
    assert used > 0.04 if asks else used < 0.03, used


def test_dense_with_adam_counts_weights_gradients_and_two_states(simulate: Callable) -> None:
    """A legacy operator (nn.Dense) and a legacy optimizer: they crash where C++ objects are not filled in."""
    done = simulate(
        HEAD
        + """
net = nn.Dense(8192, 8192, has_bias=False)
adam = nn.Adam(net.trainable_params())
step = ms.value_and_grad(lambda x: net(x).sum(), None, adam.parameters)
x = mint.ones((1, 8192))
loss, gradients = step(x)
adam(gradients)
"""
    )
    assert done.status == 0, done.text
    # weight, gradient and the two moments are 256M each; vectors of 8192 and scalars add less than a megabyte
    assert done.log.used_peak_mb == 4 * 8192 * 8192 * 4 // MB


def test_flash_attention_rms_norm_and_swiglu_with_gradients(simulate: Callable) -> None:
    done = simulate(
        HEAD
        + """
S, B, N, D = 4096, 1, 16, 128
def heads():
    return mint.ones((S, B, N * D), dtype=ms.bfloat16)
def forward(q, k, v, gamma):
    out = ops.flash_attention_score(q, k, v, N, input_layout="SBH", scalar_value=0.1)
    out = ops.rms_norm(out, gamma)[0]
    return ops.swiglu(out, -1).sum()
gradients = ms.grad(forward, (0, 1, 2, 3))(heads(), heads(), heads(), mint.ones((N * D,), dtype=ms.bfloat16))
assert [g.shape for g in gradients] == [(S, B, N * D)] * 3 + [(N * D,)]
"""
    )
    assert done.status == 0, done.text
    piece = 4096 * 2048 * 2 / MB  # 16M: one activation in bfloat16
    # At least q, k, v, the attention's output and its three gradients; at most a few temporaries more.
    assert 7 * piece <= done.log.used_peak_mb <= 12 * piece


def test_collectives_groups_and_point_to_point_of_a_rank_far_out(simulate: Callable) -> None:
    done = simulate(
        HEAD
        + """
from mindspore.mint import distributed as dist
dist.init_process_group(backend="hccl")
assert (dist.get_rank(), dist.get_world_size()) == (777, 1024)
tensor_parallel = dist.new_group(list(range(776, 784)))
x = mint.zeros((8, 1024, 1024))
dist.all_reduce(x, group=tensor_parallel)
gathered = mint.zeros((64, 1024, 1024))
dist.all_gather_into_tensor(gathered, x, group=tensor_parallel)
scattered = mint.zeros((1, 1024, 1024))
dist.reduce_scatter_tensor(scattered, x, group=tensor_parallel)
dist.send(x, 778)
dist.recv(x, 776)
""",
        rank=777,
        world_size=1024,
    )
    assert done.status == 0, done.text
    # x, the gathered and the scattered tensor are alive at once; collectives write in place
    assert done.log.used_peak_mb == 32 + 256 + 4


def test_ten_runs_count_the_same_megabyte(simulate: Callable) -> None:
    program = HEAD + "net = nn.Dense(4096, 4096)\nms.grad(lambda x: net(x).sum())(mint.ones((64, 4096)))"
    figures = {(log.used_peak_mb, log.actual_peak_mb) for log in (simulate(program).log for _ in range(10))}
    assert len(figures) == 1 and None not in next(iter(figures))


def test_the_log_is_clean(simulate: Callable) -> None:
    done = simulate(HEAD + "net = nn.Dense(64, 64)\nprint(net(mint.ones((2, 64))).shape)")
    assert "(2, 64)" in done.text
    assert not re.search(r"\[(ERROR|CRITICAL)\]|Traceback", done.text)


@pytest.mark.parametrize("jit_level", ["O0", "O1"])
def test_graph_mode_below_o2_works(simulate: Callable, tmp_path, jit_level: str) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + f"ms.set_context(mode=ms.GRAPH_MODE, jit_config={{'jit_level': '{jit_level}'}})\n"
        "class Net(nn.Cell):\n    def construct(self, x):\n        return ops.matmul(x, x)\n"
        "Net()(mint.zeros((4096, 4096)))\n"
    )
    done = simulate("import runpy; runpy.run_path('program.py', run_name='__main__')")
    assert done.status == 0, done.text
    assert done.log.used_peak_mb >= 64
