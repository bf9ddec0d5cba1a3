"""The kernel cache on disk: what is stored comes back, what is damaged does not, and nothing fails a run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn3.backends.hopper import compile, config, disk_cache, environment
from attn3.backends.hopper.config import BackwardFeatures, Features
from attn3.backends.hopper.config_fp8 import QuantizeFeatures
from attn3.backends.hopper.disk_cache import LIBRARY, DiskCache

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


def test_what_is_made_from_an_object_is_an_entry_of_its_own(cache):
    put(cache)
    assert cache.lookup(KEY, Path.read_bytes, LIBRARY) is None and get(cache) == b"object"
    cache.store(KEY, lambda path: path.write_bytes(b"linked") and None, LIBRARY)
    assert cache.lookup(KEY, Path.read_bytes, LIBRARY) == b"linked" and get(cache) == b"object"
    assert cache.info().entries == 1  # one kernel
    files(cache, LIBRARY)[0].write_bytes(b"linkeD")
    assert cache.lookup(KEY, Path.read_bytes, LIBRARY) is None and not files(cache, LIBRARY)
    assert get(cache) == b"object"
    assert cache.clear().entries == 1 and not list(cache.folder.iterdir())


DENSE = Features("bfloat16", 64, 64, lse=False)
PACKED = Features("bfloat16", 64, 64, packed=True, lse=False)
needs_dsl = pytest.mark.skipif(bool(environment.software_reasons()), reason="needs the `hopper` extra")
needs_linker = pytest.mark.skipif(environment.linker() is None, reason="needs a C compiler or a linker")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A cache with two kernels as a machine without a linker leaves them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN3_CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        patch.setattr(environment, "linker", lambda: None)
        for features in (DENSE, PACKED):
            compile._load_or_compile(features)
        cache = disk_cache.default()
    assert len(files(cache, ".o")) == 2 and not files(cache, LIBRARY)
    return cache


@pytest.fixture
def kernels(objects, tmp_path, monkeypatch):
    """A copy of it that nothing can be compiled into."""
    shutil.copytree(objects.folder, tmp_path / "kernels")
    monkeypatch.setenv("ATTN3_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "build", _refuse)
    return disk_cache.default()


def _refuse(*args, **kwargs):
    raise AssertionError("not to be used here")


def signature(kernel) -> str:
    """What a kernel takes, from its complaint about a call that it does not."""
    with pytest.raises(TypeError) as caught:
        kernel(*[0] * 20)
    return str(caught.value)


def is_dense(kernel) -> bool:
    return "mQ: Tensor([n0, n1, n2, 64], bfloat16)" in signature(kernel)


@needs_dsl
@needs_linker
@pytest.mark.compile
def test_every_kind_of_kernel_is_kept_as_a_library(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN3_CACHE_DIR", str(tmp_path))
    kinds = BackwardFeatures("bfloat16", 64, 64), QuantizeFeatures("bfloat16", 64, True, True, False)
    for features in kinds:
        compile._load_or_compile(features)
    assert len(files(disk_cache.default(), LIBRARY)) == 2
    monkeypatch.setattr(compile, "build", _refuse)
    monkeypatch.setattr(compile, "load", _refuse)  # the DSL's loader
    for features in kinds:
        compile._load_or_compile(features)


@needs_dsl
@needs_linker
@pytest.mark.compile
def test_an_object_is_linked_once(kernels, monkeypatch):
    monkeypatch.setattr(compile, "load", _refuse)
    assert is_dense(compile._load_or_compile(DENSE))
    assert not is_dense(compile._load_or_compile(PACKED))
    assert len(files(kernels, LIBRARY)) == 2
    monkeypatch.setattr(compile, "link", _refuse)
    dense, packed = compile._load_or_compile(DENSE), compile._load_or_compile(PACKED)
    assert is_dense(dense) and not is_dense(packed)  # the same symbols, side by side


@needs_dsl
@needs_linker
@pytest.mark.compile
def test_a_new_process_loads_a_kernel_without_the_dsl(kernels):
    compile._load_or_compile(DENSE)
    probe = f"""
