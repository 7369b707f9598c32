"""The programs that stand in for others while a script is captured: first on PATH, and called by path as well.

A script is run to learn its launcher call. What writes, deletes, copies, stops or connects does nothing and ends well;
what computes a value runs as it is; what starts another program starts ours where that program is one of ours.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from mindspeed_dryrun.launch.read_call import LAUNCHERS
from mindspeed_dryrun.rank import activation

SHIM = Path(activation.SHIM)

_QUIET = (
    "mkdir", "rmdir", "rm", "mv", "cp", "ln", "touch", "chmod", "chown", "install", "truncate", "dd", "tar", "unzip", "gzip",
    "wget", "curl", "pip", "pip3", "pkill", "killall", "kill", "scp", "rsync", "sleep", "ray", "ping", "nc", "apt", "apt-get",
    "yum", "dnf", "mount", "umount", "systemctl", "reboot",
)  # fmt: skip
REMOTE = ("ssh", "pdsh", "ansible", "kubectl", "sbatch")
_GIT_CHANGES = "clone|pull|fetch|checkout|switch|reset|submodule|init|apply|stash|clean|lfs"
_OTHER_LAUNCHERS = ("mpirun", "mpiexec", "deepspeed", "accelerate")
_PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(7, 15)))
# Programs that start another one. Those of _KEPT run for real where that other one is not ours: they change nothing but it.
_KEPT = ("nohup", "setsid", "nice", "ionice", "stdbuf", "taskset", "chrt", "timeout", "time", "numactl")
_DROPPED = ("sudo", "srun")
# The same where they are installed: `command -v docker` says what is on this machine.
_DROPPED_IF_HERE = (
    "docker", "podman", "singularity", "apptainer", "su", "runuser", "gosu", "flock", "script", "screen", "tmux", "watch",
    "strace", "ltrace", "msprof", "uv", "poetry", "pdm", "pipenv",
)  # fmt: skip
_KEPT_IF_HERE = ("conda", "mamba", "micromamba")

# The program that would have run without us, with PATH as it is: what it starts is stood in for again.
_REAL = """
IFS=:
for folder in $PATH; do
    if [ "$folder" != "$__dryrun_bin" ] && [ -f "$folder/%s" ] && [ -x "$folder/%s" ]; then exec "$folder/%s" "$@"; fi
done
"""
_NOT_FOUND = """
echo "%s: command not found" >&2
exit 127"""
# The first word that names a program of ours, a script, or a whole command line is what gets started; words before it are
# the starter's options.
_STARTER = """
while [ $# -gt 0 ]; do
    case $1 in
    --application=*) exec "$__dryrun_bin/bash" -c "${1#*=}";;
    -*) ;;
    *msrun" "*|*torchrun" "*|*bash" "*|*.sh" "*) exec "$__dryrun_bin/bash" -c "$1";;
    *=*) ;;
    *.sh) exec "$__dryrun_bin/bash" "$@";;
    *) if [ -e "$__dryrun_bin/${1##*/}" ]; then name=${1##*/}; shift; exec "$__dryrun_bin/$name" "$@"; fi;;
    esac
    shift
done
exit 0
"""
_KEPT_STARTER = """
signal=
for word; do
    if [ -n "$signal" ]; then signal=; continue; fi
    case $word in
    -s|-k) signal=1;;  # `timeout -s kill`
    -*|*=*) ;;
    *.sh) while [ "$1" != "$word" ]; do shift; done
          exec "$__dryrun_bin/bash" "$@";;
    *) if [ -e "$__dryrun_bin/${word##*/}" ]; then
           while [ "$1" != "$word" ]; do shift; done
           shift
           exec "$__dryrun_bin/${word##*/}" "$@"
       fi;;
    esac
done
"""
# `env -i A=1 B=2 /opt/venv/bin/msrun …`: the assignments are made by the real env; the program is ours.
_ENV = """
count=$# found= name=
for word; do
    if [ -n "$name" ]; then name=
    elif [ -z "$found" ]; then
        case $word in
        -u|-C|--unset|--chdir) name=1;;
        -*|*=*) ;;
        *) found=1
           if [ -e "$__dryrun_bin/${word##*/}" ]; then word=$__dryrun_bin/${word##*/}; fi
           case $word in *.sh) set -- "$@" "$__dryrun_bin/bash";; esac;;
        esac
    fi
    set -- "$@" "$word"
