"""Activation of a shell: every variable comes back as it was; other Python processes hardly notice."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dryrun.launch import shell_activation as activation
from mindspeed_dryrun.rank.activation import VARIABLE, Activation

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {"MS_SIMULATION_LEVEL": "1", "GLOG_v": "2", "LD_LIBRARY_PATH": "/stand in/lib64", "MS_ROLE": None}


def engine_environment(base: dict[str, str]) -> dict[str, str]:
    changed = {name: value for name, value in ENGINE.items() if value is not None}
    return {name: value for name, value in base.items() if name != "MS_ROLE"} | changed


def commands(environ: dict[str, str], **settings: Any) -> str:
    base = activation.before_activation(environ)
    changes = activation.activated(base, engine_environment(base), Activation(**settings))
    return "\n".join(activation.activate_commands(changes, base))


def bash(script: str, environ: dict[str, str]) -> str:
    done = subprocess.run(["bash", "--norc", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def state_of_shell() -> str:
    return "export -p; set | grep -v -E '^(_|BASH_EXECUTION_STRING|PIPESTATUS|LINENO|BASH_.*|FUNCNAME)='"


VERB = f"import sys; sys.path.insert(0, '{ROOT}'); from mindspeed_dryrun.commands import main; main(['deactivate'])"


@pytest.mark.parametrize("leave", ["dryrun_off", f'eval "$({sys.executable} -c "{VERB}")"'], ids=["function", "verb"])
def test_leaving_restores_every_variable_exactly(tmp_path: Path, leave: str) -> None:
    """Exported, not exported, empty, unset, with quotes and newlines: all as before, and no function is left."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MS_ROLE": "MS_WORKER",
        "LD_LIBRARY_PATH": "a'b\"c$d\ne",
        "GLOG_v": "",
    }
    output = bash(
        f"""
        PYTHONPATH='not exported'; PS1='$ '; MS_DRY_RUN=0
        before=$({state_of_shell()})
        eval "$1"
        """.replace('"$1"', "'" + commands(environ).replace("'", "'\\''") + "'")
        + f"""
        [ "$PS1" = '{activation.MARK}$ ' ] && [ -z "${{MS_ROLE+x}}" ] && [ "$MS_SIMULATION_LEVEL" = 1 ] && echo activated
        case $PATH in *launch/shim:*) echo shim first;; esac
        {leave}
        after=$({state_of_shell()})
        unset output
        before2=$(echo "$before" | grep -v '^before='); after2=$(echo "$after" | grep -v -e '^before=' -e '^after=')
        if [ "$before2" = "$after2" ]; then echo same; else diff <(echo "$before2") <(echo "$after2"); fi
        """,
        environ,
    )
    assert output.splitlines() == ["activated", "shim first", "same"]


# What `bin/activate` of Python's venv does, as far as PATH and the prompt go.
VENV = """
_old_path=$PATH; _old_prompt=$PS1; PATH=/venv/bin:$PATH; PS1="(venv) $PS1"
deactivate() { PATH=$_old_path; PS1=$_old_prompt; unset _old_path _old_prompt; unset -f deactivate; }
"""


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize("entered", ["before", "after"])
def test_a_virtual_environment_keeps_its_own_deactivate(shell: str, entered: str, tmp_path: Path) -> None:
    """Whichever is left first, nothing of the other is lost, and nothing of a dry run is left in the end."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    inner = environ | ({"PATH": f"/venv/bin:{environ['PATH']}"} if entered == "before" else {})
    steps = [VENV, commands(inner)] if entered == "before" else [commands(inner), VENV]
    look = 'echo "$PATH|$PS1|${MS_SIMULATION_LEVEL-unset}|${MINDSPEED_DRYRUN-unset}"'
    for leave in ("deactivate; dryrun_off", "dryrun_off; deactivate"):
        script = "\n".join(["PS1='$ '", *steps, leave, look])
        if entered == "after" and leave.startswith("dryrun_off"):
            continue  # the environment then restores the PATH that it found, as it does for any change made since
        if shutil.which(shell) is None:
            pytest.skip(f"there is no {shell}")
        done = subprocess.run([shell, "-c", script], env=environ, capture_output=True, text=True)
        assert done.stdout == f"{environ['PATH']}|$ |unset|unset\n", (leave, done.stdout, done.stderr)


def test_a_shell_that_only_lost_its_path_starts_nothing(tmp_path: Path) -> None:
    """The environment's `deactivate` instead of ours: the next training would be a simulation, and nobody would know."""
    (tmp_path / "mindspore.py").write_text("print('imported')\n")
    environ = activated_environment(PYTHONPATH=str(tmp_path)) | {"PATH": os.environ["PATH"]}
    done = run_python("import mindspore", environ)
    assert done.returncode == 1 and "Run dryrun_off" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    "name", ["plain", "with space", "o'brien", 'the "quoted" one', "back\\slash", "用户 ü", os.fsdecode(b"l\xe4tin")]
)
def test_msrun_finds_its_python_under_any_name(name: str, tmp_path: Path) -> None:
    python = tmp_path / name / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    text = "\n".join(
        activation.activate_commands(
            activation.activated({"PATH": "/usr/bin:/bin"}, {"PATH": "/usr/bin:/bin"}, Activation(python=str(python))),
            {"PATH": "/usr/bin:/bin"},
        )
    )
    shim = Path(activation.SHIM, "msrun")
    probe = tmp_path / "launcher.py"
    probe.write_text("import sys; sys.stdout.buffer.write(__import__('os').fsencode(sys.executable))")
    (tmp_path / "msrun").write_bytes(shim.read_bytes())
    script = os.fsencode(f"{text}\nsh '{tmp_path}/msrun'\n")
    done = subprocess.run(["bash", "-c", script], capture_output=True, env={"PATH": "/usr/bin:/bin"})
    assert os.fsdecode(done.stdout) == str(python), done.stderr


