"""Whether a file can be written where somebody wants it: asked before long work, not found out after it. A leaf."""

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


def _try(flag: str, path: Path, folder: Path) -> None:
    # Nobody's rights are asked for: they say little to the superuser, and nothing of a read-only file system.
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{flag} {path}: {folder}: {error.strerror or error}") from None
