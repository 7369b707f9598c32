"""Whatever a file holds, reading it ends in a result or in a sentence: never in a traceback, and soon.

Each reader gets a good file with random damage: bytes changed, lines cut, repeated or moved, JSON and YAML values exchanged for
others. `pytest tests/unit/test_fuzz_readers.py --fuzz-minutes 60` looks for an hour and says how many inputs it tried.
"""

from __future__ import annotations

import io
import json
import resource
import shlex
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_samples import fits
from test_hostile_records import job_file
from tracker_file import Program

from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.devices.real_runs import read_runs
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.calibration import read_log
from mindspeed_dryrun.launch import patch_catalogue, script_text
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.rank_cache import read_entry
from mindspeed_dryrun.launch.read_call import read_call
from mindspeed_dryrun.megatron import moe_load
from mindspeed_dryrun.record.summary import load_report
from mindspeed_dryrun.record.trace import read_trace
from mindspeed_dryrun.record.worker_log import read_worker_log
from mindspeed_dryrun.report import as_csv, markdown, table
from mindspeed_dryrun.report.compare import read_published
from mindspeed_dryrun.report.explain import explain
from mindspeed_dryrun.search.search_file import read_search
from mindspeed_dryrun.sweep.sweep_file import read_sweep

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 60
SECONDS_FOR_ONE, MEGABYTES_FOR_ONE = 10, 1000
CALL = (
    "--worker_num 8 --local_worker_num 8 --node_rank 0 --log_dir log --join True pretrain_gpt.py --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16"
)


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def words(data: bytes) -> list[str]:
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def read_record(folder: Path, data: bytes, name: str) -> None:
    """A record whose files are good but for one; it is shown in every form."""
    result = {"rank": 0, "represents": [0], "stage": 0, "status": "ok", "error": None, "used_peak_mb": 1, "actual_peak_mb": 2}
    files = {"job.json": json.dumps(job_file().to_json()).encode(), "ranks/00000/result.json": json.dumps(result).encode()}
    for file, content in {**files, name: data}.items():
        write(folder, f"record/{file}", content)
    report, _ = load_report(folder / "record")
    for view in (table, markdown, as_csv):
        view.render(report)
    json.dumps(report.to_json())


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("result.json", "{}")
        archive.writestr("worker.log", "text")
    return content.getvalue()


def tracked() -> bytes:
    program = Program(layers=1, microbatches=1)
    program.run()
    with tempfile.TemporaryDirectory() as folder:
        return program.write(Path(folder, "memory_block.csv")).read_bytes()


def example(name: str) -> bytes:
    return (ROOT / name).read_bytes()


Reader = Callable[[Path, bytes], object]
READERS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    "worker log": (lambda: example("tests/corpus/worker.log"), lambda folder, data: read_worker_log(io.BytesIO(data), 3)),
    "training log": (lambda: example("tests/corpus/training.log"), lambda folder, data: read_log(write(folder, "a.log", data)).seconds),
    "profiler trace": (lambda: example("tests/corpus/trace_view.json"), lambda folder, data: read_trace(write(folder, "t.json", data))),
    "memory tracker": (tracked, lambda folder, data: explain(write(folder, "memory_block.csv", data))),
    "msrun call": (CALL.encode, lambda folder, data: understand(read_call("msrun", words(data), "/nowhere"), "s.sh")),
    "torchrun call": (
        CALL.replace("--worker_num 8 --local_worker_num 8 --node_rank 0 --log_dir log --join True", "--nproc_per_node 8 --nnodes 1").encode,
        lambda folder, data: understand(read_call("torchrun", words(data), "/nowhere"), "s.sh"),
    ),
    "script text": (lambda: example("tests/corpus/script.sh"), lambda folder, data: read_script(data.decode("utf-8", "surrogateescape"))),
    "job.json": (lambda: json.dumps(job_file().to_json()).encode(), lambda folder, data: read_record(folder, data, "job.json")),
    "result.json": (
        lambda: json.dumps({"rank": 0, "represents": [0], "stage": 0, "status": "ok", "error": "x", "used_peak_mb": 1,
                            "actual_peak_mb": 2, "seconds": 1.5, "note": "n", "groups": []}).encode(),
        lambda folder, data: read_record(folder, data, "ranks/00000/result.json"),
    ),
    "report.json": (lambda: json.dumps(fits().to_json()).encode(), lambda folder, data: read_record(folder, data, "report.json")),
    "published figures": (lambda: example("examples/ab/qwen25_7b_published.json"), lambda folder, data: read_published(write(folder, "a.json", data))),
    "sweep file": (lambda: example("examples/sweeps/product.yaml"), lambda folder, data: read_sweep(write(folder, "s.yaml", data))),
    "search file": (lambda: example("examples/searches/qwen25_7b_8cards.yaml"), lambda folder, data: read_search(write(folder, "s.yaml", data))),
    "hardware file": (lambda: example("mindspeed_dryrun/devices/ascend910b-64g.yaml"), lambda folder, data: read_hardware(write(folder, "h.yaml", data))),
    "real runs": (lambda: example("mindspeed_dryrun/devices/real_runs.yaml"), lambda folder, data: read_runs(write(folder, "r.yaml", data))),
    "patch file": (lambda: example("patches/mindspore.yaml"), lambda folder, data: patch_catalogue.compile([write(folder, "p.yaml", data)])),
    "MoE load": (lambda: b"[[1, 2, 3, 4], [4, 3, 2, 1]]", lambda folder, data: moe_load.parse(str(write(folder, "load.json", data)))),
    "cached rank": (zipped, lambda folder, data: read_entry(write(folder, "entry.zip", data))),
}  # fmt: skip
ODD = st.sampled_from([
    b"", b"\0", b"\xff\xfe", b"-1", b"0", b"1e400", b"nan", b"NaN", b"Infinity", b"99999999999999999999", b"null", b"[]", b"{}", b'""', b"=", b"'", b'"',
    b"`", b"$(", b"}", b"{", b"(", b")", b"<<E", b">", b"\n", b"\r", b"\t", b": ", b"- ", b"&a *a", b"!!python/object:os.system ", b"\x1b[2J",
    "ü用".encode(), b"M", b"true", b"--", b"\\", b"1-99999999999", b"[" * 3000, b'{"a":' * 3000,
])  # fmt: skip
ODD_VALUES: list[Any] = [None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 10**30, "", "x" * 300, "nan", "\x1b[2J", [], {}, [[]],
                         {"": None}, [None], ["a", 1], {"a": {"b": []}}, "../../x", "/dev/zero"]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    data = seed
    if draw(st.booleans()) and (tree := _tree(data)) is not None:
        data = json.dumps(_exchanged(draw, tree)).encode()
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data))))
        kind = draw(st.sampled_from(["cut", "insert", "end", "line", "repeat"]))
        if kind == "cut":
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
        elif kind == "insert":
            data = data[:at] + draw(st.one_of(ODD, st.binary(max_size=8))) + data[at:]
        elif kind == "end":
            data = data[:at]
        else:
            lines = data.split(b"\n")
            index = draw(st.integers(0, len(lines) - 1))
            line = lines[index]
            lines[index : index + 1] = [] if kind == "line" else [line] * draw(st.integers(2, 30))
            data = b"\n".join(lines)
    return data


