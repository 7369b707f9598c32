"""Bayesian linear regression on named features, small and dense: a mean and a spread for every prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Features = Mapping[str, float]


@dataclass(frozen=True)
class Prior:
    """What a coefficient is believed to be before anything is measured."""

    mean: float
    spread: float


class LinearBelief:
    """Coefficients with a normal prior each, updated by observations `features · coefficients = value ± noise`."""

    def __init__(self, prior: Callable[[str], Prior]):
        self.prior = prior
        self.index: dict[str, int] = {}
        self.mean: list[float] = []
        self.covariance: list[list[float]] = []

    def _add(self, name: str) -> int:
        """A coefficient that nothing has been observed of: its prior, independent of the others."""
        prior, position = self.prior(name), len(self.mean)
        for row in self.covariance:
            row.append(0.0)
        self.covariance.append([0.0] * position + [prior.spread**2])
        self.mean.append(prior.mean)
        self.index[name] = position
        return position

    def observe(self, features: Features, value: float, noise: float) -> None:
        """One measurement (a Kalman step)."""
        pairs = self._pairs(features)
        gain = [sum(row[position] * weight for position, weight in pairs) for row in self.covariance]
        variance = sum(gain[position] * weight for position, weight in pairs) + noise**2
        error = value - sum(self.mean[position] * weight for position, weight in pairs)
        for row, left in enumerate(gain):
            if left:
                self.mean[row] += left * error / variance
                line = self.covariance[row]
                for column, right in enumerate(gain):
                    line[column] -= left * right / variance

    def predict(self, features: Features) -> tuple[float, float]:
        """Mean and standard deviation."""
        pairs = self._pairs(features)
        mean = variance = 0.0
        for row, left in pairs:
            line = self.covariance[row]
            mean += self.mean[row] * left
            shared = 0.0
            for column, right in pairs:
                shared += right * line[column]
            variance += left * shared
        return mean, math.sqrt(max(0.0, variance))

    def mean_of(self, features: Features) -> float:
        """The mean alone."""
        return sum(self.mean[position] * weight for position, weight in self._pairs(features))

    def gain(self, target: Features, probe: Features, noise: float) -> float:
        """By how much measuring `probe` would shrink the variance of `target`."""
        left, right = self._pairs(target), self._pairs(probe)
        shared = sum(a * b * self.covariance[row][column] for row, a in left for column, b in right)
        own = sum(a * b * self.covariance[row][column] for row, a in right for column, b in right)
        return shared**2 / (own + noise**2)

    def _pairs(self, features: Features) -> Sequence[tuple[int, float]]:
        index = self.index
        return [(index[name] if name in index else self._add(name), weight) for name, weight in features.items() if weight]
