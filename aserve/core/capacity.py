"""The one capacity formula: what fits, asked by admission, by the clamping of ``max_tokens`` and by the scheduler.

A request is admitted only if it could run alone to its last token in an empty cache. So whatever is preempted for it,
the last running sequence can always grow to its limit, and nothing waits for space that can never exist.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an executor can hold.

    Attributes:
        num_blocks: KV blocks that sequences may use.
        block_size: tokens per block.
        max_num_seqs: sequences in one step, and slots.
        max_batch_tokens: tokens in one step.
        max_model_len: longest prompt plus answer the model is used for.
        max_in_flight: steps that may be submitted and not yet committed (1: no overlap, 2: overlap).
        vocab_size: token ids lie in [0, vocab_size).
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    max_in_flight: int = 1
    vocab_size: int = 2**31 - 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens", "max_model_len", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def max_length(self) -> int:
        """Longest prompt plus answer that can run at all."""
        return min(self.max_model_len, self.num_kv_tokens)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens can follow a prompt; 0 or less if the prompt itself is too long."""
        return self.max_length - num_prompt_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
