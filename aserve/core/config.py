"""The configuration, frozen after validation; every field is one flag of ``aserve serve``.

The command line, environment and file are read by ``aserve.cli``; run-time facts (how many blocks fit) are return
values of the code that measures them, never written back here. Field docstrings become the flags' help texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Literal

from aserve.core.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_TOO_LARGE = 2**63
_SMALLEST_SIZE = 1024
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?(:[0-9]*)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, flag: str = "--kv-cache-memory") -> int:
    """Read a size such as ``6GiB``, ``500MB`` or ``1048576``, in bytes. Raises ConfigError that names the flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{flag}: {text!r} is not a size; write for example 6GiB, 500MB or 1048576")
    size = float(match.group(1)) * _UNITS[(match.group(2) or "").lower()]
    if size >= _TOO_LARGE:
        raise ConfigError(f"{flag}: a size of {text.strip()[:20]}... is larger than any memory")
    return int(size)


def _check_size(flag: str, text: str) -> None:
    """Refuse sizes that are no memory anybody meant: a share, or a number whose unit was left out."""
    size, number = parse_bytes(text, flag), text.strip()
    hint = f"; a share of a GPU is set by --gpu-memory-fraction {number}" if number.startswith("0.") else ""
    _require(size > 0, f"{flag} must be more than 0 bytes, not {number}{hint}")
    _require(size >= _SMALLEST_SIZE, f"{flag} {number} is {size} bytes; did you mean {number.rstrip('bB ')}GiB?")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(owner: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        flag = "--" + name.replace("_", "-")
        _require(value is None or value >= low, f"{flag} must be at least {low:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to serve and how to load it.

    Attributes:
        model: A built-in name, a Hugging Face folder, a hub id, or a .gguf file.
        served_model_name: Name or names under which clients address the model; default: the model's own name.
        revision: Revision of a hub id.
        dtype: Type of weights and activations; auto takes the checkpoint's, or what the device computes fastest.
        device: Where to run; auto takes the first CUDA device, else the CPU.
        kernels: Kernel set; auto takes triton on CUDA and cpu elsewhere; reference is for debugging.
        num_threads: Threads that compute on the CPU; default: one per core, or one alone for models whose weights are
            under 64 MiB, which gain nothing from more.
        max_model_len: Longest prompt plus answer in tokens; default: the model's context.
        cuda_graphs: Capture steps as CUDA graphs at the start; without them small steps wait for Python.
        chat_template: A Jinja file, or the template itself, in place of the model's.
        debug_load_delay_s: Wait this long before loading, to test clients against a server that is not ready.
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "reference", "cpu", "triton"] = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    cuda_graphs: bool = True
    chat_template: str | None = None
    debug_load_delay_s: float = 0.0

    def __post_init__(self) -> None:
        _require(bool(self.model), "no model was named")
        _require(all(name.strip() for name in self.served_model_name), "--served-model-name must not be empty")
        _at_least(self, 1, "num_threads", "max_model_len")
        _at_least(self, 0, "debug_load_delay_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Its size is set by at most one of the three size settings.

    Attributes:
        block_size: Tokens per KV block.
        kv_cache_tokens: Size of the KV cache in tokens, rounded up to whole blocks.
        kv_cache_memory: Size of the KV cache in bytes, for example 6GiB.
        gpu_memory_fraction: Share of the whole device memory for weights, activations and KV; default on CUDA 0.9.
        prefix_cache: Reuse the KV of equal prompt beginnings.
        host_cache_memory: Host memory for prompt beginnings that the KV cache had to give up, for example 8GiB; they
            are copied back when they are asked for again. Default none.
    """

    block_size: int = 16
    kv_cache_tokens: int | None = None
    kv_cache_memory: str | None = None
    gpu_memory_fraction: float | None = None
    prefix_cache: bool = True
    host_cache_memory: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "block_size", "kv_cache_tokens")
        sizes = [
            n for n in ("kv_cache_tokens", "kv_cache_memory", "gpu_memory_fraction") if getattr(self, n) is not None
        ]
        flags = " and ".join("--" + n.replace("_", "-") for n in sizes)
        _require(len(sizes) <= 1, f"set only one size of the KV cache, not {flags}")
        if self.kv_cache_memory is not None:
            _check_size("--kv-cache-memory", self.kv_cache_memory)
        if self.host_cache_memory is not None:
            _check_size("--host-cache-memory", self.host_cache_memory)
            _require(self.prefix_cache, "--host-cache-memory keeps prefixes, and --no-prefix-cache has none")
        fraction = self.gpu_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            hint = f"; for {fraction:g} % write {fraction / 100:g}" if 1 < fraction <= 100 else ""
            raise ConfigError(
                f"--gpu-memory-fraction is a share of the whole card, above 0 and up to 1, not {fraction:g}{hint}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Which requests run together.

    Attributes:
        max_num_seqs: Most sequences in one step; default 256 on CUDA, 32 on the CPU.
        max_batch_tokens: Most tokens in one step; longer prompts are computed in chunks. Default 8192 on CUDA, 512 on
            the CPU.
        max_in_flight: Steps submitted and not yet read: 2 overlaps planning with computing, 1 does not. Default 2 on
            CUDA, 1 on the CPU.
        max_queue: Most sequences waiting for admission; more are answered with 503.
        max_queue_tokens: Most prompt tokens waiting for admission, beyond one request; more are answered with 503.
            Default four times what the KV cache holds.
        max_queue_wait_s: What would wait longer for admission, as far as can be foreseen, is answered with 503 at once.
        policy: Order of admission: fcfs by arrival, priority by the request's priority and age, shortest-prefill by
            the prompt's length and age.
        aging_steps: Under priority, one level is worth so many steps of waiting; under shortest-prefill, a prompt that
            fills one step is. Whoever has waited for as long as that sets it back is overtaken no more.
        prefix_lookahead: Among so many requests behind the next one, and the next one itself, that with the longest
            cached prefix is admitted first; nobody is passed over more often than that. 0 turns it off.
    """

    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    max_in_flight: int | None = None
    max_queue: int = 1024
    max_queue_tokens: int | None = None
    max_queue_wait_s: float | None = None
    policy: Literal["fcfs", "priority", "shortest-prefill"] = "fcfs"
    aging_steps: int = 256
    prefix_lookahead: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_num_seqs", "max_batch_tokens", "max_in_flight", "aging_steps")
        _at_least(self, 0, "prefix_lookahead")
        _at_least(self, 0, "max_queue", "max_queue_tokens", "max_queue_wait_s")
        _require(self.max_in_flight in (None, 1, 2), f"--max-in-flight must be 1 or 2, got {self.max_in_flight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Answers that keep to a schema, a regular expression or a grammar.

    Attributes:
        grammar_timeout_s: Time that compiling one may take; what takes longer is answered with 400.
        grammar_cache: So many compiled ones are kept for requests to come.
    """

    grammar_timeout_s: float = 10.0
    grammar_cache: int = 256

    def __post_init__(self) -> None:
        _require(self.grammar_timeout_s > 0, f"--grammar-timeout-s must be more than 0, got {self.grammar_timeout_s}")
        _at_least(self, 0, "grammar_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs, with or without HTTP around it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)

    def __post_init__(self) -> None:
        check_lookahead(self.scheduler, self.cache)


def check_lookahead(scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise ConfigError if cached prefixes are to go first where none are cached."""
    _require(
        cache.prefix_cache or scheduler.prefix_lookahead == 0,
        "--prefix-lookahead looks for cached prefixes, and --no-prefix-cache has none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one, which is printed.
        api_key: Accept requests only with one of these keys (Authorization: Bearer KEY).
        api_key_file: File with more keys, one a line; lines that begin with # are comments.
        max_requests_per_key: Most requests in progress per API key; more are answered with 429. Default none.
        allowed_host: Names in Host headers that are served; * serves all. By default only local names when the server
            listens on a loopback address (no web page can reach it under its own name then), and all otherwise.
        unknown_fields: What becomes of a request to the two completion routes with a field that is not known: refuse it
            with 400, leave the field out with a line in the log, or leave it out.
        cors_origin: Origins whose pages may call the server from a browser; * allows all.
        tls_certificate: PEM file with the certificate chain; turns on HTTPS with HTTP/2 by ALPN.
        tls_key: PEM file with the certificate's private key.
        tls_client_ca: PEM file with authorities; only clients with a certificate of one of them are served.
        max_body_bytes: Largest request body.
        max_connections: Most open connections; beyond it, the longest idle one makes room, or new ones wait.
        max_streams: Most concurrent streams on one HTTP/2 connection.
        request_timeout_s: Total time limit of a request; default none.
        queue_timeout_s: Time limit of a request until it begins to run; default none.
        idle_timeout_s: Time limit of a running request between two tokens, the first included; default none.
        read_timeout_s: Time a client has to send its request's headers, and its body.
        stall_timeout_s: A client that takes no byte of its answer for this long is dropped.
        sse_keepalive_s: Comment lines are sent this often while a stream has nothing to say; 0 sends none.
        drain_timeout_s: After SIGTERM, running requests have this long to finish.
        watchdog_s: The health route turns red when no step completes for this long although work exists.
        log_level: What is written to the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_requests_per_key: int | None = None
    allowed_host: tuple[str, ...] = ()
    unknown_fields: Literal["refuse", "warn", "ignore"] = "refuse"
    cors_origin: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 4096
    max_streams: int = 1024
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    read_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    sse_keepalive_s: float = 15.0
    drain_timeout_s: float = 30.0
    watchdog_s: float = 120.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"--port must lie between 0 and 65535, got {self.port}")
        _require(all(key.strip() for key in self.api_key), "--api-key must not be empty: it would let everybody in")
        _require(
            (self.tls_certificate is None) == (self.tls_key is None), "--tls-certificate and --tls-key go together"
        )
        _require(self.tls_client_ca is None or self.tls_key is not None, "--tls-client-ca needs --tls-certificate")
        for host in self.allowed_host:
            _check_host(host)
        _at_least(self, 1, "max_body_bytes", "max_connections", "max_streams", "max_requests_per_key")
        _at_least(self, 0, "sse_keepalive_s", "drain_timeout_s")
        limits = ("request_timeout_s", "queue_timeout_s", "idle_timeout_s")
        for name in (*limits, "read_timeout_s", "stall_timeout_s", "watchdog_s"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"--{name.replace('_', '-')} must be more than 0, got {value}")


def _check_host(host: str) -> None:
    """Raise ConfigError unless it is a host as headers name it: another rule would match nothing, or everything."""
    host = host.strip()
    in_brackets = re.fullmatch(r"\[(.*)\](:[0-9]*)?", host)
    try:
        IPv6Address(in_brackets.group(1) if in_brackets else host)
    except ValueError:
        _require(
            _HOST.fullmatch(host) is not None,
            f"--allowed-host takes names such as llm.example, *.example and [::1], or *; got {host!r}",
        )
