"""Files and pipes: a mistake costs neither the input nor an older output, and every failure is one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.cli.main import main

LINE = {"prompt": "a", "max_tokens": 2}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def one_line(capsys):
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("aserve: error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("same", ["itself", "symbolic link", "hard link"])
@pytest.mark.usefixtures("fake_engine")
def test_the_input_cannot_be_the_output(tmp_path, capsys, same):
    source = write(tmp_path / "in.jsonl", LINE)
    target = tmp_path / "out.jsonl"
    if same == "itself":
        target = source
    elif same == "symbolic link":
        target.symlink_to(source)
    else:
        target.hardlink_to(source)
    assert main(["generate", "M", "-i", str(source), "-o", str(target)]) == 2
    assert "is both --input and --output" in one_line(capsys)
    assert json.loads(source.read_text()) == LINE


def test_a_model_that_is_not_there_leaves_an_older_output(tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", LINE), tmp_path / "out.jsonl"
    target.write_text("older")
    assert main(["generate", str(tmp_path / "no" / "model"), "-i", str(source), "-o", str(target)]) == 1
    assert "no file or folder" in one_line(capsys)
    assert target.read_text() == "older"


@pytest.mark.parametrize(
    ("output", "reason"),
    [("", "Is a directory"), ("nowhere/out.jsonl", "there is no folder"), ("in.jsonl/out.jsonl", "Not a directory")],
)
def test_an_output_that_cannot_be_opened_is_said_before_the_model_is_loaded(tmp_path, capsys, output, reason):
    source = write(tmp_path / "in.jsonl", LINE)
    target = f"{tmp_path}/{output}"
    assert main(["generate", "/no/model", "-i", str(source), "-o", target]) == 2
    error = one_line(capsys)
    assert f"cannot open {target}" in error
    assert reason in error


@pytest.mark.usefixtures("fake_engine")
def test_a_line_that_is_not_utf_8_fails_alone(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps(LINE).encode()
    source.write_bytes(good + b'\n{"prompt": "caf\xe9"}\n' + good + b"\n")
    assert main(["generate", "M", "-i", str(source), "-o", str(target)]) == 1
    assert "1 of 3 lines failed" in one_line(capsys)
    first, second, third = map(json.loads, target.read_text().splitlines())
    assert second["error"]["message"] == "the line is not UTF-8 text"
    assert first["text"] == third["text"] != ""


@pytest.mark.usefixtures("fake_engine")
def test_half_a_surrogate_pair_is_given_back_or_fails_its_line(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, {**LINE, "id": "\ud800"}, {**LINE, "prompt": "\udc80"}, {**LINE, "\ud800": 1}, {**LINE, "id": "é"})
    assert main(["generate", "M", "-i", str(source), "-o", str(target)]) == 1
    assert "2 of 4 lines failed" in one_line(capsys)
    results = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert results[0]["id"] == "\ud800"
    assert "surrogate" in results[1]["error"]["message"]
    assert "is not a field" in results[2]["error"]["message"]
    assert results[3]["id"] == "é"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.usefixtures("fake_engine")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_line(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", *[LINE] * 20)
    assert main(["generate", "M", "-i", str(source), "-o", "/dev/full"]) == 1
    assert one_line(capsys) == "aserve: error: cannot write the output: No space left on device\n"


PROGRAM = """
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from aserve.cli import launch
from aserve.cli.main import main
from aserve.core.capacity import Capacity
from aserve.engine.engine import run_engine
from aserve.testing import FakeExecutor, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

folder = Path(sys.argv.pop(1))
write_byte_tokenizer(folder)
capacity = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_batch_tokens=64, max_model_len=256)

@asynccontextmanager
async def open_engine(config):
    async with run_engine(executor_factory=lambda: FakeExecutor(capacity), tokenizer=Tokenizer.load(folder),
                          config=config, model_names=("M",)) as engine:
        yield engine

launch.engine_opener = lambda **_: open_engine
sys.exit(main(sys.argv[1:]))
"""


def start(tmp_path, *arguments, **options):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tokenizer"), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_reader_that_leaves_ends_the_batch_with_one_line(tmp_path):
    """As with ``| head -1``; the writer of the input is still there and silent."""
    with start(tmp_path, "generate", "M", stdout=subprocess.PIPE) as process:
        process.stdin.write(b"".join(json.dumps(LINE).encode() + b"\n" for _ in range(8)))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"]
        process.stdout.close()
        process.stdin.write(b"".join(json.dumps(LINE).encode() + b"\n" for _ in range(8)))
        process.stdin.flush()
        error = process.stderr.read().decode()
        assert process.wait(30) == 1
        assert error == "aserve: error: cannot write the output: Broken pipe\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", [("chat", "M", "--max-tokens", "4"), ("version",)])
def test_other_commands_on_a_full_disk(tmp_path, command, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full, start(tmp_path, *command, stdout=full, env=environment) as process:
        _, error = process.communicate(b"hello\n", timeout=60)
    assert error == b"aserve: error: cannot write the output: No space left on device\n"
    assert process.returncode == 1


def test_output_is_utf_8_in_any_locale(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with start(tmp_path, "generate", "M", stdout=subprocess.PIPE, env=environment) as process:
        output, _ = process.communicate(json.dumps({**LINE, "id": "é"}, ensure_ascii=False).encode(), timeout=60)
    assert process.returncode == 0
    assert json.loads(output.decode())["id"] == "é"


def test_a_question_that_is_not_utf_8_fails_alone(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    with start(tmp_path, "chat", "M", "--max-tokens", "4", stdout=subprocess.PIPE, env=environment) as process:
        output, error = process.communicate(b"caf\xe9\nhello\n", timeout=60)
    assert process.returncode == 0
    assert error.decode().startswith("aserve: error: ")
    assert error.count(b"\n") == 1
    assert len(output.strip()) == 4
