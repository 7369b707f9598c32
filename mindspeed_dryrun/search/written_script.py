"""The user's script with a strategy set: the very job that was searched, for the user to take along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dryrun.estimate.strategy import Strategy, decided_flags
from mindspeed_dryrun.files import write_text
from mindspeed_dryrun.launch.exported_script import with_arguments
from mindspeed_dryrun.megatron.arguments import pairs, without


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
    world = strategy.world
    return with_arguments(
        text,
        verb="search",
        comment=[strategy.name, "Convert the weights to the same layout:", "  " + " ".join(strategy.conversion_arguments())],
        replaced=(*decided, *(name for name, _ in pairs(more))),
        arguments=[*more, *strategy.arguments()],
        sets=sets,
        workers=("--worker_num", str(world), "--local_worker_num", str(min(cards_per_node, world))),
        script=script,
    )


def write_script(
    target: Path, script: Path, strategy: Strategy, cards_per_node: int, sets: Mapping[str, str], args: Sequence[str]
) -> None:
    """Bytes that are not UTF-8 (comments in GBK) stay what they are."""
    text = script.read_bytes().decode("utf-8", "surrogateescape")
    written = script_with(text, strategy, cards_per_node, sets, args, script)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, written)
    target.chmod(0o755)
