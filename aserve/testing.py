"""Doubles that ship: an executor without a model, a checkpoint small enough to build in a test, and a tokenizer.

``FakeExecutor`` keeps a paged cache of token ids and derives each token from every id it can read back through the
block tables, so one wrong block, slot, fence or prefix changes the text. Nothing here needs torch; the whole server
runs on it. Used by aserve's own tests and by programs that embed aserve and want to test themselves.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from aserve.core.capacity import Capacity
from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.core.request import TokenLogprobs
from aserve.core.step import EXCLUDED_TOKEN, PENDING, POOLED, ScheduledSequence, StepPlan, StepResult
from aserve.grammar import GrammarCompiler, GrammarSlots, Matcher, settle
from aserve.text.token_bytes import byte_alphabet

NextToken = Callable[[list[int], int], int]
"""(all tokens so far, seed) -> the next token id."""

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 260
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hash_letter(token_ids: list[int], seed: int) -> int:
    """A lower-case letter's byte, by a hash of every token so far; the seed does not matter."""
    del seed
    text = ",".join(map(str, token_ids))
    return 97 + int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") % 26


def fake_vector(token_ids: list[int], params: PoolingParams) -> NDArray[np.float32]:
    """The vector [8], or less if the parameters say so, that ``FakeExecutor`` makes of a prompt.

    As of a model, it is made of all tokens up to each position: of the last, of the first, or the mean over all.
    """
    states = np.stack([_fake_state(token_ids[: end + 1]) for end in range(len(token_ids))])
    return _fake_pooled(states, params)


def _fake_state(token_ids: list[int]) -> NDArray[np.float32]:
    digest = blake2b(",".join(map(str, token_ids)).encode(), digest_size=8).digest()
    return (np.frombuffer(digest, np.uint8) / 128 - 1).astype(np.float32)