def _tree(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        try:
            found = yaml.safe_load(data)
        except (yaml.YAMLError, ValueError):
            return None
    return found if isinstance(found, (dict, list)) else None


def _exchanged(draw: st.DrawFn, tree: Any, depth: int = 0) -> Any:
    """The tree with one value, somewhere in it, exchanged."""
    if not isinstance(tree, (dict, list)) or not tree or depth > 6 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(ODD_VALUES))
    if isinstance(tree, list):
        index = draw(st.integers(0, len(tree) - 1))
        return [_exchanged(draw, item, depth + 1) if number == index else item for number, item in enumerate(tree)]
    key = draw(st.sampled_from(sorted(map(str, tree))))
    if draw(st.integers(0, 5)) == 0:
        return {name: value for name, value in tree.items() if str(name) != key}
    return {name: _exchanged(draw, value, depth + 1) if str(name) == key else value for name, value in tree.items()}


def read_script(text: str) -> None:
    """Every word lies in the text, after the one before; setting variables and quieting blocks leaves a script that can be read."""
    last = 0
    for word in script_text.words(text):
        assert last <= word.start < word.end <= len(text)
        last = word.end
    script_text.assigned_names(script_text.quiet_blocks(script_text.set_variables(text, {"TP": "4"})))


@contextmanager
def within(seconds: int, megabytes: int) -> Iterator[None]:
    """A reader that takes longer hangs, as far as its user can tell; one that takes more memory ends other programs.

    Seconds of this process, not of the clock: others may keep the machine busy.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (megabytes << 20), limits[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_with_a_sentence(
    name: str, tmp_path: Path, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    seed, read = READERS[name]
    good = seed()
    read(tmp_path / "good", good)
    tried = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=damaged(good))
    def holds(data: bytes) -> None:
        nonlocal tried
        tried += 1
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder, within(SECONDS_FOR_ONE, MEGABYTES_FOR_ONE):
            try:
                read(Path(folder), data)
            except DryRunError as error:
                assert str(error).strip()

    end = time.monotonic() + 60 * pytestconfig.getoption("--fuzz-minutes") / len(READERS)
    holds()
    while time.monotonic() < end:
        holds()
    record_property("inputs", tried)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("training log", b"elapsed time per iteration (ms): 2001.191.2 | throughput per GPU (TFLOP/s/GPU): 1.2.3 |"),
        ("profiler trace", b"[" * 100_000),
        ("result.json", b'{"rank": 0, "status": "ok", "used_peak_mb": 1, "actual_peak_mb": 2, "groups": {"": null}}'),
    ],
)
def test_what_fuzzing_found_once_is_refused_with_a_sentence(name: str, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DryRunError):
        READERS[name][1](tmp_path, data)
