"""The text of policies and plans: `parse_plan` and `parse_policy`. The records and their `str` are in `policy.py` and `plans.py`.

The grammar, blanks ignored:

    plan    := part (';' part)*
    part    := [stack '='] segment ('|' segment)*
    segment := policy ['*' count]
    policy  := 'none' | 'full' | preset | rule ('+' rule)*
    rule    := save(name, …) | offload(name, …) | recompute(name, …) | dots | dots_no_batch | weights | kernels
             | smaller(bytes) | cheap(FLOPs per byte)

A count binds loosest: `save(a)+dots*3` is three layers of `save(a)+dots`. A name with other characters than letters, digits and
`_ . - / * : @ [ ]` is written as a JSON string.
"""

import json
import re

from remat_kit.errors import BudgetError, PolicyError, nearest
from remat_kit.plans import Plan, Segment, StackPlan
from remat_kit.policy import FULL, NONE, Action, ByKind, Cheap, Kind, Named, Policy, Preset, Remat, Rule, Smaller
from remat_kit.presets import PRESETS
from remat_kit.units import parse_bytes

_CALLS = tuple(f"{word}(" for word in (*Action, "smaller", "cheap"))
_WORDS = ("none", "full", *PRESETS, *Kind)
_STRING = r'"(?:[^"\\]|\\.)*"'
_WORD = re.compile(rf"{_STRING}|[A-Za-z0-9_.\-/:@\[\]]+")
_NAME = re.compile(rf"{_STRING}|[A-Za-z0-9_.\-/:@\[\]*]+")
_NUMBER = re.compile(r"-?\d{1,9}")


def parse_plan(text: str) -> Plan:
    """Reads a plan.

    Args:
        text: See the grammar above.

    Returns:
        The plan, with `parse_plan(str(plan)) == plan`.

    Raises:
        PolicyError: The text is not a plan; the message names the word and its near miss.

    Example:
        >>> parse_plan("encoder = full*8 | save(q,k)*4; decoder = none").parts[1][0]
        'decoder'
    """
    return _Reader(text).plan()


def parse_policy(text: str) -> Policy:
    """Reads a single policy: a plan of one segment, without stack and count.

    Raises:
        PolicyError: The text is not a policy.

    Example:
        >>> str(parse_policy("save( q, k ) + dots"))
        'save(q,k)+dots'
    """
    plan = parse_plan(text)
    stack, part = plan.parts[0]
    segment, *others = part.segments
    if len(plan.parts) > 1 or stack is not None or others or segment.num_layers is not None:
        raise PolicyError(f"{text!r} is a plan for a stack of layers; here one policy is taken, like {segment.policy}.")
    return segment.policy


class _Reader:
    """A recursive-descent reader: one method a line of the grammar, `position` moves forward only."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def plan(self) -> Plan:
        parts = [self.part()]
        while self.mark(";"):
            parts.append(self.part())
        if not self.at_end():
            raise self.error("expected '+', '|', ';', '*count' or the end")
        return Plan(tuple(parts))

    def part(self) -> tuple[str | None, StackPlan]:
        start = self.position
        stack = self.take(_WORD)
        if stack is None or not self.mark("="):
            self.position, stack = start, None
        segments = [self.segment()]
        while self.mark("|"):
            segments.append(self.segment())
        return (None if stack is None else _unquote(stack)), StackPlan(tuple(segments))

    def segment(self) -> Segment:
        policy = self.policy()
        if not self.mark("*"):
            return Segment(policy)
        count = self.take(_NUMBER)
        if count is None:
            raise self.error(f"expected a number of layers after '{policy}*'")
        return Segment(policy, int(count))

    def policy(self) -> Policy:
        items = [self.rule()]
        while self.mark("+"):
            items.append(self.rule())
        if len(items) == 1 and not isinstance(items[0], Named | ByKind | Smaller | Cheap):
            return items[0]
        rules = []
        for item in items:
            if not isinstance(item, Named | ByKind | Smaller | Cheap):
                raise PolicyError(f"{self.text!r}: '{item}' stands alone and is not joined by '+'; join rules like save(q)+dots.")
            rules.append(item)
        return Remat(tuple(rules))

    def rule(self) -> Rule | Policy:
        word = self.take(_WORD)
        if word is None:
            raise self.error("expected a policy")
        if self.mark("("):
            return self.call(word)
        if word == "none":
            return NONE
        if word == "full":
            return FULL
        if word in tuple(Kind):
            return ByKind(Kind(word))
        if word in PRESETS:
            return Preset(word)
        raise PolicyError(f"unknown policy {word!r} in {self.text!r}.{nearest(word, (*_WORDS, *_CALLS))} See: remat-kit policies")

    def call(self, word: str) -> Rule:
        names = [self.argument(word)]
        while self.mark(","):
            names.append(self.argument(word))
        if not self.mark(")"):
            raise self.error(f"expected ',' or ')' in {word}(…)")
        if word in tuple(Action):
            return Named(Action(word), tuple(_unquote(name) for name in names))
        if word not in ("smaller", "cheap"):
            raise PolicyError(
                f"unknown rule {word}(…) in {self.text!r}.{nearest(word + '(', _CALLS)} Rules: {', '.join(_CALLS)}…)"
            )
        if len(names) > 1:
            raise PolicyError(f"{word}(…) in {self.text!r} takes one number, not {len(names)}.")
        return Smaller(self.size(names[0])) if word == "smaller" else Cheap(self.number(names[0]))

    def argument(self, word: str) -> str:
        name = self.take(_NAME)
        if name is None:
            raise self.error(f"expected {'a number' if word in ('smaller', 'cheap') else 'a name'} in {word}(…)")
        return name

    def size(self, text: str) -> int:
        try:
            return parse_bytes(text)
        except BudgetError as error:
            raise PolicyError(f"smaller({text}): {error}") from None

    def number(self, text: str) -> int:
        if not text.isdecimal() or len(text) > 9:
            raise PolicyError(f"cheap({text}): expected a whole number of FLOPs per byte, like cheap(8).")
        return int(text)

    def mark(self, mark: str) -> bool:
        self.skip_blanks()
        found = self.text.startswith(mark, self.position)
        self.position += len(mark) * found
        return found

    def take(self, pattern: re.Pattern[str]) -> str | None:
        self.skip_blanks()
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[0]

    def skip_blanks(self) -> None:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1

    def at_end(self) -> bool:
        self.skip_blanks()
        return self.position == len(self.text)

    def error(self, expected: str) -> PolicyError:
        rest = self.text[self.position :]
        return PolicyError(
            f"{self.text!r}: {expected}, found {rest[:20]!r}." if rest else f"{self.text!r}: {expected}, found the end."
        )


def _unquote(word: str) -> str:
    if not word.startswith('"'):
        return word
    try:
        return json.loads(word)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{word} is not a quoted name: {error.msg}; inside quotes, write \\n for a line break.") from None
