"""Scripts run in real bash up to their msrun call, and leave no trace."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch import no_call
from mindspeed_dryrun.launch import script as script_module
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.launch.script_text import assignments, quiet_blocks, set_variables


@pytest.fixture(params=["with Landlock", "without Landlock"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's working directory; every test holds with and without the kernel's help."""
    if request.param == "without Landlock":
        monkeypatch.setattr(script_module, "kernel_confines", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(home: Path, text: str, name: str = "train.sh") -> Path:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(item.relative_to(folder)): item.read_bytes() if item.is_file() else b"/" for item in folder.rglob("*")}


def test_bash_expands(home: Path) -> None:
    path = write(home, 'TP=2; PP=$((TP*2))\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nARGS="--tp $TP --pp $PP"\n'
                       'msrun --worker_num $((TP*PP)) pretrain_gpt.py $ARGS --name "two words"\n')  # fmt: skip
    call = capture(path)
    assert call.world_size == 8
    assert call.program_args == ("--tp", "2", "--pp", "4", "--name", "two words")
    assert call.cwd == str(home) and call.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not any("dryrun" in name.lower() for name in call.env if name not in os.environ)
    assert call.env["PATH"] == os.environ["PATH"]


NOISY = """
set -euo pipefail
mkdir -p logs/today out && echo made
echo started > started.txt
date >> history.txt
rm -rf precious
touch stamp
cp train.sh copy.sh; mv train.sh moved.sh; ln -s train.sh link.sh
sed -i s/a/b/ precious/weights
cat > config.json <<EOF
{"a": 1}
EOF
( echo sub > sub.txt )
X=$(echo inner > inner.txt; echo value)
write() { echo "$1" > "$1.txt"; }
write function
pkill -9 python
kill -9 1
python convert_ckpt.py --out out
exec > everything.log 2>&1
nohup msrun --worker_num 8 pretrain_gpt.py --x "$X" --y 'a > b' > logs/train.log 2>&1 &
wait $!
tail -f logs/train.log
msrun_done=1
sleep 1000
"""


def test_nothing_is_left_behind(home: Path) -> None:
    (home / "precious").mkdir()
    (home / "precious" / "weights").write_text("aaa")
    (home / "history.txt").write_text("old\n")
    path = write(home, NOISY)
    before = tree(home)
    call = capture(path)
    assert call.program_args == ("--x", "value", "--y", "a > b")
    assert tree(home) == before
    assert "python convert_ckpt.py" in call.notes[-1]


def test_a_log_of_the_user_is_not_truncated(home: Path) -> None:
    (home / "train.log").write_text("yesterday")
    for redirection in ("> train.log 2>&1", "2>&1 | tee train.log", "&> train.log", ">| train.log", "2>>train.log >&2"):
        assert capture(write(home, f"msrun --worker_num 2 p.py --a 1 {redirection}\n")).program_args == ("--a", "1")
    assert (home / "train.log").read_text() == "yesterday"


BLOCKS = [
    "{ echo hi; msrun --worker_num 2 p.py --a 1; } > train.log 2>&1",
    "{ echo hi; msrun --worker_num 2 p.py --a 1; } &> train.log",
    "( echo hi; msrun --worker_num 2 p.py --a 1 ) >> train.log 2> new.log",
    "for i in 1; do msrun --worker_num 2 p.py --a $i; done > train.log",
    'if true; then msrun --worker_num 2 p.py --a 1; fi >| "train.log"',
    "while read x; do msrun --worker_num 2 p.py --a $x; done > train.log <<< 1",
    "case a in a) msrun --worker_num 2 p.py --a 1 ;; esac 2>&1 > train.log",
    "run() { msrun --worker_num 2 p.py --a $1; } > train.log\nrun 1",
    "HERE=${BASH_SOURCE[0]}\n{ msrun --worker_num 2 p.py --a 1; } > $(dirname $HERE)/train.log",
]


@pytest.mark.parametrize("text", BLOCKS)
def test_redirected_blocks_run_and_write_nothing(home: Path, text: str) -> None:
    (home / "train.log").write_text("yesterday")
    path = write(home, text + "\n")
    before = tree(home)
    assert capture(path).program_args == ("--a", "1")
    assert tree(home) == before


def test_only_files_of_blocks_are_replaced() -> None:
    text = "{ a; } > /dev/stderr 2>&1\n{ b; } >&2 | tee x\nc } > y\n# } > z\ncat <<E\n} > w\nE\n{ d; } > >(tee v)\n"
    assert quiet_blocks(text) == text
    assert quiet_blocks("{ a; } 2> x > y # } > z\n") == "{ a; } 2> /dev/null > /dev/null # } > z\n"


