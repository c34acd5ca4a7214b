"""What all tests share: Hypothesis without deadlines, and a checkpoint small enough to build in a second."""

from pathlib import Path

import pytest
from hypothesis import settings

from aserve.testing import tiny_llama

# a deadline is an absolute-time assertion, and the machines that run this share their cores
settings.register_profile("aserve", deadline=None)
settings.load_profile("aserve")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with a byte tokenizer and a chat template."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
