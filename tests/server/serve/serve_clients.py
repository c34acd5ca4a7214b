"""Clients of a server process, and what they ask for."""

import json
import socket

import httpx

CHAT = "/v1/chat/completions"


def body(max_tokens: int, **changes) -> dict:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "M", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True} | changes


def post(port: int, max_tokens: int, **options) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body(max_tokens), timeout=20, trust_env=False, **options)


def get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False)


def chat_request(max_tokens: int) -> bytes:
    """A request for a stream, as it goes over the wire."""
    content = json.dumps(body(max_tokens)).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def raw_stream(port: int, max_tokens: int) -> socket.socket:
    """A connection on which a stream has begun, and which is not read any further."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    sock.sendall(chat_request(max_tokens))
    data = b""
    while b"data:" not in data:
        data += sock.recv(1024)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    sock.close()
    return data
