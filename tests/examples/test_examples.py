"""The examples run, on a tiny model, so that they cannot rot."""

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import anyio
import httpx
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent


def test_examples_are_short():
    assert not {
        path.name: count
        for path in EXAMPLES.glob("*.py")
        if (count := path.read_text(encoding="utf-8").count("\n")) >= 60
    }


def test_every_example_is_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    assert not [path.stem for path in EXAMPLES.glob("*.py") if path.stem not in text]


def load(name):
    return importlib.import_module(f"examples.{name}")


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_generate(tiny_model, capsys):
    module = load("generate")
    texts = anyio.run(module.main, str(tiny_model), backend="trio")
    assert set(texts) == set(module.PROMPTS)
    assert capsys.readouterr().out.startswith(module.PROMPTS[0])


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_embed_no_http(tiny_model, capsys, backend):
    text = anyio.run(load("embed_no_http").main, str(tiny_model), backend=backend)
    assert text
    assert capsys.readouterr().out == text + "\n"


def test_deadlines_and_cancel(tiny_model, capsys):
    anyio.run(load("deadlines_and_cancel").main, str(tiny_model), backend="trio")
    assert capsys.readouterr().out.splitlines()[-1] == "running 0, waiting 0"


class Program:
    """An example that serves, as a process on a free port."""

    def __init__(self, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.arguments = [sys.executable, *map(str, arguments), self.url.rpartition(":")[2]]

    def __enter__(self):
        self.process = subprocess.Popen(
            self.arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self

    def get(self, path, seconds=60):
        deadline = time.monotonic() + seconds
        while True:
            try:
                return httpx.get(self.url + path, timeout=30, trust_env=False)
            except httpx.ConnectError:
                assert self.process.poll() is None, self.process.stdout.read()
                assert time.monotonic() < deadline, "the program does not listen"
                time.sleep(0.1)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=30)
        assert "Traceback" not in output, output
        return self.process.returncode

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.e2e
def test_embed_in_quart(tiny_model):
    with Program("examples/embed_in_quart.py", tiny_model) as program:
        assert program.get("/ask?q=hello").json()["answer"]
        assert program.get("/v1/models").json()["data"][0]["id"] == tiny_model.name
        assert program.stop() == 0


@pytest.mark.e2e
def test_embed_in_asyncio(tiny_model):
    with Program("examples/embed_in_asyncio.py", tiny_model) as program:
        assert program.get("/hello").text == "hello from the host"
        body = {"model": tiny_model.name, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(program.url + "/v1/completions", json=body, timeout=30, trust_env=False)
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert program.stop() in {0, -signal.SIGTERM}  # uvicorn ends by the signal that it was sent


@pytest.mark.e2e
def test_demo_and_its_client_chat_h2_client(tiny_model):
    command = [sys.executable, "-m", "examples.demo", str(tiny_model)]
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "http://127.0.0.1:9")
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"} | proxies
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    question, *answer, speed, ending = done.stdout.strip().splitlines()
    assert question == "> What is the capital of France?"
    assert answer
    assert speed.startswith("[HTTP/2, first token after ")
    assert ending == "[the server stopped with exit code 0]"


def answering(monkeypatch, client, reply):
    """Let the client talk to ``reply``, which answers chat requests, in place of a server."""

    def handle(request):
        return httpx.Response(200, json={"data": [{"id": "M"}]}) if request.url.path == "/v1/models" else reply

    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(client.httpx, "Client", functools.partial(httpx.Client, transport=transport))


ERROR = '{"error": {"message": "the engine has failed"}}'


@pytest.mark.parametrize(
    "reply",
    [httpx.Response(503, text=ERROR), httpx.Response(200, text=f": hi\n\ndata: {ERROR}\n\ndata: [DONE]\n\n")],
    ids=["before the answer", "within the answer"],
)
def test_the_client_raises_the_servers_errors(monkeypatch, reply):
    client = load("chat_h2_client")
    answering(monkeypatch, client, reply)
    with pytest.raises(RuntimeError, match=r"^the engine has failed$"):
        client.ask("http://server", "hello")


def test_the_client_prints_an_answer(monkeypatch, capsys):
    client = load("chat_h2_client")
    pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("Par", "is")]
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in (*pieces, usage))
    answering(monkeypatch, client, httpx.Response(200, text=events + "data: [DONE]\n\n"))
    assert client.ask("http://server", "hello") == "Paris"
    answer, speed = capsys.readouterr().out.splitlines()
    assert answer == "Paris"
    assert " 2 tokens, " in speed


def test_the_client_reports_errors_in_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        command = [sys.executable, "examples/chat_h2_client.py", url, "hello"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
