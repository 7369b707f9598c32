"""A sweep as its file describes it: the variants of a script."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from mindspeed_dryrun.devices.hardware import Hardware, read_hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.time_model import NEWEST, Release
from mindspeed_dryrun.language import message
from mindspeed_dryrun.units import parse_size_mb
from mindspeed_dryrun.user_file import Text, Texts, UserFile, Variables, Words, mapping_or, read_file

_Choices = Annotated[dict[str, Texts], BeforeValidator(mapping_or(message("must map each name to the list of its values")))]
_Labelled = Annotated[
    dict[str, Words],
    BeforeValidator(mapping_or(message("must map a label to its arguments, such as 'recompute: --recompute-…'"))),
]


class VariantSection(UserFile):
    """One variant: what it changes about the script."""

    name: Text | None = None
    set: Variables = Field(default_factory=dict, description="variables of the script")
    args: Words = Field(default=(), description="trainer arguments")
    env: Variables = Field(default_factory=dict, description="environment of the script")


class ProductSection(UserFile):
    """Every combination of the values."""

    set: _Choices = Field(default_factory=dict)
    args: _Labelled = Field(default_factory=dict)
    env: _Choices = Field(default_factory=dict)


class SweepFile(UserFile):
    """A sweep file: a script and its variants."""

    script: Text = Field(description="relative to this file")
    set: Variables = Field(default_factory=dict, description="variables of the script, for all variants")
    args: Words = Field(default=(), description="trainer arguments, for all variants")
    env: Variables = Field(default_factory=dict, description="environment of the script, for all variants")
    budget: Text | None = Field(default=None, description="memory of a rank, such as 58G")
    hardware: Text | None = Field(default=None, description="a device or a hardware file")
    trainer_release: Text | None = Field(default=None, description="MindSpeed-LLM's, such as 2.1; default: the newest known")
    variants: list[VariantSection] = Field(default_factory=list)
    product: ProductSection = ProductSection()


@dataclass(frozen=True)
class Variant:
    """One row: what it changes about the script."""

    name: str
    sets: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def then(self, other: Variant) -> Variant:
        """This change and then the other, under its name."""
        return Variant(other.name, {**self.sets, **other.sets}, (*self.args, *other.args), {**self.env, **other.env})


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What is run."""

    script: Path
    variants: tuple[Variant, ...]
    budget_mb: int | None = None
    hardware: Hardware | None = None
    release: Release = NEWEST  # of the trainer whose throughput line the predicted one is compared with


def read_sweep(path: Path) -> SweepPlan:
    """A sweep file, or a `UsageError` that names the key."""
    file = read_file(SweepFile, path)
    common = Variant("", file.set, file.args, file.env)
    variants = [common.then(item) for item in (*_listed(file.variants), *_product(file.product))]
    if not variants:
        raise UsageError(f"{path}: name the variants under 'variants' (a list) or 'product' (every combination).")
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{path}: two variants are called '{name}'; give each its own name.")
    return SweepPlan(
        script=path.parent / file.script,
        variants=tuple(variants),
        budget_mb=parse_size_mb(file.budget) if file.budget else None,
        hardware=read_hardware(file.hardware, path.parent) if file.hardware else None,
        release=read_release(file.trainer_release, str(path)),
    )


def read_release(text: str | None, where: str) -> Release:
    """A release of the trainer, such as 2.1; the newest that is known if the file `where` does not say."""
    if text is None:
        return NEWEST
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.partition(".")[0].isdigit()):
        raise UsageError(f"{where}: 'trainer_release' is '{text}'; give MindSpeed-LLM's release, such as 2.1.")
    return int(major), int(minor.partition(".")[0])


def _listed(sections: list[VariantSection]) -> Iterator[Variant]:
    for index, one in enumerate(sections, 1):
        label = " ".join([*(f"{name}={value}" for name, value in {**one.set, **one.env}.items()), *one.args])
        yield Variant(one.name or label or f"variant {index}", one.set, one.args, one.env)


def _product(section: ProductSection) -> Iterator[Variant]:
    axes = [[Variant(f"{name}={text}", sets={name: text}) for text in texts] for name, texts in section.set.items()]
    axes += [[Variant(f"{name}={text}", env={name: text}) for text in texts] for name, texts in section.env.items()]
    if section.args:
        axes.append([Variant(label, args=words) for label, words in section.args.items()])
    for combination in itertools.product(*axes) if axes else ():
        merged = Variant("")
        for item in combination:
            merged = merged.then(item)
        yield dataclasses.replace(merged, name=" ".join(item.name for item in combination))
