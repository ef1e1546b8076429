"""The worker process under everything that compilers do to it: answers, errors by class, crashes, hangs, noise and Ctrl-C."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from remat_kit.compile.pool import Worker, WorkerTraceback
from remat_kit.errors import CompileError, FactoryError, TargetError

HANDLER = """
import ctypes, os, signal, subprocess, sys, time
from remat_kit.errors import FactoryError, TargetError

def handle(request):
    match request["do"]:
        case "echo":
            return {"pid": os.getpid(), "got": request, "cwd": os.getcwd(), "tmp": os.environ["TMPDIR"]}
        case "modules":
            return {"modules": sorted(sys.modules)}
        case "noise":
            print("printed", flush=True)
            os.write(1, b"written by a compiler\\n")
            os.write(2, b"x" * 300_000)
            return {"read": sys.stdin.read()}
        case "target":
            raise TargetError("no such thing")
        case "factory":
            raise FactoryError("the factory raised")
        case "foreign":
            raise KeyError("lost")
        case "exit":
            sys.exit("enough")
        case "segv":
            os.write(2, b"about to crash\\n")
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "quit":
            os._exit(3)
        case "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(request["file"], "w") as file:
                file.write(f"{os.getpid()} {child.pid}\\n")
            time.sleep(600)
"""


@pytest.fixture(name="handler")
def _handler(tmp_path, monkeypatch):
    (tmp_path / "pool_handler.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pool_handler:handle"


@pytest.fixture(name="worker")
def _worker(handler):
    with Worker(handler=handler) as worker:
        yield worker


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_one_process_answers_every_request(worker):
    request = {"do": "echo", "text": 'ä\n"', "list": [1, None, 2.5]}
    first, second = worker.ask(request), worker.ask({"do": "echo", "long": "x" * 500_000})
    assert first["got"] == request and len(second["got"]["long"]) == 500_000
    assert first["pid"] == second["pid"] != os.getpid()
    assert first["cwd"] == os.getcwd()


def test_the_parents_side_imports_no_jax():
    code = "import sys, remat_kit.compile.pool, remat_kit.compile.cache, remat_kit.worker; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_noise_on_the_streams_does_not_reach_the_protocol(worker, capfd):
    assert worker.ask({"do": "noise"}) == {"read": ""}
    assert worker.ask({"do": "noise"}) == {"read": ""}
    assert capfd.readouterr() == ("", "")


def test_errors_come_back_as_what_they_are(worker):
    pid = worker.ask({"do": "echo"})["pid"]
    with pytest.raises(TargetError, match=r"^no such thing$") as caught:
        worker.ask({"do": "target"})
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in handle" in str(caught.value.__cause__)
    with pytest.raises(FactoryError, match=r"^the factory raised$"):
        worker.ask({"do": "factory"})
    with pytest.raises(CompileError, match=r"^KeyError: 'lost'$"):
        worker.ask({"do": "foreign"})
    with pytest.raises(CompileError, match=r"^SystemExit: enough$"):
        worker.ask({"do": "exit"})
    assert worker.ask({"do": "echo"})["pid"] == pid


@pytest.mark.parametrize(
    ("crash", "words"),
    [("segv", r"killed by SIGSEGV(.|\n)*about to crash"), ("abort", "killed by SIGABRT"), ("quit", "exit code 3")],
)
def test_a_crash_costs_one_request(worker, crash, words):
    before = worker.ask({"do": "echo"})
    with pytest.raises(CompileError, match=words):
        worker.ask({"do": crash})
    assert not os.path.exists(before["tmp"])
    assert worker.ask({"do": "echo"})["pid"] != before["pid"]


def test_a_handler_that_is_not_there_says_so():
    with Worker(handler="no_such_module_here:handle") as worker, pytest.raises(CompileError, match="No module named 'no_such"):
        worker.ask({})


def test_a_hang_is_ended_with_all_its_children(worker, tmp_path):
    worker.ask({"do": "echo"})
    started_s = time.monotonic()
    with pytest.raises(CompileError, match=r"no result after 1\.0 s \(--timeout\)"):
        worker.ask({"do": "hang", "file": str(tmp_path / "pids")}, timeout_s=1.0)
    assert time.monotonic() - started_s < 5
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert worker.ask({"do": "echo"})["got"] == {"do": "echo"}


def test_a_slow_answer_in_time_is_no_hang(worker):
    assert worker.ask({"do": "echo"}, timeout_s=30.0)["pid"]


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell that ran the tests in the background ignored it
from remat_kit.compile.pool import Worker
with Worker(handler="pool_handler:handle") as worker:
    worker.ask({"do": "hang", "file": sys.argv[1]})
"""


def start_parent(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(pids)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), seconds=30)
    return parent, pids.read_text().split()


@pytest.mark.usefixtures("handler")
def test_ctrl_c_ends_the_worker_and_the_caller(tmp_path):
    parent, pids = start_parent(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)
    _, words = parent.communicate(timeout=20)
    assert b"KeyboardInterrupt" in words
    assert parent.returncode != 0
    assert wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.usefixtures("handler")
def test_a_killed_caller_leaves_no_worker_behind(tmp_path):
    parent, (worker_pid, child_pid) = start_parent(tmp_path)
    parent.kill()
    parent.communicate(timeout=20)
    assert wait_until(lambda: not is_alive(worker_pid))
    os.kill(int(child_pid), signal.SIGKILL)
