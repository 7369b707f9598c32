"""Programs in graph mode: conditions inside a graph on a machine of any size, weights that are not drawn, logs in the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dryrun.launch.run import dry_run
from mindspeed_dryrun.record.run_spec import RunSpec

pytestmark = pytest.mark.engine

CONDITION = """
import os, numpy
import mindspore as ms
from mindspore import nn, ops
{choice}
ms.set_context(mode=ms.GRAPH_MODE, jit_config={{"jit_level": "O0"}})
ms.set_device("Ascend")
weight = ms.Parameter(ms.common.initializer.initializer("normal", (1024, 4096), ms.float32))
assert not weight.asnumpy().any(), "the weights were drawn"
net = nn.SequentialCell(nn.Dense(256, 256), nn.ReLU(), nn.Dense(256, 256))
class WithLoss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = net
    def construct(self, x):
        return self.net(x).sum()
scale = nn.DynamicLossScaleUpdateCell(loss_scale_value=4096, scale_factor=2, scale_window=1000)
step = nn.TrainOneStepWithLossScaleCell(WithLoss(), nn.AdamWeightDecay(net.trainable_params()), scale_sense=scale)
step(ms.Tensor(numpy.ones((4, 256), numpy.float32)))
os.makedirs(os.environ["LOG_MF_PATH"])
"""


@pytest.mark.parametrize("choice", ["", "ms.runtime.dispatch_threads_num(4)"], ids=["default", "the program's own threads"])
def test_a_condition_inside_a_graph_on_few_cores(tmp_path: Path, choice: str) -> None:
    (tmp_path / "train.py").write_text(CONDITION.format(choice=choice))
    script = tmp_path / "train.sh"
    script.write_text(f"export LOG_MF_PATH={tmp_path}/logs\nmsrun --worker_num 1 --local_worker_num 1 {tmp_path}/train.py\n")
    report = dry_run(script, RunSpec(), tmp_path / "record")
    assert [(rank.status, rank.error) for rank in report.ranks] == [("ok", None)]
    assert not (tmp_path / "logs").exists() and (tmp_path / "record/ranks/00000/scratch/log_mf_path").is_dir()
