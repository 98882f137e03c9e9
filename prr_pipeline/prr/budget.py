# SPDX-License-Identifier: Apache-2.0
"""Speculation budget policies: how many times |A| may P be, at a context length (PRR, eq 1 and its offline profile)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prr_pipeline.errors import ConfigError

# What rows of a profile may have: the time without speculation, with it, and the noise of two measurements of the same.
# Whole steps come first: beside other layers' work a phase takes another time than alone.
_TOGETHER = (("serial_step_us", "prr_step_us", 1.002), ("serial_us", "prr_us", 1.01))
_NEAR = 0.03  # share of a context by which another one is the same
DELTAS = (1.0, 1.25, 1.5, 2.0)  # what is profiled, and what hit rates are shown for


@dataclass(kw_only=True)
class BudgetPolicy(ABC):
    """delta as a function of the context. 0 means no speculation: the step is serial."""

    name: str

    def check(self) -> None:  # noqa: B027 (a policy without values has nothing to check)
        """Raise ConfigError for values out of range."""

    @property
    def active(self) -> bool:
        """Whether any context may have a budget; without one, steps are serial and nothing is predicted."""
        return True

    @property
    def needs_profile(self) -> bool:
        """Whether `fit` must be called before `ratio`."""
        return False

    def fit(self, rows: list[dict[str, Any]]) -> None:  # noqa: B027 (most policies need none)
        """Take a profile's rows: context (tokens), delta, select_us, attend_us; more, if both were timed together."""

    @abstractmethod
    def ratio(self, context: int) -> float:
        """|P| <= delta |A| at this many tokens."""

    def halves(self, context: int, delta: float) -> bool | None:
        """Whether the exact repair is faster as two launches, where it is known; it changes no bits."""
        return None

    def blocks(self, top_k: int, context: int) -> int:
        """Width of P. One that cannot hold A's size is no prediction of A and counts as 0."""
        found = width(self.ratio(context), top_k)
        return found if found >= top_k else 0


def width(delta: float, top_k: int) -> int:
    """Blocks of P: floor(delta K), of the decimal that delta was written as."""
    return int(delta * top_k + 1e-9)


@dataclass(kw_only=True)
class Off(BudgetPolicy):
    """No speculation."""

    name: str = "off"

    @property
    def active(self) -> bool:
        """Never."""
        return False

    def ratio(self, context: int) -> float:
        """Always 0."""
        return 0.0


@dataclass(kw_only=True)
class Fixed(BudgetPolicy):
    """One delta for every context."""

    name: str = "fixed"
    delta: float = 1.5

    def check(self) -> None:
        """Raise ConfigError unless delta is 0 (off) or in 1 ... 8."""
        _check_delta("budget.delta", self.delta)

    @property
    def active(self) -> bool:
        """Unless delta is 0."""
        return self.delta != 0

    def ratio(self, context: int) -> float:
        """The configured one."""
        return self.delta


def _check_delta(key: str, value: float) -> None:
    if value != 0 and not 1 <= value <= 8:
        raise ConfigError(
            f"{key} = {value}, expected 0 (no speculation) or a value in 1 ... 8: P must be able to hold A"
        )