def test_other_msruns_are_never_started(home: Path) -> None:
    real = write(home, "#!/bin/sh\ntouch REAL\n", "venv/bin/msrun")
    real.chmod(0o755)
    write(home, f'export PATH="{home}/venv/bin:$PATH"\n', "venv/bin/activate")
    for call in ("msrun", f"{home}/venv/bin/msrun", "$HOME_OF_MSRUN/msrun", "nohup ./venv/bin/msrun", "command msrun",
                 f"PATH={home}/venv/bin:$PATH msrun", "sh -c 'exec ./venv/bin/msrun \"$@\"' x", "exec ./venv/bin/msrun",
                 "python -m mindspore.parallel.cluster.run", "env A=1 msrun"):  # fmt: skip
        text = f"source venv/bin/activate\nHOME_OF_MSRUN={home}/venv/bin\n{call} --worker_num 2 p.py --a 1\n"
        assert capture(write(home, text)).program_args == ("--a", "1"), call
    assert not (home / "REAL").exists()


ASSIGNMENTS = {
    "EXTRA=$(/usr/bin/python3 -c 'print(\"--seq 7\")')\nmsrun p.py $EXTRA": "--seq 7",
    "MSRUN=/usr/local/bin/msrun\n$MSRUN p.py --m $MSRUN": "--m /usr/local/bin/msrun",
    "PYTHON=/usr/bin/python3\n$PYTHON -m mindspore.parallel.cluster.run p.py --python $PYTHON": "--python /usr/bin/python3",
    "LOGDIR=/var/log/cp msrun p.py --dir a/cp": "--dir a/cp",
    "export RM=/bin/rm CP=(/bin/cp -r)\nmsrun p.py --rm $RM ${CP[*]}": "--rm /bin/rm /bin/cp -r",
    "A=/opt/a/msrun B=/opt/b/rm\nmsrun p.py $A $B": "/opt/a/msrun /opt/b/rm",
    "X=1 Y=/bin/rm /opt/venv/bin/msrun p.py --x": "--x",
    "LIST+=/bin/rm; declare -a L=(/x/msrun); L[0]=/y/msrun\nmsrun p.py $LIST $L": "/bin/rm /y/msrun",
    'run() { echo "+ $*"; "$@"; }\nrun /opt/venv/bin/msrun p.py --y': "--y",
    "LAUNCH='nohup /opt/venv/bin/msrun'\n$LAUNCH p.py --z &\nwait": "--z",
    "MSRUN_BIN=`which msrun`\n${MSRUN_BIN:-msrun} p.py --w": "--w",
    "DIR='/opt/my env'\n\"$DIR/bin/msrun\" p.py --s": "--s",
    "exec /opt/venv/bin/msrun p.py --e 1": "--e 1",
    "command /opt/venv/bin/msrun p.py --c": "--c",
    "/usr/bin/env A=/bin/rm /opt/venv/bin/msrun p.py --v": "--v",
    "timeout -s KILL 100 /opt/venv/bin/msrun p.py --t": "--t",
    "sudo -E /opt/venv/bin/msrun p.py --u": "--u",
    "srun -N 2 --ntasks-per-node=1 bash -c 'msrun p.py --n $0' 3": "--n 3",
    "python3 /opt/venv/bin/msrun p.py --q": "--q",
    "sh -c '/opt/venv/bin/msrun p.py --sh'": "--sh",
    "[[ a1 =~ ([0-9]) ]]; P=/x/rm /bin/echo hi\nmsrun p.py --match ${BASH_REMATCH[1]}": "--match 1",
    "word=/opt/venv/bin/msrun text=no; $word p.py --shadow $text": "--shadow no",
    "i=0; A[i++]=/bin/rm; ${B:=/opt/venv/bin/msrun} p.py --i $i --b $B": "--i 1 --b /opt/venv/bin/msrun",
}


@pytest.mark.parametrize("text", ASSIGNMENTS)
def test_values_that_end_in_the_name_of_a_program_stay_values(home: Path, text: str) -> None:
    assert " ".join(capture(write(home, text + "\n")).program_args) == ASSIGNMENTS[text]


