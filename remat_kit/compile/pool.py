"""The parent's side of a worker process: one request out, one reply back, as JSON lines over pipes. No JAX.

A compiler that crashes, hangs or eats the machine's memory takes the worker with it, not the caller: the request fails with
`CompileError`, and the next one starts a fresh worker. The worker is a session of its own, so that Ctrl-C reaches only the
caller, who ends the whole group. What compilers print goes to a bounded tail, shown when a worker dies.
"""

import collections
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from remat_kit import errors
from remat_kit.errors import CompileError, RematKitError
from remat_kit.units import format_seconds

_TAIL_LINES = 20
_LINE_CHARACTERS = 400
_LAST_WORDS_S = 5.0
_BEAT_S = 1.0
"""How long a wait may be in one piece: a Ctrl-C just before it begins is noticed when it ends."""

_ERRORS = {name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, RematKitError)}


class WorkerTraceback(Exception):  # noqa: N818 (it is the cause of an error, and carries text only)
    """Where an error was raised in the worker: the `__cause__` of the error that is raised here."""


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    scratch: str
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_TAIL_LINES))
    listener: threading.Thread | None = None
    received: bytes = b""


class Worker:
    """A worker process that is started by the first request and reused until it dies.

    Args:
        handler: `module:function` that answers requests in the worker; None = the measurements of `remat_kit.verbs`.

    Example:
        with Worker() as worker:
            reply = worker.ask({"policy": "full", …}, timeout_s=600)
    """

    def __init__(self, *, handler: str | None = None) -> None:
        self._arguments = () if handler is None else (handler,)
        self._running: _Running | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker process, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            _end(running)

    def ask(self, request: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Asks one question.

        Args:
            request: JSON data.
            timeout_s: Most seconds to wait, a fresh worker's start included; None = no limit.

        Returns:
            The handler's answer, JSON data.

        Raises:
            CompileError: The worker died, hung past the timeout, or its handler raised an error that is not ours.
            RematKitError: What the handler raised, by its class; the `__cause__` is the worker's traceback.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self._running is None:
                self._running = _start(self._arguments)
            reply = _exchange(self._running, request, deadline_s)
        except TimeoutError:
            self.close()
            assert timeout_s is not None
            raise CompileError(
                f"no result after {format_seconds(timeout_s)} (--timeout): the worker process was ended. Allow more time, or "
                "compile for fewer layers or devices."
            ) from None
        except (BrokenPipeError, EOFError):
            raise CompileError(self._obituary()) from None
        except BaseException:  # Ctrl-C among them: half an exchange is no state to go on from
            self.close()
            raise
        if "error" in reply:
            raise _rebuilt(reply["error"])
        return reply["answer"]

    def _obituary(self) -> str:
        running, self._running = self._running, None
        assert running is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(timeout=_LAST_WORDS_S)
        code = running.process.poll()
        _end(running)
        words = "\n".join(running.tail) or "(it printed nothing)"
        return f"the worker process {_cause_of_death(code)}. Its last words:\n{words}"


def _start(arguments: tuple[str, ...]) -> _Running:
    scratch = tempfile.mkdtemp(prefix="remat-kit-")
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "remat_kit.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": search_path, "TMPDIR": scratch},  # its dumps go when it goes
        start_new_session=True,
    )
    running = _Running(process=process, scratch=scratch)
    assert process.stderr is not None
    running.listener = threading.Thread(target=_listen, args=(process.stderr, running.tail), daemon=True)
    running.listener.start()
    return running


def _listen(stream: IO[bytes], tail: collections.deque[str]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under us
        while chunk := stream.readline(_LINE_CHARACTERS):
            text = chunk.decode(errors="replace").rstrip()
            if text:
                tail.append(text)


def _exchange(running: _Running, request: dict[str, Any], deadline_s: float | None) -> dict[str, Any]:
    requests, replies = running.process.stdin, running.process.stdout
    assert requests is not None and replies is not None
    data = memoryview(json.dumps(request).encode() + b"\n")
    while data:  # an unbuffered pipe may take a part
        data = data[requests.write(data) :]
    while b"\n" not in running.received:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        ready, _, _ = select.select([replies], [], [], _BEAT_S if left_s is None else min(left_s, _BEAT_S))
        if not ready:
            continue
        chunk = os.read(replies.fileno(), 1 << 16)
        if not chunk:
            raise EOFError
        running.received += chunk
    line, _, running.received = running.received.partition(b"\n")
    return json.loads(line)


def _end(running: _Running) -> None:
    process = running.process
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if running.listener is not None:
        running.listener.join(timeout=_LAST_WORDS_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    shutil.rmtree(running.scratch, ignore_errors=True)


def _cause_of_death(code: int | None) -> str:
    if code is None:
        return "closed its pipes"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", most often because this machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _rebuilt(error: dict[str, str]) -> RematKitError:
    known = _ERRORS.get(error["type"])
    found = CompileError(f"{error['type']}: {error['message']}") if known is None else known(error["message"])
    found.__cause__ = WorkerTraceback(error["traceback"])
    return found