import sys
from attn3.backends.hopper import compile, environment
from attn3.backends.hopper.config import BackwardFeatures, Features
from attn3.backends.hopper.config_fp8 import QuantizeFeatures
assert not environment.software_reasons()
print(compile.kernel({DENSE!r}))
assert "tvm_ffi" in sys.modules
print(sorted(name for name in sys.modules if name.partition(".")[0] == "cutlass"))
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[1] == "[]"


@needs_dsl
@pytest.mark.compile
def test_without_a_linker_the_dsl_loads_the_object(kernels, monkeypatch, caplog):
    monkeypatch.setattr(environment, "linker", lambda: None)
    monkeypatch.setattr(compile, "load_library", _refuse)
    assert is_dense(compile._load_or_compile(DENSE))
    assert not files(kernels, LIBRARY) and not caplog.text


@needs_dsl
@pytest.mark.compile
def test_a_linker_that_fails_leaves_it_to_the_dsl(kernels, monkeypatch, caplog):
    monkeypatch.setattr(environment, "linker", lambda: shutil.which("false"))
    with caplog.at_level(logging.DEBUG, logger="attn3"):
        assert is_dense(compile._load_or_compile(DENSE))
    assert not files(kernels, LIBRARY) and len(files(kernels, ".o")) == 2
    assert "did not keep" in caplog.text and "false" in caplog.text


@needs_dsl
@needs_linker
@pytest.mark.compile
@pytest.mark.parametrize("damage", ["changed", "not a library", "misses a symbol"])
def test_a_bad_library_is_linked_again(kernels, damage, monkeypatch, caplog):
    compile._load_or_compile(DENSE)
    (library,) = files(kernels, LIBRARY)
    good = library.read_bytes()
    bad = {
        "changed": good[:-1] + b"x",
        "not a library": b"text",
        "misses a symbol": good.replace(b"TVMFFIEnvGetStream", b"TVMFFIEnvGetStreaN"),
    }
    if damage == "changed":
        library.unlink()  # the old one stays mapped
        library.write_bytes(bad[damage])
    else:  # with a record that matches, as a library of another version would have
        key = compile.cache_key(DENSE, config.choose(DENSE).tile)
        kernels.store(key, lambda path: path.write_bytes(bad[damage]) and None, LIBRARY)
    monkeypatch.setattr(compile, "load", _refuse)
    assert is_dense(compile._load_or_compile(DENSE))
    assert "unusable entry" in caplog.text
    assert files(kernels, LIBRARY)[0].read_bytes() == good
    caplog.clear()
    assert is_dense(compile._load_or_compile(DENSE)) and not caplog.text


@needs_dsl
@pytest.mark.compile
def test_a_library_that_never_loads_leaves_it_to_the_dsl(kernels, monkeypatch):
    """As on a file system that nothing may be executed from."""
    monkeypatch.setattr(compile, "load_library", _refuse)
    assert is_dense(compile._load_or_compile(DENSE))
    assert not files(kernels, LIBRARY)


@needs_dsl
def test_the_runtime_is_the_one_that_the_dsl_takes(monkeypatch):
    from cutlass.cute.runtime import find_runtime_libraries

    assert str(environment.dsl_runtime()) in find_runtime_libraries(enable_tvm_ffi=True)


@pytest.mark.parametrize(("driver", "want"), [(None, "cu13"), (14, "cu13"), (13, "cu13"), (12, "cu12"), (11, None)])
def test_the_runtime_fits_the_driver(tmp_path, monkeypatch, driver, want):
    for flavor in ("cu12", "cu13", "cuda"):
        library = tmp_path / flavor / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(environment, "find_spec", lambda name: spec)
    monkeypatch.setattr(environment, "_driver_cuda_major", lambda: driver)
    found = environment.dsl_runtime.__wrapped__()
    assert (found and found.parts[-3]) == want
    monkeypatch.setenv("CUTE_DSL_LIBS", f"/other/libx.so{os.pathsep}/own/libcute_dsl_runtime.so")
    assert environment.dsl_runtime.__wrapped__() == Path("/own/libcute_dsl_runtime.so")
