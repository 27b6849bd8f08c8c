"""Atomic writes of files and directories, with checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import mmap
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

MANIFEST = "SHA256SUMS"
PARTIAL, OLD = ".lightrl.partial", ".lightrl.old"
"""Suffixes of hidden names: incomplete files, and directories that are being replaced."""


class StorageError(OSError):
    """Raised if a file couldn't be written. The message has the path, the cause, and a fix."""


class DamagedError(ValueError):
    """Raised if a file or directory is damaged. The message is a clause without the path."""


# ---- atomic writes ---------------------------------------------------------------------------------------------------


class _Recording(io.FileIO):
    """Records why a write failed, since `torch.save` replaces the error."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: Literal["w", "wb"] = "wb", *, checksum: bool = False) -> Iterator[IO[Any]]:
    """Opens a file that appears under its name, complete and on disk, when the block ends. Discards it on errors.

    Missing directories are created, and an existing file is replaced. Text is UTF-8, with unpaired surrogates as in
    JSON (`\\ud83d`). With `checksum`, also writes `PATH.sha256` in the format of `sha256sum`, for `verify`.

    Raises:
        StorageError: The disk is full, the directory is read-only, or similar. All writing functions here raise it.
    """
    path = Path(path)
    partial = _partial(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _Recording(partial, "w")
    buffered = io.BufferedWriter(raw)
    file: IO[Any] = buffered if mode == "wb" else io.TextIOWrapper(buffered, "utf-8", "backslashreplace", newline="\n")
    try:
        try:
            yield file
        except Exception as error:
            if raw.error is None:
                raise
            with writing(path):
                raise raw.error from error
        with writing(path):
            file.flush()
            os.fsync(raw.fileno())
            file.close()
            _publish(partial, path, _sha256(partial) if checksum else None)
    finally:
        with contextlib.suppress(OSError, ValueError):
            file.close()
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _publish(partial: Path, path: Path, digest: str | None) -> None:
    """Renames a file. The list of checksums always includes its current one: first both, then only the new one."""
    if digest is not None:
        _write_sums(path, [digest, *(_read_sums(path) if path.exists() else [])])
    os.replace(partial, path)
    _sync_folder(path.parent)
    if digest is not None:
        _write_sums(path, [digest])


def _sums_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _write_sums(path: Path, sums: list[str]) -> None:
    with atomic_write(_sums_path(path), "w") as file:
        file.writelines(f"{digest}  {path.name}\n" for digest in sums)


def _read_sums(path: Path) -> list[str]:
    file = _sums_path(path)
    return [line.split()[0] for line in file.read_text(errors="replace").splitlines() if line] if file.is_file() else []


def append_lines(path: str | Path, lines: Sequence[str]) -> None:
    """Appends lines to a file, all or none. First removes an incomplete last line of a crashed run."""
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    end = content.rfind(b"\n") + 1
            file.truncate(end)
            try:
                data = memoryview("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
                while data:
                    data = data[file.write(data) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a directory to fill. Its files appear in `path`, with a list of checksums, when the block ends.

    A new directory appears only when complete. In an existing one, each file is replaced atomically, and the list last,
    so `verify` detects an interrupted replacement. Files that the list doesn't name are kept.
    """
    path = Path(path).resolve()
    inside = path.is_dir()  # possibly a mount point or the working directory
    partial = _partial(path / "new" if inside else path)
    try:
        with writing(path):
            partial.mkdir(parents=True)
            yield partial
            files = _list_files(partial)
            if not path.is_dir():
                os.rename(partial, path)
                _sync_folder(path.parent)
                return
            before = {name for name, _ in _manifest(path)}
            for name in [*files, MANIFEST]:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial / name, path / name)
            for name in before - set(files):
                (path / name).unlink(missing_ok=True)
            _sync_folder(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_folder(path: Path) -> Path:
    """Returns the directory that several ranks write to before one of them calls `publish_folder`."""
    return path.with_name(f".{path.name}.shared{PARTIAL}")


def publish_folder(partial: Path, path: Path) -> None:
    """Syncs a checkpoint directory to disk, adds its list of checksums, and replaces `path` with it."""
    with writing(path):
        _list_files(partial)
        _swap(partial, path)


def _list_files(folder: Path) -> list[str]:
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    for name in files:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    with atomic_write(folder / MANIFEST, "w") as manifest:
        manifest.writelines(f"{_sha256(folder / name)}  {name}\n" for name in files)
    return files


def _swap(partial: Path, path: Path) -> None:
    """Renames a written directory. `clean_leftovers` recovers from a crash in between."""
    old = path.with_name(f".{path.name}{OLD}")
    remove(old)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    _sync_folder(path.parent)
    remove(old)


def link(source: Path, target: Path) -> None:
    """Makes `target` a hard link to a checkpoint with checksums, atomically; a copy on file systems without links."""
    partial = _partial(target)
    try:
        with writing(target):
            if source.is_dir():
                shutil.copytree(source, partial, copy_function=_link_or_copy)
                _swap(partial, target)
            else:
                _link_or_copy(source, partial)
                _publish(partial, target, _read_sums(source)[0])
    finally:
        with contextlib.suppress(OSError):  # a read-only directory
            remove(partial)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        shutil.copyfile(source, target)  # the file system has no links
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def has_checksums(path: Path) -> bool:
    """Whether a checkpoint has checksums, so that it is complete."""
    return (path / MANIFEST).is_file() if path.is_dir() else path.is_file() and bool(_read_sums(path))


def remove(path: str | Path) -> None:
    """Removes a file or directory and its checksums, if it exists."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    _sums_path(path).unlink(missing_ok=True)


# ---- after a crash ---------------------------------------------------------------------------------------------------


def clean_leftovers(folder: Path) -> list[Path]:
    """Removes incomplete files of crashed runs, restores directories that were being replaced, and returns both.

    The caller must hold the directory's lock.
    """
    found = restore_replaced(folder)
    for path in sorted(folder.glob(".*")):
        if path.name.endswith((OLD, PARTIAL)):
            remove(path)
            found.append(path)
    return found


def restore_replaced(folder: Path) -> list[Path]:
    """Restores directories of a run that was killed while it replaced them, and returns their temporary paths."""
    found = []
    for path in sorted(folder.glob(f".*{OLD}")):
        replaced = path.with_name(path.name[1 : -len(OLD)])
        if not replaced.exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                os.rename(path, replaced)
                found.append(path)
    return found


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{PARTIAL}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # not supported by some network file systems
        pass
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that turns system errors of a write into a StorageError with the path and a fix."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError) or not (isinstance(error, OSError) or "I/O error: " in str(error)):
            raise  # a SafetensorError is an OSError only by its message
        folder = next(p for p in path.absolute().parents if p.exists())
        free = shutil.disk_usage(folder).free / 2**20
        kept = " The previous version is unchanged." if path.exists() else ""
        cause = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{str(path)!r} can't be written: {cause}.{kept} {folder} has {free:,.0f} MiB free. "
            "Free up space, check permissions and limits, or write to another directory."
        ) from error


# ---- checksums -------------------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> list[tuple[str, str]]:
    """Returns (name, SHA-256) of each file in a directory's list; empty without a list."""
    if not (folder / MANIFEST).is_file():
        return []
    lines = (folder / MANIFEST).read_text(errors="replace").splitlines()
    return [(name, digest) for digest, _, name in (line.partition("  ") for line in lines)]


def verify(path: str | Path) -> None:
    """Compares a file with `PATH.sha256`, or a directory's files with its `SHA256SUMS`; raises a DamagedError."""
    path = Path(path)
    if path.is_dir():
        for name, digest in _manifest(path):
            if not name or not (path / name).is_file():
                raise DamagedError(f"{name or 'its list of checksums'} is missing")
            if _sha256(path / name) != digest:
                raise DamagedError(f"{name} doesn't match its checksum ({MANIFEST})")
        return
    if not path.exists():
        raise DamagedError("it does not exist")
    sums = _read_sums(path)
    if sums and _sha256(path) not in sums:
        raise DamagedError(f"it doesn't match its checksum ({_sums_path(path).name})")
