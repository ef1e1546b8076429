"""`python -m train.launch --processes 2 -- --model gpt2_small …`: starts several processes of one run and watches them.

Each process gets its log in the run's folder; lines for people, which process 0 tells, are shown as well. When one dies or falls
silent, the launcher says which, at which step and how to go on, ends the others, and exits with 4; the runtime's own abort text
stays in the logs. SIGTERM and Ctrl-C are passed on, and every process saves and ends. For several machines start
`python -m train --coordinator HOST:PORT --num-processes N --process-id I` on each of them.
"""

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tyro

from remat_kit.errors import RematKitError
from train.cli import Arguments, read_arguments
from train.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_PROCESS_DIED, ConfigError
from train.folder import BEATS_FOLDER, CHECKPOINTS_FOLDER, LOGS_FOLDER, choose_folder
from train.heartbeat import SILENCE_S, read_beat

SEPARATOR = "--"
POLL_S = 0.1
# What the others get to end by themselves, before they are killed.
GRACE_S = 5.0
# After SIGTERM, to write a checkpoint.
STOP_S = 300.0
# Deaths that others follow from; a runtime that lost its peer ends otherwise.
_FIRST_CAUSES = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV, EXIT_BAD_INPUT, EXIT_DIVERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Start several processes of one run on this machine; what follows -- goes to python -m train.

    Attributes:
        processes: How many.
        port: Of process 0; 0 = a free one.
    """

    processes: int = 2
    port: int = 0


@dataclass(frozen=True, slots=True)
class Child:
    """A process and where it writes.

    Attributes:
        number: Its process id in the run.
        process: The running program.
        log: Its log.
    """

    number: int
    process: "subprocess.Popen[str]"
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that ended badly, or fell silent.

    Attributes:
        child: Which.
        what: How, for people.
        code: Its exit code, None = silent.
    """

    child: Child
    what: str
    code: int | None


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    given = list(sys.argv[1:] if args is None else args)
    at = given.index(SEPARATOR) if SEPARATOR in given else len(given)
    try:
        config = tyro.cli(LaunchConfig, prog="python -m train.launch", args=given[:at])
        passed = given[at + 1 :]
        if config.processes < 1:
            raise ConfigError(f"--processes {config.processes}: it must be at least 1.")
        folder, passed = _fix_folder(read_arguments(passed), passed)
        return launch(config, folder, passed)
    except RematKitError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT


def _fix_folder(arguments: Arguments, passed: list[str]) -> tuple[Path, list[str]]:
    """The run's folder, which all processes must be told."""
    folder = choose_folder(arguments.config, arguments.start.resume)
    named = arguments.start.resume is not None or arguments.config.run.dir is not None
    return folder, passed if named else [*passed, "--dir", str(folder)]


def launch(config: LaunchConfig, folder: Path, passed: Sequence[str]) -> int:
    """Starts the processes and watches them to their end.

    Args:
        config: How many.
        folder: Of the run.
        passed: Arguments of each.

    Returns:
        0; 4 when a process died; its own exit code when its input was bad or its loss diverged.
    """
    logs, beats = folder / LOGS_FOLDER, folder / BEATS_FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    for old in beats.glob("*.json"):
        old.unlink()
    coordinator = f"127.0.0.1:{config.port or _free_port()}"
    with _children(config, coordinator, logs, passed) as children, _forwarded_signals(children) as stopped:
        death = _watch(children, folder, stopped)
        if death is None:
            return 0
        if death.code in (EXIT_BAD_INPUT, EXIT_DIVERGED):
            sys.stderr.write(death.child.log.read_text(encoding="utf-8", errors="replace"))
            return death.code
        sys.stderr.write(_report(death, folder, config))
        return EXIT_PROCESS_DIED


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _children(config: LaunchConfig, coordinator: str, logs: Path, passed: Sequence[str]) -> Iterator[list[Child]]:
    """The processes; those that still run at the end are ended."""
    with contextlib.ExitStack() as files:
        children = []
        for number in range(config.processes):
            log = logs / f"process-{number}.log"
            file = files.enter_context(log.open("w", encoding="utf-8"))
            command = [sys.executable, "-m", "train", *passed, "--coordinator", coordinator]
            command += ["--num-processes", str(config.processes), "--process-id", str(number)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)
            assert process.stdout is not None
            shown = sys.stdout if number == 0 else None
            threading.Thread(target=_copy, args=(process.stdout, file, shown), daemon=True).start()
            children.append(Child(number, process, log))
        try:
            yield children
        finally:
            _end(children)


def _copy(source: IO[str], log: IO[str], shown: IO[str] | None) -> None:
    for line in source:
        with contextlib.suppress(ValueError):  # the log was closed: the process was killed
            log.write(line)
            log.flush()
        if shown is not None:
            shown.write(line)
            shown.flush()


@contextlib.contextmanager
def _forwarded_signals(children: Sequence[Child]) -> Iterator[list[float]]:
    """Passes SIGTERM and SIGINT on as SIGTERM; gives a list of when that was."""
    stopped: list[float] = []

    def forward(*_: object) -> None:
        stopped.append(time.monotonic())
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(children: Sequence[Child], folder: Path, stopped: list[float]) -> Death | None:
    """Waits until all processes ended well, or one did not."""
    while True:
        codes = {child.number: child.process.poll() for child in children}
        if all(code == 0 for code in codes.values()):
            return None
        dead = [child for child in children if codes[child.number] not in (None, 0)]
        if dead:
            time.sleep(POLL_S)  # others that died of it, or that it died of, are seen too
            return _first_cause(dead)
        silent = None if stopped else _silent(children, folder)
        if silent is not None:
            return silent
        if stopped and time.monotonic() - stopped[0] > STOP_S:
            child = next(child for child in children if codes[child.number] is None)
            return Death(child=child, what=f"did not end within {STOP_S:.0f} s of SIGTERM", code=None)
        time.sleep(POLL_S)


def _first_cause(dead: Sequence[Child]) -> Death:
    order = {code: place for place, code in enumerate(_FIRST_CAUSES)}
    child = min(dead, key=lambda child: order.get(child.process.returncode, len(order)))
    code = child.process.returncode
    what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Death(child=child, what=what, code=code)


def _silent(children: Sequence[Child], folder: Path) -> Death | None:
    for child in children:
        beat = read_beat(folder, child.number)
        if beat is not None and child.process.poll() is None and time.time() - beat.time_s > SILENCE_S:
            return Death(child=child, what=f"has been silent for {time.time() - beat.time_s:.0f} s", code=None)
    return None


def _end(children: Sequence[Child]) -> None:
    """Ends what still runs: a process that lost its peer waits in a collective, so it can't save."""
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _report(death: Death, folder: Path, config: LaunchConfig) -> str:
    beat = read_beat(folder, death.child.number)
    where = "before its first step" if beat is None else f"at step {beat.step}"
    steps = [int(path.name.removeprefix("step_")) for path in (folder / CHECKPOINTS_FOLDER).glob("step_*") if path.suffix == ""]
    kept = f"the newest checkpoint is of step {max(steps)}" if steps else "there is no checkpoint yet"
    again = shlex.join(["python", "-m", "train.launch", "--processes", str(config.processes), "--", "--resume", str(folder)])
    return f"process {death.child.number} {death.what} {where}; {kept}. Its log: {death.child.log}\nGo on with: {again}\n"


if __name__ == "__main__":
    sys.exit(main())
