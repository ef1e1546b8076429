"""What can go wrong in a run, as leaves of `RematKitError`, and the exit code of each.

Bad input is 2, as on remat-kit's command line, and so is a step that does not fit; a run that diverged is 3; a process that
died under `train.launch` is 4.
"""

from remat_kit.errors import RematKitError

EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_PROCESS_DIED = 4


class ConfigError(RematKitError, ValueError):
    """A key, a value or a combination of them that a run can't have."""


class DataError(RematKitError, ValueError):
    """Data that are missing, too few, or not what the step takes."""


class CheckpointError(RematKitError, RuntimeError):
    """A run folder or a checkpoint that can't be used as asked."""


class OtherModelError(CheckpointError):
    """A checkpoint whose state is not that of the model."""


class DivergedError(RematKitError, ArithmeticError):
    """A loss or a gradient that is not finite; the message says at which step and what to look at."""


class TooLargeError(RematKitError, MemoryError):
    """A step that needs more memory than its device has; the message has the command that finds a plan which fits."""


class TrainWarning(UserWarning):
    """Something that a run survives and a person should know: a damaged checkpoint, a state that was held twice."""
