"""Where bytes live: local paths and filesystem URIs (s3://, gs://, ...) behind a handful of
functions.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

T = TypeVar("T")

_CHUNK_BYTES = 1 << 22


class DamagedCopyError(ValueError):
    """What arrived from a remote filesystem is not what its manifest lists."""


def resolve(path: str) -> tuple[pafs.FileSystem, str]:
    """The pyarrow filesystem of `path` and the path inside it. Plain paths are local."""
    if "://" not in path:
        return pafs.LocalFileSystem(), os.path.abspath(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except pa.ArrowInvalid:
        import fsspec  # only for schemes that Arrow does not know itself

        protocol, _, inner = path.partition("://")
        return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem(protocol))), inner


def is_local(path: str) -> bool:
    return "://" not in path or path.startswith("file://")


def join(base: str, *names: str) -> str:
    """`base/name/...` for local paths and URIs alike."""
    return "/".join([base.rstrip("/"), *names])


def file_size(path: str) -> int | None:
    """Bytes of the file at `path`; None when there is no such file."""
    filesystem, inner = resolve(path)
    info = filesystem.get_file_info(inner)
    return info.size if info.type == pafs.FileType.File else None


def exists(path: str) -> bool:
    return file_size(path) is not None


def is_empty_folder(path: str) -> bool:
    """True when nothing is at `path`, or a folder with nothing but what killed writers left."""
    filesystem, inner = resolve(path)
    info = filesystem.get_file_info(inner)
    if info.type == pafs.FileType.NotFound:
        return True
    if info.type != pafs.FileType.Directory:
        return False
    entries = filesystem.get_file_info(pafs.FileSelector(inner))
    return all(fnmatch(entry.base_name, _temporary_name("*", "*")) for entry in entries)


def list_files(folder: str) -> list[str]:
    """The sorted names of the files in `folder`, without what killed writers left; empty when there
    is no such folder.
    """
    filesystem, inner = resolve(folder)
    if filesystem.get_file_info(inner).type != pafs.FileType.Directory:
        return []
    entries = filesystem.get_file_info(pafs.FileSelector(inner))
    names = [entry.base_name for entry in entries if entry.type == pafs.FileType.File]
    return sorted(name for name in names if not fnmatch(name, _temporary_name("*", "*")))


def free_bytes(path: str) -> int | None:
    """Free space where the local folder `path` is, or will be; None for a remote one."""
    if not is_local(path):
        return None
    folder = Path(resolve(path)[1])
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def open_input(path: str, *, offset: int = 0) -> pa.NativeFile:
    """A stream over the raw bytes of `path` from `offset` on (no implicit decompression)."""
    filesystem, inner = resolve(path)
    if offset:
        file = filesystem.open_input_file(inner)
        file.seek(offset)
        return file
    return filesystem.open_input_stream(inner, compression=None, buffer_size=_CHUNK_BYTES)


def read_bytes(path: str) -> bytes:
    with open_input(path) as stream:
        return stream.read()


def write_atomic(path: str, write: Callable[[Path], object]) -> tuple[int, str]:
    """Let `write` fill a temporary local file, make it durable and publish it as `path` in one
    step.

    Returns:
        Size in bytes and sha256 (hex) of what was published.
    """
    return _publish(path, write, lambda file: (file.stat().st_size, sha256_of(str(file))))


def write_unhashed(path: str, write: Callable[[Path], object]) -> int:
    """`write_atomic` for scratch files, which nobody verifies; returns their size in bytes."""
    return _publish(path, write, lambda file: file.stat().st_size)


def write_bytes(path: str, data: bytes) -> tuple[int, str]:
    """`write_atomic` for bytes at hand."""

    def write(file: Path) -> None:
        file.write_bytes(data)

    return write_atomic(path, write)


def copy_file(source: str, target: str) -> None:
    """Publish the bytes of `source` as `target`: a second name of the same file where one disk
    holds both (what is published is never written again), else a copy.
    """
    if is_local(source) and is_local(target):
        try:
            _link(Path(resolve(source)[1]), Path(resolve(target)[1]))
            return
        except OSError:  # another disk, or a filesystem without links
            pass
    filesystem, inner = resolve(source)
    write_unhashed(target, lambda file: _download(filesystem, inner, file))


def remove(path: str) -> None:
    """Delete one file; nothing happens when it is already gone."""
    filesystem, inner = resolve(path)
    if filesystem.get_file_info(inner).type == pafs.FileType.File:
        filesystem.delete_file(inner)


def remove_folder(path: str) -> None:
    """Delete a folder that the calling stage created, with all it holds."""
    filesystem, inner = resolve(path)
    if filesystem.get_file_info(inner).type == pafs.FileType.Directory:
        filesystem.delete_dir(inner)


def remove_abandoned(folder: str) -> None:
    """Delete what killed writers left below `folder`: their temporary files, which only local
    filesystems have.
    """
    filesystem, inner = resolve(folder)
    if isinstance(filesystem, pafs.LocalFileSystem):
        for path in Path(inner).rglob(_temporary_name("*", "*")):
            path.unlink(missing_ok=True)


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open_input(path) as stream:
        while block := stream.read(_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def local_copy(path: str, *, sha256: str | None = None) -> Path:
    """A local file with the content of `path`: itself when local, else a cached download.

    The cache is the folder SCONE_CACHE, by default `scone-cache` in the system's temporary folder.
    The key of a download is `sha256` where the caller knows it from a manifest, else URI, size and
    modification time.

    Raises:
        DamagedCopyError: the download has another sha256; nothing is left in the cache.
    """
    filesystem, inner = resolve(path)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Path(inner)
    info = filesystem.get_file_info(inner)
    version = sha256 or f"{path}:{info.size}:{info.mtime_ns}"
    target = _cache_folder(version) / Path(inner).name
    if not target.exists():
        write_unhashed(str(target), lambda file: _fetch(filesystem, inner, file, path, sha256))
    return target


def local_folder(path: str, names: Iterable[str], *, version: str) -> Path:
    """A local folder that holds the files `names` of `path`: itself when local, else a cached
    download, kept apart by `version`.
    """
    filesystem, inner = resolve(path)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Path(inner)
    folder = _cache_folder(f"{path}:{version}")
    for name in names:
        if not (folder / name).exists():
            source = f"{inner}/{name}"
            write_atomic(
                str(folder / name), lambda file, source=source: _download(filesystem, source, file)
            )
    return folder


def _cache_folder(version: str) -> Path:
    key = hashlib.sha256(version.encode()).hexdigest()[:24]
    cache = Path(os.environ.get("SCONE_CACHE", Path(tempfile.gettempdir()) / "scone-cache"))
    return cache / key


def _publish(path: str, write: Callable[[Path], object], inspect: Callable[[Path], T]) -> T:
    """Let `write` fill a temporary file, and make it `path`; what `inspect` says of the file."""
    filesystem, inner = resolve(path)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return _write_remote(filesystem, inner, write, inspect)
    target = Path(inner)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(_temporary_name(target.name, os.getpid()))
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        result = inspect(temporary)
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)}: writing {path}") from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return result


def _temporary_name(name: str, process: int | str) -> str:
    return f".{name}.{process}.tmp"


def _write_remote(
    filesystem: pafs.FileSystem,
    inner: str,
    write: Callable[[Path], object],
    inspect: Callable[[Path], T],
) -> T:
    """Object stores publish an object when its upload ends, so the local file is made first."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "upload"
        write(temporary)
        filesystem.create_dir(os.path.dirname(inner), recursive=True)
        with open(temporary, "rb") as source, filesystem.open_output_stream(inner) as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
        return inspect(temporary)


def _fetch(
    filesystem: pafs.FileSystem, inner: str, file: Path, path: str, sha256: str | None
) -> None:
    """Download and, where the sha256 is known, check what arrived before anyone can read it."""
    _download(filesystem, inner, file)
    if sha256 is not None and (found := sha256_of(str(file))) != sha256:
        raise DamagedCopyError(f"{path}: sha256 {found} arrived, {sha256} in its manifest")


def _download(filesystem: pafs.FileSystem, inner: str, file: Path) -> None:
    with filesystem.open_input_stream(inner, compression=None) as source, open(file, "wb") as sink:
        shutil.copyfileobj(source, sink, _CHUNK_BYTES)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(_temporary_name(target.name, os.getpid()))
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # replacing a name of the same file leaves it
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
