"""What to save, offload and recompute: plain, frozen, hashable data, and its text.

The records of `remat_kit.grammar`: `str` of each is its text, and parsing that text gives an equal record. Later rules win.
`none` is no rematerialization at all; `full` is the empty list of rules: only the block's input survives. Nothing here knows
JAX (`remat_kit.apply` lowers a policy to what `jax.checkpoint` takes) or any model (`bind` fits a plan to a step's stacks).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, assert_never

from remat_kit.errors import PolicyError, nearest


class Action(StrEnum):
    """What happens to the values that a rule by name matches."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Kind(StrEnum):
    """Kinds of operations whose outputs a rule by kind saves."""

    DOTS = "dots"
    DOTS_NO_BATCH = "dots_no_batch"
    WEIGHTS = "weights"
    KERNELS = "kernels"


@dataclass(frozen=True, slots=True)
class Named:
    """Acts on the values whose `checkpoint_name` matches one of the patterns.

    Attributes:
        action: What to do with them.
        patterns: Names, where `*` matches anything, `/` included.
    """

    action: Action
    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.patterns or not all(self.patterns):
            raise PolicyError(f"{self.action}() needs at least one name, like {self.action}(q, k, v).")

    def __str__(self) -> str:
        return f"{self.action}({','.join(_quote(pattern) for pattern in self.patterns)})"


@dataclass(frozen=True, slots=True)
class ByKind:
    """Saves the outputs of one kind of operation.

    Attributes:
        kind: `dots` = every matrix multiplication and convolution; `dots_no_batch` = those without batch dimensions.
    """

    kind: Kind

    def __str__(self) -> str:
        return str(self.kind)


@dataclass(frozen=True, slots=True)
class Smaller:
    """Saves every value of at most `max_bytes`.

    Attributes:
        max_bytes: Largest value that is saved, in bytes (of the whole value, over all devices).
    """

    max_bytes: int

    def __post_init__(self) -> None:
        if self.max_bytes <= 0:
            raise PolicyError(f"smaller({self.max_bytes}) saves nothing: give a size above 0, like smaller(1MiB).")

    def __str__(self) -> str:
        for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self.max_bytes % scale == 0:
                return f"smaller({self.max_bytes // scale}{unit})"
        return f"smaller({self.max_bytes})"


@dataclass(frozen=True, slots=True)
class Cheap:
    """Recomputes every value that costs at most `max_flops_per_byte` to make, whatever an earlier rule saved.

    Attributes:
        max_flops_per_byte: FLOPs of the operation over the bytes of its output.
    """

    max_flops_per_byte: int

    def __post_init__(self) -> None:
        if self.max_flops_per_byte <= 0:
            raise PolicyError(f"cheap({self.max_flops_per_byte}) matches nothing: give FLOPs per byte above 0, like cheap(8).")

    def __str__(self) -> str:
        return f"cheap({self.max_flops_per_byte})"


Rule: TypeAlias = Named | ByKind | Smaller | Cheap


@dataclass(frozen=True, slots=True)
class NoRemat:
    """No rematerialization: what the backward pass needs is kept, and no `jax.checkpoint` is traced."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy of the field by its name; `presets.resolve` turns it into rules through a model's roles.

    Attributes:
        name: A key of `remat_kit.presets.PRESETS`.
    """

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Remat:
    """Rematerialization under rules.

    Attributes:
        rules: What is kept beside the block's input. Later rules win; empty = `full`.
    """

    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return "+".join(str(rule) for rule in self.rules) or "full"


Policy: TypeAlias = NoRemat | Preset | Remat

NONE = NoRemat()
FULL = Remat()


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


def patterns(policy: Policy) -> tuple[str, ...]:
    """The value names and patterns that a policy spells out, once, in order."""
    match policy:
        case NoRemat() | Preset():
            return ()
        case Remat(rules):
            named = [pattern for rule in rules if isinstance(rule, Named) for pattern in rule.patterns]
            return tuple(dict.fromkeys(named))
        case _:
            assert_never(policy)


def matches(pattern: str, name: str) -> bool:
    """Whether a value-name pattern matches a name: `*` stands for anything, `/` included.

    Example:
        >>> matches("*/q", "layers/attn/q"), matches("q", "qq")
        (True, False)
    """
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), name, re.DOTALL) is not None


_PLAIN = re.compile(r"[A-Za-z0-9_.\-/:@\[\]*]+")


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _quote_stack(name: str) -> str:
    return _quote(name) if "*" not in name else json.dumps(name, ensure_ascii=False)


def _listing(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
