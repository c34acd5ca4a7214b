"""The table of backends."""

import subprocess
import sys

import pytest

from aserve_kernels import BACKENDS, load


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_loaded_by_its_name(name):
    assert load(name).name == name


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown kernel backend 'cuda'; known: reference, cpu, triton"):
        load("cuda")


def test_one_operation_can_be_swapped():
    reference, cpu = load("reference"), load("cpu")
    mixed = cpu.replace(paged_attention=reference.paged_attention)
    assert mixed.paged_attention is reference.paged_attention
    assert mixed.sample is cpu.sample


def test_the_cpu_path_never_imports_triton():
    code = "import sys, aserve_kernels as k; k.load('cpu'); k.load('reference'); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
