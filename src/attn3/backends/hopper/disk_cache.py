"""Compiled kernels on disk: a folder of objects, shared by all processes of one user.

An entry is a pair of files named by the SHA-256 of its key: ``<name>.o``, the object, beside ``<name>.o.json``, the key in full
and the SHA-256 of the object. An object that does not match its record never reaches the loader. What is made from the object
and only saves time (``<name>.so``, the object linked) is a pair of its own.

What is promised:

- A cache never fails a run: what cannot be read is a miss, what cannot be written is not kept. Both are logged.
- Files appear whole: they are written under a temporary name and renamed. Any number of processes may read and write at once.
- Objects are code. The folder belongs to the user alone (mode 0700); one that others own or may write to is not used.

This module knows nothing about kernels or the DSL: the caller brings functions that load and write a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attn3 import settings

T = TypeVar("T")

OBJECT, LIBRARY = ".o", ".so"
LOCK_SECONDS = 120.0  # longer than any compilation here; whoever waits longer compiles by itself

_log = logging.getLogger("attn3")
_warned: set[str] = set()


@dataclass(frozen=True)
class Info:
    """What a cache holds (or, from ``clear``, what was removed)."""

    path: Path
    entries: int
    bytes: int


class DiskCache:
    """The entries in one folder. The folder is made when something is stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def lookup(self, key: str, load: Callable[[Path], T], suffix: str = OBJECT) -> T | None:
        """``load(path)`` of the entry, or None if there is none.

        An entry that is damaged, or that ``load`` raises on, is removed and counts as missing.
        """
        if not self._trusted():
            return None
        entry, record = self._paths(key, suffix)
        try:
            matches = _matches(entry, record)
            if not matches:  # perhaps it is being replaced at this moment
                time.sleep(0.02)
                matches = _matches(entry, record)
            if matches:
                return load(entry)
            reason = "its content does not match its record"
        except FileNotFoundError:
            return None  # also a half that is being written or removed by another process
        except Exception as error:  # whatever a loader raises about a bad object, the kernel can be compiled again
            reason = f"{type(error).__name__}: {error}"
        _log.warning("removed an unusable entry of the kernel cache, %s (%s)", entry, reason)
        for path in (record, entry):
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def store(self, key: str, write: Callable[[Path], None], suffix: str = OBJECT) -> None:
        """Keeps what ``write(path)`` puts at the path it is given. Never raises."""
        temporary: list[Path] = []
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusted():
                return
            entry, record = self._paths(key, suffix)
            new_entry, new_record = self._temporary(suffix, temporary), self._temporary(".json", temporary)
            write(new_entry)
            content = {"key": key, "sha256": _digest(new_entry), "bytes": new_entry.stat().st_size}
            new_record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            for path in (new_entry, new_record):
                path.chmod(0o600)
            # between the two renames a reader sees a pair that does not match, or half a pair: a miss, never a wrong object
            os.replace(new_entry, entry)
            os.replace(new_record, record)
        except Exception as error:
            _log.debug("did not keep a compiled kernel in %s (%s: %s)", self.folder, type(error).__name__, error)
        finally:
            for path in temporary:
                with contextlib.suppress(OSError):
                    path.unlink()

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Holds the entry's lock, so that one process compiles while the others wait; after two minutes they stop waiting.

        A lock that cannot be had (no rights, a file system without locks) is done without.
        """
        held = None
        try:
            import filelock

            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._trusted():
                held = filelock.FileLock(str(self._paths(key, ".lock")[0]), timeout=LOCK_SECONDS, mode=0o600)
                held.acquire()
        except Exception as error:
            held = None
            _log.debug("compiling without the lock of %s (%s: %s)", self.folder, type(error).__name__, error)
        try:
            yield
        finally:
            if held is not None:
                with contextlib.suppress(Exception):
                    held.release()

    def info(self) -> Info:
        """Entries and bytes, records included."""
        entries = size = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                size += path.stat().st_size
                entries += path.suffix == OBJECT and not path.name.startswith(_TEMPORARY)
        return Info(self.folder, entries, size)

    def clear(self) -> Info:
        """Removes all entries, left-over temporary files and unused locks; returns what was removed."""
        entries = size = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                bytes_of_file = path.stat().st_size
                path.unlink()
                size += bytes_of_file
                entries += path.suffix == OBJECT and not path.name.startswith(_TEMPORARY)
        return Info(self.folder, entries, size)

    def _paths(self, key: str, suffix: str) -> tuple[Path, Path]:
        name = hashlib.sha256(key.encode()).hexdigest() + suffix
        return self.folder / name, self.folder / f"{name}.json"

    def _temporary(self, suffix: str, made: list[Path]) -> Path:
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, suffix=suffix, dir=self.folder)
        os.close(handle)
        made.append(Path(name))
        return made[-1]

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if path.suffix in (OBJECT, LIBRARY, ".json", ".lock") and path.is_file()]
        except OSError:
            return []

    def _trusted(self) -> bool:
        """Is the folder there, ours, and writable by nobody else? (Windows has no such modes; its user folders are private.)"""
        try:
            status = self.folder.stat()
        except OSError:
            return False
        if not hasattr(os, "getuid"):
            return True
        if status.st_uid != os.getuid():
            reason = f"belongs to user {status.st_uid}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            reason = "can be written to by others"
        else:
            return True
        if str(self.folder) not in _warned:
            _warned.add(str(self.folder))
            advice = "make it yours, mode 0700, or set ATTN3_CACHE_DIR"
            _log.warning("the kernel cache %s is not used: it %s (%s)", self.folder, reason, advice)
        return False


_TEMPORARY = "tmp-"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _matches(entry: Path, record: Path) -> bool:
    return _digest(entry) == json.loads(record.read_text(encoding="utf-8"))["sha256"]


def default() -> DiskCache | None:
    """The user's cache of kernels, or None when the settings turn it off."""
    if not settings.disk_cache_enabled():
        return None
    return DiskCache(settings.cache_dir() / "kernels")
