"""`python -m train`."""

import logging
import sys

from remat_kit.errors import RematKitError
from train.cli import read_arguments
from train.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, DivergedError


def main(args: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
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
    except RematKitError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
