"""``aserve plan`` as it is typed: where the config comes from, what is printed, the exit code; torch is not needed."""

import json
import subprocess
import sys

import pytest

from aserve.cli.main import main

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
FLAGS = ["--gpu-memory", "24GiB", "--max-batch-tokens", "2048", "--max-num-seqs", "16"]


@pytest.fixture
def config(tmp_path):
    """A folder with a config and nothing else."""
    folder = tmp_path / "32B-AWQ"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "config.json"


def test_a_folder_and_its_config_give_the_same_table(config, capsys):
    assert main(["plan", str(config), *FLAGS]) == 0
    from_file = capsys.readouterr().out
    assert main(["plan", str(config.parent), *FLAGS]) == 0
    from_folder = capsys.readouterr().out
    assert from_file.splitlines()[1:] == from_folder.splitlines()[1:]
    assert "linear layers stored as awq, 4 bits, groups of 128: 15." in from_file
    assert "embeddings, norms, biases and layers left alone stay in float16: 2.90 GiB" in from_file
    assert "awq weights: planned for sizing only; serve cannot run this yet" in from_file
    assert "longest request: 9," in from_file
    rows = {line.split()[0]: line for line in from_file.splitlines() if "*" in line[:12]}
    assert list(rows) == ["fp8", "int8", "int4", "*"]
    assert " 34," in rows["int4"]
    assert max(map(len, from_file.splitlines()[1:])) <= 80


def test_another_type_of_kv_comes_first(config, capsys):
    assert main(["plan", str(config), *FLAGS, "--kv-dtype", "int4"]) == 0
    text = capsys.readouterr().out
    assert "--kv-dtype int4: planned for sizing only; serve cannot run this yet" in text
    assert "longest request: 34," in text


def test_a_builtin_name_needs_no_download(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "smollm2-135m", "--gpu-memory", "8GiB"]) == 0
    assert "0.13 billion weights in bfloat16" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_what_does_not_fit_is_an_error_with_a_remedy(config, capsys):
    assert main(["plan", str(config), "--gpu-memory", "18GiB"]) == 2
    output, error = capsys.readouterr()
    assert "does not fit" in output
    assert error.startswith("aserve: error: no memory is left for a KV cache of 64.0 MiB, which 256 tokens take: ")
    assert error.count("\n") == 1
    assert "these settings take one of 24 GiB" in error


def test_the_advice_of_a_refusal_is_accepted(config, capsys):
    flags = ["--gpu-memory", "22GiB", "--max-num-seqs", "64"]
    assert main(["plan", str(config), *flags]) == 2
    flag, value = capsys.readouterr().err.split()[-2:]
    assert flag == "--gpu-memory-fraction"
    assert main(["plan", str(config), *flags, flag, value]) == 0


def test_settings_come_from_the_environment_too(config, monkeypatch, capsys):
    monkeypatch.setenv("ASERVE_GPU_MEMORY", "24GiB")
    monkeypatch.setenv("ASERVE_MAX_MODEL_LEN", "1000")
    assert main(["plan", str(config)]) == 0
    assert "longest request: 1,000 tokens, prompt and answer together (the context)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "say how much memory the GPU has, for example --gpu-memory 24GiB"),
        (["--gpu-memory", "24"], "did you mean 24GiB?"),
        (["--gpu-memory", "24GiB", "--tp", "3"], "--tp 3 does not divide the model's 40 query heads"),
        (["--gpu-memory", "24GiB", "--max-model-len", "200000"], "set at most --max-model-len 131072"),
        (["--gpu-memory", "24GiB", "--kv-cache-tokens", "9", "--kv-cache-memory", "1GiB"], "set only one size"),
        (["--gpu-memory", "24GiB", "--kv-dtype", "fp4"], "fp4"),
    ],
)
def test_settings_that_make_no_sense(config, capsys, flags, message):
    assert main(["plan", str(config), *flags]) == 2
    assert message in capsys.readouterr().err


def test_neither_torch_nor_weights_are_needed(config):
    script = f"""
import sys
for name in ("torch", "triton", "transformers", "anyio", "trio"):
    sys.modules[name] = None
from aserve.cli.main import main
sys.exit(main(["plan", {str(config)!r}, "--gpu-memory", "24GiB"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert "longest request" in done.stdout
