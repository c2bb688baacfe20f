"""Print the requirements of pyproject.toml's extras for pip, without this project, for the worker's image.

    python requirements.py dreambooth > requirements.txt

The script imports only the standard library, because the build of the image runs it before any installation.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def requirements_of(project: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """Return the dependencies of the project and of the extras, with nested extras. Raises KeyError.

    project: the table `project` of pyproject.toml.
    """
    found: list[str] = list(project["dependencies"])
    waiting, seen = list(extras), set(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop(0)]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([^]]+)\]", requirement)
            if own is None:
                found.append(requirement)
                continue
            named = [name.strip() for name in own[1].split(",")]
            waiting += [name for name in named if name not in seen]
            seen.update(named)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(requirements_of(project, sys.argv[1:])) + "\n")
