"""Flags are the configuration's fields; a value comes from the command line, the environment, the file, the default."""

from dataclasses import MISSING, fields

import pytest

from aserve.cli.main import main
from aserve.cli.settings import SERVER, all_settings
from aserve.core.config import ServerConfig


def shown(output: str) -> dict[str, tuple[str, str]]:
    """--show-config's table: value and source by name."""
    rows = (line.split("  ") for line in output.splitlines())
    cells = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    return {name: (value, source) for name, value, source in cells}


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for setting in all_settings():
        monkeypatch.delenv("ASERVE_" + setting.name.upper(), raising=False)


def test_every_field_is_a_documented_flag(capsys):
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for config_class in SERVER:
        for field in fields(config_class):
            if field.default is not MISSING:
                assert "--" + field.name.replace("_", "-") + " " in text
    assert all(setting.help for setting in all_settings())


def test_no_two_settings_share_a_name():
    names = [setting.name for setting in all_settings()]
    assert len(names) == len(set(names))


def test_defaults_are_those_of_the_classes(capsys):
    assert main(["serve", "M", "--show-config"]) == 0
    table = shown(capsys.readouterr().out)
    assert table["port"] == (str(ServerConfig().port), "default")
    assert table["model"] == ("M", "command line")
    assert table.keys() == {setting.name for setting in all_settings()}


def test_precedence(capsys, monkeypatch, tmp_path):
    file = tmp_path / "aserve.toml"
    file.write_text('port = 1\nhost = "file"\nmax-queue = 3\nprefix_cache = false\nserved_model_name = ["a", "b"]\n')
    monkeypatch.setenv("ASERVE_PORT", "2")
    monkeypatch.setenv("ASERVE_HOST", "environment")
    assert main(["serve", "M", "--config", str(file), "--port", "3", "--show-config"]) == 0
    table = shown(capsys.readouterr().out)
    assert table["port"] == ("3", "command line")
    assert table["host"] == ("environment", "ASERVE_HOST")
    assert table["max_queue"] == ("3", str(file))
    assert table["prefix_cache"] == ("False", str(file))
    assert table["served_model_name"] == ("a b", str(file))
    assert table["block_size"] == ("16", "default")


def test_yaml_file_named_by_the_environment(capsys, monkeypatch, tmp_path):
    file = tmp_path / "aserve.yaml"
    file.write_text("drain-timeout-s: 2.5\nmodel: M\nrevision: null\n")
    monkeypatch.setenv("ASERVE_CONFIG", str(file))
    assert main(["serve", "--show-config"]) == 0
    table = shown(capsys.readouterr().out)
    assert table["drain_timeout_s"] == ("2.5", str(file))
    assert table["model"] == ("M", str(file))
    assert table["revision"] == ("-", "default")


def test_keys_repeat_and_are_not_shown(capsys):
    assert main(["serve", "M", "--api-key", "first", "--api-key", "second", "--show-config"]) == 0
    output = capsys.readouterr().out
    assert shown(output)["api_key"] == ("(set)", "command line")
    assert "first" not in output


def test_a_file_may_hold_settings_of_other_commands(capsys, tmp_path):
    file = tmp_path / "aserve.toml"
    file.write_text("port = 1\nblock_size = 32\n")
    assert main(["chat", "M", "--config", str(file), "--show-config"]) == 0
    table = shown(capsys.readouterr().out)
    assert table["block_size"] == ("32", str(file))
    assert "port" not in table


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_commands_own_flags_come_from_the_same_sources(capsys, monkeypatch, tmp_path, command):
    file = tmp_path / "aserve.toml"
    file.write_text("temperature = 0.5\nseed = 3\nmax-tokens = 7\n")
    monkeypatch.setenv("ASERVE_SEED", "4")
    monkeypatch.setenv("ASERVE_TOP_P", "0.9")
    assert main([command, "M", "--config", str(file), "--max-tokens", "8", "--show-config"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    table = shown(output)
    assert table["temperature"] == ("0.5", str(file))
    assert table["seed"] == ("4", "ASERVE_SEED")
    assert table["top_p"] == ("0.9", "ASERVE_TOP_P")
    assert table["max_tokens"] == ("8", "command line")
    own = {"chat": "system", "generate": "output"}[command]
    assert table[own] == ({"system": "-", "output": "-"}[own], "default")


def test_a_commands_own_flag_is_no_setting_of_the_server(capsys, monkeypatch):
    monkeypatch.setenv("ASERVE_TEMPERATURE", "0")
    assert main(["serve", "M", "--show-config"]) == 0
    output, error = capsys.readouterr()
    assert "temperature" not in shown(output)
    assert error == "aserve: warning: there is no setting for ASERVE_TEMPERATURE\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", "prot = 1", "there is no setting 'prot'; did you mean port?"),
        ("a.toml", 'config = "b.toml"', "there is no setting 'config'"),
        ("a.toml", "port = ", "is malformed"),
        ("a.yaml", "port: [", "is malformed"),
        ("a.yaml", "- port", "must hold settings by name"),
        ("a.toml", "port = 1979-05-27", "port must be a text, a number, true or false, or a list"),
        ("a.ini", "port = 1", "must end in .toml, .yaml or .yml"),
        ("a.toml", 'port = "many"', 'unable to convert "many" into int'),
        ("a.toml", "port = 99999", "got 99999 (set by {path})"),
    ],
)
def test_a_wrong_file_is_one_line(capsys, tmp_path, name, content, reason):
    file = tmp_path / name
    file.write_text(content)
    assert main(["serve", "M", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aserve: error: ")
    assert error.count("\n") == 1
    assert reason.format(path=file) in error
    assert str(file) in error


def test_a_missing_file_is_one_line(capsys):
    assert main(["serve", "M", "--config", "/nowhere.toml"]) == 2
    assert capsys.readouterr().err == (
        "aserve: error: cannot read the settings file /nowhere.toml: No such file or directory\n"
    )