ABSENT = {
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh\nmsrun p.py --a": "--a",
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh && msrun p.py --and": "--and",
    "set -u\n. /usr/local/Ascend/nnal/atb/set_env.sh\nunset LD_LIBRARY_PATH; source $HOME/Ascend/x/set_env.sh\n"
    "export LD_LIBRARY_PATH=$ASCEND_TOOLKIT_HOME/lib64:$LD_LIBRARY_PATH\nmsrun p.py ${LD_LIBRARY_PATH%%:*}":
        "/usr/local/Ascend/ascend-toolkit/latest/lib64",
    "source ~/no-such-home/miniconda3/bin/activate env\nconda activate env\nmodule load cann\nmsrun p.py --conda": "--conda",
    "cd /data/no/such || exit 1\nmsrun p.py --cwd $PWD --pwd $(pwd) --up $(cd ..; pwd)": "--cwd /data/no/such --pwd /data/no/such --up /data/no",
    "DATA=/data/none\npushd $DATA; popd\ncd $DATA; cd sub; msrun p.py --sub `pwd`": "--sub /data/none/sub",
    "npu-smi info > /dev/null\nN=$(npu-smi info -l | grep 'Total Count' | awk '{print $NF}')\nmsrun p.py --n $N": "--n 8",
    "N=$(npu-smi info | grep 910B | wc -l)\nmsrun p.py --n $N": "--n 8",
    "IP=$(no-such-tool --ip)\nulimit -n 99999999\nhccn_tool -i 0\nmsrun p.py --ip ${IP:-none}": "--ip none",
}  # fmt: skip


# What else surrounds a call in scripts of users: each is captured as bash would make it, and leaves the folder as it was.
SURROUNDINGS = {
    "trap 'echo bye > bye.txt; rm -rf out' EXIT\nmsrun p.py --exit > train.log 2>&1": "--exit",
    "cleanup() { echo bye > bye.txt; }\ntrap cleanup EXIT INT TERM\nset -e\n/opt/venv/bin/msrun p.py --f > x": "--f",
    "trap 'echo $BASH_COMMAND' DEBUG\nmsrun p.py --debug > train.log": "--debug",
    "trap - DEBUG\necho a > b.txt\nmsrun p.py --off > train.log": "--off",
    "msrun p.py --tee > >(tee train.log) 2> >(tee err.log >&2)": "--tee",
    "exec > >(tee -a train.log) 2>&1\nmsrun p.py --exec": "--exec",
    "exec 3> fd.txt\necho x >&3\nmsrun p.py --fd 1>&3": "--fd",
    "exec 9> lock\nflock -n 9 || exit 1\nmsrun p.py --lock": "--lock",
    "flock -n lock msrun p.py --flock": "--flock",
    "N=$(python3 - <<EOF\nprint(4 if 3 > 2 else 1)\nEOF\n)\nmsrun p.py --n $N": "--n 4",
    "bash <<EOF\nmsrun p.py --stdin > train.log\nEOF": "--stdin",
    "ARGS=$(cat <<'EOF'\n--a 1\n--b x->y\nEOF\n)\nmsrun p.py $ARGS": "--a 1 --b x->y",
    "T=$(mktemp)\necho '--temp 1' > $T\nmsrun p.py $(cat $T)": "--temp 1",
    "T=$(mktemp /tmp/args.XXXXXX)\ncat > \"$T\" <<EOF\n--temp 2\nEOF\nmsrun p.py $(cat $T)": "--temp 2",
    "text=1 target=2 out=3; T=$(mktemp -d); echo $text >> $T/sub; msrun p.py $(cat $T/sub) $target $out": "1 2 3",
    "env -i /opt/venv/bin/msrun p.py --i": "--i",
    "env -i PATH=/usr/bin:/bin msrun p.py --path": "--path",
    "env -u A -C . B=1 ./venv/bin/msrun p.py --u > train.log": "--u",
    "env -i bash other.sh --nested": "--nested",
    "./dash.sh --dash > train.log": "--dash",
    "dash dash.sh --named": "--named",
    "unset BASH_ENV\nbash other.sh --unset": "--unset",
    "bash -ic 'msrun p.py --inter > train.log'": "--inter",
    "cd /data/none && cd - && mkdir -p logs || exit 3\nmsrun p.py --back > logs/x": "--back",
    "T=$(mktemp -d); echo a > $T/b/c; mkdir -p logs || exit 3\nmsrun p.py --made $(cat $T/b/c)": "--made a",
    "timeout -s kill 10 msrun p.py --kill": "--kill",
    "no-such-starter -n ms msrun p.py --starter": "--starter",
    "no-such-starter bash -c 'exit 1' || msrun p.py --or": "--or",
    "su - me -c 'cd . && msrun p.py --su > train.log'": "--su",
    "find . -name other.sh -delete\ngit init -q repo\nmsrun p.py --find": "--find",
    "while true; do msrun p.py --loop && break; done": "--loop",
}  # fmt: skip


