"""The embedded trainer on the real MindSpore: it counts, to the megabyte, what MindSpeed-LLM counts.

The figures are those of a dry run of MindSpeed-LLM itself (2.2.0, on MindSpeed 2.2.0_core_r0.12.1, Megatron core_v0.12.1).
Qwen2.5-7B with 10240 tokens is the published tutorial's job; the small ones are its layers, four or two to a stage.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.record.model import RankReport
from mindspeed_dryrun.record.run_spec import RunSpec

pytestmark = pytest.mark.engine

QWEN = (  # noqa: SIM905
    "--use-mcore-models --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
    "--num-query-groups 4 --seq-length 10240 --max-position-embeddings 10240 --disable-bias-linear --add-qkv-bias "
    "--use-flash-attn --swiglu --use-fused-swiglu --normalization RMSNorm --norm-epsilon 1e-6 --use-fused-rmsnorm "
    "--position-embedding-type rope --rotary-base 1000000 --use-fused-rotary-pos-emb "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 64 --padded-vocab-size 152064 "
    "--make-vocab-size-divisible-by 1 --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --attention-softmax-in-fp32 --train-iters 2000"
).split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def run(out: Path, rank: int, more: str = "", world_size: int = 4) -> RankReport:
    """One rank of the job, launched as a user would."""
    argv = ["--worker_num", str(world_size), "--local_worker_num", str(min(world_size, 8)), "pretrain_gpt.py"]
    job = understand(read_msrun_call([*argv, *override_args(QWEN, more.split())], str(out)), "script.sh")
    report = dry_run_job(job, out / "record", RunSpec(ranks=str(rank), trainer="embedded"), Execution(jobs=1))
    (result,) = report.ranks
    assert result.status in ("ok", "oom"), result.error
    return result


@pytest.mark.parametrize(
    ("rank", "more", "used_peak_mb", "actual_peak_mb"),
    [
        (0, "", 55389, 57341),
        (2, "", 48436, 50052),
        (0, FULL, 34946, 35720),
        (2, FULL, 37813, 40298),
    ],
)
def test_the_tutorial_s_figures(tmp_path: Path, rank: int, more: str, used_peak_mb: int, actual_peak_mb: int) -> None:
    result = run(tmp_path, rank, more)
    assert result.used_peak_mb == used_peak_mb
    assert result.actual_peak_mb == pytest.approx(actual_peak_mb, rel=0.005)


SMALL = "--num-layers 8 --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 8"


@pytest.mark.parametrize(
    ("rank", "world_size", "more", "used_peak_mb"),
    [
        pytest.param(0, 8, f"{SMALL} --use-distributed-optimizer", 11206, id="distributed optimizer, first stage"),
        pytest.param(4, 8, f"{SMALL} --use-distributed-optimizer", 11581, id="distributed optimizer, last stage"),
        pytest.param(
            4, 8, f"{SMALL} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 11581, id="overlap"
        ),
        pytest.param(0, 8, f"{SMALL} --use-distributed-optimizer --reuse-fp32-param", 10501, id="reuse fp32 parameters"),
        pytest.param(
            0, 8,
            "--num-layers 8 --seq-length 16384 --max-position-embeddings 16384 --global-batch-size 4 "
            "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", 18368, id="ulysses",
        ),
        pytest.param(
            0, 8,
            "--num-layers 8 --seq-length 16384 --max-position-embeddings 16384 --global-batch-size 4 --tensor-model-parallel-size 1 "
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2", 30959, id="hybrid",
        ),
        pytest.param(
            2, 8,
            "--num-layers 44 --noop-layers 7,8,9,10,11,12,21,22,23,24,33,34,35,41,42,43 --recompute-granularity full --recompute-method "
            "block --recompute-num-layers 3 --seq-length 4096 --max-position-embeddings 4096 --tensor-model-parallel-size 1 "
            "--pipeline-model-parallel-size 4 --use-distributed-optimizer", 35230, id="recomputed stage by stage, second stage",
        ),
        pytest.param(0, 8, f"{SMALL} --use-ascend-coc --coc-fused-kernel", 15404, id="fused linear layers, first stage"),
        pytest.param(4, 8, f"{SMALL} --use-ascend-coc --coc-fused-kernel", 15779, id="fused linear layers, last stage"),
    ],
)  # fmt: skip
def test_layouts_of_the_real_stack(tmp_path: Path, rank: int, world_size: int, more: str, used_peak_mb: int) -> None:
    assert run(tmp_path, rank, more, world_size).used_peak_mb == used_peak_mb


def test_a_rank_costs_no_host_memory_for_its_parameters(tmp_path: Path) -> None:
    """2 billion parameters on this rank, 4 GB in half precision: the process stays at what MindSpore itself takes."""
    result = run(tmp_path, 0, "--num-layers 4 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 "
                              "--ffn-hidden-size 49152 --seq-length 1024 --padded-vocab-size 152064")  # fmt: skip
    assert result.host_rss_mb is not None and result.host_rss_mb < 1000


def test_a_flag_that_is_not_modelled_costs_no_rank(tmp_path: Path) -> None:
    from mindspeed_dryrun.errors import DryRunError

    with pytest.raises(DryRunError, match="--smart-swap"):
        run(tmp_path, 0, "--smart-swap")
    assert not (tmp_path / "record" / "ranks").exists()


# Hides every installed distribution that the `engine` extra does not bring along.
_ENGINE_ONLY = """
import importlib.metadata as metadata, re, sys
def name(text): return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", text)[0]).lower()
installed = {name(d.metadata["Name"]): d for d in metadata.distributions()}
wanted, todo = set(), [name(r) for r in metadata.requires("mindspeed-dryrun") if "extra" not in r or "engine" in r.partition("extra")[2]]
while todo:
    one = todo.pop()
    if one not in wanted and one in installed:
        wanted.add(one)
        todo += [name(r) for r in installed[one].requires or () if "extra" not in r]
wanted |= {"mindspeed-dryrun", "msadapter", "megatron-core"}
homes = {}
for module, names in metadata.packages_distributions().items():
    homes[module] = {name(n) for n in names}
class Hide:
    def find_spec(self, fullname, path=None, target=None):
        owners = homes.get(fullname.partition(".")[0])
        if owners and not owners & wanted:
            raise ModuleNotFoundError(f"No module named {fullname!r}: not of the engine extra", name=fullname)
sys.meta_path.insert(0, Hide())
"""


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"])
def test_a_rank_needs_nothing_but_the_engine_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_ENGINE_ONLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert run(tmp_path, 0, f"{SMALL} {more}", 8).status == "ok"
