"""The disk cache: private, whole or absent, bounded, shared by processes; stale code misses."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from refluent.gpu import cache
from refluent.gpu.cache import Artifact, Cache

KEY, OTHER = "a" * 64, "b" * 64
ARTIFACT = Artifact(b"\x7fELF" + bytes(range(256)) * 4, ".version 9.0 // é")


@pytest.fixture(autouse=True)
def fresh_warnings():
    cache._warn.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def store(tmp_path):
    return Cache(tmp_path / "refluent" / "kernels")


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


@pytest.mark.parametrize("artifact", [ARTIFACT, Artifact(b"object only")])
def test_what_was_saved_is_loaded(store, artifact):
    assert store.load(KEY) is None
    store.save(KEY, artifact, "a kernel")
    assert store.load(KEY) == artifact
    assert store.load(OTHER) is None
    assert files(store) == sorted(f"{KEY}.{end}" for end in ("json", "o", *(["ptx"] if artifact.ptx else [])))


def test_nobody_else_may_look(store):
    before = os.umask(0)
    try:
        store.save(KEY, ARTIFACT, "a kernel")
        with store.lock(KEY):
            pass
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("end", ["o", "ptx", "json"])
@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:9] + b"?" + raw[10:], lambda raw: b""])
def test_a_damaged_entry_is_dropped(store, end, damage):
    store.save(KEY, ARTIFACT, "a kernel")
    path = store.folder / f"{KEY}.{end}"
    path.write_bytes(damage(path.read_bytes()))
    assert store.load(KEY) is None
    assert files(store) == []
    store.save(KEY, ARTIFACT, "a kernel")
    assert store.load(KEY) == ARTIFACT


@pytest.mark.parametrize("end", ["o", "ptx"])
def test_an_entry_without_one_of_its_files(store, end):
    store.save(KEY, ARTIFACT, "a kernel")
    (store.folder / f"{KEY}.{end}").unlink()
    assert store.load(KEY) is None


def test_a_folder_open_to_others_is_not_read(store):
    store.save(KEY, ARTIFACT, "a kernel")
    store.folder.chmod(0o770)
    with pytest.warns(RuntimeWarning, match=r"it is not read: .* has mode 770; others must have no access"):
        assert store.load(KEY) is None
    with pytest.warns(RuntimeWarning, match="nothing was saved"):
        store.save(OTHER, ARTIFACT, "a kernel")
    store.folder.chmod(0o700)
    assert store.load(KEY) == ARTIFACT
    assert store.load(OTHER) is None


@pytest.mark.parametrize("end", ["o", "ptx", "json"])
def test_a_file_open_to_others_is_not_read(store, end):
    store.save(KEY, ARTIFACT, "a kernel")
    (store.folder / f"{KEY}.{end}").chmod(0o622)
    with pytest.warns(RuntimeWarning, match="has mode 622"):
        assert store.load(KEY) is None


@pytest.mark.parametrize("what", ["folder", "file"])
def test_links_are_not_followed(store, what, tmp_path):
    store.save(KEY, ARTIFACT, "a kernel")
    path = store.folder if what == "folder" else store.path(KEY)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    with pytest.warns(RuntimeWarning, match="is a symbolic link"):
        assert store.load(KEY) is None


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Cache(tmp_path / "file" / "kernels")
    with store.lock(KEY), pytest.warns(RuntimeWarning, match="nothing was saved"):
        store.save(KEY, ARTIFACT, "a kernel")
    with pytest.warns(RuntimeWarning, match="could not be read"):
        assert store.load(KEY) is None


def test_the_least_recently_used_make_room(tmp_path):
    store = Cache(tmp_path / "kernels", limit=3300)
    keys = [letter * 64 for letter in "abcd"]
    for age, key in enumerate(keys[:3]):
        store.save(key, Artifact(bytes(900)), key[0])
        os.utime(store.folder / f"{key}.json", (1000 + age, 1000 + age))
    assert store.load(keys[0]) is not None  # now the most recently used
    store.save(keys[3], Artifact(bytes(900)), "d")
    assert [entry.name for entry in store.entries()] == ["d", "a", "c"]
    assert sum(entry.size for entry in store.entries()) <= 3300
    assert store.load(keys[1]) is None
    store.save(OTHER, Artifact(bytes(9000)), "larger than the limit")  # is kept until the next one
    assert [entry.key for entry in store.entries()] == [OTHER]


def test_clearing(store):
    store.save(KEY, ARTIFACT, "one")
    store.save(OTHER, ARTIFACT, "two")
    (store.folder / "interrupted.new").write_bytes(bytes(10))
    size = sum(path.stat().st_size for path in store.folder.iterdir())
    assert store.clear() == size
    assert files(store) == []
    assert store.clear() == 0
    assert Cache(store.folder / "nowhere").clear() == 0
    assert Cache(store.folder / "nowhere").entries() == []


def test_a_write_that_fails_leaves_nothing(store, monkeypatch):
    store.save(KEY, ARTIFACT, "a kernel")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        store.save(OTHER, ARTIFACT, "a kernel")
    assert OTHER not in "".join(files(store))
    assert not [name for name in files(store) if name.endswith(".new")]
    assert store.load(KEY) == ARTIFACT


def compile_once(folder, log):
    store = Cache(Path(folder))
    with store.lock(KEY):
        if store.load(KEY) is None:
            with open(log, "a") as file:
                file.write("compiled\n")
            time.sleep(0.2)
            store.save(KEY, ARTIFACT, "a kernel")
    assert store.load(KEY) == ARTIFACT


def test_processes_compile_an_entry_once(store, tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")  # a fresh interpreter would import torch first
    workers = [context.Process(target=compile_once, args=(str(store.folder), str(log))) for _ in range(3)]
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "compiled\n"


def test_a_dead_process_frees_its_lock(store):
    store.folder.mkdir(mode=0o700, parents=True)
    code = f"""if True:
        import os; from pathlib import Path; from refluent.gpu.cache import Cache
        with Cache(Path({str(store.folder)!r})).lock({KEY!r}):
            os._exit(3)
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    start = time.monotonic()
    with store.lock(KEY):
        assert time.monotonic() - start < 5


