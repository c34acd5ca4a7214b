"""The command line: which commands exist, and how a failure is shown.

Owns nothing else: every command is a module of this package. Must stay quick to import: no torch, no transformers, no
HTTP server before a command runs. Exit codes: 0, 1 for a failure, 2 for wrong usage or settings, 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import cast

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter

from aserve.cli import chat, check_env, generate, inspect, plan, pull, run_batch, serve, simulate
from aserve.cli.sources import Sources
from aserve.core.errors import AserveError, ConfigError

DESCRIPTION = """Serve language models.

Every flag can also be set by an environment variable (--max-queue by ASERVE_MAX_QUEUE) or in a TOML or YAML file named
by --config (max_queue = 8). The command line wins over the environment, the environment over the file.
"""


def build_app(sources: Sources | None = None) -> App:
    """The command line as a cyclopts application. ``sources`` records where settings come from."""
    sources = sources or Sources()
    app = App(
        name="aserve",
        help=DESCRIPTION,
        version=_version(),
        config=sources,
        default_parameter=Parameter(negative_iterable=()),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    app.command(serve.command(sources), name="serve")
    app.command(chat.command(sources), name="chat")
    app.command(generate.command(sources), name="generate")
    app.command(run_batch.command(sources), name="run-batch")
    app.command(inspect.command(sources), name="inspect")
    app.command(plan.command(sources), name="plan")
    app.command(pull.pull)
    app.command(simulate.command(sources), name="simulate")
    app.command(check_env.check_env, name="check-env")
    app.command(_print_version, name="version")
    return app


def _version() -> str:
    try:
        return metadata.version("aserve")
    except metadata.PackageNotFoundError:  # a source tree on the import path
        return "unknown (not installed)"


def _print_version() -> None:
    """Print the version."""
    print(_version())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A failure is one line on stderr."""
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        return code or _unwritten(error)  # an error has said it already
    return code


def _run(arguments: Sequence[str] | None) -> int:
    sources = Sources()
    try:
        result = build_app(sources)(list(sys.argv[1:] if arguments is None else arguments))
    except CycloptsError as error:
        return _fail(_usage_message(error), 2)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _unwritten(error)
    except AserveError as error:
        return _fail(sources.explain(error.message), 2 if isinstance(error, ConfigError) else 1)
    except BaseExceptionGroup as group:
        causes = list(_leaves(group))
        if all(isinstance(cause, KeyboardInterrupt) for cause in causes):
            return 130
        if all(isinstance(cause, AserveError) for cause in causes):
            return _fail(sources.explain(str(causes[0])), 2 if isinstance(causes[0], ConfigError) else 1)
        if isinstance(causes[0], OSError) and len(causes) == 1:
            return _unwritten(causes[0])
        raise
    return result if isinstance(result, int) else 0


def _usage_message(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.command_chain:
        argument, command = error.argument, " ".join(error.command_chain)
        if not argument.field_info.required:
            return f"{argument.name} needs a value"
        return f"{command} needs a {argument.field_info.name.upper()}; see: aserve {command} --help"
    error.verbose = False  # cyclopts would add the signature of the Python function
    return str(error)


def _unwritten(error: OSError) -> int:
    """The exit code, if an error is one of writing to the terminal or a pipe; any other one is raised again."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has left, as `head` does
        return 1
    if error.errno in {errno.ENOSPC, errno.EDQUOT} and error.filename is None:
        return _fail(f"cannot write the output: {error.strerror}", 1)
    raise error


def _discard_output() -> None:
    """Send what stdout still holds nowhere, or the interpreter would try to write it at exit, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _fail(message: str, code: int) -> int:
    print(f"aserve: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
