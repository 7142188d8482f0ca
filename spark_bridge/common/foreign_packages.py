# SPDX-License-Identifier: Apache-2.0

"""Finds foreign packages in the place of Headgate's own ``protocol`` or ``actors``.

Both names are general. Another distribution, or a file of the user's own, can come first on Python's path, on the
driver or on a worker. Without this check the user would see "No module named 'protocol.errors'". It runs whenever
``headgate`` or ``spark_bridge`` is imported, so it only asks where the packages lie and loads none of them.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

__all__ = ["distributions_with", "explain", "overwritten", "refuse_foreign_packages"]

_OURS = ("protocol", "actors")
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def refuse_foreign_packages() -> None:
    """Raise ``ImportError`` if Python would import another ``protocol`` or ``actors``; the text says what to do."""
    for name in _OURS:
        foreign = _foreign_origin(name)
        if foreign is not None:
            raise ImportError(_refusal(name, foreign), name=name)


def overwritten() -> str | None:
    """What to do about a distribution that was installed into Headgate's own folders; None if there is none.

    Reads the metadata of every installed distribution, which takes a while.
    """
    for name in (*_OURS, "spark_bridge", "headgate"):
        for distribution in distributions_with(name, _FOLDER):
            return (
                f"the distribution {distribution} installed a package {name!r} over Headgate's own in {_FOLDER}. "
                f"{_remedy(distribution)}, then reinstall Headgate (pip install --force-reinstall --no-deps headgate)"
            )
    return None


def explain(error: Exception) -> None:
    """Raise an ``ImportError`` that names the foreign package behind ``error``, which came from importing our modules.

    Returns if there is none.
    """
    refuse_foreign_packages()
    found = overwritten()
    if found is not None:
        raise ImportError(f"{error}: {found}") from error


def _foreign_origin(name: str) -> str | None:
    """The file or folder of a package ``name`` that is not ours; None if it is ours, or if there is none at all."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that was made by hand
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if not folders or spec.origin is None:  # a single file, or a folder without __init__.py: ours is neither
        return spec.origin or folders[0]
    above = os.path.dirname(os.path.abspath(folders[0]))
    # A worker may have taken `protocol` from an installed Headgate and take the rest from the archive: both are ours.
    ours = above == _FOLDER or PathFinder.find_spec("spark_bridge", [above]) is not None
    return None if ours else spec.origin


def _refusal(name: str, origin: str) -> str:
    file = os.path.abspath(origin)
    package = os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file
    folder = os.path.dirname(package)
    found = f"Headgate needs its own package {name!r}, but Python ({sys.executable}) finds another one in {package}"
    for distribution in distributions_with(name, folder):
        return f"{found}. The distribution {distribution} installed it. {_remedy(distribution)}"
    return (
        f"{found}. No installed distribution brought it. Rename it, or take {folder} off Python's path (PYTHONPATH, or "
        "the folder in which the program or Spark was started)"
    )


def _remedy(distribution: str) -> str:
    name = distribution.partition(" ")[0]
    return f"Uninstall it (pip uninstall {name}), or install Headgate into a separate environment"


def distributions_with(name: str, folder: str) -> list[str]:
    """Return the distributions, with their versions, that installed a package ``name`` into ``folder``, except ours.

    Reads the metadata of every installed distribution, which takes a while.
    """
    from importlib import metadata

    claims = set(metadata.packages_distributions().get(name, ())) - {"headgate"}
    return [
        f"{distribution.name} {distribution.version}"
        for distribution in metadata.distributions()
        if distribution.name in claims
        and os.path.realpath(str(distribution.locate_file(""))) == os.path.realpath(folder)
    ]