class TestKeys:
    def test_facts_and_sources(self, monkeypatch):
        made_by = cache._made_by()
        key = cache.key_of({"head_dim": 64})
        assert key == cache.key_of({"head_dim": 64})
        assert key != cache.key_of({"head_dim": 128})
        for n in range(len(made_by)):
            changed = [*made_by[:n], "changed", *made_by[n + 1 :]]
            monkeypatch.setattr(cache, "_made_by", lambda changed=changed: changed)
            assert key != cache.key_of({"head_dim": 64})

    def test_every_source_counts(self, tmp_path):
        (tmp_path / "deep").mkdir()
        for name in ("a.py", "deep/b.py"):
            (tmp_path / name).write_text("x = 1\n")
        before = cache._sources(tmp_path)
        assert before == cache._sources(tmp_path)
        (tmp_path / "deep" / "b.py").write_text("x = 2\n")
        after = cache._sources(tmp_path)
        (tmp_path / "deep" / "b.py").rename(tmp_path / "deep" / "c.py")
        assert len({before, after, cache._sources(tmp_path)}) == 3

    def test_where(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.default_folder() == tmp_path / "refluent" / "kernels"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says: ignore
        assert cache.default_folder() == Path.home() / ".cache" / "refluent" / "kernels"


def test_facts_are_readable(store):
    store.save(KEY, ARTIFACT, "a kernel")
    facts = json.loads((store.folder / f"{KEY}.json").read_text())
    assert facts["name"] == "a kernel"
    (entry,) = store.entries()
    assert (entry.key, entry.name) == (KEY, "a kernel")
    assert abs(entry.used - time.time()) < 60
