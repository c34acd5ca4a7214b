"""A failure is one line on stderr, with exit code 2 for wrong usage and 1 for the rest, and never a traceback."""

import pytest

from aserve.cli.main import main

USAGE = [
    (["frobnicate"], "frobnicate"),
    (["serve"], "serve needs a MODEL; see: aserve serve --help"),
    (["pull"], "pull needs a NAME"),
    (["serve", "M", "extra"], "extra"),
    (["serve", "M", "--prot", "1"], "Did you mean --port?"),
    (["serve", "M", "--port", "99999"], "--port must lie between 0 and 65535, got 99999"),
    (["serve", "M", "--port", "-1"], "got -1"),
    (["serve", "M", "--port", "many"], '"many"'),
    (["serve", "M", "--port"], "--port"),
    (["serve", "M", "--dtype", "float8"], '"float8"'),
    (["serve", "M", "--api-key", ""], "--api-key must not be empty"),
    (["serve", "M", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
    (["serve", "M", "--kv-cache-tokens", "64", "--kv-cache-memory", "1GiB"], "set only one size of the KV cache"),
    (["serve", "M", "--tls-key", "k.pem"], "--tls-certificate and --tls-key go together"),
    (["serve", "M", "--kv-cache-memory", "lots"], "'lots' is not a size"),
    (["generate", "M", "--input", "/nowhere.jsonl"], "cannot open /nowhere.jsonl: No such file or directory"),
]


@pytest.mark.parametrize(("arguments", "reason"), USAGE, ids=[" ".join(a) for a, _ in USAGE])
def test_wrong_usage(capsys, arguments, reason):
    assert main(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("aserve: error: ")
    assert error.count("\n") == 1
    assert reason in error


def test_a_variable_at_fault_is_named(capsys, monkeypatch):
    monkeypatch.setenv("ASERVE_PORT", "tcp://10.0.0.1:8000")  # what Kubernetes sets for a service called aserve
    assert main(["serve", "M"]) == 2
    assert "ASERVE_PORT" in capsys.readouterr().err


def test_an_empty_key_in_the_environment_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("ASERVE_API_KEY", "")
    assert main(["serve", "M"]) == 2
    assert "--api-key must not be empty" in capsys.readouterr().err


def test_an_unknown_variable_is_a_warning(capsys, monkeypatch):
    monkeypatch.setenv("ASERVE_PROT", "1")
    assert main(["serve", "M", "--show-config"]) == 0
    assert capsys.readouterr().err == "aserve: warning: there is no setting for ASERVE_PROT\n"


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "1" + "0" * 30, "99999999TiB"])
def test_a_size_beyond_any_memory_is_refused(capsys, size):
    assert main(["serve", "M", "--kv-cache-memory", size]) == 2
    error = capsys.readouterr().err
    assert "is larger than any memory" in error
    assert len(error) < 200
