"""No child outlives its parent, whatever ends it; who is stopped says how to go on, and going on changes nothing.

In real processes. What differs between signals is tried on a parent, a child and a worker without torch, which are
started as `training.compare`, a run and its data loader's worker are; then comparisons are stopped as users start them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.conftest import DIGITS, ROOT, clean_env, losses
from training import compare
from training.loop.run import how_to_go_on
from training.system import disk, processes
from training.tasks import image

MARK = "ATTNRES_TEST_MARK"  # in the environment of everything that a test starts
SECONDS = 120  # of waiting for what must happen; the machine may be busy

CHILD = """
import os, sys, time
from training.system import processes
processes.end_with_parent()
if os.fork() == 0:  # as a data loader does
    processes.end_worker_with_parent(0)
    open(sys.argv[1] + ".worker", "w").close()
    time.sleep(600)
with processes.stoppable(lambda: "child"):
    open(sys.argv[1], "w").close()
    time.sleep(600)
"""
PARENT = f"""
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from training.system import processes
path, how = sys.argv[1:]
with processes.stoppable(lambda: "results are in X"), ThreadPoolExecutor(1) as pool, processes.children_end_here():
    done = pool.submit(processes.run, [sys.executable, "-c", {CHILD!r}, path])
    while not (Path(path).exists() and Path(path + ".worker").exists()):
        time.sleep(0.02)
    print("started", flush=True)
    if how == "error":
        raise OSError("no space left")
    while how == "print":
        time.sleep(0.1)
        print("a line", flush=True)
    done.result()
