"""Find what exercises start from: losses, sample ids, stack dumps and launch logs, recorded once into checks/data."""

import json
from pathlib import Path

FOLDER = Path(__file__).with_name("data")


def recorded(name: str) -> dict | str:
    """Return what the file `name` in checks/data holds: parsed if it is JSON, otherwise its text.

    Raises ValueError for an unknown name, with the names of all recordings.
    """
    known = sorted(path.name for path in FOLDER.iterdir())
    if name not in known:
        raise ValueError(f"there is no recording {name!r}. checks/data holds {', '.join(known)}")
    text = (FOLDER / name).read_text()
    return json.loads(text) if name.endswith(".json") else text
