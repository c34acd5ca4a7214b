"""Flags from the configuration classes: every field is one flag, its docstring the help, its default the default.

A command gets the values by field name and turns them into frozen configuration here. Where a value that was not
given on the command line comes from is the matter of ``sources``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

import docstring_parser
from cyclopts import Group, Parameter

from aserve.core.config import CacheConfig, EngineConfig, GrammarConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.simulate.cost import MachineConfig
from aserve.simulate.setup import Setup
from aserve.simulate.trace import TraceConfig

ConfigClass = (
    type[ModelConfig]
    | type[CacheConfig]
    | type[SchedulerConfig]
    | type[GrammarConfig]
    | type[ServerConfig]
    | type[TraceConfig]
    | type[MachineConfig]
)

ENGINE: tuple[ConfigClass, ...] = (ModelConfig, CacheConfig, SchedulerConfig, GrammarConfig)
SERVER: tuple[ConfigClass, ...] = (*ENGINE, ServerConfig)
TITLES: Mapping[ConfigClass, str] = {
    ModelConfig: "Model",
    CacheConfig: "KV cache",
    SchedulerConfig: "Scheduler",
    GrammarConfig: "Grammars",
    ServerConfig: "Server",
    TraceConfig: "Requests",
    MachineConfig: "Machine",
}

ConfigFile = Annotated[
    str | None,
    Parameter(
        name="--config", group="General", help="Settings file: TOML or YAML, one key per flag.", show_default=False
    ),
]
ShowConfig = Annotated[
    bool,
    Parameter(name="--show-config", group="General", help="Print every setting with its source and stop.", negative=()),
]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration class, as a flag."""

    owner: ConfigClass
    name: str
    annotation: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """The flag, for example ``--max-queue``."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_required(self) -> bool:
        """Whether there is no default; such a setting is positional."""
        return self.default is MISSING


def settings_of(config_class: ConfigClass) -> tuple[Setting, ...]:
    """The settings of one configuration class, in the order of its fields."""
    annotations = get_type_hints(config_class)
    documented = {p.arg_name: p.description or "" for p in docstring_parser.parse(config_class.__doc__ or "").params}
    return tuple(
        Setting(config_class, f.name, annotations[f.name], f.default, " ".join(documented[f.name].split()))
        for f in fields(config_class)
    )


def all_settings(config_classes: Sequence[ConfigClass] = SERVER) -> tuple[Setting, ...]:
    """The settings of several configuration classes, in order."""
    return tuple(setting for config_class in config_classes for setting in settings_of(config_class))


def with_settings(
    *config_classes: ConfigClass, without: Sequence[str] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command one flag per field; it receives their values, by field name, as ``**values``.

    Args:
        without: Fields that make no sense for this command.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        groups = {c: Group(TITLES[c], sort_key=number) for number, c in enumerate(config_classes, start=1)}
        flags = [_parameter(s, groups[s.owner]) for s in all_settings(config_classes) if s.name not in without]
        signature = inspect.Signature(sorted([*flags, *own], key=lambda p: p.kind))  # positional ones first

        def run(*positional: Any, **named: Any) -> int:
            return command(**signature.bind(*positional, **named).arguments)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        setattr(run, "__signature__", signature)  # noqa: B010  (functions declare no such field)
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def _parameter(setting: Setting, group: Group) -> inspect.Parameter:
    if setting.is_required:
        flag = Parameter(help=setting.help, group=group)
        annotation = Annotated[setting.annotation, flag]
        return inspect.Parameter(setting.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
    flag = Parameter(
        name=setting.flag, help=setting.help, group=group, show_default=_shown_default, negative_iterable=()
    )
    annotation = Annotated[setting.annotation, flag]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation
    )


def _shown_default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, ()) else str(value)


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration from values by field name. Raises ConfigError."""
    return EngineConfig(
        model=ModelConfig(**_values_for(ModelConfig, values)),
        cache=CacheConfig(**_values_for(CacheConfig, values)),
        scheduler=SchedulerConfig(**_values_for(SchedulerConfig, values)),
        grammar=GrammarConfig(**_values_for(GrammarConfig, values)),
    )


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The server's configuration from values by field name. Raises ConfigError."""
    return ServerConfig(**_values_for(ServerConfig, values))


def setup_of(values: Mapping[str, Any]) -> Setup:
    """What a simulation is made of, from values by field name. Raises ConfigError."""
    return Setup(
        scheduler=SchedulerConfig(**_values_for(SchedulerConfig, values)),
        cache=CacheConfig(**_values_for(CacheConfig, values)),
        machine=MachineConfig(**_values_for(MachineConfig, values)),
        trace=TraceConfig(**_values_for(TraceConfig, values)),
    )


def _values_for(config_class: ConfigClass, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(config_class) if f.name in values}
