"""The studio without a browser: what may be changed, who may ask, what is given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import report_samples

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.studio import session as sessions
from mindspeed_dryrun.studio import words
from mindspeed_dryrun.studio.choices import Choice, Control, Subject, controls, read_choice
from mindspeed_dryrun.studio.export import as_script, as_sweep
from mindspeed_dryrun.studio.gate import LONGEST_BODY, Gate
from mindspeed_dryrun.studio.session import Session, Try, name_of
from mindspeed_dryrun.sweep.sweep import variant_job
from mindspeed_dryrun.sweep.sweep_file import read_sweep

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(EXAMPLE)


def found(subject: Subject, choice: Choice) -> dict[str, Control]:
    return {control.key: control for control in controls(subject, choice, subject.job(choice))}


def test_the_controls_are_those_of_the_job(subject: Subject) -> None:
    shown = found(subject, Choice())
    assert {key: shown[key].value for key in ("tp", "pp", "vpp", "cp", "mbs", "gbs", "seq", "layers", "recompute", "do", "sp")} == {
        "tp": "2", "pp": "2", "vpp": "1", "cp": "1", "mbs": "1", "gbs": "64", "seq": "10240", "layers": "28",
        "recompute": "none", "do": "off", "sp": "on",
    }  # fmt: skip
    assert "ep" not in shown, "the model has no experts"
    assert shown["TP"].kind == "variable" and shown["TP"].value == "2"


def test_what_megatron_would_refuse_has_its_reason(subject: Subject) -> None:
    reasons = {option.value: option.refused for option in found(subject, Choice())["tp"].options}
    assert reasons["1"] is None and reasons["2"] is None
    assert reasons["4"] and "not divisible" in reasons["4"]
    one_stage = Choice(flags={"--pipeline-model-parallel-size": "1"})
    assert {option.value: option.refused for option in found(subject, one_stage)["tp"].options}["4"] is None
    chunks = {option.value: option.refused for option in found(subject, Choice())["vpp"].options}
    assert chunks["4"] == "28 layers cannot be cut into PP 2 × 4 equal chunks."


def test_every_option_that_is_not_refused_makes_a_job(subject: Subject) -> None:
    for control in found(subject, Choice()).values():
        for option in control.options:
            if option.refused is None:
                job = subject.job(Choice().changed(option.patch))
                values = {"tp": job.parallel.tp, "pp": job.parallel.pp, "vpp": job.parallel.vpp or 1, "cp": job.parallel.cp}
                assert str(values.get(control.key, option.value)) == option.value
                assert control.key != "recompute" or (job.recompute or "none") == option.value


def test_a_flag_of_the_script_can_be_taken_out(subject: Subject) -> None:
    job = subject.job(Choice(flags={"--sequence-parallel": None}))
    assert not job.arguments.has("--sequence-parallel") and subject.job(Choice()).arguments.has("--sequence-parallel")


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"command": "rm -rf /"},
        {"flags": {"--tensor-model-parallel-size": "2; touch /tmp/x"}},
        {"flags": {"--tensor-model-parallel-size": "$(touch x)"}},
        {"flags": {"--tensor-model-parallel-size": "9" * 30}},
        {"flags": {"--tensor-model-parallel-size": 4}},
        {"flags": {"--tensor-model-parallel-size": ""}},
        {"flags": {"--tensor-model-parallel-size": "four"}},
        {"flags": {"--use-distributed-optimizer": "yes"}},
        {"flags": {"--load": "/etc"}},
        {"flags": {"--data-path": "x"}},
        {"flags": {"--save": "x"}},
        {"flags": {"--no-such-flag": "1"}},
        {"flags": {f"--{n}": "1" for n in range(1000)}},
        {"sets": {"PATH": "/tmp"}},
        {"sets": {"TP": "2\nrm x"}},
        {"sets": {"TP": "`id`"}},
        {"sets": {"TP": "x" * 1000}},
        {"sets": {"BASH_ENV": "x"}},
        {"device": "/etc/passwd"},
        {"budget": "58G; ls"},
        {"budget": "9" * 12 + "G"},
    ],
)
def test_only_flags_of_the_registry_and_variables_of_the_script(subject: Subject, data: Any) -> None:
    with pytest.raises(UsageError):
        read_choice(data, subject)


def test_a_choice_survives_the_address(subject: Subject) -> None:
    choice = Choice({"GBS": "32"}, {"--use-distributed-optimizer": "", "--sequence-parallel": None}, "ascend910b4-32g", "28G")
    assert read_choice(choice.to_json(), subject) == choice


@pytest.mark.parametrize(
    ("sets", "flags"),
    [
        ({}, {}),
        ({"GBS": "32", "TP": "4", "PP": "1"}, {}),
        ({}, {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}),
        ({"GBS": "8"}, {"--sequence-parallel": None, "--use-distributed-optimizer": "", "--micro-batch-size": "2"}),
    ],
)
def test_an_exported_script_is_the_same_job(
    subject: Subject, tmp_path: Path, sets: dict[str, str], flags: dict[str, Any]
) -> None:
    choice = Choice(sets, flags)
    job = subject.job(choice)
    script = tmp_path / "exported.sh"
    script.write_text(as_script(subject, Try(number=1, choice=choice, job=job, name=name_of(job))))
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    exported = Subject(script).job(Choice())
    assert sorted(exported.args) == sorted(job.args) and exported.world_size == job.world_size
    assert capture(script).program == "pretrain_gpt.py"


def test_tries_become_a_sweep_file(subject: Subject, tmp_path: Path) -> None:
    choices = [Choice(), Choice({"GBS": "32"}, {"--use-distributed-optimizer": ""}), Choice(flags={"--sequence-parallel": None})]
    tries = [Try(number=n, choice=choice, job=subject.job(choice), name=f"try {n}") for n, choice in enumerate(choices, 1)]
    file = tmp_path / "sweep.yaml"
    file.write_text(as_sweep(subject, tries))
    plan = read_sweep(file)
    assert [variant.name for variant in plan.variants] == ["1 try 1", "2 try 2"], "a sweep cannot take a flag out"
    for variant, one in zip(plan.variants, tries, strict=False):
        assert variant_job(plan.script, variant).args == subject.job(one.choice).args


def ask(gate: Gate, **changes: Any) -> tuple[int, bool]:
    """The status of a request, and whether it reached the application."""
    headers = {"host": "127.0.0.1:9", "x-studio-token": "secret", **changes.pop("headers", {})}
    scope = {
        "type": "http",
        "path": "/api/tries",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items() if value is not None],
        **changes,
    }
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    gate.app.reached = False  # type: ignore[attr-defined]
    asyncio.run(gate(scope, receive, send))
    headers_sent = dict(said[0].get("headers", []))
    assert b"default-src 'none'" in headers_sent.get(b"content-security-policy", b"")
    return said[0]["status"], gate.app.reached  # type: ignore[attr-defined]


class App:
    """Notes that it was reached."""

    reached = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached = True
        await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": {"x-studio-token": None}},
        {"headers": {"x-studio-token": "wrong"}},
        {"headers": {"x-studio-token": "sécret"}},
        {"query_string": b"token=wrong", "headers": {"x-studio-token": None}},
        {"headers": {"host": "evil.example"}},
        {"headers": {"host": "evil.example:9"}},
        {"headers": {"host": "127.0.0.1:10"}},
        {"headers": {"host": None}},
        {"headers": {"origin": "http://evil.example"}},
        {"headers": {"origin": "null"}},
        {"headers": {"origin": "https://127.0.0.1:9"}},
        {"headers": {"sec-fetch-site": "cross-site"}},
        {"headers": {"content-length": str(LONGEST_BODY + 1)}},
        {"path": "/static/studio.js", "headers": {"host": "evil.example"}},
    ],
)
def test_others_are_kept_out(changes: dict[str, Any]) -> None:
    gate = Gate(App(), "secret", frozenset(["127.0.0.1:9", "localhost:9"]))
    assert ask(gate, **changes) == (403, False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"headers": {"host": "localhost:9", "origin": "http://localhost:9", "sec-fetch-site": "same-origin"}},
        {"query_string": b"token=secret&lang=zh", "headers": {"x-studio-token": None}},
        {"path": "/static/studio.css", "headers": {"x-studio-token": None}},
    ],
)
def test_its_own_page_is_let_in(changes: dict[str, Any]) -> None:
    gate = Gate(App(), "secret", frozenset(["127.0.0.1:9", "localhost:9"]))
    assert ask(gate, **changes) == (200, True)


def test_both_languages_say_everything() -> None:
    english, chinese = words.words("en"), words.words("zh")
    assert english.keys() == chinese.keys() and all(chinese.values())
    translated = [key for key in english if english[key] != chinese[key]]
    assert len(translated) >= len(english) - 2, "rank stays a rank"


class Attacked:
    """A studio of its own in a folder of its own, and raw requests to it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "tmp").mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_dryrun", "studio", str(EXAMPLE), "--no-browser", "--out", str(home / "records")],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout
        address = urlparse(re.findall(r"http://\S+", self.process.stdout.readline())[0])
        self.host, self.token = address.netloc, parse_qs(address.query)["token"][0]

    def raw(self, text: str, cut: bool = True) -> str:
        """The first line of the answer to these bytes; nothing where the connection is closed."""
        name, _, port = self.host.partition(":")
        with socket.create_connection((name, int(port)), timeout=60) as line:
            line.sendall(text.encode("utf-8", "surrogateescape"))
            if cut:
                line.shutdown(socket.SHUT_WR)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while part := line.recv(1 << 16):
                    data += part
        return data.partition(b"\r\n")[0].decode("latin-1")

    def post(self, path: str, body: str, **headers: str) -> str:
        known = {
            "Host": self.host,
            "X-Studio-Token": self.token,
            "Content-Length": str(len(body.encode())),
            "Connection": "close",
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in known.items())
        return self.raw(f"POST {path} HTTP/1.1\r\n{head}\r\n{body}", cut=False)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Whatever was sent, at the end nothing has been run and nothing is left behind."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    one = Attacked(tmp_path_factory.mktemp("attacked") / "home")
    yield one
    assert not (one.home / "records").exists(), "nothing was run"
    children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text()
    one.process.send_signal(signal.SIGINT)
    said = one.process.communicate(timeout=60)[0]
    assert one.process.returncode == 128 + signal.SIGINT and "Traceback" not in said, said
    assert children == "" and [path.name for path in one.home.rglob("*")] == ["tmp"]


