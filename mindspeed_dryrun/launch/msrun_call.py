"""What `msrun` received, read as msrun 2.7.1 reads it, and kinder where a copied tutorial went wrong.

It starts nothing and reads no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.captured_call import MSRUN, CapturedCall, drop_comments, is_flag

# msrun's own options up to 2.10.0, all with one value. `rank` is not one of them: there it abbreviates `rank_table_file`, which
# would take the job out of the simulated memory path. People who write it mean the rank of this node.
OPTIONS = (
    "worker_num",
    "local_worker_num",
    "master_addr",
    "master_port",
    "node_rank",
    "log_dir",
    "join",
    "cluster_time_out",
    "bind_core",
    "bind_numa",  # from 2.9.0 on
    "sim_level",
    "sim_rank_id",
    "rank_table_file",
    "worker_log_name",
    "tail_worker_log",
)
DEFAULT_WORKER_NUM = 8

# A dry run opens no connection and places no process: the others may be empty or hold a placeholder.
_NEEDED = ("worker_num", "local_worker_num", "sim_level", "sim_rank_id")
_INTERPRETERS = {"python", "python3"}


def read_msrun_call(argv: Sequence[str], cwd: str, env: Mapping[str, str] | None = None) -> CapturedCall:
    """The call as a dataclass, or a `UsageError` that says what is wrong with it."""
    words, dropped = drop_comments(argv)
    options: dict[str, str] = {}
    notes: list[str] = []
    strays: list[str] = []
    position = 0
    program_at = _program_index(words)
    while position < program_at:
        word = words[position]
        position += 1
        if not word.startswith("-"):
            strays.append(word)
            continue
        name, equals, value = word.partition("=")
        option = _option(name)
        if name == "--rank":
            notes.append("--rank is read as the rank of this node (msrun itself would take it for --rank_table_file)")
        if not equals:
            if position < program_at and not is_flag(words[position]):
                value = words[position]
                position += 1
            elif option not in _NEEDED:
                notes.append(f"--{option} has no value (an empty variable in the script?); a dry run does not need it")
                continue
            else:
                raise UsageError(f"The msrun option --{option} has no value: the variable that should provide it is empty.")
        options[option] = value
    _check_numbers(options, notes)
    if program_at == len(words) or not words[program_at].strip():
        raise UsageError("This msrun call names no program to run.")
    program, rest = words[program_at], words[program_at + 1 :]
    if program in _INTERPRETERS:
        while rest and rest[0].startswith("-"):
            rest = rest[1:]
        if not rest or not rest[0].strip():
            raise UsageError(f"This msrun call runs {program} without a program.")
        program, rest = rest[0], rest[1:]
    if strays:
        dropped.append(f"'{' '.join(strays)}' among msrun's options (a placeholder that was never filled in?)")
    world_size = int(options.get("worker_num", DEFAULT_WORKER_NUM))
    return CapturedCall(
        launcher=MSRUN,
        argv=tuple(argv),
        cwd=cwd,
        options=options,
        world_size=world_size,
        local_world_size=min(int(options.get("local_worker_num", DEFAULT_WORKER_NUM)), world_size),
        program=program,
        program_args=tuple(rest),
        dropped=tuple(dropped),
        notes=tuple(notes),
        env=dict(env or {}),
    )


def _program_index(words: Sequence[str]) -> int:
    """Where msrun's own options end: at the first Python file, else at the first word that no option can own."""
    for index, word in enumerate(words):
        if not word.startswith("-") and (word.endswith(".py") or word in _INTERPRETERS):
            return index
    index = 0
    while index < len(words):
        word = words[index]
        if not is_flag(word):
            return index
        index += 1 if "=" in word or index + 1 >= len(words) or is_flag(words[index + 1]) else 2
    return len(words)


def _option(flag: str) -> str:
    name = flag.lstrip("-")
    if flag.startswith("--"):
        if name == "rank":
            return "node_rank"
        if name in OPTIONS:
            return name
        longer = [option for option in OPTIONS if option.startswith(name)]  # argparse takes abbreviations
        if len(longer) == 1 and name:
            return longer[0]
        if len(longer) > 1 and name:
            raise UsageError(f"The msrun option {flag} could be {' or '.join('--' + option for option in longer)}.")
    near = difflib.get_close_matches(name.replace("-", "_"), OPTIONS, n=1)
    hint = f" (did you mean --{near[0]}?)" if near else ""
    raise UsageError(f"msrun has no option {flag}{hint}. Trainer arguments belong after the program.")


def _check_numbers(options: dict[str, str], notes: list[str]) -> None:
    for name in _NEEDED:
        if name not in options:
            continue
        try:
            number = int(options[name])
        except ValueError:
            raise UsageError(f"The msrun option --{name} expects a whole number and got '{options[name]}'.") from None
        if name in ("worker_num", "local_worker_num") and number < 1:
            raise UsageError(f"The msrun option --{name} is {number}: at least one worker is needed.")
    for name in ("node_rank", "master_port"):
        if name in options and not options[name].lstrip("-").isdigit():
            notes.append(f"--{name} is '{options.pop(name)}', not a number; a dry run does not need it")
