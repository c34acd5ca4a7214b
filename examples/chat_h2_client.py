"""Ask a running server over HTTP/2 without TLS, print the answer as it comes, and say how fast it came.

aserve serve smollm2-135m
python examples/chat_h2_client.py http://127.0.0.1:8000 "What is the capital of France?"
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event; comments and the closing [DONE] are left out."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is none with an error."""
    if response.is_error:
        raise RuntimeError(json.loads(response.read())["error"]["message"])
    return response


def ask(url: str, question: str, **options: Any) -> str:
    """Stream one answer to stdout and return it."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, **options}
    body["stream_options"] = {"include_usage": True}
    text, num_tokens, first_s = "", 0, None
    with httpx.Client(base_url=url, http1=False, http2=True, timeout=60, trust_env=False) as client:  # no proxy
        body["model"] = checked(client.get("/v1/models")).json()["data"][0]["id"]
        started_s = time.perf_counter()
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for event in events(checked(response)):
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first_s = first_s or time.perf_counter()
                        text += piece
                        print(piece, end="", flush=True)
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        ended_s = time.perf_counter()
    first_s = first_s or ended_s
    print(f"\n[{response.http_version}, first token after {first_s - started_s:.2f} s, "
          f"{num_tokens} tokens, {(num_tokens - 1) / max(ended_s - first_s, 1e-9):.0f} tokens/s]")  # fmt: skip
    return text


if __name__ == "__main__":
    try:
        ask(sys.argv[1], sys.argv[2])
    except (RuntimeError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")
