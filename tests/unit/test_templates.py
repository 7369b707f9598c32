"""The cluster templates submit what they say. Slurm, ssh, Ray and the product are stand-ins that write down their calls.

Gold files: what was called, sorted. `DRYRUN_GOLD=1 pytest tests/unit/test_templates.py` writes them anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
GOLD = ROOT / "tests" / "gold" / "templates"

# Writes its call down, one line, then does what each stand-in must do.
FAKE = """#!/bin/bash
line=$(printf '%s' "${0##*/}"; printf ' %q' "$@")
printf '%s\\n' "$line" >> "$CALLS"   # in one piece: several write at once
case "${0##*/} $*" in
    sbatch*--array*) echo "101;cluster" ;;
    sbatch*) echo 102 ;;
    scontrol*) printf 'node1\\nnode2\\nnode3\\n' ;;
    srun*hostname*|hostname*) echo "10.0.0.1 fe80::1" ;;
    *"ray start"*--block*) exec sleep 600 ;;
    mindspeed-dryrun*--plan-only*) cat "$PLAN" ;;
    mindspeed-dryrun*)  # a real one takes longer than starting the cluster in the background does
        for _ in $(seq 200); do [ "$(grep -cE 'ray[\\\\ ]+start' "$CALLS")" -ge "${RAY_STARTS:-0}" ] && break; sleep 0.1; done
        exit "${STATUS:-0}" ;;
esac
"""


class Cluster:
    """A PATH on which every program of a cluster is a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.calls.touch()
        programs = folder / "bin"
        programs.mkdir()
        for name in ("sbatch", "srun", "scontrol", "ssh", "ray", "hostname", "mindspeed-dryrun"):
            (programs / name).write_text(FAKE)
            (programs / name).chmod(0o755)
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"ranks": [{"rank": rank} for rank in (0, 8, 16, 24, 31)]}))
        self.env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "PLAN": str(plan),
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_JOB_ID": "4711",
            "SLURM_CPUS_PER_TASK": "16",
        }

    def run(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env={**self.env, **env}, capture_output=True, text=True, timeout=60)

    def called(self) -> str:
        lines = self.calls.read_text().replace(str(ROOT), "REPO").splitlines()
        return "".join(line + "\n" for line in sorted(lines))

    def left(self) -> list[str]:
        marked = f"CALLS={self.calls}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
        return found

    def ends(self) -> bool:
        deadline = time.monotonic() + 10
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.left()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def check_gold(name: str, text: str) -> None:
    file = GOLD / name
    if os.environ.get("DRYRUN_GOLD"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{file} differs"


OPTIONS = ("--budget", "58G", "--", "--train-iters", "3")


def test_slurm_array(cluster: Cluster) -> None:
    done = cluster.run(LAUNCH / "slurm" / "array.sh", "my script.sh", "/shared/out", *OPTIONS, SBATCH_OPTIONS="-p cpu -A me")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "array 101, report 102 (dryrun-102.out)\n"
    check_gold("slurm_array.txt", cluster.called())


def test_what_the_slurm_array_submits_can_be_run(cluster: Cluster) -> None:
    """The text after --wrap is a shell script: run it as Slurm would, and see which ranks it asks for."""
    cluster.run(LAUNCH / "slurm" / "array.sh", "my script.sh", "/shared/out", *OPTIONS, SHARES="2")
    wrapped = [line for line in cluster.calls.read_text().splitlines() if line.startswith("sbatch")]
    assert len(wrapped) == 2
    cluster.calls.write_text("")
    for line in wrapped:
        words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True).stdout.split("\0")
        for share in ("0", "1") if "--array=0-1" in words else ("",):
            done = cluster.run("sh", "-c", words[words.index("--wrap") + 1], SLURM_ARRAY_TASK_ID=share)
            assert done.returncode == 0, done.stderr
    check_gold("slurm_array_tasks.txt", cluster.called())


def test_a_share_without_ranks_does_nothing(cluster: Cluster) -> None:
    done = cluster.run(LAUNCH / "share.sh", "7", "8", "s.sh", "out")
    assert done.returncode == 0 and "no rank" in done.stdout
    assert "--ranks" not in cluster.called()


