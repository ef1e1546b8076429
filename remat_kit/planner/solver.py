"""One way to ask HiGHS: least of a linear goal under rows and bounds, whole numbers where asked, to optimality."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`lower <= matrix @ x <= upper`, row by row.

    Attributes:
        matrix: One row per condition.
        lower: Least value of each, or of all.
        upper: Largest value of each, or of all.
    """

    matrix: np.ndarray | csr_array
    lower: np.ndarray | float = -np.inf
    upper: np.ndarray | float = np.inf


def at_most(row: np.ndarray, limit: float) -> Rows:
    """`row @ x <= limit`."""
    return Rows(matrix=row[None, :], upper=limit)


def minimise(
    goal: np.ndarray, rows: Sequence[Rows], *, lower: np.ndarray | float, upper: np.ndarray, is_whole: np.ndarray
) -> np.ndarray | None:
    """The x with the least `goal @ x`, None when no x meets the rows.

    Args:
        goal: Coefficients.
        rows: Conditions.
        lower: Least value of each unknown, or of all.
        upper: Largest value of each.
        is_whole: 1 for each unknown that is a whole number, 0 for others.
    """
    conditions: Any = [LinearConstraint(part.matrix, part.lower, part.upper) for part in rows]  # pyright: ignore[reportArgumentType]
    bounds = Bounds(lower, upper)  # pyright: ignore[reportArgumentType] (scipy's types know scalars only)
    result = milp(goal, constraints=conditions, bounds=bounds, integrality=is_whole, options={"mip_rel_gap": 0.0})
    return result.x
