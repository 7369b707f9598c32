"""The user's script with a strategy set: the very job that was searched, for the user to take along."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dryrun.estimate.strategy import Strategy, decided_flags
from mindspeed_dryrun.launch.script_text import assign_variables, has_default
from mindspeed_dryrun.megatron.arguments import pairs, without

# A flag that is replaced goes with all words up to the next flag, as `megatron.arguments` reads them.
_BLOCK = """
# --- added by mindspeed-dryrun search: the script below is unchanged{but}, its msrun call gets this strategy ---
# {name}
# Convert the weights to the same layout:
#   {conversion}
{exports}msrun() {{
    local replaced=" {replaced} " kept=() skip="" seen="" word
    for word in "$@"; do
        if [ -z "$seen" ]; then
            if [ -n "$skip" ]; then skip=""; continue; fi
            case "$word" in
            --worker_num|--local_worker_num) skip=1; continue;;
            --worker_num=*|--local_worker_num=*) continue;;
            *.py) seen=1; kept+=({workers});;
            esac
        elif [[ "$word" == --* ]]; then
            skip=""
            if [[ "$replaced" == *" ${{word%%=*}} "* ]]; then skip=1; fi
        fi
        if [ -z "$skip" ]; then kept+=("$word"); fi
    done
    command msrun "${{kept[@]}}" {arguments}
}}
# --- end of what was added ---
"""


def script_with(
    text: str,
    strategy: Strategy,
    cards_per_node: int,
    sets: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    script: Path | str = "The script",
) -> str:
    """The script with variables set, and with a shell function in front of msrun that exchanges the flags that the
    strategy and `args` decide. Nothing else is rewritten, so whatever builds its command line stays as it is."""
    decided = decided_flags(strategy)
    more = without(args, decided)
    replaced = dict.fromkeys((*decided, *(name for name, _ in pairs(more))))
    exported = {name: value for name, value in (sets or {}).items() if has_default(text, name)}
    block = _BLOCK.format(
        but=f" but for {', '.join(sets)}" if sets else "",
        name=strategy.name,
        conversion=" ".join(strategy.conversion_arguments()),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exported.items()),
        replaced=" ".join(replaced),
        workers=f"--worker_num {strategy.world} --local_worker_num {min(cards_per_node, strategy.world)}",
        arguments=shlex.join([*more, *strategy.arguments()]),
    )
    text = assign_variables(text, sets or {}, script)
    first, newline, rest = text.partition("\n")
    if first.startswith("#!"):
        return first + newline + block + rest
    return block + text


def write_script(
    target: Path, script: Path, strategy: Strategy, cards_per_node: int, sets: Mapping[str, str], args: Sequence[str]
) -> None:
    """Bytes that are not UTF-8 (comments in GBK) stay what they are."""
    text = script.read_bytes().decode("utf-8", "surrogateescape")
    written = script_with(text, strategy, cards_per_node, sets, args, script)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    temporary.write_bytes(written.encode("utf-8", "surrogateescape"))
    temporary.chmod(0o755)
    temporary.replace(target)
