"""A new user follows README.md, and then the tutorial and the page of verbs, from top to bottom: every command that they show
works as it stands, on this machine.

Commands are the lines of its `bash` and `console` blocks, and code in its tables that starts with a verb. Three words stand for
something of the user's: SCRIPT (the first script that the README itself launches), RECORD (what the last launch left) and msrun_log
(worker logs of a real run: those of the first launch).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from simulated_rank import as_shown

from mindspeed_dryrun.commands import VERBS
from mindspeed_dryrun.engines.packages import packages_folder

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = ("docs/tutorial.md", "docs/verbs.md")  # in this order: the second goes on with what the first has left
LEFT_ENGLISH = [
    "mindspeed-dryrun report full --format csv",
    "mindspeed-dryrun patches mindspore-grouped-matmul",
]  # data, and the catalogue
ELSEWHERE: dict[str, str] = {}  # page → what its commands need that a test machine has not
_BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_RANK_ROW = re.compile(r"^ *▶?\d+ .*\d+M")
# Set-up of a machine, what clones from the network, or this very test: what they name must exist, and that is all.
_INSTALLS = re.compile(r"^(bash (launch|tests)/|pip |git |python3? -m (pip|venv)|mindspeed-dryrun setup --stack)")
_NEEDS_NPUS = {"--save", "--ab"}  # keeps, or makes, a real run
_MINUTES = ("sweep", "search")


@dataclass(frozen=True)
class Shown:
    """A command of the README, and the output that is shown below it."""

    command: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command, comments=True)

    @property
    def verb(self) -> str:
        if self.words[:2] == ["python", "-m"]:
            return self.words[2].rpartition(".")[2]
        return self.words[1] if self.words[0] == "mindspeed-dryrun" else self.words[0]


def shown_commands(text: str) -> list[Shown]:
    """In the order of the text: of blocks, and of tables."""
    found = shown_blocks(text)
    for row in re.finditer(r"^\|.*\|$", text, re.MULTILINE):
        for code in _CODE.findall(row[0]):
            words = code.removeprefix("mindspeed-dryrun").split()
            if words and words[0] in VERBS:
                found.append((row.start(), Shown("mindspeed-dryrun " + code.removeprefix("mindspeed-dryrun").strip())))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def shown_blocks(text: str) -> list[tuple[int, Shown]]:
    """Every command of a block, with the place of the block."""
    found: list[tuple[int, Shown]] = []
    for block in _BLOCK.finditer(text):
        lines = block[2].splitlines()
        if lines[0].startswith("eval "):  # what it sets is for the lines below it
            found.append((block.start(), Shown("\n".join(lines))))
            continue
        if block[1] == "bash":
            found += [(block.start(), Shown(line)) for line in lines if line.strip() and not line.startswith("#")]
            continue
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            found.append((block.start(), Shown(lines[start][2:], tuple(lines[start + 1 : end]))))
    return found


@dataclass
class User:
    """A clone of the repository, and what the commands have left in it."""

    clone: Path
    script: str
    record: str = ""
    said: list[str] = field(default_factory=list)

    def follow(self, shown: Shown) -> subprocess.CompletedProcess[str]:
        command = re.sub(r"\bSCRIPT\b", self.script, shown.command)
        command = re.sub(r"\bRECORD\b", self.record or "RECORD", command)
        if "--try" in shown.words and "--yes" not in shown.words:
            command += " --yes"  # it asks, and there is no terminal to answer at
        environ = {**os.environ, "PATH": f"{self.clone / '.bin'}:{os.environ['PATH']}", "PYTHONPATH": str(self.clone)}
        line = command if command.startswith("eval ") else f"exec {command}"
        process = subprocess.Popen(["bash", "-c", line], cwd=self.clone, env=environ, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
        if shown.verb == "studio":  # serves until it is interrupted
            assert process.stderr and "The studio is at" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=500)
        if record := re.search(r"^record: (\S+)$", out, re.MULTILINE):
            self.record = record[1]
            if not (self.clone / "msrun_log").exists():
                self._real_run()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _real_run(self) -> None:
        (self.clone / "msrun_log").mkdir()
        report = json.loads((self.clone / self.record / "report.json").read_text(encoding="utf-8"))
        for rank in report["ranks"]:
            for other in rank["represents"]:  # a real run has the logs of all ranks
                log = self.clone / self.record / "ranks" / f"{rank['rank']:05d}" / "worker.log"
                shutil.copy(log, self.clone / "msrun_log" / f"worker_{other}.log")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    programs = tmp_path / "clone" / ".bin"
    programs.mkdir()
    for name, line in (("mindspeed-dryrun", f"{sys.executable} -m mindspeed_dryrun"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path / "clone"


def user_of(clone: Path, page: str) -> User:
    """A user whose script is the first one that the page launches; it is also what a page calls my_training_script.sh."""
    launched = next(item for item in shown_commands((ROOT / page).read_text(encoding="utf-8")) if item.verb == "launch")
    script = next(word for word in launched.words if word.endswith(".sh"))
    shutil.copy(clone / script, clone / "my_training_script.sh")
    return User(clone, script)


def follow_all(user: User, chosen: list[Shown]) -> None:
    for shown in chosen:
        if _INSTALLS.match(shown.command):
            assert all((ROOT / word).exists() for word in shown.words if word.endswith(".sh")), shown.command
            continue
        if _NEEDS_NPUS & set(shown.words):
            continue
        if any(word.endswith("_ptd.sh") for word in shown.words) and importlib.util.find_spec("torch_npu") is None:
            continue  # the README says that torchrun's scripts have an environment of their own
        if shown.verb == "studio" and importlib.util.find_spec("uvicorn") is None:
            continue  # the README says that it needs an extra
        done = user.follow(shown)
        said = f"{shown.command}\nexit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert done.returncode in ((0, 130) if shown.verb == "studio" else (0, 3)), said
        assert "Traceback" not in done.stdout + done.stderr, said
        for line in shown.output:
            if _RANK_ROW.match(line):
                assert line in done.stdout.splitlines(), f"the README shows\n{line}\n{said}"


@pytest.mark.engine
@as_shown
@pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run")
@pytest.mark.parametrize("readme", READMES)
def test_every_command_of_the_readme_works(clone: Path, readme: str) -> None:
    if shutil.which("npu-smi"):
        pytest.skip("this machine has cards: the README is about one that has none")
    commands = shown_commands((ROOT / readme).read_text(encoding="utf-8"))
    follow_all(user_of(clone, readme), [item for item in commands if item.verb not in _MINUTES])


@pytest.mark.slow
@pytest.mark.engine
@as_shown
@pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run")
def test_the_commands_that_take_minutes_work(clone: Path) -> None:
    commands = shown_commands((ROOT / READMES[0]).read_text(encoding="utf-8"))
    follow_all(user_of(clone, READMES[0]), [item for item in commands if item.verb in _MINUTES])


@pytest.mark.slow
@pytest.mark.engine
@as_shown
@pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run")
def test_every_command_of_the_pages_works(clone: Path) -> None:
    """Sweeps, searches and tries included."""
    user = user_of(clone, PAGES[0])
    for page in PAGES:
        follow_all(user, page_commands(page))


@pytest.mark.engine
@as_shown
@pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run")
def test_the_quick_commands_of_the_pages_work(clone: Path) -> None:
    user = user_of(clone, PAGES[0])
    for page in PAGES:
        follow_all(user, [item for item in page_commands(page) if item.verb not in _MINUTES and "--try" not in item.words])


def page_commands(page: str) -> list[Shown]:
    return [item for _, item in shown_blocks((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES)
def test_the_chinese_page_shows_commands_of_the_english_one(page: str) -> None:
    english = {item.command.partition("  #")[0].strip() for item in page_commands(page)}
    chinese = {item.command.partition("  #")[0].strip() for item in page_commands(page.replace(".md", ".zh.md"))}
    assert len(chinese) > 7 and chinese <= english


def test_no_other_page_has_commands_that_nothing_runs() -> None:
    """What other pages show are blocks of other languages, and commands in tables, which tests/unit/test_docs.py parses."""
    pages = {str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("*.md") if page_commands(str(file.relative_to(ROOT)))}
    assert pages <= {*PAGES, *(page.replace(".md", ".zh.md") for page in PAGES), *ELSEWHERE}


@pytest.mark.parametrize("readme", READMES)
def test_the_readme_shows_commands(readme: str) -> None:
    """A README that is written another way must not leave nothing to test."""
    verbs = {item.verb for item in shown_commands((ROOT / readme).read_text(encoding="utf-8"))}
    assert {"launch", "explain", "compare", "sweep", "search", "doctor"} <= verbs


def figures(shown: Shown) -> list[str]:
    """Of three characters and more: a name of ours that is cut off in one language may hold a smaller one."""
    return sorted(re.findall(r"\d[\d.]{2,}", "\n".join(shown.output)))


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_the_chinese_page_shows_the_same_figures(page: str) -> None:
    """What a Chinese reader sees, in Chinese, with every figure of the English page."""
    pages = [page, page.replace(".md", ".zh-CN.md" if page == "README.md" else ".zh.md")]
    english, chinese = (
        {item.command.replace(" --lang zh", ""): item for _, item in shown_blocks((ROOT / one).read_text("utf-8")) if item.output}
        for one in pages
    )
    assert chinese and chinese.keys() == english.keys()
    assert {name for name in english if figures(english[name]) != figures(chinese[name])} == set()
    assert [name for name, item in chinese.items() if not re.search("[一-鿿]", "".join(item.output))] in ([], LEFT_ENGLISH)
