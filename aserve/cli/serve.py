"""``aserve serve``: settings in, exit code out. The server itself is ``aserve.server.serve``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aserve.cli.settings import SERVER, ConfigFile, ShowConfig, engine_config, server_config, with_settings
from aserve.cli.sources import Sources


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting."""

    @with_settings(*SERVER)
    def serve(*, config: ConfigFile = None, show_config: ShowConfig = False, **values: Any) -> int:
        """Serve a model over HTTP/1.1 and HTTP/2 with OpenAI's API. Ends with code 0 after SIGTERM or Ctrl-C.

        Parameters
        ----------
        model
            A built-in name, a Hugging Face folder, a hub id, or a .gguf file.
        """
        engine_settings, server_settings = engine_config(values), server_config(values)
        if show_config:
            print(sources.show(engine_settings, server_settings))
            return 0
        from aserve.cli.launch import engine_opener
        from aserve.server.serve import run_server

        return run_server(engine_settings, server_settings, open_engine=engine_opener())

    return serve
