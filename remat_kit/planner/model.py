"""Predicts the bytes of a step under any plan, from the trace's numbers and what was measured so far.

A linear model whose coefficients start at what the trace says and move as far as measurements demand (Bayesian least squares):
fixed bytes; bytes per layer whatever the policy; how much of each name's traced bytes the compiler really keeps (padding makes it
more than 1, a value that is not alive at the peak 0); the working set; corrections per policy; what mixing costs; how much of a
last layer's values is gone by the peak, when it alone follows its policy; and what only shows at full depth, as an offset and as
a part of what is kept. Traced bytes are only where to start from.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.planner.closure import LayerChoice
from remat_kit.planner.layout import Layout, PlannedStack, last_alone
from remat_kit.planner.mixture import Room
from remat_kit.planner.options import StackOptions
from remat_kit.planning import Objective
from remat_kit.policy import NoRemat

MiB = 2**20
LONG = 8
"""Layers from which on no segment has a single one: compilers unroll a loop of one, whose bytes lie off every line."""
SMALL_NOISE, WHOLE_NOISE = 5e-4, 1e-4
"""How closely totals are followed, as parts of them: padding and holes are not linear, and only whole totals count in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A measured total.

    Attributes:
        layout: What was measured, with the layers that it had.
        is_whole: Whether at the step's full depth.
        total_bytes: Of a device.
    """

    layout: Layout
    is_whole: bool
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Coefficients by feature, see `features`.

    Attributes:
        coefficients: Bytes per unit of each feature that a measured plan had.
        covariance: Of these coefficients, in their order: how uncertain they still are, and which of them together.
    """

    coefficients: Mapping[str, float]
    covariance: np.ndarray

    def coefficient(self, feature: str) -> float:
        """Bytes per unit of a feature; what nothing was measured of is where it started."""
        return self.coefficients.get(feature, prior(feature)[0])

    def has_seen(self, stack: str, choice: LayerChoice) -> bool:
        """Whether a plan with this policy was measured."""
        return f"policy {stack} {choice.policy}" in self.coefficients

    def spread(self, amounts: Mapping[str, float]) -> float:
        """Standard deviation, in bytes, of a sum of so much of each feature."""
        known = np.array([amounts.get(name, 0.0) for name in self.coefficients])
        unknown = sum((prior(name)[1] * amount) ** 2 for name, amount in amounts.items() if name not in self.coefficients)
        return math.sqrt(max(0.0, float(known @ self.covariance @ known)) + unknown)

    def predict(self, layout: Layout, *, is_whole: bool = True) -> int:
        """Total bytes of a device under a plan."""
        return round(sum(self.coefficient(name) * value for name, value in features(layout, is_whole=is_whole).items()))

    def chance(self, layout: Layout, budget_bytes: int) -> float:
        """Probability that the whole step under a plan is within a budget."""
        expected = self.predict(layout)
        doubt = math.hypot(self.spread(features(layout, is_whole=True)), WHOLE_NOISE * expected)
        return 0.5 * (1 + math.erf((budget_bytes - expected) / doubt / math.sqrt(2)))


def features(layout: Layout, *, is_whole: bool) -> dict[str, float]:
    """What a plan's total is a linear function of: feature -> MiB (or 1, or a number of layers)."""
    found: dict[str, float] = {"fixed": 1.0, "mixed": float(layout.is_mixed), "whole": float(is_whole)}
    for stack, segment in layout.segments:
        for name, amount in layer_features(stack, segment.choice, is_whole=is_whole).items():
            found[name] = found.get(name, 0.0) + amount * segment.num_layers
    name, segments = layout.stacks[-1]
    if len(segments) > 1 and segments[-1].num_layers == 1:
        found |= alone_features(name, segments[-1].choice)
    stack, widest = max(layout.segments, key=lambda pair: pair[1].choice.working_bytes)
    return found | working_features(stack, widest.choice)


def working_features(stack: str, choice: LayerChoice) -> dict[str, float]:
    """The part of the working set; that of the widest policy in use counts once."""
    return {"working": choice.working_bytes / MiB, f"width {stack} {choice.policy}": choice.working_bytes / MiB}


def layer_features(stack: str, choice: LayerChoice, *, is_whole: bool) -> dict[str, float]:
    """The part of one layer."""
    found = {
        f"layers {stack}": 1.0,
        f"policy {stack} {choice.policy}": (choice.saved_bytes + choice.host_bytes) / MiB,
        "bend": choice.saved_bytes / MiB * is_whole,
    }
    if isinstance(choice.policy, NoRemat):
        found[f"none {stack}"] = choice.saved_bytes / MiB
    return found | name_features(stack, choice)


def alone_features(stack: str, choice: LayerChoice) -> dict[str, float]:
    """The part of a last layer that alone follows its policy: no loop holds what it keeps while that over the others runs."""
    found = {f"alone {stack}": choice.saved_bytes / MiB}
    if isinstance(choice.policy, NoRemat):  # keeps more than a layer's working set, which bounds what is spared
        found[f"bare {stack}"] = choice.saved_bytes / MiB
    return found


