"""What JAX's own errors mean for a run: a step that is too large for its device, and compiler options that are none.

In: an error of the compiler or of a step. Out: a `RematKitError` that says what to do; any other error passes as it is.
"""

import contextlib
import re
from collections.abc import Iterator

import jax

from remat_kit import RematKitError
from train.build import Built
from train.errors import ConfigError, TooLargeError

_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|[Rr]an out of memory")
_BAD_OPTION = re.compile(r"No such compile option: '[^']*'|While setting option \w+.*|Failed to parse '[^']*' into flag \w+")


@contextlib.contextmanager
def explained(built: Built) -> Iterator[None]:
    """Compiles and runs a step inside; says what its errors mean.

    Args:
        built: The step.

    Raises:
        ConfigError: The compiler doesn't take an option of `--xla`.
        TooLargeError: The step needs more memory than there is.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        meant = _meaning(str(error), built)
        if meant is None:
            raise
        raise meant from error


def _meaning(message: str, built: Built) -> RematKitError | None:
    if built.xla and (found := _BAD_OPTION.search(message)):
        return ConfigError(f"--xla {' '.join('='.join(pair) for pair in built.xla)}: {found[0]}.")
    if _NO_MEMORY.search(message):
        first = message.strip().splitlines()[0]
        return TooLargeError(
            f"the step does not fit into the memory: {first}\n{built.planning} finds the fastest plan that fits, for --plan; "
            "--accumulate splits the batch, --mesh spreads the state."
        )
    return None
