"""How tokens are spread over experts: `even`, `hot:X`, or a file of tokens per expert. Pure, standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError


@dataclass(frozen=True)
class MoeLoad:
    """Either a factor for the experts of the simulated rank, or the observed number of tokens of each expert."""

    factor: float = 1.0
    tokens: tuple[int, ...] = ()

    @property
    def is_even(self) -> bool:
        """Every expert gets the same number of tokens."""
        return self.factor == 1 and not self.tokens

    def __str__(self) -> str:
        """As `parse` reads it; an observed load is spelled out, so that a record needs no file."""
        if self.tokens:
            return json.dumps(self.tokens)
        return "even" if self.is_even else f"hot:{self.factor:g}"

    @property
    def words(self) -> str:
        """For people."""
        if self.tokens:
            return f"the tokens per expert that were given, the busiest of {len(self.tokens)} with {max(self.tokens)}"
        return "an even load" if self.is_even else f"{self.factor:g} × an even load on every simulated rank"

    def busiest(self, total: int, experts: int, local: int) -> list[int]:
        """Of `total` routed tokens, what each of the `local` experts of the busiest rank receives."""
        if not self.tokens:
            return self.counts(total, experts, range(local))
        groups = (range(start, start + local) for start in range(0, experts, local))
        return max((self.counts(total, experts, group) for group in groups), key=sum)

    def counts(self, total: int, experts: int, local: Sequence[int]) -> list[int]:
        """Of `total` routed tokens, how many each local expert receives; rounded up, an under-estimate is dangerous."""
        if self.is_even:
            shares = [total * (part + 1) // experts - total * part // experts for part in range(experts)]
            return [shares[expert] for expert in local]
        if not self.tokens:
            return [math.ceil(total / experts * self.factor)] * len(local)
        if len(self.tokens) != experts:
            raise UsageError(f"The MoE load names {len(self.tokens)} experts, and the model has {experts}.")
        observed = sum(self.tokens)
        return [-(-total * self.tokens[expert] // observed) for expert in local]


def parse(value: str) -> MoeLoad:
    """`even`, `hot:2.0`, or a list of tokens per expert, or one such list for each rank: as JSON, or a file of it."""
    if value == "even":
        return MoeLoad()
    if value.startswith("hot:"):
        return MoeLoad(factor=_factor(value))
    try:
        data = json.loads(value if value.startswith("[") else Path(value).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"The MoE load '{value}' is not even or hot:X, and no file of that name can be read.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"The MoE load '{value}' is not JSON: give lists of tokens per expert, even or hot:X.") from None
    return MoeLoad(tokens=_tokens(value, data))


def _factor(value: str) -> float:
    try:
        factor = float(value[len("hot:") :])
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise UsageError(f"The MoE load '{value}' needs a number of at least 1 after hot:, such as hot:2.0.")
    return factor


def _tokens(name: str, data: Any) -> tuple[int, ...]:
    """Lists of several ranks are added up: what an expert receives comes from all of them."""
    rows = data if isinstance(data, list) and data and all(isinstance(row, list) for row in data) else [data]
    good = all(isinstance(row, list) and len(row) == len(rows[0]) and all(type(n) is int and n >= 0 for n in row) for row in rows)
    if not good or not any(sum(row) for row in rows):
        raise UsageError(f"{name} must hold a list of tokens per expert, or one such list of equal length for each rank.")
    return tuple(sum(column) for column in zip(*rows, strict=True))
