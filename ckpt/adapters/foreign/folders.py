"""Folders into which a checkpoint of another library is written: whole, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ckpt.errors import StoreError


def check_empty(folder: Path) -> None:
    """Raises StoreError where the folder has something in it, OSError where it cannot be looked at."""
    if any(folder.iterdir()):
        raise StoreError(f"{folder}: not empty; choose another place, or empty it, if nothing there is wanted")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes a folder, or takes an empty one, and deletes every file in it, and a folder that it made, if the body
    fails. Raises StoreError where the folder has something in it, or cannot be written."""
    try:
        made = not folder.exists()
        if not made:
            check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except BaseException:
            for path in folder.iterdir():
                path.unlink()
            if made:
                folder.rmdir()
            raise
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error}") from error
