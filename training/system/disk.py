"""Files on disk: written whole or not at all, hashed, flushed; folders that one process at a time writes into."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(value, indent=1))
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """The file's value; None if there is no such file, or it is damaged: what it says is then computed again."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError:
        return None


def sha256(path: Path) -> str:
    """The hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Ask the system to write a file, or a folder's list of names, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_locks: dict[Path, IO[str]] = {}  # open files, which hold their locks until the process ends


def lock_folder(run_dir: Path) -> None:
    """Keep other processes out of the folder: two would mix their metrics and overwrite each other's checkpoints."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir.resolve() / ".lock"
    if path in _locks:
        return
    file = path.open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise RuntimeError(
            f"another process is training into {run_dir}: wait for it, or choose another output_dir"
        ) from error
    _locks[path] = file
