"""Permission checks of folders with compiled objects: loading an object runs its code with the user's rights."""

import os
import stat
from pathlib import Path


class UntrustedFolder(PermissionError):
    """A folder of compiled objects that another user could have written."""


def insist_on_trust(folder: Path) -> None:
    """Raise UntrustedFolder unless `folder` belongs to the user or root and no other user can write to it.

    No folder above it may be world-writable, except with the sticky bit, like /tmp. A folder that cannot be read has
    nothing to load. Systems without POSIX users, such as Windows, are not checked.
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
            f"{folder} must belong to you or root, since compiled kernels are loaded from it; it belongs to user "
            f"{status.st_uid}. Set CUTE_KERNELS_CACHE_DIR to another folder"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFolder(
            f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), and compiled kernels are "
            f"loaded from it: chmod go-w {folder}, or set CUTE_KERNELS_CACHE_DIR to another folder"
        )
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UntrustedFolder(
                f"{above}, above {folder}, can be written by everybody (mode {stat.S_IMODE(mode):o}), and compiled "
                "kernels are loaded from it: chmod o-w, or set CUTE_KERNELS_CACHE_DIR to another folder"
            )
