"""Getting models: what is printed, and what is said when there is none."""

from aserve.cli.main import main
from aserve.hub import BUILTIN_MODELS
from aserve.models.registry import ARCHITECTURES


def test_the_folder_is_printed(tiny_model, capsys):
    assert main(["pull", str(tiny_model)]) == 0
    assert capsys.readouterr().out == f"{tiny_model}\n"


def test_a_model_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("smollm2-135m", "nobody/nothing", str(tmp_path / "missing.gguf")):
        assert main(["pull", name]) == 1
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith("aserve: error: ")
        assert error.count("\n") == 1
        assert name in error


def test_serve_says_the_same_and_ends(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", "smollm2-135m", "--port", "0"]) == 1
    error = capfd.readouterr().err
    assert "aserve: error: smollm2-135m" in error
    assert "Traceback" not in error


def test_help_says_what_can_only_be_pulled(capsys):
    """Built-in models of an architecture that no model family has."""
    assert main(["pull", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, model in BUILTIN_MODELS.items():
        assert name in text
        assert (f"{name}, pull only so far" in text) == (model.architecture not in ARCHITECTURES)
