"""The one capacity formula: what fits, asked by admission, by the clamping of ``max_tokens`` and by the scheduler.

A request is admitted only if it could run alone to its last token in an empty cache. So whatever is preempted for it,
the last running sequence can always grow to its limit, and nothing waits for space that can never exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aserve.core.memory import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an executor can hold.

    Attributes:
        num_blocks: KV blocks that sequences may use, of whichever group.
        block_size: tokens per block.
        max_num_seqs: sequences in one step, and slots.
        max_batch_tokens: tokens in one step.
        max_model_len: longest prompt plus answer the model is used for.
        max_in_flight: steps that may be submitted and not yet committed (1: no overlap, 2: overlap).
        vocab_size: token ids lie in [0, vocab_size).
        windows: per KV group, how many positions a query sees, its own included; None: all before it.
        parity_context: context at which a prompt's token costs as much in attention as in all else, were there no
            windows; None: context costs nothing.
        num_host_blocks: blocks of host memory for prefixes that had to leave the cache; 0: none are kept.
        whole_prompts: a prompt is computed in one step and leaves no KV, as encoders do; so none is longer than that.
        memory: where the device's memory goes; None where nobody has looked.
        max_length: longest prompt plus answer that can run at all.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    max_in_flight: int = 1
    vocab_size: int = 2**31 - 1
    windows: tuple[int | None, ...] = (None,)
    parity_context: int | None = None
    num_host_blocks: int = 0
    whole_prompts: bool = False
    memory: MemoryUse | None = field(default=None, compare=False)
    max_length: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_batch_tokens", "max_model_len", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.parity_context is not None and self.parity_context < 1:
            raise ValueError(f"parity_context must be at least 1, got {self.parity_context}")
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be at least 0, got {self.num_host_blocks}")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows must be one positive number or None per KV group, got {self.windows}")
        object.__setattr__(self, "max_length", self._longest())
        if self.max_length < 1:
            raise ValueError(f"num_blocks must be at least {self.num_blocks_for(1)}, one per KV group")

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the whole KV cache holds for all layers; windowed layers forget some, and make room for more."""
        return self.num_blocks // self.num_groups * self.block_size

    @property
    def table_width(self) -> int:
        """Entries of the block table of the longest sequence, in each group."""
        return -(-self.max_length // self.block_size)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens can follow a prompt; 0 or less if the prompt itself is too long."""
        return self.max_length - num_prompt_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, of all groups together, with which a sequence can be computed to this length.

        A window group needs what its window touches: a prompt's chunk and a second step in flight take more blocks
        while there are some, and else get smaller or wait for the commit that frees what fell behind the window.
        """
        num_positions = -(-num_tokens // self.block_size)
        return sum(min(num_positions, self._window_blocks(window, num_positions)) for window in self.windows)

    def first_block(self, window: int | None, start: int) -> int:
        """Index in the block table of the first block that a row at position ``start``, or any later one, reads."""
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def _window_blocks(self, window: int | None, otherwise: int) -> int:
        """Most blocks that ``window`` consecutive positions touch."""
        return otherwise if window is None else (window - 2) // self.block_size + 2

    def _longest(self) -> int:
        """Largest length up to ``max_model_len`` whose blocks there are; grows in whole blocks."""
        if self.whole_prompts:
            return min(self.max_model_len, self.max_batch_tokens, self.num_blocks * self.block_size)
        if self.num_blocks_for(self.max_model_len) <= self.num_blocks:
            return self.max_model_len
        low, high = 0, -(-self.max_model_len // self.block_size)  # blocks per table: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.num_blocks_for(middle * self.block_size) <= self.num_blocks
            low, high = (middle, high) if fits else (low, middle)
        return low * self.block_size
