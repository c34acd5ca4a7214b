"""The hosts under which the application is tested; two of them, near relatives of others, before releases only."""

import pytest

HOSTS = (
    "anycorn-trio",
    "hypercorn-asyncio",
    "uvicorn",
    pytest.param("anycorn-asyncio", marks=pytest.mark.slow),
    pytest.param("hypercorn-trio", marks=pytest.mark.slow),
)
