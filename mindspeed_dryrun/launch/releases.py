"""Releases of the upstream stack: which trees and which MindSpore belong together, as each release's install guide says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.rank import installed


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of MindSpeed-LLM with the branches of the trees beside it, as its install guide names them.

    The tags of the same names stand still: v2.2.0 and v26.1.0 lack fixes that their branches have.
    """

    name: str
    mindspeed: str
    mindspore: str  # what its install guide asks for
    megatron: str = "core_v0.12.1"

    @property
    def references(self) -> dict[str, str]:
        """What to check out, by the name of the tree's folder."""
        return {"MindSpeed-LLM": self.name, "MindSpeed": self.mindspeed, "Megatron-LM": self.megatron}


# docs/mindspore/install_guide.md and docs/zh/mindspore/install_guide.md of each release.
RELEASES = {
    release.name: release
    for release in (
        Release(name="2.2.0", mindspeed="2.2.0_core_r0.12.1", mindspore="2.7.1"),
        Release(name="2.3.0", mindspeed="2.3.0_core_r0.12.1", mindspore="2.7.2"),
        Release(name="26.0.0", mindspeed="26.0.0_core_r0.12.1", mindspore="2.8.0"),
        Release(name="26.1.0", mindspeed="26.1.0_core_r0.12.1", mindspore="2.9.0"),
        Release(name="master", mindspeed="master", mindspore="2.9.0"),
    )
}
MINDSPORE_VERSIONS = ("2.7.1", "2.7.2", "2.8.0", "2.9.0", "2.10.0")  # that the engine's tests pass on
# Where a package of that name shows that a tree is whole.
TREES = {"MindSpeed-LLM": "mindspeed_llm", "MindSpeed": "mindspeed", "Megatron-LM": "megatron/training"}


def named(name: str) -> Release:
    """The release of this name."""
    if name not in RELEASES:
        raise UsageError(f"There is no release {name} here; known are {', '.join(RELEASES)}.")
    return RELEASES[name]


def release_of(root: Path) -> str | None:
    """The release of MindSpeed-LLM in a folder of trees; None where there is none, or it does not say."""
    return installed.mindspeed_llm_release(root / "MindSpeed-LLM")


def missing_trees(root: Path) -> list[str]:
    """The trees that a real stack needs and that are not in this folder."""
    return [tree for tree, sign in TREES.items() if not (root / tree / sign).is_dir()]
