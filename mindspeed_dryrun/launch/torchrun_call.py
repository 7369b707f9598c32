"""What `torchrun` received, read as torch/distributed/run.py of 2.13 reads it; older releases have fewer options.

`python -m torch.distributed.run` and `python -m torch.distributed.launch` take the same words (the latter `--use-env` too).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.captured_call import TORCHRUN, CapturedCall, drop_comments, is_flag

SWITCHES = ("standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env")
OPTIONS = (
    "nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "local_addr", "rdzv_backend", "rdzv_endpoint",
    "rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "start_method", "event_log_handler", "role", "log_dir",
    "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs",
    "numa_binding", "signals_to_handle", "shutdown_timeout",
)  # fmt: skip
_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
# They shape the job; a dry run opens no connection and places no process, so the others may be empty.
_NEEDED = ("nnodes", "nproc_per_node")
_CARDS_OF_A_NODE = 8  # `--nproc_per_node auto` counts the machine's devices, and the machine of a dry run has none
_COUNTED = ("auto", "gpu", "npu")


def read_torchrun_call(argv: Sequence[str], cwd: str, env: Mapping[str, str] | None = None) -> CapturedCall:
    """The call as a dataclass, or a `UsageError` that says what is wrong with it."""
    env = dict(env or {})
    words, dropped = drop_comments(argv)
    notes: list[str] = []
    options, switches, rest = _own_options(words, notes, dropped)
    for name in _NEEDED:
        if name not in options and env.get(f"PET_{name.upper()}"):  # torchrun's own defaults from the environment
            options[name] = env[f"PET_{name.upper()}"]
    if not rest or not rest[0].strip():
        raise UsageError("This torchrun call names no program to run.")
    program, args = _program(rest, switches)
    nodes, local = _nodes(options.get("nnodes", "1"), notes), _local(options.get("nproc_per_node", "1"), notes)
    return CapturedCall(
        launcher=TORCHRUN,
        argv=tuple(argv),
        cwd=cwd,
        options=options,
        world_size=nodes * local,
        local_world_size=local,
        program=program,
        program_args=args,
        dropped=tuple(dropped),
        notes=tuple(notes),
        env=env,
    )


def _own_options(words: Sequence[str], notes: list[str], dropped: list[str]) -> tuple[dict[str, str], set[str], Sequence[str]]:
    """torchrun's options, its switches, and the words from the program on."""
    options: dict[str, str] = {}
    switches: set[str] = set()
    position = 0
    while position < len(words) and words[position].startswith("-"):
        flag, equals, value = words[position].partition("=")
        position += 1
        name = _option(flag)
        if name in SWITCHES:
            switches.add(name)
            continue
        if not equals:
            following = words[position] if position < len(words) else "-"
            if is_flag(following) or (following.endswith(".py") and name not in ("log_dir", "role")):
                if name in _NEEDED:
                    raise UsageError(f"The torchrun option --{name} has no value: the variable that should provide it is empty.")
                notes.append(f"--{name} has no value (an empty variable in the script?); a dry run does not need it")
                continue
            value = following
            position += 1
        options[name] = value
        if name not in _NEEDED and (strays := _strays(words[position:])):
            dropped.append(f"'{' '.join(strays)}' among torchrun's options (a placeholder that was never filled in?)")
            position += len(strays)
    return options, switches, words[position:]


def _strays(words: Sequence[str]) -> Sequence[str]:
    """Words of a value that the shell has split, up to the program or an option: `your master node IP --nnodes 2 train.py`."""
    end = next((index for index, word in enumerate(words) if is_flag(word) or word.endswith(".py")), 0)
    ends_well = words and (words[end].endswith(".py") or _name(words[end].partition("=")[0]) in (*OPTIONS, *SWITCHES))
    return words[:end] if ends_well else ()


def _program(rest: Sequence[str], switches: set[str]) -> tuple[str, tuple[str, ...]]:
    """The program and its arguments; with `--no-python` a leading interpreter is the program's."""
    words = list(rest)
    if "no_python" in switches and words[0].split("/")[-1] in ("python", "python3"):
        words.pop(0)
        while words and words[0].startswith("-"):
            words.pop(0)
    if not words:
        raise UsageError("This torchrun call runs an interpreter without a program.")
    return words[0], tuple(words[1:])


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _option(flag: str) -> str:
    name = _name(flag)
    known = (*OPTIONS, *SWITCHES)
    if not flag.startswith("--"):
        name = _SHORT.get(name, name)
    if name in known:
        return name
    longer = [option for option in known if option.startswith(name)]  # argparse takes abbreviations
    if flag.startswith("--") and len(longer) == 1 and name:
        return longer[0]
    if flag.startswith("--") and len(longer) > 1 and name:
        raise UsageError(f"The torchrun option {flag} could be {' or '.join('--' + option for option in longer)}.")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean --{near[0]}?)" if near else ""
    raise UsageError(f"torchrun has no option {flag}{hint}. Trainer arguments belong after the program.")


def _nodes(text: str, notes: list[str]) -> int:
    """`4`, or `2:4` of an elastic job, which is counted at its largest."""
    first, colon, last = text.partition(":")
    numbers = [part for part in (first, last) if part]
    if not numbers or not all(part.isdigit() and int(part) > 0 for part in numbers):
        raise UsageError(f"The torchrun option --nnodes expects a number of nodes and got '{text}'.")
    if colon:
        notes.append(f"--nnodes {text} is elastic: {numbers[-1]} nodes are counted")
    return int(numbers[-1])


def _local(text: str, notes: list[str]) -> int:
    if text in _COUNTED:
        notes.append(f"--nproc_per_node {text} depends on the machine: {_CARDS_OF_A_NODE} cards a node are assumed")
        return _CARDS_OF_A_NODE
    if not text.isdigit() or not int(text):
        raise UsageError(f"The torchrun option --nproc_per_node expects a number of ranks and got '{text}'.")
    return int(text)
