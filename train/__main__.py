"""`python -m train`."""

import logging
import sys
import warnings

from remat_kit.errors import RematKitError, RematWarning
from train.cli import read_arguments
from train.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, DivergedError, TrainWarning

_PLAIN_FORMAT = warnings.formatwarning


def main(args: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    warnings.formatwarning = _as_a_line
    try:
        arguments = read_arguments(sys.argv[1:] if args is None else args)
        # JAX is loaded once the arguments are known to make sense.
        from train.devices import start_devices
        from train.run import train

        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells every file it writes
        train(arguments.config, start_devices(arguments.config), resume=arguments.start.resume, tell=_tell)
    except DivergedError as error:
        sys.stderr.write(f"diverged: {error}\n")
        return EXIT_DIVERGED
    except (RematKitError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


def _as_a_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Warnings meant for people without the place in our code; others as Python writes them."""
    if issubclass(category, (TrainWarning, RematWarning)):
        return f"warning: {message}\n"
    return _PLAIN_FORMAT(message, category, filename, lineno, line)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
