"""How many sequences and tokens a step may have, and how long a request may be: the settings with defaults filled in.

Called by whoever builds an executor and by ``aserve plan``, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.core.config import EngineConfig
from aserve.core.encoder_spec import EncoderSpec
from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's limits on one kind of device."""

    max_num_seqs: int
    max_batch_tokens: int
    max_in_flight: int
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec | EncoderSpec, *, on_gpu: bool) -> Limits:
        """Fill in the defaults. Raises ConfigError when ``max_model_len`` is more than the model's context."""
        scheduler = config.scheduler
        max_model_len = config.model.max_model_len or spec.max_positions
        if max_model_len > spec.max_positions:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the model's context of {spec.max_positions} tokens; "
                f"set at most --max-model-len {spec.max_positions}"
            )
        return cls(
            max_num_seqs=scheduler.max_num_seqs or (256 if on_gpu else 32),
            max_batch_tokens=scheduler.max_batch_tokens or (8192 if on_gpu else 512),
            max_in_flight=scheduler.max_in_flight or (2 if on_gpu else 1),
            max_model_len=max_model_len,
        )