def test_a_share_hands_the_exit_status_on(cluster: Cluster) -> None:
    assert cluster.run(LAUNCH / "share.sh", "0", "2", "s.sh", "out", STATUS="3").returncode == 3


@pytest.mark.parametrize("status", ["0", "3"])
def test_slurm_with_ray(cluster: Cluster, status: str) -> None:
    done = cluster.run(LAUNCH / "slurm" / "ray.sbatch", "my script.sh", "/shared/out", *OPTIONS, STATUS=status, RAY_STARTS="2")
    assert done.returncode == int(status), done.stderr
    assert cluster.ends(), cluster.left()
    check_gold("slurm_ray.txt", cluster.called())


@pytest.mark.parametrize("status", ["0", "1"])
def test_hostfile_over_ssh(cluster: Cluster, tmp_path: Path, status: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nnode1 slots=8\n\nnode2   # spare\nnode1 slots=8\n")
    setup = {"REMOTE_SETUP": "source ~/venv/bin/activate", "SSH_OPTIONS": "-p 2222", "STATUS": status, "RAY_STARTS": "3"}
    done = cluster.run(LAUNCH / "ssh" / "hostfile.sh", hosts, "my script.sh", "out", *OPTIONS, **setup)
    assert done.returncode == int(status), done.stderr
    assert cluster.ends(), cluster.left()
    check_gold("ssh_hostfile.txt", cluster.called())


def test_ending_the_ssh_launch_ends_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1\n")
    (tmp_path / "bin" / "mindspeed-dryrun").write_text("#!/bin/bash\nexec sleep 600\n")
    running = subprocess.Popen(
        [LAUNCH / "ssh" / "hostfile.sh", tmp_path / "hosts", "s.sh", "out"], env=cluster.env, start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not any("sleep" in line for line in cluster.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(running.pid, signal.SIGTERM)  # what a terminal or a batch system does
    assert running.wait(20) == 143
    assert cluster.ends(), cluster.left()


@pytest.mark.parametrize("template", ["slurm/array.sh", "ssh/hostfile.sh"])
def test_wrong_use_shows_the_usage(cluster: Cluster, template: str) -> None:
    done = cluster.run(LAUNCH / template)
    assert done.returncode == 2 and "SCRIPT OUT" in done.stderr
    assert cluster.called() == ""


def pods(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = document["spec"]
    templates = {task["name"]: task["template"] for task in spec["tasks"]} if "tasks" in spec else {"share": spec["template"]}
    return {name: template["spec"] for name, template in templates.items()}


@pytest.mark.parametrize("name", ["indexed-job", "volcano-ray"])
def test_kubernetes(cluster: Cluster, tmp_path: Path, name: str) -> None:
    document = yaml.safe_load((LAUNCH / "kubernetes" / f"{name}.yaml").read_text())
    for task, pod in pods(document).items():
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
        assert container["resources"]["limits"] == container["resources"]["requests"], "a rank must not be evicted"
        env = {item["name"]: item["value"] for item in container.get("env", ())}
        env |= {"JOB_COMPLETION_INDEX": "1", "VC_HEAD_HOSTS": "dryrun-head-0.dryrun"}
        command = [
            word.replace("/job/share.sh", str(LAUNCH / "share.sh")) for word in (*container["command"], *container["args"])
        ]
        if task == "worker":
            command[-1] = command[-1].replace("exec ray", "timeout 1 ray")  # it blocks, as it should
            cluster.run(*command, **env)
            continue
        for status, expected in (("0", 0), ("3", 0), ("1", 0), ("137", 1)):
            assert cluster.run(*command, **env, STATUS=status).returncode == expected
    check_gold(f"kubernetes_{name}.txt", "".join(sorted(set(cluster.called().splitlines(keepends=True)))))


def test_the_indexed_job_counts_its_shares_right() -> None:
    spec = yaml.safe_load((LAUNCH / "kubernetes" / "indexed-job.yaml").read_text())["spec"]
    env = spec["template"]["spec"]["containers"][0]["env"]
    assert spec["completions"] == int(env[0]["value"])
