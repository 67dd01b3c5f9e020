"""Which folders compiled objects may be loaded from: loading one runs its code with the user's rights."""

import os
import stat
from pathlib import Path


class UntrustedFolder(PermissionError):
    """A folder of compiled objects that somebody else could have written."""


def insist_on_trust(folder: Path) -> None:
    """Raise UntrustedFolder with the reason, unless `folder` is the user's or root's and nobody else can write it.

    Of the folders above it none may be writable for everybody, but with the sticky bit, as /tmp has it. A folder that
    cannot be looked into has nothing to load. Systems without users in this sense, such as Windows, are not checked.
    """
    if not hasattr(os, "getuid"):
        return
    folder = Path(os.path.realpath(folder))
    try:
        status = folder.stat()
    except OSError:
        return
    if status.st_uid not in (os.getuid(), 0):
        raise UntrustedFolder(
            f"{folder} belongs to user {status.st_uid}; compiled kernels are loaded only from folders of yours or of "
            "root. Set CUTE_KERNELS_CACHE_DIR to another one"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFolder(
            f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), who could put their code into "
            f"compiled kernels: chmod go-w {folder}, or set CUTE_KERNELS_CACHE_DIR to another folder"
        )
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UntrustedFolder(
                f"{above}, above {folder}, can be written by everybody (mode {stat.S_IMODE(mode):o}), who could "
                "replace compiled kernels by their own: chmod o-w, or set CUTE_KERNELS_CACHE_DIR to another folder"
            )
