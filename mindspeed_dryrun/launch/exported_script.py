"""A user's script with other trainer arguments: a shell function in front of msrun exchanges them.

Nothing of the script is rewritten, so whatever builds its command line stays as it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_dryrun.launch.script import assignments
from mindspeed_dryrun.megatron.flags import FLAGS

_BLOCK = """
# --- added by mindspeed-dryrun {verb}: the script below is unchanged, its msrun call gets other arguments ---
{comment}
msrun() {{
    local flags=" {valued} " switches=" {switches} " kept=() skip="" seen="" word
    for word in "$@"; do
        if [ -n "$skip" ]; then skip=""; continue; fi
{workers}        if [[ "$word" == --* && "$flags" == *" ${{word%%=*}} "* ]]; then
            [[ "$word" == *=* ]] || skip=1
            continue
        fi
        if [[ "$switches" == *" $word "* && "$word" == --* ]]; then continue; fi
        kept+=("$word")
    done
    command msrun "${{kept[@]}}" {arguments}
}}
# --- end of what was added ---
"""
_WORKERS = """        case "$word" in
        --worker_num|--local_worker_num) skip=1; continue;;
        --worker_num=*|--local_worker_num=*) continue;;
        *.py) if [ -z "$seen" ]; then seen=1; kept+=({workers}); fi;;
        esac
"""


def with_arguments(
    text: str, verb: str, comment: Sequence[str], gone: Iterable[str], arguments: Sequence[str], workers: Sequence[str] = ()
) -> str:
    """The script with the flags `gone` taken out of its msrun call and `arguments` put in; `workers` are msrun's own."""
    gone = list(gone)
    block = _BLOCK.format(
        verb=verb,
        comment="\n".join(f"# {line}" for line in comment),
        valued=" ".join(name for name in gone if FLAGS[name].takes),
        switches=" ".join(name for name in gone if not FLAGS[name].takes),
        workers=_WORKERS.format(workers=" ".join(workers)) if workers else "",
        arguments=shlex.join(arguments),
    )
    first, newline, rest = text.partition("\n")
    return first + newline + block + rest if first.startswith("#!") else block + text


def with_variables(text: str, sets: Mapping[str, str]) -> str:
    """The script with every assignment of the named variables replaced."""
    for item in sorted(assignments(text), key=lambda item: item.start, reverse=True):
        if item.name in sets:
            text = text[: item.start] + shlex.quote(sets[item.name]) + text[item.end :]
    return text
