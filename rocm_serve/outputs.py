"""Files that somebody wants: asked before long work whether they can be written, and written whole. A leaf."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from rocm_serve.errors import UserError


def check_file(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written; what is there under that name stays. Errors: UserError."""
    if path.is_dir():
        raise UserError(f"{flag} {path}: Is a directory; legal: a file")
    _try(flag, path, path.parent)


def check_folder(flag: str, path: Path) -> None:
    """Make the folder, and refuse one in which nothing can be written. Errors: UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}") from None
    _try(flag, path, path)


def write_file(flag: str, path: Path, content: bytes) -> None:
    """Write a file whole: what was there stays until all of the new one is written. Errors: UserError."""
    beside = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe takes bytes and cannot be replaced
            path.write_bytes(content)
            return
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}") from None


def _try(flag: str, path: Path, folder: Path) -> None:
    # Nobody's rights are asked for: they say little to the superuser, and nothing of a read-only file system.
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{flag} {path}: {folder}: {error.strerror or error}") from None
