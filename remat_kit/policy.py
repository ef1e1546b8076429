"""What to save, offload and recompute: plain, frozen, hashable data, and its text.

The records of `remat_kit.grammar`: `str` of each is its text, and parsing that text gives an equal record. Later rules win.
`none` is no rematerialization at all; `full` is the empty list of rules: only the block's input survives. Nothing here knows
JAX (`remat_kit.apply` lowers a policy to what `jax.checkpoint` takes) or any model; `plans.py` has the layers of stacks.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, assert_never

from remat_kit.errors import PolicyError


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
        return f"{self.action}({','.join(quote(pattern) for pattern in self.patterns)})"


@dataclass(frozen=True, slots=True)
class ByKind:
    """Saves the outputs of one kind of operation.

    Attributes:
        kind: `dots` = every matrix multiplication and convolution; `dots_no_batch` = plain matmuls without batch dimensions, as
            in JAX; `weights` = matmuls with parameters, batched or not; `kernels` = attention and other custom kernels.
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

    Raises:
        PolicyError: One rule saves a name that another one offloads.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for position, later in enumerate(self.rules):
            for rule in self.rules[:position]:
                _check_places(rule, later)

    def __str__(self) -> str:
        return "+".join(str(rule) for rule in self.rules) or "full"


Policy: TypeAlias = NoRemat | Preset | Remat

NONE = NoRemat()
FULL = Remat()


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


def overruled(policy: Policy) -> tuple[tuple[Rule, Rule], ...]:
    """The rules of a policy without any effect: pairs of such a rule and the later one that speaks of all its values.

    Example:
        >>> [(str(rule), str(later)) for rule, later in overruled(Remat((ByKind(Kind.DOTS_NO_BATCH), ByKind(Kind.DOTS))))]
        [('dots_no_batch', 'dots')]
    """
    rules = policy.rules if isinstance(policy, Remat) else ()
    pairs = ((rule, later) for position, later in enumerate(rules) for rule in rules[:position] if _covers(later, rule))
    return tuple(dict(pairs).items())


def _covers(later: Rule, rule: Rule) -> bool:
    match later, rule:
        case Named(_, over), Named(_, under):
            return all(any(matches(pattern, each) for pattern in over) for each in under)
        case (ByKind(over), ByKind(under)):
            return over == under or (over, under) == (Kind.DOTS, Kind.DOTS_NO_BATCH)
        case (Smaller(over), Smaller(under)) | (Cheap(over), Cheap(under)):
            return over >= under
        case _:
            return False


def _check_places(rule: Rule, later: Rule) -> None:
    if not (isinstance(rule, Named) and isinstance(later, Named)) or {rule.action, later.action} != {Action.SAVE, Action.OFFLOAD}:
        return
    # A pattern taken as a name: what matches it there, matches all that it stands for.
    for name in rule.patterns:
        if any(matches(pattern, name) for pattern in later.patterns):
            raise PolicyError(
                f"{rule} and {later} both speak of {name!r}, which is kept on the device or in host memory, not in both: take it "
                f"out of one of them."
            )


def matches(pattern: str, name: str) -> bool:
    """Whether a value-name pattern matches a name: `*` stands for anything, `/` included.

    Example:
        >>> matches("*/q", "layers/attn/q"), matches("q", "qq")
        (True, False)
    """
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), name, re.DOTALL) is not None


def quote(name: str) -> str:
    """A value name as it stands in a policy's text."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


_PLAIN = re.compile(r"[A-Za-z0-9_.\-/:@\[\]*]+")
