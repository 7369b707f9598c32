"""Rank classes cover the world once, and tell apart what differs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.rank_classes import rank_classes
from mindspeed_dryrun.launch.short_run import short_run


def job(tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, extra: str = "") -> Job:
    text = (
        f"--worker_num {tp * pp * cp * dp} pretrain_gpt.py --num-layers {4 * pp} --hidden-size 64 --num-attention-heads 64 "
        f"--seq-length 1024 --micro-batch-size 2 --global-batch-size {2 * dp * 32} --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --context-parallel-size {cp} {extra}"
    )
    return understand(read_msrun_call(text.split(), "/"), "x.sh")


sizes = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)
@given(sizes, sizes, sizes, sizes, st.sampled_from(["", "--context-parallel-algo ulysses_cp_algo", "--use-tp-pp-dp-mapping"]))
def test_the_world_is_covered_once(tp: int, pp: int, cp: int, dp: int, extra: str) -> None:
    found = job(tp, pp, cp, dp, extra)
    classes = rank_classes(found)
    assert sorted(rank for item in classes for rank in item.represents) == list(range(found.world_size))
    assert all(item.rank == item.represents[0] for item in classes)
    assert len({found.layout.place(rank) for rank in range(found.world_size)}) == found.world_size


def test_the_number_of_classes_does_not_grow_with_data_parallel_ranks() -> None:
    assert len(rank_classes(job(8, 8, 1, 2))) == len(rank_classes(job(8, 8, 1, 64))) == 8


def test_megatrons_order() -> None:
    found = job(tp=2, cp=2, dp=2, pp=2)
    at = found.layout.place(11)  # 1 + 2 × (1 + 2 × (0 + 2 × 1))
    assert (at.tp, at.cp, at.dp, at.pp) == (1, 1, 0, 1)
    at = job(tp=2, cp=2, dp=2, pp=2, extra="--use-tp-pp-dp-mapping").layout.place(11)
    assert (at.tp, at.cp, at.dp, at.pp) == (1, 1, 1, 0)


@pytest.mark.parametrize(("cp", "algorithm", "classes"), [(2, "", 2), (8, "", 3), (8, "ulysses_cp_algo", 1)])
def test_places_in_the_ring(cp: int, algorithm: str, classes: int) -> None:
    assert len(rank_classes(job(cp=cp, extra=f"--context-parallel-algo {algorithm}" if algorithm else ""))) == classes


def test_words_say_what_sets_a_class_apart() -> None:
    why = [item.why for item in rank_classes(job(pp=4, extra="--noop-layers 15"))]
    assert why == [
        "first stage, embedding, 4 layers",
        "middle stage, 4 layers",
        "middle stage, 4 layers",
        "last stage, head, 3 layers, 1 no-op",
    ]
    assert rank_classes(job())[0].why == "embedding and head, 4 layers"


@pytest.mark.parametrize(
    ("kwargs", "microbatches"),
    [({"pp": 1}, 2), ({"pp": 4}, 5), ({"pp": 4, "extra": "--num-layers-per-virtual-pipeline-stage 2"}, 16),
     ({"pp": 2, "extra": "--schedules-method dualpipev"}, 32)],
)  # fmt: skip
def test_short_runs(kwargs: dict[str, object], microbatches: int) -> None:
    found = job(dp=2, **kwargs)  # type: ignore[arg-type]
    short = short_run(found)
    assert (short.iterations, short.microbatches) == (2, microbatches)
    assert short.args[short.args.index("--global-batch-size") + 1] == str(2 * 2 * microbatches)
    assert short_run(found, "all").microbatches == 32


def test_short_runs_drop_what_counts_beyond_them() -> None:
    found = job(extra="--lr-warmup-iters 500 --lr-decay-iters 10000 --train-samples 64000 --rampup-batch-size 2 2 100")
    args = short_run(found).args
    assert "--train-iters" in args
    assert not {"--lr-warmup-iters", "--lr-decay-iters", "--train-samples", "--rampup-batch-size"} & set(args)
