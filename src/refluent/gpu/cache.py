"""Compiled kernels on disk: one object file an entry, found by the digest of everything that made it.

An entry is three files: KEY.o (host code with the device code inside), KEY.ptx (what the emulator runs; absent for a
real device) and, written last, KEY.json: its facts and the others' SHA-256. Nothing is unpickled or imported. The
folder and the files belong to the user alone; whatever does not is not read. Several processes may share the folder:
files appear by renaming, and a lock keeps two of them from compiling the same entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path

from refluent import gpu

LIMIT = 512 << 20  # bytes that a folder holds at most
_FORMAT = 1
_SUFFIXES = (".json", ".ptx", ".o")  # in the order in which an entry is deleted


@dataclass(frozen=True)
class Artifact:
    """A compiled host function: its object file, and the PTX of its kernels if the emulator is to run them."""

    code: bytes
    ptx: str = ""


@dataclass(frozen=True)
class Entry:
    """What is known of an entry without reading it. size in bytes, used in seconds since 1970."""

    key: str
    name: str
    size: int
    used: float


class UnsafeError(OSError):
    """The folder, or a file in it, could have been written by somebody else."""


class Cache:
    """The entries in a folder, `limit` bytes at most; the least recently used ones make room for new ones."""

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder, self.limit = folder, limit

    def path(self, key: str) -> Path:
        """The entry's object file."""
        return self.folder / f"{key}.o"

    def load(self, key: str) -> Artifact | None:
        """The entry, now the most recently used; None if there is none. One that is damaged is deleted."""
        record = self.folder / f"{key}.json"
        try:
            self._check_folder()
            facts = json.loads(_read(record))
            code, ptx = _read(self.path(key)), _read(self.folder / f"{key}.ptx") if facts["ptx"] else b""
            if facts["format"] != _FORMAT or facts["sha256"] != _digest(code, ptx):
                raise ValueError("checksum")
            os.utime(record)
            return Artifact(code, ptx.decode())
        except FileNotFoundError:
            return None
        except UnsafeError as error:
            _warn(f"it is not read: {error}")
        except (ValueError, KeyError, TypeError):  # JSON, checksum, encoding
            self._delete(key)
        except OSError as error:
            _warn(f"it could not be read: {error}")
        return None

    def save(self, key: str, artifact: Artifact, name: str) -> None:
        """Add or replace an entry; a full disk or a folder without permission costs a warning, no more."""
        ptx = artifact.ptx.encode()
        facts = {"format": _FORMAT, "name": name, "ptx": bool(ptx), "sha256": _digest(artifact.code, ptx)}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            self._write(f"{key}.o", artifact.code)
            if ptx:
                self._write(f"{key}.ptx", ptx)
            self._write(f"{key}.json", json.dumps(facts).encode())
            self._evict(keep=key)
        except OSError as error:
            _warn(f"nothing was saved: {error}")

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process at a time, and freed if that one dies; not at all where the folder cannot be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            handle = os.open(self.folder / f"lock-{key[:2]}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def entries(self) -> list[Entry]:
        """All of them, the most recently used first."""
        found = []
        for record in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                name = str(json.loads(_read(record))["name"])
                paths = [record.with_suffix(suffix) for suffix in _SUFFIXES]
                size = sum(path.stat().st_size for path in paths if path.exists())
                found.append(Entry(record.stem, name, size, record.stat().st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Delete every entry, and what interrupted processes left; returns the bytes that were freed."""
        freed = 0
        for path in self.folder.glob("*"):
            if path.suffix in (*_SUFFIXES, ".new"):
                with contextlib.suppress(FileNotFoundError):
                    size = path.lstat().st_size
                    path.unlink()
                    freed += size
        return freed

    def _check_folder(self) -> None:
        _check_private(self.folder, os.lstat(self.folder))

    def _write(self, name: str, content: bytes) -> None:
        """All of the file or none of it."""
        handle, temporary = tempfile.mkstemp(suffix=".new", dir=self.folder)  # made with mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.folder / name)
        except BaseException:
            os.unlink(temporary)
            raise

    def _delete(self, key: str) -> None:
        for suffix in _SUFFIXES:
            with contextlib.suppress(OSError):
                (self.folder / f"{key}{suffix}").unlink()

    def _evict(self, keep: str) -> None:
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        for entry in reversed(entries):
            if total <= self.limit:
                return
            if entry.key != keep:
                self._delete(entry.key)
                total -= entry.size


def default_folder() -> Path:
    """Where the XDG base directory specification puts what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "refluent" / "kernels"


_active: Cache | None = Cache(default_folder())


def active() -> Cache | None:
    """The cache that compiled kernels go to, None if they go to none."""
    return _active


def use(cache: Cache | None) -> Cache | None:
    """Keep compiled kernels there from now on, None: in memory alone. Returns what was in use before."""
    global _active
    before, _active = _active, cache
    return before


def sources_changed() -> bool:
    """Whether a source has been edited since this process began to import them: its code may be neither old nor new."""
    now = time.time()
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "mods")
    return any(gpu.IMPORTED < path.stat().st_mtime <= now for folder in folders for path in folder.rglob("*.py"))


def key_of(facts: dict[str, object]) -> str:
    """The name of the entry that these facts, our own sources and this machine's tools make."""
    everything = {**facts, "made by": _made_by()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@once
def _made_by() -> list[str]:
    """The sources of the kernels and of their host code, the compiler, and the processor that the host code is for."""
    from importlib.metadata import version

    gpu_sources, mods_sources = (_sources(Path(__file__).parents[1] / name) for name in ("gpu", "mods"))
    # torch derives the gradients of mods
    tools = [version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")]
    return [gpu_sources, mods_sources, *tools, _processor()]


def _sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _processor() -> str:
    """Its features; a home folder may be shared by machines that differ in them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(line.encode()).hexdigest()
    return ""


def _digest(code: bytes, ptx: bytes) -> str:
    return hashlib.sha256(len(code).to_bytes(8, "little") + code + ptx).hexdigest()


def _read(path: Path) -> bytes:
    """The file, if it is a regular one of ours that nobody else may write or read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeError(f"{path} is a symbolic link") from error
        raise
    with os.fdopen(handle, "rb") as file:
        _check_private(path, os.fstat(handle))
        return file.read()


def _check_private(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeError(f"{path} is a symbolic link")
    if status.st_uid != os.geteuid():
        raise UnsafeError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        raise UnsafeError(f"{path} has mode {stat.S_IMODE(status.st_mode):o}; others must have no access to it")


@once
def _warn(problem: str) -> None:
    """Once for each problem."""
    warnings.warn(f"the cache of compiled kernels: {problem}", RuntimeWarning, stacklevel=3)
