"""``aserve pull``: get a model into the cache folder before it is served."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from aserve.cli import env
from aserve.cli.launch import progress_bar


def pull(name: Annotated[str, Parameter()], *, revision: str | None = None) -> None:
    """Download a model into the cache folder, convert it if needed, and print its folder.

    Parameters
    ----------
    name
        A built-in name (smollm2-135m, gemma3-270m) or a Hugging Face hub id.
    revision
        Revision of a hub id.
    """
    from aserve.hub import resolve

    with progress_bar(f"fetching {name}") as progress:
        folder = resolve(
            name, revision=revision, cache_dir=env.cache_folder(), offline=env.offline(), progress=progress
        )
    print(folder)
