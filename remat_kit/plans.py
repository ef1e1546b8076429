"""Policies for the layers of a step's stacks: plain, frozen, hashable data, and its text.

In: policies (`policy.py`) for consecutive layers. Out: `StackPlan` for one stack, `Plan` for a step, and `Policies`, which `bind`
makes of a plan and the stacks that a step declares, every count filled in. Nothing here knows JAX or a model.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remat_kit.errors import PolicyError, nearest
from remat_kit.policy import NONE, Policy, quote


@dataclass(frozen=True, slots=True)
class Segment:
    """A policy for consecutive layers of a stack.

    Attributes:
        policy: What each of the layers keeps.
        num_layers: How many layers; None = the layers that the other segments leave.
    """

    policy: Policy
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.num_layers is not None and self.num_layers < 1:
            raise PolicyError(f"{self.policy}*{self.num_layers}: a segment has at least 1 layer.")

    def __str__(self) -> str:
        return str(self.policy) if self.num_layers is None else f"{self.policy}*{self.num_layers}"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The segments of one stack, first layer first.

    Attributes:
        segments: At least one; at most one of them without a count.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if sum(segment.num_layers is None for segment in self.segments) > 1:
            raise PolicyError(f"{self}: only one segment may be without a count; write policy*layers for the others.")

    def __str__(self) -> str:
        return " | ".join(str(segment) for segment in self.segments)

    @property
    def is_mixed(self) -> bool:
        """Whether the layers of the stack follow more than one policy."""
        return len({segment.policy for segment in self.segments}) > 1

    @property
    def policy(self) -> Policy:
        """The one policy of all layers.

        Raises:
            PolicyError: The plan is mixed.
        """
        if self.is_mixed:
            raise PolicyError(f"{self} mixes policies over the layers of one stack: apply it with remat_kit.stack.")
        return self.segments[0].policy

    def fit(self, num_layers: int) -> "StackPlan":
        """Gives every segment its count.

        Args:
            num_layers: Layers of the stack.

        Returns:
            The same plan, with counts that add up to `num_layers`.

        Raises:
            PolicyError: They can't.
        """
        counted = sum(segment.num_layers or 0 for segment in self.segments)
        rest = num_layers - counted
        has_open = any(segment.num_layers is None for segment in self.segments)
        if rest < has_open or (rest > 0 and not has_open):
            raise PolicyError(f"{self} speaks of {counted + has_open} layers{' or more' * has_open}, the stack has {num_layers}.")
        return StackPlan(tuple(Segment(segment.policy, segment.num_layers or rest) for segment in self.segments))


@dataclass(frozen=True, slots=True)
class Plan:
    """Policies for the stacks of a step.

    Attributes:
        parts: Pairs of stack name and its segments; the name None stands for every stack.
    """

    parts: tuple[tuple[str | None, StackPlan], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if len(set(names)) < len(names) or (None in names and len(names) > 1):
            raise PolicyError(f"{self}: give each stack once, or one part without stack= for all of them.")

    def __str__(self) -> str:
        return "; ".join(str(part) if name is None else f"{_quote_stack(name)}={part}" for name, part in self.parts)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy in the plan, once, in order."""
        return tuple(dict.fromkeys(segment.policy for _, part in self.parts for segment in part.segments))


@dataclass(frozen=True, slots=True)
class Policies:
    """What a step factory is handed: `policies["layers"]` is the `StackPlan` of that stack.

    Attributes:
        by_stack: Pairs of stack name and plan, counts filled in.
        default: Plan of a stack that is not listed; None = such a stack is an error.
    """

    by_stack: tuple[tuple[str, StackPlan], ...] = ()
    default: StackPlan | None = None

    def __getitem__(self, stack: str) -> StackPlan:
        found = dict(self.by_stack).get(stack, self.default)
        if found is None:
            names = [name for name, _ in self.by_stack]
            raise PolicyError(f"no policy for stack {stack!r}; there is one for {_listing(names)}.{nearest(stack, names)}")
        return found


NO_REMAT = Policies(default=StackPlan((Segment(NONE),)))


def bind(plan: Plan, num_layers: Mapping[str, int]) -> Policies:
    """Fits a plan to the stacks of a step.

    Args:
        plan: Parts by stack name, or one part for all.
        num_layers: Stack name -> number of layers, as the step declares them.

    Returns:
        A plan for each stack, counts filled in.

    Raises:
        PolicyError: A part names no stack, a stack has no part, or the counts do not fit.
    """
    parts = dict(plan.parts)
    for name in parts:
        if name is not None and name not in num_layers:
            raise PolicyError(f"stack {name!r} in {str(plan)!r}: the step has {_listing(num_layers)}.{nearest(name, num_layers)}")
    missing = [name for name in num_layers if name not in parts and None not in parts]
    if missing:
        raise PolicyError(f"{str(plan)!r} has no part for stack {_listing(missing)}: add '; {missing[0]}=none'.")
    fitted = []
    for name, count in num_layers.items():
        part = parts.get(name, parts.get(None))
        assert part is not None
        try:
            fitted.append((name, part.fit(count)))
        except PolicyError as error:
            raise PolicyError(f"stack {name!r}: {error}") from None
    return Policies(by_stack=tuple(fitted))


def _quote_stack(name: str) -> str:
    return quote(name) if "*" not in name else json.dumps(name, ensure_ascii=False)


def _listing(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
