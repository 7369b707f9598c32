"""`explain --try`: what is run is the record's own job, with one change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from report_samples import fits, job_file

from mindspeed_dryrun.advise.levers import Lever
from mindspeed_dryrun.advise.report_page import job_to_change
from mindspeed_dryrun.commands import explain
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.run_spec import LauncherCall, RunSpec

WORDS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


def test_a_tried_change_is_the_recorded_job_with_that_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exports, patches, the load of the experts and the size of a node come from the record."""
    layout = Parallel(tp=2, pp=2, dp=4)
    small = job_file()
    recorded = dataclasses.replace(
        small,
        job=dataclasses.replace(small.job, trainer="embedded", world_size=16, parallel=layout, trainer_args=tuple(WORDS.split())),
        spec=RunSpec(patch_files=("/my/patch.yaml",), moe_load="hot:2", microbatches="all", ranks="3", check_classes=2),
        call=LauncherCall(
            launcher="msrun",
            options={"local_worker_num": "4"},
            program="pretrain_gpt.py",
            args=(),
            cwd="/job",
            env={"HCCL_BUFFSIZE": "100"},
        ),
    )
    tried: list[tuple[Job, RunSpec]] = []

    def dry_run(job: Job, stem: Path, spec: RunSpec, _: object) -> tuple[object, Path]:
        tried.append((job, spec))
        return fits(), stem

    monkeypatch.setattr(explain, "dry_run_beside", dry_run)
    lever = Lever(name="more TP", flags=("--tensor-model-parallel-size", "4"), used_peak_mb=1, saves_mb=1, why="", command="")
    job = job_to_change(recorded)
    assert job and explain._try(tmp_path, recorded, job, lever) == fits()
    ((changed, spec),) = tried
    assert (changed.parallel.tp, changed.parallel.dp, changed.local_world_size) == (4, 2, 4)
    assert changed.env["HCCL_BUFFSIZE"] == "100" and changed.cwd == "/job"
    assert (spec.patch_files, spec.moe_load, spec.microbatches) == (("/my/patch.yaml",), "hot:2", "all")
    assert (spec.trainer, spec.ranks, spec.check_classes, spec.explain) == ("embedded", "auto", 0, False)
