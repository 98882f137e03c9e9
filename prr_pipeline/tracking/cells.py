# SPDX-License-Identifier: Apache-2.0
"""Values as the cells of a table: what is unknown is "-", and no text of a cell breaks the table."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


def number(value: Any) -> float | None:
    """Return a finite number as such; None for what is absent, NaN or infinite."""
    return None if absent(value) else float(value)


def absent(value: Any) -> bool:
    """Whether a value is unknown: None, NaN or infinite."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def mean(values: Iterable[Any]) -> float | None:
    """Return the mean of the known numbers, None if there are none."""
    known = [known for value in values if (known := number(value)) is not None]
    return sum(known) / len(known) if known else None


def fixed(value: Any, digits: int) -> str:
    """Return a number with so many decimals, "-" for an unknown one."""
    known = number(value)
    return "-" if known is None else f"{known:.{digits}f}"


def percent(value: Any, digits: int = 1) -> str:
    """Return a fraction as a percentage, "-" for an unknown one."""
    known = number(value)
    return fixed(None if known is None else 100 * known, digits)


def both(first: str, second: str) -> str:
    """Join two cells that share a column; "-" if neither is known."""
    return "-" if first == second == "-" else f"{first}/{second}"


def grid(columns: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: names to the left, numbers to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *body]
    return "\n".join(f"| {' | '.join(map(_plain, cells))} |" for cells in lines)


def _plain(cell: str) -> str:
    """Return a cell whose text cannot end it: names come from option files and benchmarks."""
    return " ".join(cell.split()).replace("|", "\\|")
