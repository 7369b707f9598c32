"""A user's script with other trainer arguments: a shell function in front of its launcher exchanges them.

Nothing else of the script is rewritten, so whatever builds its command line stays as it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mindspeed_dryrun.launch.script_text import assign_variables, has_default

# A flag that is replaced goes with all words up to the next flag, as `megatron.arguments` reads them.
_BLOCK = """
# --- added by mindspeed-dryrun {verb}: the script below is unchanged{but}, its {launcher} call gets other arguments ---
{comment}
{exports}{launcher}() {{
    local replaced=" {replaced} " kept=() skip="" seen="" word
    for word in "$@"; do
        if [ -z "$seen" ]; then
            if [ -n "$skip" ]; then skip=""; continue; fi
            case "$word" in
{workers}            *.py) seen=1{placed};;
            esac
        elif [[ "$word" == --* ]]; then
            skip=""
            if [[ "$replaced" == *" ${{word%%=*}} "* ]]; then skip=1; fi
        fi
        if [ -z "$skip" ]; then kept+=("$word"); fi
    done
    command {launcher} "${{kept[@]}}" {arguments}
}}
# --- end of what was added ---
"""
_WORKERS = """            --worker_num|--local_worker_num) skip=1; continue;;
            --worker_num=*|--local_worker_num=*) continue;;
"""


def with_arguments(
    text: str,
    *,
    verb: str,
    comment: Sequence[str],
    replaced: Iterable[str],
    arguments: Sequence[str],
    sets: Mapping[str, str] | None = None,
    workers: Sequence[str] = (),
    launcher: str = "msrun",
    script: Path | str = "The script",
) -> str:
    """The script with variables set, the flags `replaced` taken out of its launcher call, and `arguments` put in.

    `workers` are msrun's own options in place of the script's.
    """
    exported = {name: value for name, value in (sets or {}).items() if has_default(text, name)}
    block = _BLOCK.format(
        verb=verb,
        launcher=launcher,
        but=f" but for {', '.join(sets)}" if sets else "",
        comment="\n".join(f"# {line}" for line in comment),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exported.items()),
        replaced=" ".join(dict.fromkeys(replaced)),
        workers=_WORKERS if workers else "",
        placed=f"; kept+=({shlex.join(workers)})" if workers else "",
        arguments=shlex.join(arguments),
    )
    text = assign_variables(text, sets or {}, script)
    first, newline, rest = text.partition("\n")
    return first + newline + block + rest if first.startswith("#!") else block + text
