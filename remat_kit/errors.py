"""The errors that remat-kit raises, all under one root.

Every leaf also subclasses the builtin that a caller would expect, so `except ValueError` keeps working. A message says what was
given, what is allowed and what to do; `nearest` words the near miss. Exit codes of the CLI: bad input is 2, a row that could
not be measured is 1.
"""

import difflib
from collections.abc import Iterable


class RematKitError(Exception):
    """Root of every error that remat-kit raises on purpose."""


class PolicyError(RematKitError, ValueError):
    """A policy or plan text, or a name in it, that means nothing here."""


class TargetError(RematKitError, ValueError):
    """A target that is unknown, malformed, or lacks what the step asks for."""


class StepError(RematKitError, ValueError):
    """A step factory, its options, or the step it returned breaks the step contract."""


class FactoryError(StepError):
    """The user's step factory raised an error of its own; the message carries its last own frame."""


class BudgetError(RematKitError, ValueError):
    """A memory budget that is malformed or out of range."""


class CompileError(RematKitError, RuntimeError):
    """The target's compiler, or the worker that runs it, failed on a valid question."""


class ApplyError(RematKitError, ValueError):
    """A wrapping that can't be applied as asked: static arguments or module patterns that fit nothing."""


class RematWarning(UserWarning):
    """A wrapping that works but does not do what was probably meant; the message gives the reason."""


class IdleRuleWarning(RematWarning):
    """A rule of a policy that keeps nothing: no value has its name, or the backward pass never reads the values that have it."""


class ForwardModeError(RematKitError, TypeError):
    """Forward-mode differentiation of what has a reverse-mode derivative only."""


class DumpError(RematKitError, ValueError):
    """A compiler's dump that is missing, cut off, or disagrees with the compiler's own totals."""


def nearest(given: str, allowed: Iterable[str], *, likeness: float = 0.6) -> str:
    """Words the near miss of a mistyped word.

    Args:
        given: What the user wrote.
        allowed: The words that would have been right.
        likeness: How near one has to be, from 0 to 1 = the same (`difflib`).

    Returns:
        `" Did you mean 'x'?"` with a leading space, or the empty string when nothing is near.

    Example:
        >>> nearest("ful", ["full", "none"])
        " Did you mean 'full'?"
    """
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""
