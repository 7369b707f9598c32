"""Activation of a shell: every variable comes back as it was; other Python processes hardly notice."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.launch import shell_activation as activation
from mindspeed_dryrun.rank.activation import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {"MS_SIMULATION_LEVEL": "1", "GLOG_v": "2", "LD_LIBRARY_PATH": "/stand in/lib64", "MS_ROLE": None}


def engine_environment(base: dict[str, str]) -> dict[str, str]:
    changed = {name: value for name, value in ENGINE.items() if value is not None}
    return {name: value for name, value in base.items() if name != "MS_ROLE"} | changed


def commands(environ: dict[str, str], **settings: object) -> str:
    base = activation.before_activation(environ)
    changes = activation.activated(base, engine_environment(base), {"options": [], **settings})
    return "\n".join(activation.activate_commands(changes, base))


def bash(script: str, environ: dict[str, str]) -> str:
    done = subprocess.run(["bash", "--norc", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def state_of_shell() -> str:
    return "export -p; set | grep -v -E '^(_|BASH_EXECUTION_STRING|PIPESTATUS|LINENO|BASH_.*|FUNCNAME)='"


def test_deactivate_restores_every_variable_exactly(tmp_path: Path) -> None:
    """Exported, not exported, empty, unset, with quotes and newlines: all as before."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MS_ROLE": "MS_WORKER",
        "LD_LIBRARY_PATH": "a'b\"c$d\ne",
        "GLOG_v": "",
    }
    program = f"import sys; sys.path.insert(0, '{ROOT}'); from mindspeed_dryrun.commands import main; main(['deactivate'])"
    deactivate = f'{sys.executable} -c "{program}"'
    output = bash(
        f"""
        PYTHONPATH='not exported'; PS1='$ '; MS_DRY_RUN=0
        before=$({state_of_shell()})
        eval "$1"
        """.replace('"$1"', "'" + commands(environ).replace("'", "'\\''") + "'")
        + f"""
        [ "$PS1" = '{activation.MARK}$ ' ] && [ -z "${{MS_ROLE+x}}" ] && [ "$MS_SIMULATION_LEVEL" = 1 ] && echo activated
        case $PATH in *launch/shim:*) echo shim first;; esac
        eval "$({deactivate})"
        after=$({state_of_shell()})
        unset output
        before2=$(echo "$before" | grep -v '^before='); after2=$(echo "$after" | grep -v -e '^before=' -e '^after=')
        if [ "$before2" = "$after2" ]; then echo same; else diff <(echo "$before2") <(echo "$after2"); fi
        """,
        environ,
    )
    assert output.splitlines() == ["activated", "shim first", "same"]


def test_activating_twice_keeps_the_first_state() -> None:
    base = {"PATH": "/bin", "GLOG_v": "1"}
    first = activation.activated(base, engine_environment(base), {"options": []})
    active = {name: value for name, value in (base | first).items() if value is not None}
    assert activation.before_activation(active) == base
    second = activation.activated(
        activation.before_activation(active), engine_environment(base), {"options": ["--jobs", "1"]}
    )
    assert json.loads(str(second[VARIABLE]))["saved"] == json.loads(str(first[VARIABLE]))["saved"]
    assert str(second["PATH"]).count("shim") == 1


def test_nothing_to_undo_where_nothing_is_activated() -> None:
    assert not activation.is_activated({})
    assert not activation.is_activated({VARIABLE: '{"mode": "rank"}'})
    assert activation.before_activation({"A": "1"}) == {"A": "1"}


def activated_environment(**extra: str) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], **extra}
    changes = activation.activated(base, engine_environment(base), {"options": [], "patches": "", "trainer": "script"})
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