@pytest.mark.parametrize("text", SURROUNDINGS)
def test_what_surrounds_a_call_changes_neither_it_nor_a_file(home: Path, text: str) -> None:
    write(home, "#!/bin/sh\ntouch REAL\n", "venv/bin/msrun").chmod(0o755)
    write(home, 'rm -rf venv\necho a > a.txt\nmsrun p.py "$@" > train.log\n', "other.sh")
    write(home, '#!/bin/sh\necho a > a.txt\nmsrun p.py "$@" > train.log\n', "dash.sh").chmod(0o755)
    path = write(home, text + "\n")
    before = tree(home)
    assert " ".join(capture(path).program_args) == SURROUNDINGS[text]
    assert tree(home) == before


def test_a_file_of_an_earlier_run_counts_and_is_mentioned(home: Path) -> None:
    write(home, "10.0.0.1\n10.0.0.2\n", "hosts")
    call = capture(write(home, 'echo 10.0.0.9 > "hosts"\nN=$(wc -l < hosts)\nmsrun --worker_num $((N*4)) p.py > hosts.log\n'))
    assert call.world_size == 8
    assert call.notes == ("the script writes hosts and reads it again: what was in it before is what counts here",)


@pytest.mark.parametrize(
    "text",
    [
        "echo X=1 > env.tmp\nsource env.tmp",
        "sed s/A/1/ train.sh > new.sh\nbash new.sh",
        'F=$PWD/hosts\ncat > $F <<E\na\nE\nN=$(wc -l < "$F")',
    ],
)
def test_a_call_that_depends_on_a_file_that_was_not_written_is_refused(home: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"writes \S*(env\.tmp|new\.sh|hosts) and reads it before it calls msrun"):
        capture(write(home, text + "\nmsrun p.py --x $X $N\n"))
    assert [item.name for item in home.iterdir()] == ["train.sh"]


def test_a_log_that_is_shown_after_the_call_is_no_reason_to_refuse(home: Path) -> None:
    text = "date > train.log\nmsrun p.py --a 1 >> train.log\ngrep loss train.log\ncat train.log\n"
    assert capture(write(home, text)).notes == ()


@pytest.mark.parametrize("text", ABSENT)
def test_what_only_the_machine_of_the_training_has_is_stood_in_for(home: Path, text: str) -> None:
    call = capture(write(home, f"set -e\n{text}\n"))
    assert " ".join(call.program_args) == ABSENT[text]
    assert call.notes[-1].startswith("not on this machine, and taken to be on that of the training: ")
    assert not any("dryrun" in value.lower() for value in call.env.values())


def test_the_working_directory_may_be_elsewhere(home: Path) -> None:
    call = capture(write(home, "cd /data/no/such/MindSpeed-LLM\nexport ROOT=$PWD\nmsrun p.py\n"))
    assert call.cwd == call.env["ROOT"] == "/data/no/such/MindSpeed-LLM"


