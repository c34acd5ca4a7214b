"""Coverage-guided fuzzing of what reads clients' bytes and of what writes answers: ``python -m tests.fuzz requests``.

Each target states what must hold for any input; atheris mutates inputs towards code not yet reached. A failing input
is written to ``crash-...`` in the working folder and can be given as an argument to play it again. The seeds are
made here, so that nothing has to be kept. ``make fuzz`` runs all targets for ten minutes together.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(
    include=["aserve.server", "aserve.text", "aserve.engine.limits", "aserve.engine.options"]
):
    from tests.fuzz import answers, requests

Target = Callable[[bytes], None]
TARGETS: dict[str, tuple[Target, list[Any]]] = {
    "requests": (requests.check, requests.SEEDS),
    "answers": (answers.check, answers.SEEDS),
}


def main() -> None:
    name, *flags = sys.argv[1:]
    target, seeds = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds):
            data = seed if isinstance(seed, bytes) else json.dumps(seed).encode()
            (Path(corpus) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], corpus, *flags], target)
        atheris.Fuzz()


main()
