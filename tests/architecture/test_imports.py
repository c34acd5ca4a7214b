"""What may import what: the contracts in pyproject.toml, and proofs by import that halves stand alone."""

import ast
import subprocess
import sys

import pytest

WITHOUT = """
import importlib, sys
for name in {banned!r}:
    sys.modules[name] = None  # importing it raises ImportError
for name in {wanted!r}:
    importlib.import_module(name)
"""


def test_contracts(root):
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=root,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("wanted", "banned"),
    [
        (["aserve.scheduler", "aserve.core"], ["torch", "numpy", "anyio", "trio", "pydantic", "transformers"]),
        (["aserve.engine.engine", "aserve.text.tokenizer", "aserve.testing"], ["torch", "triton", "hypercorn"]),
        (["aserve.server.app", "aserve.server.serve"], ["torch", "triton", "aserve_kernels"]),
        (["aserve.runtime.executor", "aserve.models.registry"], ["anyio", "trio", "hypercorn", "quart"]),
        (["aserve_kernels"], ["aserve", "anyio", "transformers"]),
    ],
    ids=["scheduler", "engine", "server", "runtime", "kernels"],
)
def test_imports_without(wanted, banned):
    script = WITHOUT.format(wanted=wanted, banned=banned)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["aserve.core", "aserve.scheduler", "aserve.planning"])
def test_standard_library_only(modules, package):
    allowed = sys.stdlib_module_names | {"aserve"}
    checked = [module for module in modules if module.dotted.startswith(package)]
    assert checked
    for module in checked:
        for node in ast.walk(module.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{module.name} imports {name}"