def _fake_pooled(states: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    rows = {PoolingKind.MEAN: states.mean(axis=0), PoolingKind.FIRST: states[0]}
    vector = rows.get(params.kind, states[-1])[: params.dimensions]
    return (vector / np.linalg.norm(vector) if params.normalize else vector).astype("<f4")


class FakeExecutor:
    """A StepExecutor whose model is a function of the tokens that it reads back from its own paged cache.

    Args:
        capacity: as a real executor would report it.
        next_token: the model.
        step_s: seconds that ``wait`` takes.
        fail_at_step: ``wait`` of this step raises RuntimeError, as a CUDA error would.
        grammars: what the engine compiles grammars with; a sequence that has one says the model's token where that is
            allowed, and else the lowest that is.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        next_token: NextToken = hash_letter,
        step_s: float = 0.0,
        fail_at_step: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._capacity = capacity
        self._grammars = GrammarSlots(grammars)
        self._constrained: set[int] = set()
        self._next_token = next_token
        self._step_s = step_s
        self._fail_at_step = fail_at_step
        self._cache = [[-1] * capacity.block_size for _ in range(capacity.num_blocks)]
        self._host_cache = [[-1] * capacity.block_size for _ in range(capacity.num_host_blocks)]
        self._tables: list[list[list[int]]] = [[[] for _ in capacity.windows] for _ in range(capacity.max_num_seqs)]
        self._tokens: list[list[int]] = [[] for _ in range(capacity.max_num_seqs)]
        self._seeds = [0] * capacity.max_num_seqs
        self._num_logprobs: list[int | None] = [None] * capacity.max_num_seqs
        self._last_sampled = [PENDING] * capacity.max_num_seqs
        self._pooling: list[PoolingParams | None] = [None] * capacity.max_num_seqs
        self._states: list[list[NDArray[np.float32]]] = [[] for _ in range(capacity.max_num_seqs)]
        self._results: deque[Callable[[], StepResult]] = deque()
        self.closed = False

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        assert len(self._results) < self._capacity.max_in_flight, "too many steps in flight"
        sampled: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        vectors: dict[int, bytes] = {}
        matched: dict[int, Matcher] = {}
        for block_id, host_slot in plan.saves:
            self._host_cache[host_slot] = list(self._cache[block_id])
        for block_id, host_slot in plan.restores:
            self._cache[block_id] = list(self._host_cache[host_slot])
        for row in plan.sequences:
            tokens = self._compute(row)
            pooling = self._pooling[row.slot]
            if pooling is not None:
                self._states[row.slot] += [_fake_state(tokens[: end + 1]) for end in range(row.start, len(tokens))]
            if not row.samples:
                continue
            if pooling is not None:
                vectors[len(sampled)] = _fake_pooled(np.stack(self._states[row.slot]), pooling).tobytes()
                sampled.append(POOLED)
                continue
            token = self._next_token(tokens, self._seeds[row.slot])
            if row.slot in self._constrained:
                (matcher,) = self._grammars.matchers([row.slot])
                matched[len(sampled)] = matcher
                token = self._within(matcher, len(tokens), token)
            self._last_sampled[row.slot] = token
            count = self._num_logprobs[row.slot]
            if count is not None:
                top = tuple((97 + i, -1.0 - i) for i in range(count))
                logprobs[len(sampled)] = TokenLogprobs(token, -0.5, top)
            sampled.append(token)
        self._results.append(partial(_settled, StepResult(plan.step_id, tuple(sampled), logprobs, vectors), matched))

    def wait(self) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)  # noqa: TID251 - the step thread is meant to block
        result = self._results.popleft()()
        if result.step_id == self._fail_at_step:
            raise RuntimeError(f"injected failure in step {result.step_id}")
        return result

    def close(self) -> None:
        self.closed = True

    def _within(self, matcher: Matcher, position: int, token: int) -> int:
        """The token, or the lowest allowed one; EXCLUDED_TOKEN if there is none."""
        size = min(self._capacity.vocab_size, self._grammars.num_ids)
        (allowed,) = np.unpackbits(
            self._grammars.allowed([matcher], [position], size), axis=1, count=size, bitorder="little"
        )
        if allowed[token]:
            return token
        return int(allowed.argmax()) if allowed.any() else EXCLUDED_TOKEN

    def _compute(self, row: ScheduledSequence) -> list[int]:
        """Write the row's tokens into the cache and read back what each group sees of the sequence."""
        tables, known = self._tables[row.slot], self._tokens[row.slot]
        if row.new is not None:
            for table in tables:
                table.clear()
            known[:] = row.new.prior_token_ids
            self._seeds[row.slot] = row.new.sampling.seed
            self._num_logprobs[row.slot] = row.new.sampling.num_logprobs
            self._pooling[row.slot] = row.new.pooling
            self._states[row.slot] = []
            self._grammars.close(row.slot)
            self._constrained.discard(row.slot)
            if row.new.sampling.grammar is not None:
                self._constrained.add(row.slot)
        if row.slot in self._constrained:
            self._grammars.observe(row)
        for table, block_ids in zip(tables, row.new_block_ids, strict=False):  # no ids at all, or some for each group
            table.extend(block_ids)
        known += [self._last_sampled[row.slot] if token == PENDING else token for token in row.token_ids]
        cache, size = self._cache, self._capacity.block_size
        end = row.start + len(row.token_ids)
        tokens = known.copy()
        for table, window in zip(tables, self._capacity.windows, strict=True):
            for place in range(row.start, end):
                cache[table[place // size]][place % size] = known[place]
            first = 0 if window is None else max(0, row.start - window + 1)
            seen = [cache[table[place // size]][place % size] for place in range(first, end)]
            if seen != known[first:end]:
                tokens[first:end] = seen  # what was read is what the model computes with, right or wrong
        return tokens


def _settled(result: StepResult, matched: dict[int, Matcher]) -> StepResult:
    """The result with what the matchers make of their tokens, which they take now."""
    if not matched:
        return result
    token_ids, completed = settle(result.sampled, list(matched), list(matched.values()))
    return replace(result, sampled=token_ids, completed=completed)


def write_byte_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer with one token per byte and four specials."""
    specials = {"<s>": BOS, "</s>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": byte_alphabet() | specials,
            "merges": [],
        },
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def tiny_llama(folder: Path, *, seed: int = 0, std: float = 0.3, **changes: Any) -> Path:
    """Write a random checkpoint of about 100,000 parameters with a byte tokenizer; returns the folder.

    ``changes`` override keys of config.json; architectures other than Llama get the tensors they need (biases of
    Qwen2, head norms of Qwen3).
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    } | changes
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_random_weights(config, seed, std), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_weights(config: dict[str, Any], seed: int, std: float) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    hidden, inter, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * head, "k": config["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    family = config["architectures"][0]

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.normal(0.0, std, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, size in rows.items():
            weights[f"{prefix}self_attn.{part}_proj.weight"] = draw(size, hidden)
            if family.startswith("Qwen2"):
                weights[f"{prefix}self_attn.{part}_proj.bias"] = draw(size)
        if family.startswith("Qwen3"):
            weights |= {f"{prefix}self_attn.{part}_norm.weight": np.ones(head, np.float32) for part in "qk"}
        weights[prefix + "self_attn.o_proj.weight"] = draw(hidden, rows["q"])
        weights[prefix + "mlp.gate_proj.weight"] = draw(inter, hidden)
        weights[prefix + "mlp.up_proj.weight"] = draw(inter, hidden)
        weights[prefix + "mlp.down_proj.weight"] = draw(hidden, inter)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    return weights