def name_features(stack: str, choice: LayerChoice) -> dict[str, float]:
    """The part of one layer's kept names."""
    return {f"kept {stack} {name}": num_bytes / MiB for name, num_bytes in choice.kept_bytes}


def prior(feature: str) -> tuple[float, float]:
    """Mean and standard deviation of a coefficient before anything is measured, in bytes per unit of the feature."""
    match feature.split(" ")[0]:
        case "fixed" | "layers":
            return 0.0, 1e6 * MiB
        case "kept":
            return MiB, 0.04 * MiB
        case "none":
            return MiB, 0.3 * MiB
        case "working":  # a loop takes what its layers kept out of their stack again: little of the set depends on the policy
            return 0.3 * MiB, 0.3 * MiB
        case "policy":
            return 0.0, 0.01 * MiB
        case "bend":
            return 0.0, 0.015 * MiB
        case "width":
            return 0.0, 0.07 * MiB
        case "alone":
            return 0.0, 0.7 * MiB
        case "bare":
            return 0.0, 0.4 * MiB
        case "mixed":
            return 0.0, 64.0 * MiB
        case "whole":
            return 0.0, 64.0 * MiB
        case _:
            raise AssertionError(f"no prior for {feature}")


def fit(observations: Iterable[Observation]) -> MemoryModel:
    """The coefficients that follow the measurements and stay near the trace where they say nothing."""
    seen = list(observations)
    rows = [features(item.layout, is_whole=item.is_whole) for item in seen]
    names = sorted({name for row in rows for name in row})
    means = np.array([prior(name)[0] for name in names])
    spreads = np.array([prior(name)[1] for name in names])
    design = np.array([[row.get(name, 0.0) for name in names] for row in rows]).reshape(len(rows), len(names))
    noise = np.array([max(1.0, item.total_bytes * (WHOLE_NOISE if item.is_whole else SMALL_NOISE)) for item in seen])
    miss = (np.array([float(item.total_bytes) for item in seen]) - design @ means) / noise
    scaled = design * spreads / noise[:, None]
    system, target = np.vstack([scaled, np.eye(len(names))]), np.concatenate([miss, np.zeros(len(names))])
    moved = np.linalg.lstsq(system, target, rcond=None)[0]
    root = np.asarray(np.linalg.qr(system, mode="r"))
    half = np.linalg.solve(root.T, np.diag(spreads))
    coefficients = dict(zip(names, (means + spreads * moved).tolist(), strict=True))
    return MemoryModel(coefficients=coefficients, covariance=half.T @ half)


def options_of(
    model: MemoryModel, stacks: Sequence[PlannedStack], *, objective: Objective, max_segments: int, optimism: float = 0.0
) -> list[StackOptions]:
    """What each policy of each stack comes to under the model, in whole bytes, rounded up.

    Args:
        model: Predicts bytes.
        stacks: The stacks.
        objective: What is made least of.
        max_segments: How many policies a stack may mix.
        optimism: Standard deviations by which bytes are taken to be fewer than expected.
    """

    def layer_bytes(stack: str, choice: LayerChoice) -> int:
        amounts = layer_features(stack, choice, is_whole=True)
        doubt = optimism * model.spread(amounts) if optimism else 0.0
        return max(0, math.ceil(_expected(model, amounts) - doubt))

    return [
        StackOptions(
            num_layers=stack.num_layers,
            layer_bytes=tuple(layer_bytes(stack.name, choice) for choice in stack.choices),
            working_bytes=tuple(
                max(0, math.ceil(_expected(model, working_features(stack.name, choice)))) for choice in stack.choices
            ),
            costs=tuple(float(choice.cost(objective) * stack.repeats) for choice in stack.choices),
            num_names=tuple(choice.num_names for choice in stack.choices),
            max_segments=min(stack.max_segments, max_segments),
            min_layers=2 if stack.num_layers >= LONG and not stack.is_unrolled else 1,
            last_bytes=_last_bytes(model, stack, layer_bytes) if max_segments > 1 and stack.name == last_alone(stacks) else (),
        )
        for stack in stacks
    ]


def _last_bytes(model: MemoryModel, stack: PlannedStack, layer_bytes: Callable[[str, LayerChoice], int]) -> tuple[int, ...]:
    """What each policy keeps in a last layer that alone follows it; () while nothing was measured of that."""
    if f"alone {stack.name}" not in model.coefficients:
        return ()

    def last(choice: LayerChoice) -> int:
        amounts = alone_features(stack.name, choice)
        is_known = all(name in model.coefficients for name in amounts)  # what nobody measured is not counted on
        return max(0, layer_bytes(stack.name, choice) + (math.ceil(_expected(model, amounts)) if is_known else 0))

    return tuple(map(last, stack.choices))


def _expected(model: MemoryModel, amounts: Mapping[str, float]) -> float:
    return sum(model.coefficient(name) * amount for name, amount in amounts.items())


def room_of(model: MemoryModel, budget_bytes: int, *, is_mixed: bool) -> Room:
    """What the layers may fill at full depth."""
    fixed = sum(model.coefficient(name) for name in ("fixed", "whole", *(["mixed"] if is_mixed else [])))
    return Room(budget_bytes=budget_bytes, fixed_bytes=math.ceil(fixed))