GOOD = '{"flags": {"--micro-batch-size": "1"}}'


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Studio-Token": "wrong"},
        {"X-Studio-Token": "\udcff"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Length": "99999999999"},
    ],
)
def test_strangers_are_refused_over_the_wire(attacked: Attacked, headers: dict[str, str]) -> None:
    for path in ("/api/tries", "/api/search", "/api/check", "/api/stop"):
        assert attacked.post(path, GOOD, **headers).partition(" ")[2][:3] in ("403", "400")


@pytest.mark.parametrize(
    "flags",
    [
        {"--micro-batch-size": "1; touch owned"},
        {"--micro-batch-size": "$(touch owned)"},
        {"--micro-batch-size": "`touch owned`"},
        {"--micro-batch-size": "1\ntouch owned"},
        {"--micro-batch-size": "1 --save owned"},
        {"--micro-batch-size": "9" * 40},
        {"--num-layers": "1000000000"},
        {"--num-layers": "1e9"},
        {"--tensor-model-parallel-size": "999999999"},
        {"--save": "owned"},
        {"--tokenizer-name-or-path": "/etc"},
    ],
)
def test_shell_characters_and_huge_numbers_are_refused_over_the_wire(attacked: Attacked, flags: dict[str, str]) -> None:
    body = json.dumps({"flags": flags})
    assert attacked.post("/api/tries", body).partition(" ")[2][:3] == "422"
    assert attacked.post("/api/search", body).partition(" ")[2][:3] == "422"


