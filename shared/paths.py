"""Read the paths and URIs of a command line, and find the folder for Ray's files."""

import argparse
import os
import sys
from pathlib import Path

from shared.errors import UsageError

SOCKET_BYTES = 103 if sys.platform == "darwin" else 107  # the longest path that a Unix socket may have


def local_path(text: str) -> str:
    """Return an option's value as an absolute path on this machine, with ~ as the home folder.

    Raises ArgumentTypeError for a URI.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URI, but must be a path on this machine")
    return os.path.abspath(os.path.expanduser(text))


def path_or_uri(text: str) -> str:
    """Return an option's value as an absolute path, or as a URI without its trailing slash."""
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))


def ray_temp_dir(subfolder: str = "") -> str:
    """Return the folder in which a new Ray makes its own folder `ray`: RAY_TMPDIR, TMPDIR or /tmp.

    subfolder: a folder in it that the caller will make and give to Ray instead. Raises UsageError if Ray could not work
    there. Its processes would each fail with a traceback, or wait for each other.
    """
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    folder = os.environ.get(name, "/tmp")
    if not os.path.isabs(folder):  # or is empty; Ray's processes run in several folders
        raise UsageError(f"{name}={folder} is not an absolute path: set RAY_TMPDIR to a folder such as /tmp")
    socket = os.path.join(
        folder, subfolder, f"ray/session_2026-01-31_23-59-59_123456_{os.getpid()}/sockets/plasma_store"
    )
    if (excess := len(os.fsencode(socket)) - SOCKET_BYTES) > 0:
        raise UsageError(
            f"{name}={folder} is too long by {excess} bytes for Ray's sockets: set RAY_TMPDIR to a shorter folder, "
            "such as /tmp"
        )
    # Ray makes missing folders. An existing path may be a file, or belong to a different user.
    nearest = next(path for path in (Path(folder, "ray"), Path(folder), *Path(folder).parents) if os.path.exists(path))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"Ray cannot write to {nearest} ({name}={folder}): set RAY_TMPDIR to a folder of your own")
    return folder