def test_a_file_of_the_users_own_that_is_missing_stays_an_error(home: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.sh: No such file"):
        capture(write(home, "set -e\nsource ./config.sh\nmsrun p.py\n"))
    with pytest.raises(UsageError, match="exit status 3"):
        capture(write(home, "no-such-tool || exit 3\nmsrun p.py\n"))


def test_arguments_functions_and_nested_scripts(home: Path) -> None:
    write(home, "launch() { msrun --worker_num 4 p.py --node ${1:-none} --of ${2:-none}; }\n", "lib/launch.sh")
    path = write(home, 'source "$(dirname "$0")/../lib/launch.sh"\nlaunch "$1" "$2"\n', "jobs/train.sh")
    assert capture(path, script_args=["3", "8"]).program_args == ("--node", "3", "--of", "8")
    outer = write(home, f"bash {path} 1 2\n", "outer.sh")
    assert capture(outer).program_args == ("--node", "1", "--of", "2")


def test_set_changes_a_copy_that_behaves_like_the_script(home: Path) -> None:
    write(home, "LIB=from_lib\n", "jobs/lib.sh")
    text = """set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/lib.sh"
if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then MAIN=yes; else MAIN=no; fi
export TP=8 PP=1   # TP=9 in a comment
NAME="a
TP=7"
msrun --worker_num $((TP*PP)) p.py --zero "$0" --here "$HERE" --first $1 --lib $LIB --main $MAIN --name "$NAME"
"""
    path = write(home, text, "jobs/train.sh")
    plain = capture(path, {}, ["one"])
    changed = capture(path, {"TP": "2", "PP": "3"}, ["one"])
    assert changed.world_size == 6 and plain.world_size == 8
    assert changed.program_args == plain.program_args
    assert changed.cwd == plain.cwd == str(home)
    assert path.read_text() == text


def test_set_of_a_variable_that_is_not_there_lists_those_that_are(home: Path) -> None:
    path = write(home, "TP=2\nexport PP=4\nmsrun p.py\n")
    with pytest.raises(UsageError, match=r"no assignment VPP=… to set .*It assigns: TP, PP"):
        capture(path, {"VPP": "2"})


def test_a_close_name_is_proposed(home: Path) -> None:
    with pytest.raises(UsageError, match=r"SEQ_LENGHT=… to set \(did you mean SEQ_LENGTH\?\)"):
        capture(write(home, "SEQ_LENGTH=2\nmsrun p.py\n"), {"SEQ_LENGHT": "4"})


def test_set_reaches_variables_of_sourced_files(home: Path) -> None:
    write(home, "export TP=8\nPP=2\nWORLD=$((TP*PP))\n", "config/model.sh")
    path = write(home, 'source "$(dirname "$0")/config/model.sh"\nmsrun --worker_num $WORLD p.py --tp $TP --pp $PP\n')
    call = capture(path, {"TP": "4", "PP": "1"})
    assert (call.world_size, call.program_args, call.env["TP"]) == (4, ("--tp", "4", "--pp", "1"), "4")
    with pytest.raises(UsageError, match="no assignment VPP=… to set"):
        capture(path, {"VPP": "1"})


def test_set_reaches_defaults_from_the_environment(home: Path) -> None:
    path = write(home, ': "${TP:=8}"\nPP=${PP:-2}\nmsrun --worker_num $((TP*PP)) p.py\n')
    assert capture(path, {"TP": "2", "PP": "1"}).world_size == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo nothing to do\n", "calls neither msrun nor torchrun"),
        ("msrun --worker_num 2 a.py\nmsrun --worker_num 2 b.py\n", "calls msrun more than once"),
        (
            "echo 'no such model' >&2; exit 7\nmsrun a.py\n",
            r"failed before it called msrun or torchrun \(exit status 7\).*no such model",
        ),
        ("set -e\nfalse\nmsrun a.py\n", "failed before it called msrun"),
        ("set -u\nmsrun a.py $UNSET_THING\n", "UNSET_THING"),
        ("deepspeed pretrain_gpt.py\n", "deepspeed, not with msrun or torchrun"),
        ("msrun --worker_num --node_rank 0 a.py\n", "has no value"),
        ("msrun --gpus 8 a.py\n", "no option --gpus"),
        ("ssh node1 'cd /job && msrun a.py'\n", "on other machines with ssh.*the script that runs on one node"),
        ("TP=2\r\nmsrun a.py\r\n", "Windows line ends.*sed -i"),
        ("printf 'X=1\\r\\n' > /dev/null; . <(printf 'X=1\\r\\n')\nmsrun a.py --x $X\n", r"Windows line ends in its words \(1\)"),
        ("\ufeffTP=2\nmsrun a.py --tp $TP\n", "byte order mark.*sed -i"),
        ("#!/bin/zsh\nmsrun a.py\n", "written for zsh"),
        ("#!/usr/bin/env -S python3 -u\nimport os\n", "written for python3"),
        ("\x7fELF\0\1", "not a text file"),
        ("python pretrain_gpt.py --a\n", r"It runs python pretrain_gpt\.py: if that is the training"),
        ("set -e\nno-such-starter --x\n", "Not on this machine: no-such-starter"),
        ("msrun --worker_num 2 \\ \n    a.py --x\n", r"runs a\.py as a command of its own"),
        ("msrun a.py --x 1 \\\n  # --y 2 \\\n  --z 3\n", "runs --z as a command of its own"),
        ("while true; do msrun a.py; sleep 1; done\n", "calls msrun more than once"),
        ("set -x\necho problem >&2; exit 4\nmsrun a.py\n", "Its last output was: (?!.*dryrun)"),
    ],
)
def test_each_way_to_fail_has_its_sentence(home: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        capture(write(home, text))


def test_a_script_that_starts_others_names_them(home: Path) -> None:
    write(home, "torchrun $ARGS pretrain_gpt.py\n", "train/edge.sh")
    write(home, "echo helper\n", "train/helper.sh")
    path = write(home, '[ -d /data/model ] || exit 0\nfor s in "./train/edge.sh" train/helper.sh; do bash $s & done\n')
    with pytest.raises(UsageError, match=r"Give one of these: \./train/edge\.sh\.$"):
        capture(path)


def test_no_script(home: Path) -> None:
    with pytest.raises(UsageError, match="There is no script"):
        capture(home / "missing.sh")


def test_a_script_that_never_ends(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_call, "TIME_LIMIT_S", 1.0)
    with pytest.raises(UsageError, match="reached neither msrun nor torchrun within 1 s"):
        capture(write(home, "while true; do sleep 1; done\nmsrun a.py\n"))
    assert capture(write(home, "msrun --worker_num 2 a.py\nwhile true; do sleep 1; done\n")).world_size == 2


def test_bash_features_survive_the_watching(home: Path) -> None:
    text = """set -euo pipefail
[[ host-17 =~ ([0-9]+) ]]
NODE=${BASH_REMATCH[1]}
false || STATUS=$?
if (( NODE > 3 )); then BIG=yes; fi
case $NODE in 1*) KIND=teen;; esac
declare -A MAP=([a]=1)
true | false | true && PIPE=ok || PIPE=failed
for i in 1 2; do LAST=$i; done
msrun --worker_num 2 p.py --n $NODE --s $STATUS --b $BIG --k $KIND --m ${MAP[a]} --p $PIPE --l $LAST
"""
    args = capture(write(home, text)).program_args
    assert args == ("--n", "17", "--s", "1", "--b", "yes", "--k", "teen", "--m", "1", "--p", "failed", "--l", "2")


def test_assignments_are_found_where_bash_sees_them() -> None:
    text = """A=1; B="x y" C='z;w'
export D=$(( (1+2) * 3 )) E
if true; then F=(1 2 3); fi
# G=1
echo H=1 "I=1"
cat <<EOF
J=1
EOF
f() { local K=`date`; }
L=$(M=1; echo "$M") N=${X:-"a b"}
case x in y) O=1 ;; esac
"""
    assert [item.name for item in assignments(text)] == ["A", "B", "C", "D", "F", "K", "L", "N", "O"]
    values = {item.name: text[item.start : item.end] for item in assignments(text)}
    assert values["B"] == '"x y"' and values["D"] == "$(( (1+2) * 3 ))" and values["F"] == "(1 2 3)"
    assert values["L"] == '$(M=1; echo "$M")' and values["N"] == '${X:-"a b"}'


def test_set_quotes_its_value() -> None:
    assert set_variables("A=1\n", {"A": "two words; rm -rf /"}) == "A='two words; rm -rf /'\n"


@pytest.mark.parametrize(
    "start",
    [
        "torchrun",
        "python -m torch.distributed.run",
        "python3 -u -m torch.distributed.launch",
        "nohup /opt/venv/bin/torchrun",
        "python /opt/x/torch/distributed/run.py",
    ],
)
def test_every_way_to_start_torchrun_is_captured(home: Path, start: str) -> None:
    script = home / "train.sh"
    script.write_text(
        f"export TASK_QUEUE_ENABLE=2\nN=4\n{start} --nproc_per_node $N --nnodes 2 pretrain_gpt.py --seq-length 8 > log 2>&1 &\nwait $!\n"
    )
    call = capture(script)
    assert (call.launcher, call.world_size, call.local_world_size) == ("torchrun", 8, 4)
    assert (call.program, call.program_args) == ("pretrain_gpt.py", ("--seq-length", "8"))
    assert call.env["TASK_QUEUE_ENABLE"] == "2" and not (home / "log").exists()


def test_two_stale_shims_on_path_hand_over_to_the_real_launcher(tmp_path: Path) -> None:
    """Two installations, each of which was activated once: neither may call the other for ever."""
    folders = []
    for name in ("one", "two"):
        shutil.copytree(script_module.SHIM, tmp_path / name / "launch" / "shim")
        folders.append(str(tmp_path / name / "launch" / "shim"))
    real = write(tmp_path, '#!/bin/sh\necho real "$@"\n', "venv/bin/msrun")
    real.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "MINDSPEED_DRYRUN"}
    env["PATH"] = os.pathsep.join([*folders, str(real.parent), env["PATH"]])
    done = subprocess.run(["msrun", "p.py"], env=env, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout == "real p.py\n"
