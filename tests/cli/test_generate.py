"""A batch of lines: order, identity, mistakes in a line, the engine's death."""

import io
import json

import pytest

from aserve.cli.main import main

pytestmark = pytest.mark.usefixtures("fake_engine")


def run(tmp_path, lines, *flags):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    code = main(["generate", "M", "--input", str(source), "--output", str(target), *flags])
    return code, [json.loads(line) for line in target.read_text().splitlines()]


def test_answers_come_in_the_order_of_the_lines(tmp_path):
    lengths = [(37 * i) % 23 + 1 for i in range(60)]  # more lines than the window, long and short ones mixed
    lines = [{"prompt": f"line {i}", "max_tokens": n, "id": f"id-{i}"} for i, n in enumerate(lengths)]
    code, results = run(tmp_path, lines)
    assert code == 0
    assert [result["index"] for result in results] == list(range(60))
    assert [result["id"] for result in results] == [f"id-{i}" for i in range(60)]
    assert [len(result["text"]) for result in results] == lengths
    assert all(result["finish_reason"] == "length" for result in results)
    assert results[7]["usage"] == {"prompt_tokens": len("line 7"), "completion_tokens": lengths[7]}


def test_a_line_is_answered_as_if_alone(tmp_path):
    line = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    others = [{"prompt": f"other {i}", "max_tokens": 20} for i in range(5)]
    _, (alone,) = run(tmp_path, [line])
    _, among = run(tmp_path, [*others, line])
    assert among[-1]["text"] == alone["text"]


def test_flags_are_defaults_of_lines(tmp_path):
    code, results = run(tmp_path, [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}], "--max-tokens", "5")
    assert code == 0
    assert [len(result["text"]) for result in results] == [5, 2]


MISTAKES = [
    ("not json", "the line is not JSON", None),
    ("[1]", "the line is not a JSON object", None),
    ({"max_tokens": 3}, "either prompt or messages", None),
    ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either prompt or messages", None),
    ({"prompt": 5}, "prompt must be a text or a list of token ids", "prompt"),
    ({"messages": []}, "messages must be a list of messages", "messages"),
    ({"prompt": "a", "max_token": 3}, "max_token is not a field of a line", "max_token"),
    ({"prompt": "a", "max_tokens": "3"}, "max_tokens must be an integer", "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature must be a number, at least 0; got -1", "temperature"),
    ({"prompt": "a", "stop": [1]}, "stop must be a text or a list of texts", "stop"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos must be true or false", "ignore_eos"),
    ({"prompt": "a" * 500}, "256", "prompt"),
]


@pytest.mark.parametrize(("line", "message", "param"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_ends_its_line_only(tmp_path, capsys, line, message, param):
    good = {"prompt": "good", "max_tokens": 3}
    code, results = run(tmp_path, [good, line, good])
    assert code == 1
    assert capsys.readouterr().err == "aserve: error: 1 of 3 lines failed: see their error field\n"
    assert results[0]["text"] == results[2]["text"] != ""
    assert message in results[1]["error"]["message"]
    assert results[1]["error"]["param"] == param
    assert results[1]["error"]["type"] == "invalid_request_error"
    assert "text" not in results[1]


def test_null_and_blank_lines_mean_nothing(tmp_path):
    code, results = run(tmp_path, ["", {"prompt": "a", "max_tokens": 2, "stop": None, "seed": None}, "  "])
    assert code == 0
    assert len(results) == 1


def test_stdin_and_stdout(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a", "max_tokens": 4}\n'))
    assert main(["generate", "M"]) == 0
    output, error = capsys.readouterr()
    assert len(json.loads(output)["text"]) == 4
    assert error == ""


def test_the_engines_death_ends_the_batch_with_one_line(tmp_path, capsys, executor, caplog):
    executor._fail_at_step = 5
    code, results = run(tmp_path, [{"prompt": "a", "max_tokens": 50}] * 20)
    assert code == 1
    assert capsys.readouterr().err == "aserve: error: the engine has failed and serves no more requests\n"
    assert len(results) < 20
    assert "the step loop failed" in caplog.text
