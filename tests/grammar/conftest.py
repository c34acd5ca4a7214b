"""A compiler over one token per byte, and walks through what it allows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aserve.assembly import grammar_compiler
from aserve.testing import write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from grammar_walk import Walk


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def compiler(byte_tokenizer):
    return grammar_compiler(byte_tokenizer, size=64)


@pytest.fixture
def walk(compiler):
    return lambda grammar, **options: Walk(compiler, grammar, **options)
