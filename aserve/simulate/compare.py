"""One setup becomes several: every combination of the values that a comparison names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from aserve.core.errors import ConfigError
from aserve.simulate.setup import NOT_SIMULATED, Setup

_SWITCH = {"on": True, "true": True, "off": False, "false": False}


def variants(setup: Setup, comparisons: Sequence[str]) -> dict[str, Setup]:
    """Setups by title. A comparison is ``name=value,value,...``; without one the setup itself has an empty title.

    Raises ConfigError for a setting that does not exist, or a value that it cannot have.
    """
    choices: list[list[tuple[str, str]]] = []
    for comparison in comparisons:
        name, equals, values = comparison.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--compare: {comparison!r} is no comparison; write for example policy=fcfs,priority")
        choices.append([(name, value.strip()) for value in values.split(",")])
    found: dict[str, Setup] = {}
    for combination in itertools.product(*choices):
        variant = setup
        for name, value in combination:
            variant = _with(variant, name, value)
        found[" ".join(_title(name, value) for name, value in combination)] = variant
    return found


def _title(name: str, value: str) -> str:
    return value if name in {"policy", "machine"} else f"{name}={value}"


def _with(setup: Setup, name: str, text: str) -> Setup:
    if name in NOT_SIMULATED:
        raise ConfigError(f"--compare: {name!r} makes no difference in a simulation")
    for part in fields(setup):
        config: Any = getattr(setup, part.name)
        hints: dict[str, Any] = get_type_hints(cast("type[Any]", type(config)))
        annotation = hints.get(name)
        if annotation is not None:
            return replace(setup, **{part.name: replace(config, **{name: _value(name, annotation, text)})})
    raise ConfigError(f"--compare: there is no setting {name!r} in a simulation")


def _value(name: str, annotation: Any, text: str) -> Any:
    """The value that a text stands for, by the type of its field."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    for kind in kinds:
        if get_origin(kind) is Literal and text in get_args(kind):
            return text
        if kind is bool and text in _SWITCH:
            return _SWITCH[text]
        if kind in {int, float}:
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    raise ConfigError(f"--compare: {text!r} is no value for {name}")
