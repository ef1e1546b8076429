"""Keeps account of measurements: none is made twice, none beyond the limits, all are written down."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat_kit.planner.layout import Layout
from remat_kit.planner.model import MemoryModel, Observation, fit
from remat_kit.planning import LogEntry, Measure, Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be compiled, and how close to the budget is close enough.

    Attributes:
        max_whole: Compiles at full depth.
        max_compiles: All compiles.
        min_gain: A plan that is better by a smaller part of the best one's cost is not worth a compile.
        num_probes: Small compiles of the policies that are least certain.
    """

    max_whole: int = 4
    max_compiles: int = 12
    min_gain: float = 0.002
    num_probes: int = 2


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The measurements so far.

    Attributes:
        measure: Compiles.
        limits: See `Limits`.
        observations: Totals, for the model.
        whole: Layouts measured at full depth, in order, with what came out.
        log: Every measurement.
    """

    measure: Measure
    limits: Limits
    observations: list[Observation] = field(default_factory=list)
    whole: list[tuple[Layout, Measured]] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)

    @property
    def num_small_left(self) -> int:
        """Compiles at small depth that leave enough for the whole ones."""
        return self.limits.max_compiles - self.limits.max_whole - len(self.log)

    @property
    def can_measure_small(self) -> bool:
        """Whether a compile at small depth is left."""
        return self.num_small_left > 0

    @property
    def can_measure_whole(self) -> bool:
        """Whether a compile at full depth is left."""
        return len(self.whole) < self.limits.max_whole and len(self.log) < self.limits.max_compiles

    def model(self) -> MemoryModel:
        """The model by everything measured."""
        return fit(self.observations)

    def is_known(self, layout: Layout, depth: int | None) -> bool:
        """Whether it was measured."""
        text = str(layout)
        return any(entry.plan == text and entry.depth == depth for entry in self.log)

    def observe(self, layout: Layout, *, depth: int | None) -> Measured:
        """Measures a layout that has the layers of this depth."""
        predicted = self.model().predict(layout, is_whole=depth is None) if self.observations else None
        measured = self.measure(str(layout), depth)
        self.observations.append(Observation(layout=layout, is_whole=depth is None, total_bytes=measured.total_bytes))
        self.log.append(LogEntry(plan=str(layout), depth=depth, predicted_bytes=predicted, total_bytes=measured.total_bytes))
        if depth is None:
            self.whole.append((layout, measured))
        return measured

    def observe_small(self, layouts: Sequence[Layout], *, depth: int) -> None:
        """Measures layouts at a small depth, those that are new, as far as the limits go."""
        for layout in layouts:
            if self.can_measure_small and not self.is_known(layout, depth):
                self.observe(layout, depth=depth)

    def forget(self, *, depth: int) -> None:
        """Lets the model know nothing of depths up to this one: they turned out not to stand for the full one."""
        self.observations = [item for item in self.observations if item.is_whole or item.layout.depth > depth]

    def fitting(self, budget_bytes: int) -> list[tuple[Layout, Measured]]:
        """Whole layouts within the budget."""
        return [(layout, measured) for layout, measured in self.whole if measured.total_bytes <= budget_bytes]
