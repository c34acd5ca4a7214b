"""Where a setting's value comes from: command line, then environment, then the file of ``--config``, then default.

``Sources`` fills in what the command line left out and remembers the source of every value. cyclopts calls it with
the parsed command line before anything is converted, so all sources share one conversion and one kind of error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cyclopts import App, Argument, ArgumentCollection, Token

from aserve.cli import env
from aserve.cli.config_file import read_config_file
from aserve.cli.settings import all_settings, settings_of
from aserve.core.config import CacheConfig, EngineConfig, GrammarConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.simulate.cost import MachineConfig
from aserve.simulate.trace import TraceConfig

PartConfig = ModelConfig | CacheConfig | SchedulerConfig | GrammarConfig | ServerConfig | TraceConfig | MachineConfig
Config = EngineConfig | PartConfig

COMMAND_LINE = "command line"
SECRETS = frozenset({"api_key"})
_NOT_IN_FILES = frozenset({"config", "show_config"})


@dataclass(slots=True)
class Sources:
    """One per run of the command line. ``origins`` has the source of each value that is not a default."""

    origins: dict[str, str] = field(default_factory=dict[str, str])

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        by_name = {argument.field_info.name: argument for argument in arguments}
        if "config" not in by_name:
            return  # a command without settings
        self.origins.update({name: COMMAND_LINE for name, argument in by_name.items() if argument.tokens})
        known = [*dict.fromkeys((*(setting.name for setting in all_settings()), *by_name))]
        self._fill_from_environment(by_name, known)
        if by_name["config"].tokens:
            keys = [name for name in known if name not in _NOT_IN_FILES]
            self._fill_from_file(by_name, by_name["config"].tokens[0].value, keys)

    def _fill_from_environment(self, by_name: Mapping[str, Argument], known: Sequence[str]) -> None:
        variables = env.settings()
        for name, argument in by_name.items():
            variable = env.variable_of(name)
            if variable in variables and not argument.tokens:
                value = variables[variable]
                # a blank list stays one blank item: an empty ASERVE_API_KEY is refused, not read as no key at all
                items = value.split() or [value] if _is_list(argument) else [value]
                self._fill(argument, variable, items)
        unknown = sorted(variables.keys() - set(map(env.variable_of, known)))
        if unknown:
            print(f"aserve: warning: there is no setting for {', '.join(unknown)}", file=sys.stderr)

    def _fill_from_file(self, by_name: Mapping[str, Argument], path: str, keys: Sequence[str]) -> None:
        for name, items in read_config_file(path, keys).items():
            if name in by_name and not by_name[name].tokens:  # a key of another command is no error
                self._fill(by_name[name], path, items)

    def _fill(self, argument: Argument, source: str, items: Sequence[str]) -> None:
        for index, item in enumerate(items):
            argument.append(Token(keyword=argument.name, value=item, source=source, index=index))
        self.origins[argument.field_info.name] = source

    def explain(self, message: str) -> str:
        """``message``, with the source of the flags that it names and that the command line did not set."""
        words = {word.strip(",.:;") for word in message.split()}
        for name, origin in self.origins.items():
            if origin != COMMAND_LINE and "--" + name.replace("_", "-") in words:
                message += f" (set by {origin})"
        return message

    def show(self, *configs: Config, own: Mapping[str, Any] | None = None, without: Sequence[str] = ()) -> str:
        """Every setting with its value and source, as a table; secrets are masked.

        Args:
            own: The command's own arguments, which belong to no configuration class.
            without: Settings that the command does not have.
        """
        rows: list[tuple[str, str, str]] = []
        for config in _parts(configs):
            for setting in (s for s in settings_of(type(config)) if s.name not in without):
                value = getattr(config, setting.name)
                text = "(set)" if setting.name in SECRETS and value else _plain(value)
                rows.append((setting.name, text, self.origins.get(setting.name, "default")))
        rows += [(name, _plain(value), self.origins.get(name, "default")) for name, value in (own or {}).items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)


def _parts(configs: Sequence[Config]) -> Iterator[PartConfig]:
    for config in configs:
        if isinstance(config, EngineConfig):
            yield from (config.model, config.cache, config.scheduler, config.grammar)
        else:
            yield config


def _is_list(argument: Argument) -> bool:
    return argument.token_count()[1]  # whether it takes any number of tokens


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[Any, ...]", value))) or "-"
    return "-" if value is None else str(value)
