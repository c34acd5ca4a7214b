"""The whole way once: get a model, start the server, ask it over HTTP/2, stop it. This is `make demo`.

python -m examples.demo [MODEL]
"""

import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import IO

from examples.chat_h2_client import ask

QUESTION = "What is the capital of France?"
ASERVE = (sys.executable, "-m", "aserve")


def wait_until_ready(log: IO[str]) -> str:
    """Follow the server's log until it is ready, and return its address."""
    for line in log:
        sys.stderr.write(line)
        if " ready on " in line:
            return line.split(" ready on ")[1].split()[0]
    raise SystemExit("the server ended before it was ready")


def main(model: str) -> int:
    """Returns 0 if the question was answered and the server stopped cleanly."""
    if not Path(model).exists():
        subprocess.run([*ASERVE, "pull", model], check=True)
    command = [*ASERVE, "serve", model, "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = wait_until_ready(server.stderr)
            Thread(target=sys.stderr.writelines, args=(server.stderr,), daemon=True).start()
            print(f"\n> {QUESTION}")
            answer = ask(url, QUESTION, temperature=0, max_tokens=64)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    print(f"[the server stopped with exit code {code}]")
    return 0 if answer and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
