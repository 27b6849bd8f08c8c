"""What is written to a run's folder: whole or not at all, with checksums, by one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, overload

from lightrl.redaction import redact_text

__all__ = [
    "DamagedError",
    "FolderLock",
    "StorageError",
    "append_lines",
    "atomic_folder",
    "atomic_write",
    "checkpoint_kind",
    "clean_leftovers",
    "finish_folder",
    "has_checksums",
    "link",
    "partial_folder",
    "read_records",
    "remove",
    "require_entries",
    "require_written",
    "same_data",
    "verify",
]

MANIFEST = "SHA256SUMS"
LOCK = ".lightrl.lock"
PARTIAL, OLD = ".lightrl.partial", ".lightrl.old"
"""Ends of the hidden names of what is half written, and of what is being replaced."""
BLOCK = 1 << 20


class StorageError(OSError):
    """Something could not be written; the message names the path, the cause and the way out."""


class DamagedError(ValueError):
    """A file or folder is not what was written; the message says why."""


# ---- whole or not at all ---------------------------------------------------------------------------------------------


class _Recording(io.FileIO):
    """Remembers why a write failed: `torch.save` reports it as an error of its own."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


@overload
def atomic_write(
    path: str | Path, mode: Literal["wb"] = "wb", *, checksum: bool = False
) -> contextlib.AbstractContextManager[IO[bytes]]: ...
@overload
def atomic_write(
    path: str | Path, mode: Literal["w"], *, checksum: bool = False
) -> contextlib.AbstractContextManager[IO[str]]: ...
@contextlib.contextmanager
def atomic_write(path: str | Path, mode: Literal["w", "wb"] = "wb", *, checksum: bool = False) -> Iterator[IO[Any]]:
    """Opens a file that appears under its name, whole and on the disk, when the block ends; not at all if it raises.

    It is written beside the target, since a rename is only atomic within one file system.

    Args:
        path: the file; folders above it are made, a file of that name is replaced.
        mode: "wb" or "w" (UTF-8).
        checksum: also write `PATH.sha256`, in the format of `sha256sum`, which `verify` reads.

    Raises:
        StorageError: the disk is full, the folder cannot be written to, or the like.
    """
    path = Path(path)
    partial = _partial(path)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _Recording(partial, "w")
    buffered = io.BufferedWriter(raw)
    file: IO[Any] = io.TextIOWrapper(buffered, encoding="utf-8", newline="\n") if mode == "w" else buffered
    try:
        try:
            yield file
        except Exception as error:
            if raw.error is not None:  # whoever wrote says that writing failed, but not why
                raise raw.error from error
            raise
        with _told(path):
            file.flush()
            os.fsync(raw.fileno())
            file.close()
            if checksum:
                _publish_with_checksum(partial, path, _sha256(partial))
            else:
                os.replace(partial, path)
            _sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, StorageError) or error is not raw.error:
            raise
        with _told(path):
            raise
    finally:
        with contextlib.suppress(OSError, ValueError):
            file.close()
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _publish_with_checksum(partial: Path, path: Path, digest: str) -> None:
    """At every moment the file that bears the name has its sum in the list: first both, then the new one alone."""
    sums = [digest, *(_read_sums(path) if path.exists() else [])]
    _write_sums(path, sums)
    os.replace(partial, path)
    _sync_folder(path.parent)
    _write_sums(path, sums[:1])


def _sums_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _write_sums(path: Path, sums: list[str]) -> None:
    with atomic_write(_sums_path(path), "w") as file:
        file.writelines(f"{digest}  {path.name}\n" for digest in sums)


def _read_sums(path: Path) -> list[str]:
    if not _sums_path(path).is_file():
        return []
    return [line.split()[0] for line in _sums_path(path).read_text(errors="replace").splitlines() if line.strip()]


def append_lines(path: str | Path, lines: Sequence[str]) -> None:
    """Appends lines to a file, all of them or none.

    What a run that died left of a last line is cut away first, so that no reader meets half a record.

    Raises:
        StorageError: the disk is full, the folder cannot be written to, or the like.
    """
    path = Path(path)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            end = _end_of_lines(file)
            file.truncate(end)
            try:
                data = memoryview("".join(f"{line}\n" for line in lines).encode())
                while data:
                    data = data[file.write(data) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file that LightRL wrote, one a line.

    Raises:
        ValueError: there is no such file, or a line is no object; the message names both.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): it belongs to what lies beside it.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            record = error
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}:{number} is not what was written there ({str(record)[:80]}): the file is damaged."
            )
        records.append(record)
    return records


