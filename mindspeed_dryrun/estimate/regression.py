"""Bayesian linear regression on named features, small and dense: a mean and a spread for every prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Features = Mapping[str, float]


@dataclass(frozen=True)
class Prior:
    """What a coefficient is believed to be before anything is measured."""

    mean: float
    spread: float


class LinearBelief:
    """Coefficients with a normal prior each, updated by observations `features · coefficients = value ± noise`."""

    def __init__(self, priors: Mapping[str, Prior]):
        self.names = sorted(priors)
        self.index = {name: position for position, name in enumerate(self.names)}
        self.mean = [priors[name].mean for name in self.names]
        size = len(self.names)
        self.covariance = [[0.0] * size for _ in range(size)]
        for position, name in enumerate(self.names):
            self.covariance[position][position] = priors[name].spread ** 2

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
        return [(self.index[name], weight) for name, weight in features.items() if weight]
