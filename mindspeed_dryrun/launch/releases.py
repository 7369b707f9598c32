"""Releases of the upstream stack: which trees and which MindSpore belong together, as each release's install guide says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.rank import installed


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of MindSpeed-LLM with the branches of the trees beside it, as its install guide names them.

    The tags of the same names, with a v in front, stand still: v2.2.0 and v26.1.0 lack fixes that their branches have.
    """

    name: str
    mindspeed: str
    mindspore: str  # what its install guide asks for
    megatron: str = "core_v0.12.1"
    mindspeed_has_tag: bool = True
    at_tags: bool = False

    @property
    def references(self) -> dict[str, str]:
        """What to check out, by the name of the tree's folder."""
        llm = f"v{self.name}" if self.at_tags else self.name
        mindspeed = f"v{self.mindspeed}" if self.at_tags and self.mindspeed_has_tag else self.mindspeed
        return {"MindSpeed-LLM": llm, "MindSpeed": mindspeed, "Megatron-LM": self.megatron}


# docs/mindspore/install_guide.md and docs/zh/mindspore/install_guide.md of each release.
RELEASES = {
    release.name: release
    for release in (
        Release(name="2.2.0", mindspeed="2.2.0_core_r0.12.1", mindspore="2.7.1"),
        Release(name="2.3.0", mindspeed="2.3.0_core_r0.12.1", mindspore="2.7.2"),
        Release(name="26.0.0", mindspeed="26.0.0_core_r0.12.1", mindspore="2.8.0"),
        Release(name="26.1.0", mindspeed="26.1.0_core_r0.12.1", mindspore="2.9.0", mindspeed_has_tag=False),
        Release(name="master", mindspeed="master", mindspore="2.9.0"),
    )
}
MINDSPORE_VERSIONS = ("2.7.1", "2.7.2", "2.8.0", "2.9.0", "2.10.0")  # that the engine's tests pass on
# Where a package of that name shows that a tree is whole.
TREES = {"MindSpeed-LLM": "mindspeed_llm", "MindSpeed": "mindspeed", "Megatron-LM": "megatron/training"}


def named(name: str) -> Release:
    """The release of this name; with a v in front at its tags."""
    plain = name.removeprefix("v")
    if plain not in RELEASES or name == f"v{installed.MASTER}":
        raise UsageError(f"There is no release {name} here; known are {', '.join(RELEASES)}, and as tags v2.2.0 and so on.")
    return replace(RELEASES[plain], at_tags=name != plain)


def release_of(root: Path) -> str | None:
    """The release of MindSpeed-LLM in a folder of trees; None where there is none, or it does not say."""
    return installed.mindspeed_llm_release(root / "MindSpeed-LLM")


def missing_trees(root: Path) -> list[str]:
    """The trees that a real stack needs and that are not in this folder."""
    return [tree for tree, sign in TREES.items() if not (root / tree / sign).is_dir()]