def _end_of_lines(file: io.FileIO) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(end - BLOCK, 0)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path`, with a checksum of each file, when the block ends.

    Args:
        path: the folder; `finish_folder` says what becomes of what stands there. Of a link the folder that it leads to.

    Raises:
        ValueError: no folder can be called that, or it is the root of all.
        StorageError: the disk is full, the folder cannot be written to, or the like.
    """
    path = _resolved(path)
    partial = _partial(path / "new") if _stays(path) else _partial(path)
    try:
        with _told(path):
            partial.mkdir(parents=True)
            yield partial
            finish_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _resolved(path: str | Path) -> Path:
    try:
        found = Path(path).resolve()
    except (ValueError, RuntimeError, OSError) as error:  # NUL; links in a circle
        raise ValueError(f"{str(path)!r}: no folder can be called that ({error}): give another.") from error
    if found == found.parent:
        raise ValueError(f"{str(path)!r} is the root of all folders: give a folder below it.")
    return found


def _stays(path: Path) -> bool:
    """A folder that another cannot take the place of: where a disk is mounted, or one that this process stands in."""
    if not path.is_dir():
        return False
    with contextlib.suppress(FileNotFoundError):  # somebody removed what this process stood in
        if Path.cwd().is_relative_to(path):
            return True
    return path.is_mount()


def partial_folder(path: str | Path) -> Path:
    """Where several processes together write the folder `path`, until one of them calls `finish_folder`."""
    path = Path(path)
    return path.with_name(f".{path.name}.shared{PARTIAL}")


def finish_folder(partial: Path, path: Path) -> None:
    """Brings a written folder to the disk, lists its files' checksums in it, and gives it its name.

    What this function put there before is replaced as a whole; files that others put beside it stay. A folder that it
    did not write, that a disk is mounted at, or that this process stands in is filled file by file, the list last.

    Args:
        partial: the folder that was written, beside `path`, or inside one that stays.
        path: the name it gets.

    Raises:
        StorageError: the disk is full, the folder cannot be written to, or the like.
    """
    with _told(path):
        files = sorted(p.relative_to(partial) for p in partial.rglob("*") if p.is_file())
        for name in files:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())
        with atomic_write(partial / MANIFEST, "w") as manifest:
            manifest.writelines(f"{_sha256(partial / name)}  {name}\n" for name in files)
        stays = _stays(path.resolve())
        if stays or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
            before = {
                Path(name) for name, _ in _manifest(path) if (path / name).resolve().is_relative_to(path.resolve())
            }
            for name in [*files, Path(MANIFEST)]:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial / name, path / name)
            for name in before - set(files):
                if (path / name).is_file():
                    (path / name).unlink()
            _sync_folder(path)
            return
        if path.is_dir():
            _link_others(path, partial)
        _swap(partial, path)


def _link_others(path: Path, partial: Path) -> None:
    """Files of a written folder that are not in its list also belong into the one that replaces it."""
    listed = {name for name, _ in _manifest(path)} | {MANIFEST}
    for file in [p for p in path.rglob("*") if p.is_file()]:
        name = file.relative_to(path)
        if str(name) not in listed and not (partial / name).exists():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, partial / name)
            except OSError:  # a file system without links
                shutil.copy2(file, partial / name)


def _manifest(folder: Path) -> list[tuple[str, str]]:
    """(name, SHA-256) of each file in a folder's list; nothing without one."""
    if not (folder / MANIFEST).is_file():
        return []
    lines = (folder / MANIFEST).read_text(errors="replace").splitlines()
    return [(name, digest) for digest, _, name in (line.partition("  ") for line in lines)]


def link(source: Path, target: Path) -> None:
    """Makes `target` a second name of a written checkpoint, without a copy if the file system has hard links.

    `target` is replaced, and whole at every moment if it is a file. A folder gets links of its files.

    Args:
        source: File with `SOURCE.sha256`, or a folder with its list of checksums.
        target: New name, on the same file system.

    Raises:
        StorageError: The disk is full, or the folder is read-only.
    """
    partial = _partial(target)
    try:
        with _told(target):
            if source.is_dir():
                shutil.copytree(source, partial, copy_function=_link_or_copy)
                _swap(partial, target)
            else:
                _link_or_copy(source, partial)
                _publish_with_checksum(partial, target, _read_sums(source)[0])
                _sync_folder(target.parent)
    finally:
        remove(partial)


def same_data(path: Path, other: Path) -> bool:
    """Whether two checkpoints are links to one another, so that damage to one damages both."""
    first, second = (each / MANIFEST if each.is_dir() else each for each in (path, other))
    return first.exists() and second.exists() and first.samefile(second)


def has_checksums(path: Path) -> bool:
    """Whether this module wrote a checkpoint, so that it is whole now."""
    return (path / MANIFEST).is_file() if path.is_dir() else bool(_read_sums(path))


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        shutil.copyfile(source, target)  # a file system without links
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _swap(partial: Path, path: Path) -> None:
    """Gives a written folder its name; a run that dies in between is repaired by `clean_leftovers`."""
    old = path.with_name(f".{path.name}{OLD}")
    remove(old)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    _sync_folder(path.parent)
    remove(old)


def remove(path: str | Path) -> None:
    """Removes a file or a folder with its checksums; nothing happens where there is none."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    _sums_path(path).unlink(missing_ok=True)


def clean_leftovers(folder: str | Path, *, other_hosts: bool = True) -> list[Path]:
    """Removes what runs that died left half written in a folder; the caller holds its lock, and has not yet written.

    Only names of the form that this module gives count, and of what earlier versions left what cannot be another's.

    Args:
        folder: looked at without the folders below it.
        other_hosts: also what runs of hosts of other names left (a container has a new one at each start), none of
            which can be alive. Where the lock is not known to hold, such a one may be.

    Returns:
        what was removed, or brought back: a folder that was being replaced.
    """
    folder, found = Path(folder), []
    if not folder.is_dir():
        return []
    for path in sorted(folder.glob(".*")):
        replaced = _replaced_name(path)
        if replaced:
            target = path.with_name(replaced)
            if not target.exists():
                os.rename(path, target)
            else:
                remove(path)
        elif _is_partial(path) and not _writer_lives(path, other_hosts):
            remove(path)
        else:
            continue
        found.append(path)
    return found


def _replaced_name(path: Path) -> str:
    """Of what was being replaced, the name it had; "" where it is something else."""
    if path.name.endswith(OLD):
        return path.name[1 : -len(OLD)]
    earlier = path.name.endswith(".old") and path.is_dir() and (path / MANIFEST).is_file()
    return path.name[1 : -len(".old")] if earlier else ""


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}{PARTIAL}")


WRITER = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<pid>\d+)(?P<own>\.lightrl)?\.partial")


def _is_partial(path: Path) -> bool:
    if path.name.endswith((f".shared{PARTIAL}", ".ckpt.shared.partial")):
        return path.is_dir()
    found = WRITER.fullmatch(path.name)
    if found is None:
        return False
    return bool(found["own"]) or found["host"] == _host() or found["name"].endswith((".ckpt", ".ckpt.sha256"))


def _writer_lives(path: Path, other_hosts: bool) -> bool:
    found = WRITER.fullmatch(path.name)
    if found is None:  # of several processes, whose lock the caller holds
        return False
    if found["host"] != _host():
        return not other_hosts
    return int(found["pid"]) != os.getpid() and _alive(int(found["pid"]))


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    """When a process that lives began, as the system counts; None where there is none, or no /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else rest[18]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tells which path could not be written, why, and what helps."""
    try:
        yield
    except StorageError:
        raise
    except Exception as raised:
        error = _os_error(raised)
        if error is None:
            raise
        folder = next(p for p in path.absolute().parents if p.exists())
        if not folder.is_dir():
            raise StorageError(
                f"{str(path)!r} cannot be written: {str(folder)!r} is a file and must be a folder. Move the file away, "
                "or write to another folder."
            ) from raised
        free = shutil.disk_usage(folder).free / 2**20
        kept = " What stood there before is untouched." if path.exists() else ""
        raise StorageError(
            f"{str(path)!r} cannot be written: {error.strerror or error}.{kept} "
            f"{free:,.0f} MiB are free in {str(folder)!r}; free some, check its permissions and limits, or write to "
            "another folder."
        ) from raised


def _os_error(error: Exception) -> OSError | None:
    """What the system said; safetensors, as libraries in Rust do, tells it in the text of an error of its own."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


# ---- checksums -------------------------------------------------------------------------------------------------------


DATA = {".pt", ".bin", ".distcp", ".safetensors", ".metadata", "latest"}
"""Endings and names of what a checkpoint is read from; notes and the like may be put beside it."""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def verify(path: str | Path) -> None:
    """Compares a file with `PATH.sha256`, or a folder's files with the `SHA256SUMS` inside.

    A file without sums (of an earlier version, or copied alone) is looked through with the sums that a zip archive,
    which `torch.save` writes, has of its own; a folder without them is taken as it is.

    Raises:
        DamagedError: there is nothing at `path`, or not what was written; the message is a clause without the path.
    """
    path = Path(path)
    if path.is_dir():
        _verify_folder(path)
        return
    if not path.exists():
        raise DamagedError("it does not exist")
    if path.stat().st_size == 0:
        raise DamagedError("it is empty (0 bytes)")
    sums = _read_sums(path)
    if sums:
        if _sha256(path) not in sums:
            raise DamagedError(f"its bytes are not those that were written ({_sums_path(path).name} says so)")
        return
    if not zipfile.is_zipfile(path):
        raise DamagedError("it is damaged, cut off, or no checkpoint at all (not a file that torch.save writes)")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # of damaged archives nearly anything: RuntimeError, zlib.error, UnicodeDecodeError
        raise DamagedError(f"its bytes are damaged ({error})") from error
    if broken is not None:
        raise DamagedError(f"its bytes are damaged (in {broken})")


def _verify_folder(path: Path) -> None:
    listed = _manifest(path)
    for name, digest in listed:
        if not name:
            raise DamagedError(f"its list {MANIFEST} is damaged")
        if not (path / name).is_file():
            raise DamagedError(f"{name} is missing")
        if _sha256(path / name) != digest:
            raise DamagedError(f"the bytes of {name} are not those that were written ({MANIFEST} says so)")
    if not (path / MANIFEST).is_file():
        return
    if not listed:
        raise DamagedError(f"its list {MANIFEST} is empty")
    data = (p for p in path.rglob("*") if p.is_file() and (p.suffix in DATA or p.name in DATA))
    others = {str(p.relative_to(path)) for p in data if _list_above(p) == path / MANIFEST}
    for name in sorted(others - {name for name, _ in listed}):
        raise DamagedError(f"{MANIFEST} lacks {name}: one of them was changed (a file of yours is to lie elsewhere)")


def _list_above(file: Path) -> Path:
    """The nearest list of checksums: an export may lie in the folder of another."""
    return next(folder / MANIFEST for folder in file.parents if (folder / MANIFEST).is_file())


def require_written(folder: Path, what: str) -> None:
    """Refuses a folder, such as an exported model, whose files are not those in its list, before it is read.

    Folders without a list, as others write them, pass. A process looks once at what it reads several times.

    Args:
        folder: to look at.
        what: the message calls it so.

    Raises:
        ValueError: a file was changed, or is missing.
    """
    if not (folder / MANIFEST).is_file():
        return
    files = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    state = frozenset((path, of.st_ino, of.st_size, of.st_mtime_ns) for path, of in files)
    if state in _WRITTEN:
        return
    try:
        verify(folder)
    except DamagedError as error:
        raise ValueError(
            f"{what}: {error}. Copy or export it again; where you changed it on purpose, remove its {MANIFEST}."
        ) from error
    _WRITTEN.add(state)


_WRITTEN: set[frozenset[tuple[Path, int, int, int]]] = set()


def require_entries(state: Any, kinds: Mapping[str, type | tuple[type, ...]], where: str = "") -> None:
    """Looks whether a part of a checkpoint can be what was written.

    Args:
        state: the part.
        kinds: name of an entry -> what it must be an instance of.
        where: name of the part, empty for the whole.

    Raises:
        DamagedError: it is no dictionary, or an entry is missing or of another type.
    """
    changed = "it was changed by hand, or written by something else"
    if not isinstance(state, Mapping):
        raise DamagedError(f"{where or 'what'} the checkpoint holds is a {type(state).__name__}: {changed}")
    for name, kind in kinds.items():
        place = f"{where}.{name}".strip(".")
        if name not in state:
            raise DamagedError(f"the checkpoint has no {place}: {changed}")
        if not isinstance(state[name], kind):
            raise DamagedError(f"the checkpoint's {place} is {str(state[name])[:60]!r}: {changed}")


def checkpoint_kind(path: str | Path) -> str:
    """What wrote the checkpoint at `path`: `plain`, `fsdp2` or `zero`.

    Raises:
        ValueError: there is no checkpoint, or one that was not finished.
    """
    path = Path(path)
    if path.is_file():
        return "plain"
    if not path.is_dir():
        raise ValueError(f"checkpoint={str(path)!r} does not exist: give the .ckpt file or folder that a run wrote.")
    if (path / "checkpoint").is_dir() or list(path.glob("*_model_states.pt")):
        if path.name == "checkpoint" and not (path / "checkpoint").is_dir():
            raise ValueError(f"checkpoint={str(path)!r} is the inside of a ZeRO checkpoint: give {str(path.parent)!r}.")
        return _finished("zero", path, ["latest"])
    if list(path.glob("*.distcp")):
        return _finished("fsdp2", path, [".metadata", "meta.pt"])
    inside = sorted(str(p) for p in path.glob("*.ckpt"))
    found = (
        f"it holds {', '.join(inside)}: give one of these" if inside else "give what `trainer.save_checkpoint` wrote"
    )
    raise ValueError(f"checkpoint={str(path)!r} is a folder, but no checkpoint; {found}.")


def _finished(kind: str, path: Path, last: Sequence[str]) -> str:
    missing = [name for name in last if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"checkpoint={str(path)!r} was not finished ({', '.join(missing)} is missing, which is written last): the "
            "run ended while it saved. Take an earlier one."
        )
    return kind


# ---- one run at a time -----------------------------------------------------------------------------------------------


class FolderLock:
    """Holds a folder for a run of this process; the lock goes with the process, however it ends.

    The system forgets a lock when anything in its process closes the file, as a backup of the folder does. So what the
    file says counts, too: where it names a living process of this host, the folder is in use.

    Args:
        folder: made if it is missing. `.lightrl.lock` in it says who holds it.

    Attributes:
        ended: the run is over, so that another of this process may take the folder.
        sure: the file system has locks, so that no other host's run is in the folder.

    Raises:
        ValueError: another process that is alive holds it, or another run of this one; the message names it.
        StorageError: the folder cannot be written to.
    """

    _held: ClassVar[list[FolderLock]] = []

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOCK
        self.ended = False
        self.sure = True
        self._pid = os.getpid()
        with _told(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for other in self._of_this_process():  # before it is opened: to close a file gives up all locks on it
                if not other.ended:
                    raise self._in_use(f"another run of this process ({self._pid})")
                other.release()
            self._file = self.path.open("a+", encoding="utf-8")
        try:
            # A lock of the process, which processes that it starts do not inherit.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = self._holder()
            self._file.close()
            raise self._in_use(holder) from None
        except OSError as error:
            self.sure = False
            print(f"Cannot lock {folder} ({error}): make sure that no other run writes there.", file=sys.stderr)
        if self._named_lives():
            holder = self._holder()
            self._file.close()
            raise self._in_use(holder)
        own = {
            **{"pid": os.getpid(), "host": socket.gethostname(), "command": redact_text(" ".join(sys.argv))},
            **{"started": _started(os.getpid()), "file": os.fstat(self._file.fileno()).st_ino},
        }
        self._file.truncate(0)
        self._file.write(json.dumps(own) + "\n")
        self._file.flush()
        self._held.append(self)

    def end_run(self) -> None:
        """Says that the run is over: the lock stays until another run of this process wants the folder."""
        self.ended = True

    def _of_this_process(self) -> list[FolderLock]:
        """Locks of the same file, whatever the folder is called."""
        if not self.path.exists():
            return []
        file = self.path.stat()
        return [other for other in self._held if other.locks(file)]

    def locks(self, file: os.stat_result) -> bool:
        """Whether it is this file that this process locks by it; a process that was forked has none of its locks."""
        return self._pid == os.getpid() and os.path.samestat(os.fstat(self._file.fileno()), file)

    def _in_use(self, holder: str) -> ValueError:
        return ValueError(
            f"{str(self.path.parent)!r} is in use by {holder}: two runs in one folder would mix their metrics and "
            "checkpoints. Wait for it, end it, or give this run a folder of its own (--run_dir, the logger's name or "
            "version, the checkpoints' dirpath; another working folder for a quickstart)."
        )

    def _holder(self) -> str:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
            return f"process {holder['pid']} on {holder['host']} ({holder['command']})"
        except (ValueError, KeyError, TypeError):
            return "another process"

    def _named_lives(self) -> bool:
        """Whether the process that the file names is another one of this host that lives, and wrote it.

        One that got its number later began at another time, and a copied file has another number of its own.
        """
        self._file.seek(0)
        try:
            named = json.loads(self._file.read())
            pid, started, file = int(named["pid"]), named["started"], named["file"]
            if pid == os.getpid() or named["host"] != socket.gethostname() or started is None:
                return False
        except (ValueError, KeyError, TypeError, OverflowError):  # nothing, or of an earlier version
            return False
        return bool(file == os.fstat(self._file.fileno()).st_ino and _started(pid) == started)

    def release(self) -> None:
        """Lets go. The file stays, empty: another process may be about to lock it."""
        if not self._file.closed:
            self._held.remove(self)
            self._file.truncate(0)
            self._file.close()
