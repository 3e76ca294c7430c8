"""Paths and URIs as a command line names them."""

import argparse
import os


def local_path(text: str) -> str:
    """An option's value as an absolute path on this machine; ~ is the home. Raises ArgumentTypeError for a URI."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URI, and has to be a path on this machine")
    return os.path.abspath(os.path.expanduser(text))


def path_or_uri(text: str) -> str:
    """An option's value as an absolute path, or a URI without its trailing slash; ~ is the home folder."""
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))
