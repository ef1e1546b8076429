"""What to change when nothing fits: each change is measured at its leanest, none is guessed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from remat_kit.errors import RematKitError
from remat_kit.planning import WayOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something to change in the step.

    Attributes:
        text: What, as a person would say it: `batch 4 instead of 8`.
        smallest_total: Compiles the changed step under its leanest plan and gives its bytes per device.
    """

    text: str
    smallest_total: Callable[[], int]


def ways_out(changes: Iterable[Change], *, budget_bytes: int, max_measured: int = 6) -> tuple[WayOut, ...]:
    """Measures changes.

    Args:
        changes: Most promising first.
        budget_bytes: Of a device.
        max_measured: How many are measured at most.

    Returns:
        Those that fit first, then by total; what could not be measured says why, last.
    """
    found = [_measured(change, budget_bytes) for _, change in zip(range(max_measured), changes, strict=False)]
    return tuple(sorted(found, key=lambda way: (way.total_bytes is None, not way.fits, way.total_bytes or 0)))


def _measured(change: Change, budget_bytes: int) -> WayOut:
    try:
        total = change.smallest_total()
    except RematKitError as error:
        return WayOut(text=change.text, total_bytes=None, fits=False, error=str(error))
    return WayOut(text=change.text, total_bytes=total, fits=total <= budget_bytes)