@dataclass(kw_only=True)
class Profiled(BudgetPolicy):
    """The largest delta that does not lengthen a step, from a profile of this machine.

    Where the profile has timed whole steps, or the attention phases of a step, with and without speculation, a delta
    must not take longer than without, nor longer than the best delta by more than noise. Else its attention must be
    done before selection is. Near the profile's contexts its table decides, between them a polynomial regression of the
    latencies, and beyond them the nearest one: polynomials that were never held against a measurement there say
    anything.

    deltas: the candidates. degree: of the polynomials. slack: share of the time allowed that may be exceeded.
    """

    name: str = "profiled"
    deltas: list[float] = field(default_factory=lambda: list(DELTAS))
    degree: int = 2
    slack: float = 0.0

    def __post_init__(self) -> None:
        self._table: dict[int, float] = {}
        self._names = ("select_us", "attend_us")  # of what is allowed, and of what a delta takes
        self._allowed: np.ndarray | None = None
        self._takes: dict[float, np.ndarray] = {}
        self._halves: dict[tuple[int, float], bool] = {}

    def check(self) -> None:
        """Raise ConfigError for no or wrong candidates."""
        if not self.deltas:
            raise ConfigError("budget.deltas is empty, expected at least one candidate such as 1.5")
        for value in self.deltas:
            _check_delta("budget.deltas", value)
        if self.degree < 0 or not 0 <= self.slack < float("inf"):
            raise ConfigError(
                f"budget.degree = {self.degree} and budget.slack = {self.slack}, expected none below 0 and finite"
            )

    @property
    def needs_profile(self) -> bool:
        """It is made of one."""
        return True

    def fit(self, rows: list[dict[str, Any]]) -> None:
        """See BudgetPolicy. Rows of other deltas than the candidates are ignored."""
        contexts = sorted({int(r["context"]) for r in rows})
        timed = [names for names in _TOGETHER if rows and all(name in r for r in rows for name in names[:2])]
        self._names = timed[0][:2] if timed else ("select_us", "attend_us")
        allowed = {int(r["context"]): float(r[self._names[0]]) for r in rows}
        takes = {(int(r["context"]), float(r["delta"])): float(r[self._names[1]]) for r in rows}
        missing = [d for d in self.deltas if d and any((c, d) not in takes for c in contexts)]
        if not contexts or missing:
            raise ConfigError(
                f"the profile has no rows for delta {missing or self.deltas}; run stage profile with force=true"
            )
        self._halves = {(int(r["context"]), float(r["delta"])): r["halves"] for r in rows if "halves" in r}
        if timed:
            for c in contexts:
                best = min(takes[c, d] for d in self.deltas if d)
                allowed[c] = min(allowed[c], best * timed[0][2])
        self._table = {
            c: max((d for d in self.deltas if d and self._fits(takes[c, d], allowed[c])), default=0.0) for c in contexts
        }
        self._allowed = self._poly(contexts, [allowed[c] for c in contexts])
        self._takes = {d: self._poly(contexts, [takes[c, d] for c in contexts]) for d in self.deltas if d}

    def _fits(self, takes: float, allowed: float) -> bool:
        return takes <= allowed * (1 + self.slack)

    def _poly(self, contexts: list[int], us: list[float]) -> np.ndarray:
        return np.polyfit(np.array(contexts) / 1024, us, min(self.degree, len(contexts) - 1))

    def ratio(self, context: int) -> float:
        """From the table near its contexts, else from the regression; 0 where no candidate fits."""
        if self._allowed is None:
            raise ConfigError("budget=profiled has no profile; run stage profile before decode")
        context = min(max(context, min(self._table)), max(self._table))
        near = self._nearest(context)
        if abs(near - context) <= _NEAR * near:
            return self._table[near]
        allowed = float(np.polyval(self._allowed, context / 1024))
        fits = [d for d, p in self._takes.items() if self._fits(float(np.polyval(p, context / 1024)), allowed)]
        return max(fits, default=0.0)

    def halves(self, context: int, delta: float) -> bool | None:
        """As at the nearest profiled context."""
        return self._halves.get((self._nearest(context), delta))

    def _nearest(self, context: int) -> int:
        """The profiled context that is; 0 without a profile."""
        return min(self._table, key=lambda c: abs(c - context), default=0)

    def regression(self) -> dict[str, Any]:
        """Coefficients, highest power first, in us over context / 1024."""
        allowed = [] if self._allowed is None else self._allowed.tolist()
        return {self._names[0]: allowed, self._names[1]: {str(d): p.tolist() for d, p in self._takes.items()}}
