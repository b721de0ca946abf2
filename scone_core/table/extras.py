"""a package that only some installations have -> the package, or how to get it."""

import importlib
from typing import Any


def import_extra(package: str, *, needed_for: str, remedy: str) -> Any:
    """The module `package`.

    Raises:
        ValueError: it is not installed; names what needs it and the remedy.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{needed_for} needs the package {package} ({error}); {remedy}") from error
