"""A text classifier, trained on one machine or on a Ray cluster."""

from importlib.util import find_spec


def has_shared() -> bool:
    """Return whether the workshop's package `shared` can be imported. Other packages of that name do not count."""
    try:
        return find_spec("shared.distributed") is not None
    except ModuleNotFoundError:  # `shared` does not exist, or is a single file
        return False


if not has_shared():
    raise ModuleNotFoundError(
        "the package `shared` is missing. It comes from the workshop's folder, never from a package index. "
        "Run `pip install -e WORKSHOP`, where WORKSHOP is the path of that folder. "
        "Or copy WORKSHOP/shared next to the folder `training`, as README.md says.",
        name="shared",
    )