def test_activating_twice_keeps_the_first_state() -> None:
    base = {"PATH": "/bin", "GLOG_v": "1"}
    first = activation.activated(base, engine_environment(base), Activation())
    active = {name: value for name, value in (base | first).items() if value is not None}
    assert activation.before_activation(active) == base
    second = activation.activated(
        activation.before_activation(active), engine_environment(base), Activation(options=("--jobs", "1"))
    )
    assert json.loads(str(second[VARIABLE]))["saved"] == json.loads(str(first[VARIABLE]))["saved"]
    assert str(second["PATH"]).count("shim") == 1


def test_nothing_to_undo_where_nothing_is_activated() -> None:
    assert not activation.is_activated({})
    assert not activation.is_activated({VARIABLE: '{"mode": "rank"}'})
    assert activation.before_activation({"A": "1"}) == {"A": "1"}


def activated_environment(**extra: str) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], **extra}
    changes = activation.activated(base, engine_environment(base), Activation())
    return {name: value for name, value in (base | changes).items() if value is not None}


def run_python(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.users_own = __file__\n")
    done = run_python(
        "import sys, sitecustomize; print(sys.users_own, sitecustomize.__file__)",
        activated_environment(PYTHONPATH=str(tmp_path)),
    )
    own = str(tmp_path / "sitecustomize.py")
    assert done.stdout.split() == [own, own], done.stderr


def test_a_process_that_is_no_training_job_imports_nothing_of_ours() -> None:
    done = run_python("import sys; print([m for m in sys.modules if m.startswith('mindspeed_dryrun')])", activated_environment())
    assert done.stdout.strip() == "[]", done.stderr


def test_a_process_that_is_no_training_job_pays_milliseconds() -> None:
    """CPU time, best of several, so that a busy machine does not decide: the hook itself is an import of one small file."""

    def best(environ: dict[str, str]) -> float:
        times = []
        for _ in range(7):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run_python("pass", environ)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    plain = {"PATH": os.environ["PATH"]}
    assert best(activated_environment()) - best(plain) < 0.030


def test_importing_mindspore_without_simulation_stops_an_activated_process(tmp_path: Path) -> None:
    (tmp_path / "mindspore.py").write_text("print('a real MindSpore would start here')\n")
    environ = activated_environment(PYTHONPATH=str(tmp_path))
    stopped = run_python("import mindspore", environ | {"MS_SIMULATION_LEVEL": ""})
    assert stopped.returncode == 1 and "Simulation is not on" in stopped.stderr and not stopped.stdout
    works = run_python("import mindspore", environ)
    assert works.returncode == 0 and "real MindSpore" in works.stdout, works.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"mode": "rank"}'])
def test_other_activations_leave_a_process_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "mindspore.py").write_text("print('imported')\n")
    environ = activated_environment(PYTHONPATH=str(tmp_path)) | {VARIABLE: text, "MS_SIMULATION_LEVEL": ""}
    done = run_python("import mindspore", environ)
    assert done.stdout.strip() == "imported", done.stderr


def test_an_activation_comes_back_as_it_went() -> None:
    told = Activation(mode="rank", rank=3, options=("--out", "用户"), saved={"PATH": "/bin", "LANG": None})
    assert Activation.from_env(told.to_env()) == told
    assert list(json.loads(Activation(mode="rank").to_env()[VARIABLE])) == ["mode"]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"rank": "0"}', '{"options": "--out"}', '{"saved": 1}'])
def test_what_cannot_be_read_activates_nothing(text: str) -> None:
    assert Activation.from_env({VARIABLE: text}) == Activation()
