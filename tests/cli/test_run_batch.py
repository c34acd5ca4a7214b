"""A file of OpenAI requests: what a line means, mistakes in lines, and a second run that goes on from the first."""

import io
import json

import pytest

from aserve.cli.main import main
from aserve.cli.openai_batch import answered

pytestmark = pytest.mark.usefixtures("fake_engine")


def line(custom_id, prompt="hello", url="/v1/completions", **fields):
    body = {"model": "M", "prompt": prompt, "max_tokens": 5, "temperature": 0, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def run(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *flags):
        texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
        source.write_text("".join(text + "\n" for text in texts))
        code = main(["run-batch", "M", "-i", str(source), "-o", str(target), *flags])
        return code, [json.loads(text) for text in target.read_text().splitlines()]

    run.output = target
    return run


def test_each_line_has_the_answer_of_its_request(run):
    chat = {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2}
    code, results = run(
        [line(f"c{i}", prompt=f"prompt {i}", max_tokens=i + 1) for i in range(30)]
        + [{"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}]
    )
    assert code == 0
    by_id = {result["custom_id"]: result for result in results}
    assert len(by_id) == 31
    for i in range(30):
        response = by_id[f"c{i}"]["response"]
        assert response["status_code"] == 200
        assert len(response["body"]["choices"][0]["text"]) == i + 1
    assert len(by_id["chat"]["response"]["body"]["choices"]) == 2
    assert all(result["error"] is None for result in results)
    assert len({result["id"] for result in results}) == 31


MISTAKES = [
    ("not json", "not JSON"),
    ("[1]", "not a JSON object"),
    ({"method": "POST", "url": "/v1/completions", "body": {}}, "custom_id"),
    (line("c0"), "used by an earlier line"),
    ({**line("x"), "method": "GET"}, "method must be POST"),
    ({**line("x"), "url": 5}, "url must be"),
    ({**line("x"), "body": "text"}, "body must be"),
    ({**line("x"), "other": 1}, "other is not a field"),
    (line("x", stream=True), "cannot be streamed"),
]


@pytest.mark.parametrize(("wrong", "what"), MISTAKES)
def test_a_mistake_costs_its_own_line(run, capsys, wrong, what):
    code, results = run([line("c0"), wrong, line("c1")])
    assert code == 1
    assert "1 of 3 requests failed" in capsys.readouterr().err
    (failed,) = [result for result in results if result["error"] is not None]
    assert what in failed["error"]["message"] and failed["error"]["code"]
    assert failed["response"] is None
    assert {result["custom_id"] for result in results if result["response"]} == {"c0", "c1"}


def test_a_refused_request_has_its_status(run):
    code, results = run([line("a", model="other"), line("b", max_tokens=-1), line("c", url="/v1/nothing")])
    assert code == 1
    statuses = {result["custom_id"]: result["response"]["status_code"] for result in results}
    assert statuses == {"a": 404, "b": 400, "c": 404}
    assert all("message" in result["response"]["body"]["error"] for result in results)


def test_a_second_run_asks_only_for_what_has_no_good_answer(run):
    _, first = run([line("a"), line("b", model="other")])
    kept = next(result for result in first if result["custom_id"] == "a")
    with run.output.open("a") as file:
        file.write(json.dumps({**kept, "custom_id": "c"})[:-20])  # the run was killed while it wrote
    code, second = run([line("a"), line("b"), line("c")])
    assert code == 0
    assert sorted(result["custom_id"] for result in second) == ["a", "b", "c"]
    assert kept in second
    code, third = run([line("a"), line("b"), line("c")])
    assert (code, third) == (0, second)


def test_a_file_that_is_no_output_of_ours_keeps_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"response": {"status_code": 200}}\n5\n{"custom_id": 3, "response": {"status_code": 200}}\n\n')
    assert answered(path) == set()
    assert answered(tmp_path / "none") == set()


def test_the_output_must_be_a_file(capsys):
    assert main(["run-batch", "M", "-i", "-", "-o", "-"]) == 2
    assert "--output must be a file" in capsys.readouterr().err


def test_requests_from_stdin(run, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(line("a")) + "\n"))
    target = tmp_path / "o.jsonl"
    assert main(["run-batch", "M", "-i", "-", "-o", str(target)]) == 0
    assert json.loads(target.read_text())["custom_id"] == "a"


def test_the_death_of_the_engine_ends_the_batch(run, executor, capsys, monkeypatch):
    def wait():
        raise RuntimeError("injected")

    monkeypatch.setattr(executor, "wait", wait)
    code, results = run([line(f"c{i}", max_tokens=50) for i in range(20)])
    assert code == 1
    assert "the engine has failed" in capsys.readouterr().err
    assert all(result["response"] is None or result["response"]["status_code"] == 200 for result in results)
