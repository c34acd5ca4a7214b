"""The settings file: TOML or YAML, flat, one key per flag. Reads it into tokens as the command line would have them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from aserve.core.errors import ConfigError


def read_config_file(path: str, known: Iterable[str]) -> dict[str, list[str]]:
    """Settings in a file by field name, each as a list of texts.

    Args:
        path: A ``.toml``, ``.yaml`` or ``.yml`` file.
        known: Field names that a file may set; ``-`` and ``_`` are the same in a key.

    Raises:
        ConfigError: The file cannot be read, is malformed, or has a key that is not a setting.
    """
    names = list(known)
    settings: dict[str, list[str]] = {}
    for key, value in _load(Path(path)).items():
        name = str(key).replace("-", "_")
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: there is no setting {key!r}{hint}")
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        if value is not None:
            settings[name] = [_text(path, name, item) for item in items]
    return settings


def _load(path: Path) -> Mapping[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings file {path}: {reason}") from error
    try:
        content = _parse(path, text)
    except ValueError as error:
        raise ConfigError(f"{path} is malformed: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings by name, for example: port: 8000")
    return cast("dict[Any, Any]", content)


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix in {".yaml", ".yml"}:
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    raise ConfigError(f"the settings file {path} must end in .toml, .yaml or .yml")


def _text(path: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{path}: {name} must be a text, a number, true or false, or a list of those")