@pytest.mark.parametrize("variables", [{"TP": "2;ls"}, {"PATH": "/tmp"}, {"NPUS_PER_NODE": "1000000000"}, {"TP": "\ud800"}])
def test_variables_are_refused_over_the_wire(attacked: Attacked, variables: dict[str, str]) -> None:
    assert attacked.post("/api/tries", json.dumps({"sets": variables})).partition(" ")[2][:3] == "422"


@pytest.mark.parametrize(
    "text",
    [
        "GET / HTTP/1.1\r\n\r\n",
        "\x00\x01\x02\r\n\r\n",
        "POST /api/tries HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\nContent-Length: x\r\n\r\n{{}}",
        "POST /api/tries HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\nContent-Length: -1\r\n\r\n{{}}",
        "POST /api/tries HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\nX-Studio-Token: {token}\r\nContent-Length: 2\r\n\r\n{{}}",
        "GET /api/tries HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\n\r\n",
        "PUT /api/tries HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\nContent-Length: 2\r\n\r\n{{}}",
        "GET /static/../../commands/studio.py HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\n\r\n",
        "GET /api/tries/99999999999999999999 HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\n\r\n",
        "GET /api/tries/1/export/..%2f..%2fetc HTTP/1.1\r\nHost: {host}\r\nX-Studio-Token: {token}\r\n\r\n",
        "GET /api/events HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_odd_requests_are_refused(attacked: Attacked, text: str) -> None:
    answer = attacked.raw(text.format(host=attacked.host, token=attacked.token))
    assert answer == "" or answer.partition(" ")[2][:1] == "4", answer


@pytest.mark.parametrize(
    "body", ["", "[", "null", "[]", '"text"', '{"flags": []}', "[" * 60000, '{"flags": {"--lr": "' + "1" * 70000 + '"}}']
)
def test_odd_bodies_are_refused(attacked: Attacked, body: str) -> None:
    assert attacked.post("/api/tries", body).partition(" ")[2][:3] in ("403", "422")


def test_a_thousand_requests_of_a_stranger_run_nothing(attacked: Attacked) -> None:
    answers = [attacked.post("/api/tries", GOOD, **{"X-Studio-Token": f"{number:032x}"}) for number in range(1000)]
    assert {answer.partition(" ")[2][:3] for answer in answers} == {"403"}


class FakeRuns:
    """Dry runs that wait to be let go and say in which order they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go = threading.Semaphore(0)
        monkeypatch.setattr(sessions, "dry_run_beside", self.run)
        monkeypatch.setattr(sessions, "explain_ranks", lambda record, ranks: {})
        monkeypatch.setattr(sessions, "levers", lambda *_: [])

    def run(self, job: Job, stem: Path, spec: RunSpec, *_: Any, **__: Any) -> tuple[Report, Path]:
        self.begun.append(f"{job.micro_batch}{' explained' if spec.explain else ''}")
        assert self.go.acquire(timeout=30)
        return report_samples.fits(), stem


@pytest.fixture
def session(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, FakeRuns]]:
    runs = FakeRuns(monkeypatch)
    one = Session(subject, tmp_path, lambda *_: None)
    yield one, runs
    for _ in range(50):
        runs.go.release()
    one.close()


def micro_batch(size: int) -> Choice:
    return Choice(flags={"--micro-batch-size": str(size)})


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_looked_at_comes_first(session: tuple[Session, FakeRuns]) -> None:
    one, runs = session
    one.ask(micro_batch(1))
    eventually(lambda: runs.begun == ["1"])
    for size in (2, 4, 8):
        one.ask(micro_batch(size))
    for _ in range(8):
        runs.go.release()
    eventually(lambda: all(item.state == "done" for item in one.tries.values()))
    assert runs.begun == ["1", "8", "8 explained", "4", "4 explained", "2", "2 explained", "1 explained"]


def test_the_same_job_is_one_try_however_it_is_said(session: tuple[Session, FakeRuns]) -> None:
    one, runs = session
    runs.go.release()
    first = one.ask(Choice())
    assert one.ask(micro_batch(1)) is first, "the script says so already"
    assert one.ask(Choice(budget="40G")) is not first
    assert one.ask(Choice(device="ascend910b-32g")) is not first