done
shift $count
"""
# An interactive or privileged shell does not read BASH_ENV.
_BASH = """
case ${1-} in
--*|-) ;;
-*[ip]*) flags=$(printf %s "$1" | tr -d ip); shift; [ "$flags" = - ] || set -- "$flags" "$@";;
esac
"""
# The cards of the machine that the script is for: a node of eight, unless there are real ones here. It is said.
_NPU_SMI = """
case "$*" in info*) ;; *) exit 0;; esac
printf "%s\\n" "npu-smi (8 cards are assumed)" >> "$__dryrun_bin/../absent"
case "$*" in
*-l*) printf "\\tTotal Count                    : 8\\n"
      printf "\\tNPU ID                         : %s\\n" 0 1 2 3 4 5 6 7;;
*-m*) printf "\\t%s       0       %s       Ascend 910B3\\n" 0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7;;
*) printf "| %s     910B3               | OK            | 90.0        40     0 / 0       |\\n" 0 1 2 3 4 5 6 7;;
esac
exit 0
"""
# Python itself runs (`$(python -c …)` computes values), but not the script's other steps (conversion, preprocessing).
_PYTHON = """
for word; do
    case $word in
    -m) case $* in
        *mindspore.parallel.cluster.run*) while [ "$1" != -m ]; do shift; done; shift 2; exec msrun "$@";;
        *torch.distributed.run*|*torch.distributed.launch*) while [ "$1" != -m ]; do shift; done; shift 2; exec torchrun "$@";;
        *"-m pip "*) exit 0;; esac; break;;
    -c) break;;
    -*) ;;
    */msrun|*/torchrun) while [ "$1" != "$word" ]; do shift; done; shift; exec "${word##*/}" "$@";;
    */torch/distributed/run.py|*/torch/distributed/launch.py)
        while [ "$1" != "$word" ]; do shift; done; shift; exec torchrun "$@";;
    *.py) printf "%s\\n" "{name} $word" >> "$__dryrun_bin/../skipped"; exit 0;;
    *) break;;
    esac
done
"""


def write_programs(folder: Path, environ: Mapping[str, str]) -> None:
    """Makes the folder of stand-ins. They know `environ` by themselves: `env -i` starts them with nothing."""
    folder.mkdir()
    known = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environ.items())
    for name, body in _programs().items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{known}\n{body}\n", encoding="utf-8", errors="surrogateescape")
        path.chmod(0o755)


def _programs() -> dict[str, str]:
    ours = f"exec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(SHIM / 'launcher.py'))}"
    kept = (*_KEPT, *filter(shutil.which, _KEPT_IF_HERE))
    return {
        **dict.fromkeys(_QUIET, "exit 0"),
        **{name: f'printf "%s\\n" {name} >> "$__dryrun_bin/../launchers"; exit 0' for name in (*_OTHER_LAUNCHERS, *REMOTE)},
        **{name: _KEPT_STARTER + _real(name) for name in kept},
        **dict.fromkeys((*_DROPPED, *filter(shutil.which, _DROPPED_IF_HERE), "__dryrun_starter"), _STARTER),
        **{name: _PYTHON.replace("{name}", name) + _real(name) for name in _PYTHONS},
        "env": _ENV + _real("env"),
        "npu-smi": _real("npu-smi", _NPU_SMI),
        "tee": "exec cat",
        # a file of ours is wherever the script asked for it
        "mktemp": 'for word; do shift; case $word in */*X) word=$TMPDIR/${word##*/};; esac; set -- "$@" "$word"; done'
        + _real("mktemp"),
        # following a log that will never come would never end
        "tail": f"for word; do case $word in -f|-F|-[0-9]*f|--follow*) exit 0;; esac; done; {_real('tail')}",
        "sed": f"for word; do case $word in -i*|-[nrEsz]*i*|--in-place*) exit 0;; esac; done; {_real('sed')}",
        "find": f"for word; do case $word in -delete) exit 0;; esac; done; {_real('find')}",
        "git": f"for word; do case $word in {_GIT_CHANGES}) exit 0;; esac; done; {_real('git')}",
        "bash": _BASH + _real("bash"),
        # dash does not read BASH_ENV, and with it what a nested script must not do
        **dict.fromkeys(("sh", "dash"), 'exec "$__dryrun_bin/bash" "$@"'),
        **{name: f'{ours} {name} "$@"' for name in LAUNCHERS},
    }


def _real(name: str, otherwise: str = _NOT_FOUND) -> str:
    """The end of a stand-in: the real program with the same arguments, or `otherwise` where there is none."""
    return (_REAL + otherwise).replace("%s", name) if otherwise is _NOT_FOUND else _REAL.replace("%s", name) + otherwise
