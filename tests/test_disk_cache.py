"""The kernel cache on disk: what is stored comes back, what is damaged does not, and nothing fails a run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from attn3.backends.hopper import disk_cache
from attn3.backends.hopper.disk_cache import DiskCache

KEY = "forward bf16 d128 causal"
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX owners and modes")


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "kernels")


def put(cache, key=KEY, content=b"object"):
    cache.store(key, lambda path: path.write_bytes(content) and None)


def get(cache, key=KEY):
    return cache.lookup(key, Path.read_bytes)


def files(cache, suffix):
    return sorted(path for path in cache.folder.iterdir() if path.suffix == suffix)


def test_round_trip(cache):
    assert get(cache) is None
    put(cache)
    assert get(cache) == b"object"
    assert get(cache, "another key") is None
    put(cache, content=b"newer")
    assert get(cache) == b"newer"
    assert len(files(cache, ".o")) == len(files(cache, ".json")) == 1
    assert json.loads(files(cache, ".json")[0].read_text())["key"] == KEY


@posix
def test_only_the_owner_may_read(cache):
    put(cache)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "record"])
def test_a_damaged_entry_never_reaches_the_loader(cache, damage, caplog):
    put(cache)
    entry, record = files(cache, ".o")[0], files(cache, ".json")[0]
    if damage == "record":
        record.write_text("{")
    else:
        entry.write_bytes({"truncated": b"obj", "changed": b"objecT", "empty": b""}[damage])
    loaded = []
    assert cache.lookup(KEY, loaded.append) is None
    assert not loaded and not files(cache, ".o") and "unusable entry" in caplog.text
    put(cache)
    assert get(cache) == b"object"


@pytest.mark.parametrize("missing", [".o", ".json"])
def test_half_an_entry_is_a_miss(cache, missing):
    put(cache)
    files(cache, missing)[0].unlink()
    assert get(cache) is None


def test_an_entry_that_does_not_load_is_removed(cache):
    put(cache)

    def load(path):
        raise RuntimeError("wrong architecture")

    assert cache.lookup(KEY, load) is None
    assert not files(cache, ".o")


def test_a_writer_that_fails_leaves_nothing(cache, caplog):
    def write(path):
        path.write_bytes(b"half")
        raise RuntimeError("the exporter gave up")

    with caplog.at_level(logging.DEBUG, logger="attn3"):
        cache.store(KEY, write)
    assert get(cache) is None and not list(cache.folder.iterdir())
    assert "the exporter gave up" in caplog.text


@pytest.mark.parametrize("call", ["mkstemp", "replace", "mkdir"])
def test_a_disk_that_takes_nothing_does_not_fail_a_run(cache, call, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    target = {"mkstemp": disk_cache.tempfile, "replace": os, "mkdir": Path}[call]
    monkeypatch.setattr(target, call, refuse)
    put(cache)
    with cache.lock(KEY):
        pass
    monkeypatch.undo()
    assert get(cache) is None
    assert not cache.folder.exists() or not files(cache, ".o")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "kernels")
    put(cache)
    with cache.lock(KEY):
        assert get(cache) is None
    assert cache.info().entries == cache.clear().entries == 0


@posix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_others_can_write_to_is_not_used(cache, mode, caplog):
    put(cache)
    cache.folder.chmod(mode)
    loaded = []
    assert cache.lookup(KEY, loaded.append) is None and not loaded
    put(cache, "second")
    assert len(files(cache, ".o")) == 1
    assert caplog.text.count("can be written to by others") == 1  # said once, not per call


@posix
def test_a_folder_of_another_user_is_not_used(cache, monkeypatch, caplog):
    put(cache)
    monkeypatch.setattr(os, "getuid", lambda: cache.folder.stat().st_uid + 1)
    assert get(cache) is None
    assert "belongs to user" in caplog.text


def test_an_exception_inside_the_lock_is_the_callers(cache):
    with pytest.raises(KeyError):
        with cache.lock(KEY):
            raise KeyError("from the body")
    with cache.lock(KEY):
        pass


def test_a_lock_held_too_long_is_not_waited_for(cache, monkeypatch):
    monkeypatch.setattr(disk_cache, "LOCK_SECONDS", 0.05)
    with cache.lock(KEY):
        entered = False
        with cache.lock(KEY):
            entered = True
    assert entered


def test_info_and_clear(cache):
    assert cache.info() == disk_cache.Info(cache.folder, 0, 0)
    put(cache), put(cache, "second", b"x" * 1000)
    with cache.lock(KEY):
        pass
    (cache.folder / "tmp-left-over.o").write_bytes(b"x")
    (cache.folder / "notes.txt").write_text("not ours")
    held = cache.info()
    assert held.entries == 2 and held.bytes > 1006
    assert cache.clear() == held
    assert cache.info().entries == 0 and [path.name for path in cache.folder.iterdir()] == ["notes.txt"]


def test_the_settings_decide(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN3_CACHE_DIR", str(tmp_path))
    assert disk_cache.default().folder == tmp_path / "kernels"
    monkeypatch.setenv("ATTN3_NO_CACHE", "1")
    assert disk_cache.default() is None


def _compete(folder, start, results):
    """Every process wants the same entries; a content names its own key, so that a mix-up shows."""
    cache = DiskCache(folder)
    start.wait()
    compiled = 0
    for turn in range(30):
        key = f"kernel {turn % 5}"
        content = key.encode() * 2000
        with cache.lock(key):
            got = get(cache, key)
            if got is None:
                compiled += 1
                put(cache, key, content)
        unlocked = get(cache, key)
        if turn % 10 == 9:
            put(cache, key, content)  # writers without the lock must not hurt readers
        if got not in (None, content) or unlocked not in (None, content):
            results.put("mixed up")
            return
    results.put(compiled)


def test_many_processes(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_compete, args=(tmp_path / "kernels", start, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    start.set()
    counts = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert "mixed up" not in counts
    cache = DiskCache(tmp_path / "kernels")
    assert [get(cache, f"kernel {n}") for n in range(5)] == [f"kernel {n}".encode() * 2000 for n in range(5)]
    assert sum(counts) >= 5