"""


@pytest.fixture
def alive() -> Iterator[Callable[[], list[str]]]:
    """The command lines of the living processes that this test has started, down to the last grandchild."""
    mark = f"{MARK}={uuid.uuid4().hex}".encode()
    os.environb[MARK.encode()] = mark.partition(b"=")[2]

    def find() -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                pass
        return found

    yield lambda: list(find().values())
    del os.environ[MARK]
    for pid in find():  # of a test that failed
        os.kill(pid, signal.SIGKILL)


def eventually(holds: Callable[[], object], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


def ignoring(*signals: signal.Signals) -> Callable[[], None]:
    """For `preexec_fn`: what a shell does before it starts a command in the background, or `nohup`."""

    def ignore() -> None:
        for signum in signals:
            signal.signal(signum, signal.SIG_IGN)

    return ignore


def start(command: list[Any], **options: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=clean_env(), text=True, **pipes)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("ignored", [(), (signal.SIGINT,)], ids=["foreground", "background"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_children_end_with_a_parent_that_a_signal_ends(
    signum: signal.Signals, ignored: tuple[signal.Signals, ...], tmp_path: Path, alive: Callable[[], list[str]]
) -> None:
    parent = start(["-c", PARENT, tmp_path / "child", "wait"], preexec_fn=ignoring(*ignored))
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    assert len(alive()) == 3
    parent.send_signal(signum)
    _, errors = parent.communicate(timeout=SECONDS)
    assert eventually(lambda: not alive(), 5), alive()
    if signum == signal.SIGKILL:
        assert parent.returncode == -signal.SIGKILL
    else:
        assert parent.returncode == 128 + signum
        assert f"stopped by {signum.name}: results are in X" in errors and "Traceback" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["error", "print"])
def test_children_end_with_a_parent_that_fails_or_whose_output_nobody_reads(
    how: str, tmp_path: Path, alive: Callable[[], list[str]]
) -> None:
    parent = start(["-c", PARENT, tmp_path / "child", how])
    assert parent.stdout is not None and parent.stderr is not None
    assert parent.stdout.readline() == "started\n"
    parent.stdout.close()  # as `| head -1` does
    errors = parent.stderr.read()
    parent.wait(SECONDS)
    assert eventually(lambda: not alive(), 5), alive()
    if how == "error":
        assert parent.returncode == 1 and "OSError: no space left" in errors
    else:
        assert parent.returncode == 128 + signal.SIGPIPE
        assert "stopped by SIGPIPE: results are in X" in errors and "Traceback" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nohup_keeps_what_it_started(tmp_path: Path, alive: Callable[[], list[str]]) -> None:
    parent = start(["-c", PARENT, tmp_path / "child", "wait"], preexec_fn=ignoring(signal.SIGHUP))
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    parent.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert parent.poll() is None and len(alive()) == 3
    parent.terminate()
    parent.communicate(timeout=SECONDS)
    assert eventually(lambda: not alive(), 5), alive()


def test_no_child_starts_outside_of_a_block_that_ends_it() -> None:
    with pytest.raises(RuntimeError, match="no child starts outside of children_end_here"):
        processes.run([sys.executable, "-c", ""])
    with processes.children_end_here():
        assert processes.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3


########################################################################################################################
# Comparisons and runs
########################################################################################################################
def table(tmp_path: Path, **fields: Any) -> list[Any]:
    """The arguments of a comparison of one variant, with a data loader's worker."""
    base = {**DIGITS, "data": {**DIGITS["data"], "workers": 1}, "schedule": {"steps": 60}, "profile": False}
    base |= {"log_interval": 1, "checkpoint_interval": 5}
    content = {"name": "tiny", "base": base, "variants": {"standard": {}}, "seeds": [0, 1], "speed_rounds": 0}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump({**content, **fields}))
    return ["--config", str(tmp_path / "table.yaml"), "--output_dir", str(tmp_path / "out")]


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_comparison_that_a_scheduler_interrupts_goes_on_to_the_same_results(
    tmp_path: Path, alive: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started in the background, where SIGINT is ignored; one of two runs is complete, the other one is training."""
    trained: list[str] = []

    def here(item: compare.Run) -> tuple[float, str | None]:
        trained.append(item.label)
        image.train(item.config)
        return 0.0, None

    monkeypatch.setattr(compare, "_run_process", here)
    assert compare.main([*table(tmp_path, seeds=[0]), "--jobs", "1"]) == 0
    for lock in disk._locks.values():  # this process has done with the folders
        lock.close()
    disk._locks.clear()
    arguments = table(tmp_path)
    second = compare.plan(*compare.load(arguments))[1]
    process = start(["-m", "training.compare", *arguments], preexec_fn=ignoring(signal.SIGINT))
    assert eventually(lambda: steps_of(second.folder) >= 9)
    assert len(alive()) >= 3  # with the worker
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert eventually(lambda: not alive(), 5), alive()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert f"stopped by SIGINT: 1 of 2 runs are complete, in {tmp_path / 'out'}. The same command goes on" in errors
    assert "stopped by SIGTERM: the run is in" in (second.folder / "log.txt").read_text()
    assert 9 <= steps_of(second.folder) < 60

    trained.clear()
    assert compare.main([*arguments, "--jobs", "1"]) == 0
    assert trained == [second.label]
    interrupted, second.config.output_dir = second.folder, str(tmp_path / "whole")
    image.train(second.config)
    assert losses(interrupted) == losses(tmp_path / "whole")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, alive: Callable[[], list[str]]) -> None:
    """The launcher, the comparison, its run, the worker: none of them can be told by the one that is killed."""
    endless = [*table(tmp_path, seeds=[0]), "--base.schedule.steps", "100000"]
    run = compare.plan(*compare.load(endless))[0]
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]
    log = (tmp_path / "log").open("w+")
    command = [*launch, "-m", "training.compare", *endless]
    process = start(command, stdout=log, stderr=log)
    assert eventually(lambda: steps_of(run.folder) >= 1), (tmp_path / "log").read_text()
    assert len(alive()) >= 4
    process.kill()
    process.wait()
    assert eventually(lambda: not alive(), 30), alive()
    text = (tmp_path / "log").read_text()
    assert f"stopped by SIGTERM: 0 of 1 runs are complete, in {tmp_path / 'out'}" in text


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_run_says_how_it_goes_on(resume: str, digits: Any) -> None:
    config = digits({"resume": resume})
    assert "from the start: it has no checkpoint" in how_to_go_on(config)
    (Path(config.output_dir) / "checkpoints" / "step_00000005").mkdir(parents=True)
    text = how_to_go_on(config)
    assert f"the run is in {config.output_dir}" in text and "its last checkpoint, step_00000005" in text
    assert ("resume: auto" in text) == (resume == "none")
