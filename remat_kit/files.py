"""Files that are there whole or not at all, also when two processes write one or a write is broken off; roots of source files."""

import os
import sys
import tempfile
from pathlib import Path

PRIVATE_MODE = 0o600


def write_whole(path: Path, data: bytes, *, mode: int = PRIVATE_MODE) -> None:
    """Writes a file through a temporary one beside it, which takes its place in one step.

    Args:
        path: Where; its folder must exist.
        data: What.
        mode: Permissions.

    Raises:
        OSError: The folder can't be written to; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def default_mode() -> int:
    """Permissions that a file gets when a program just opens it: those that the process's umask leaves."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def source_roots() -> list[str]:
    """The current folder and Python's search path, deepest first: what the names of source files are relative to."""
    folders = {os.getcwd(), *(os.path.abspath(entry) for entry in sys.path if entry)}
    folders |= {os.path.realpath(folder) for folder in folders}
    return sorted((folder for folder in folders if folder != os.sep), key=lambda folder: (-len(folder), folder))
