"""The worker process: `python -m remat_kit.worker [module:function]`. Started by `remat_kit.compile.pool`, not by people.

Requests come in on standard input and replies go out on standard output, one JSON object a line. Both streams are taken away
from everybody else first: compilers print, and a factory may read or print too; what they print goes to standard error. When the
caller goes away, so does this process, even from the middle of a compile.
"""

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any, TypeAlias

from remat_kit.compile.environment import prepare_environment

Handler: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

DEFAULT_HANDLER = "remat_kit.verbs.measure:answer"


def main(arguments: list[str]) -> int:
    """Answers requests until standard input ends.

    Args:
        arguments: Empty, or the `module:function` that answers instead of our own.

    Returns:
        Exit code.
    """
    requests, replies = _claim_streams()
    prepare_environment()
    handle = _load(arguments[0] if arguments else DEFAULT_HANDLER)
    waiting: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(requests, waiting), daemon=True).start()
    while True:
        reply = _answer(handle, json.loads(waiting.get()))
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _claim_streams() -> tuple[IO[bytes], IO[bytes]]:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _load(name: str) -> Handler:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _receive(requests: IO[bytes], waiting: "queue.Queue[bytes]") -> None:
    for line in requests:
        waiting.put(line)
    os._exit(0)  # the main thread may be inside a compile


def _answer(handle: Handler, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": handle(request)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it is, it is the caller's to judge)
        return {"error": {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
