"""Ends of processes: no child outlives its parent, and what was stopped says where its results lie.

- `stoppable` turns signals, and a closed pipe on stdout, into an orderly end with a message and exit code 128 + signal.
- `run` starts a child in a process group of its own; `children_end_here` ends all of them, however its block is left.
- `end_with_parent` is the child's side, for parents that are killed: the kernel tells it (Linux), or it looks.

Only the standard library: `end_with_parent` is called before the slow imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PARENT = "ATTNRES_PARENT"  # in the environment of our children: the process they end with
GRACE = 10.0  # seconds that a process has from SIGTERM to SIGKILL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1

_lock = threading.Lock()
_running: list[subprocess.Popen[Any]] = []
_open = False  # in a block of `children_end_here`, which is not being left: children may start
_ending = False  # children are being ended: further signals do not interrupt that


class Stopped(BaseException):
    """A signal arrived. Not an `Exception`: nothing on the way takes it for a failure of its own."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def stoppable(describe: Callable[[], str]) -> Iterator[None]:
    """Leave the block at SIGINT, SIGTERM, SIGHUP or a closed stdout, with a message and exit code 128 + signal.

    SIGINT counts also where it was ignored, as shells do for what they start in the background: schedulers send it.
    SIGHUP stays ignored where it was: that is what `nohup` is for.

    Args:
        describe: what is said on stderr: where the results lie and how to go on; nothing if it is empty.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others cannot have handlers
        for signum in _SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                handlers[signum] = signal.signal(signum, _stop)
    try:
        yield
        sys.stdout.flush()
    except Stopped as stopped:
        _ignore(handlers)
        raise _say_and_exit(stopped.signum, describe()) from None
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        _ignore(handlers)
        raise _say_and_exit(signal.SIGPIPE, describe()) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _stop(signum: int, frame: FrameType | None) -> None:
    if not _ending:
        raise Stopped(signum)


def _ignore(handlers: Mapping[int, Any]) -> None:
    for signum in handlers:
        signal.signal(signum, signal.SIG_IGN)


def _say_and_exit(signum: int, message: str) -> SystemExit:
    """Say it on stderr, or on stdout where nobody reads that: `accelerate launch`, once killed, forwards none of it."""
    for stream in (sys.stderr, sys.stdout):
        try:
            if message:
                print(f"\nstopped by {signal.Signals(signum).name}: {message}", file=stream, flush=True)
                message = ""
            stream.flush()
        except (OSError, ValueError):  # nobody reads it: Python would try again at exit, and change the exit code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return SystemExit(128 + signum)


def _stdout_is_closed() -> bool:
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file: a test's, a notebook's
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


########################################################################################################################
# Parents
########################################################################################################################
@contextlib.contextmanager
def children_end_here() -> Iterator[None]:
    """End what `run` has started, in whatever thread, before the block is left: by a return, an error or a signal."""
    global _ending, _open
    _open = True
    try:
        yield
    finally:
        _ending = True
        with _lock:
            _open = False
            children = list(_running)
        try:
            _end(children)
        finally:
            _ending = False


def run(command: Sequence[Any], env: Mapping[str, str] | None = None, **options: Any) -> int:
    """Run a command as a child that ends with this process; returns its exit code.

    Args:
        command: as of `subprocess.Popen`.
        env: the environment, of which a copy with `PARENT` in it is used.
        options: of `subprocess.Popen`.

    Raises:
        RuntimeError: no block of `children_end_here` is open, or it is being left.
    """
    environment = {**(os.environ if env is None else env), PARENT: str(os.getpid())}
    with _lock:
        if not _open:
            raise RuntimeError("no child starts outside of children_end_here, or while that is left")
        child: subprocess.Popen[Any] = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        _running.append(child)
    try:
        return child.wait()
    finally:
        _signal_group(child, signal.SIGKILL)  # what the child itself left behind
        with _lock:
            _running.remove(child)


def _end(children: Sequence[subprocess.Popen[Any]]) -> None:
    for child in children:
        child.send_signal(signal.SIGTERM)  # to the child alone: it ends its own
    deadline = time.monotonic() + GRACE
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[Any], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: no permission for what has ended
        os.killpg(child.pid, signum)


########################################################################################################################
# Children
########################################################################################################################
def end_with_parent() -> None:
    """End this process with its parent, if that is a comparison (`run`) or a launcher; a shell may go.

    It gets SIGTERM, so that it can say where its results lie, and SIGKILL if it does not end by that.
    """
    parent = os.getppid()
    asked = os.environ.pop(PARENT, None)  # not for what this process starts
    if asked is None and not is_launcher(command_of(parent)):
        return
    if asked is not None:
        parent = int(asked)
    _signal_at_death_of_parent(signal.SIGTERM)
    threading.Thread(target=_end_after, args=(parent,), daemon=True, name="end with parent").start()


def end_worker_with_parent(worker: int) -> None:
    """`worker_init_fn` of a `DataLoader`: the worker ends with the process that loads, and leaves signals to it.

    torch's own watchdog looks every five seconds, and not while a worker reads.
    """
    _signal_at_death_of_parent(signal.SIGKILL)
    for signum in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to workers, too
        signal.signal(signum, signal.SIG_IGN)


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty where it cannot be seen (Linux only)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def is_accelerate_launch(command: Sequence[str]) -> bool:
    return any("accelerate" in word for word in command[:3]) and "launch" in command


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of `accelerate launch` or `torchrun`."""
    names = ("torchrun", "torch.distributed.run")
    return is_accelerate_launch(command) or any(Path(word).name in names for word in command[:4])


def _signal_at_death_of_parent(signum: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _end_after(parent: int) -> None:
    """Also where the kernel does not tell, the parent was gone before it was asked, or SIGTERM is not enough."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3 * GRACE)  # more than it gives its own children
    os.kill(os.getpid(), signal.SIGKILL)
