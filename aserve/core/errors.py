"""The error tree: each class carries the HTTP status and the OpenAI error type and code it is answered with.

Raised anywhere below the server, turned into a response only by the server. Messages are for the client: they name
what was wrong and the numbers involved, never a path or a class name.
"""

from __future__ import annotations

from typing import ClassVar


class AserveError(Exception):
    """Base class of everything aserve raises on purpose.

    ``param`` names the request field at fault; ``retry_after_s`` is sent as ``Retry-After``.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(AserveError):
    """The client's mistake: a field is malformed, out of range, or not supported."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedFieldError(InvalidRequestError):
    """A field that aserve knows but does not offer, or does not know at all."""

    code = "unsupported_parameter"


class InvalidGrammarError(InvalidRequestError):
    """A schema, regular expression or grammar is wrong, has something that is not supported, or is too large."""

    code = "invalid_grammar"


class GrammarTimeoutError(InvalidGrammarError):
    """Compiling the request's grammar took longer than it may."""

    code = "grammar_timeout"


class ContextLengthError(InvalidRequestError):
    """The prompt can never fit the context or the KV cache."""

    code = "context_length_exceeded"


class TaskNotOfferedError(InvalidRequestError):
    """The model can be asked for other things than this one: answers, vectors or scores."""

    code = "task_not_offered"


class AuthenticationError(AserveError):
    """No API key, or not one of the configured ones."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(AserveError):
    """No such route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class RequestNotFoundError(NotFoundError):
    """No request of this id is in progress, or it is another caller's."""

    code = "request_not_found"


class MethodNotAllowedError(AserveError):
    """The route exists, for other methods."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestAbortedError(AserveError):
    """Somebody with the same API key, or its own client, has ended this request by its id."""

    status = 409
    type = "invalid_request_error"
    code = "request_aborted"


class PayloadTooLargeError(AserveError):
    """The request body is larger than the configured limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(AserveError):
    """The body is not JSON by its content type, or carries a content encoding."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RequestTimeoutError(AserveError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class HostNotAllowedError(AserveError):
    """The request names a host under which this server is not to be reached."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class ConcurrencyLimitError(AserveError):
    """The caller has as many requests in progress as its API key may have; others are not affected."""

    status = 429
    type = "rate_limit_error"
    code = "concurrency_limit_exceeded"


class QueueFullError(AserveError):
    """The server's queue holds as much as it may, whoever sent it; try again later."""

    status = 503
    code = "queue_full"


class QueueTimeoutError(AserveError):
    """The request waited for its first step for as long as it may."""

    status = 503
    code = "queue_timeout"


class EngineLoadingError(AserveError):
    """The model is still being loaded."""

    status = 503
    code = "engine_loading"


class EngineDrainingError(AserveError):
    """The server is shutting down and admits nothing new."""

    status = 503
    code = "engine_draining"


class EngineDeadError(AserveError):
    """The step loop has failed; no request can be served any more."""

    status = 503
    code = "engine_dead"


class GenerationError(AserveError):
    """This request's own computation failed (for example logits that are not finite); others go on."""

    code = "generation_failed"


class BatchError(AserveError):
    """Some lines of a batch have no good answer; its output says which and why. Shown on one line."""

    code = "batch_failed"


class PromptError(AserveError):
    """This request's prompt could not be made ready by a fault of the server; others go on."""

    code = "prompt_failed"


class GrammarError(GenerationError):
    """This request's grammar could not be followed any further, by a fault of the server; others go on."""

    code = "grammar_failed"


class NoTokenLeftError(GenerationError):
    """The request's grammar and its other constraints together exclude every token."""

    status = 400
    type = "invalid_request_error"
    code = "no_token_left"


class DetokenizationError(GenerationError):
    """This request's tokens could not be turned into text by a fault of the server; others go on."""

    code = "detokenization_failed"


class DeadlineExceededError(AserveError):
    """The request's total time limit passed before it was complete."""

    status = 504
    code = "deadline_exceeded"


class IdleTimeoutError(AserveError):
    """The request had run for as long as it may without a new token."""

    status = 504
    code = "idle_timeout"


class GenerationClosedError(AserveError):
    """The request was closed from outside (its client left, or it was cancelled). Nobody reads this answer."""

    status = 499
    code = "request_cancelled"


class ConfigError(AserveError):
    """A setting is wrong, or two settings contradict each other. Shown on one line at start."""

    code = "invalid_config"


class OutputError(AserveError):
    """A command cannot write its output. Shown on one line."""

    code = "output_failed"


class ModelLoadError(AserveError):
    """A checkpoint is missing, damaged, or of a kind that is not supported. Shown on one line at start."""

    code = "model_load_failed"
