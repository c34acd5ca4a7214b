"""What only the kernels in C promise: nothing unseen is read, rows have no part of their batch, nor of threads."""

import math
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.cpu.native import library as native_library
from tests.kernels.conftest import NATIVE, native_backend

ATTENTION = OPERATIONS["paged_attention"]
SMALL = {"heads": 6, "kv_heads": 2, "dim": 20, "block_size": 8}


@pytest.fixture(params=NATIVE)
def kernels(request):
    return native_backend(request.param)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [([1, 1, 1], [33, 90, 7]), ([25, 1, 130], [70, 90, 130])], ids=str)
def test_attention_reads_only_positions_that_a_query_sees(kernels, dtype, window, lengths):
    query_lens, seq_lens = lengths
    shape = {**SMALL, "query_lens": query_lens, "seq_lens": seq_lens, "window": window}
    inputs = make_inputs(ATTENTION, shape, dtype=dtype)
    expected = kernels.paged_attention(**inputs)
    seen = torch.zeros(inputs["k_cache"].shape[:2], dtype=torch.bool)
    for s, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = 0 if window is None else max(0, length - queries - window + 1)
        for position in range(first, length):
            seen[int(inputs["block_tables"][s, position // 8]), position % 8] = True
        inputs["block_tables"][s, : first // 8] = -1
        inputs["block_tables"][s, -(-length // 8) :] = -1
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        cache[~seen] = math.nan
    out = torch.full_like(expected, math.nan)
    assert torch.equal(kernels.paged_attention(**inputs, out=out), expected)


def test_a_sequence_with_nan_stays_alone(kernels, dtype):
    shape = {**SMALL, "query_lens": [1, 30, 1, 1], "seq_lens": [40, 70, 5, 40]}
    inputs = make_inputs(ATTENTION, shape, dtype=dtype)
    expected = kernels.paged_attention(**inputs)
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        cache[inputs["block_tables"][2, 0].long(), 3] = math.nan
    result = kernels.paged_attention(**inputs)
    assert result[31].isnan().all()
    others = torch.arange(33) != 31
    assert torch.equal(result[others], expected[others])


def test_a_sequence_of_length_0_gets_zeros(kernels, dtype):
    inputs = make_inputs(ATTENTION, {**SMALL, "query_lens": [1, 3, 1], "seq_lens": [9, 0, 20]}, dtype=dtype)
    out = torch.full_like(inputs["q"], math.nan, memory_format=torch.contiguous_format)
    kernels.paged_attention(**inputs, out=out)
    assert torch.equal(out[1:4], torch.zeros_like(out[1:4]))
    assert out.isfinite().all()


def test_an_infinite_score_is_no_silent_number(kernels):
    inputs = make_inputs(ATTENTION, {**SMALL, "query_lens": [1], "seq_lens": [20]}, dtype=torch.float32)
    inputs["q"].fill_(3e38)
    assert not kernels.paged_attention(**inputs).isfinite().any()


def test_what_a_row_computes_has_no_part_of_its_batch(kernels, dtype):
    shape = {**SMALL, "query_lens": [1] * 7, "seq_lens": [65, 1, 200, 64, 63, 90, 128]}
    inputs = make_inputs(ATTENTION, shape, dtype=dtype)
    together = kernels.paged_attention(**inputs)
    for s in range(7):
        own = {name: inputs[name][s : s + 1] for name in ("q", "block_tables", "seq_lens")}
        alone = kernels.paged_attention(**{**inputs, **own, "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)})
        assert torch.equal(alone[0], together[s])
    packed = kernels.pack(torch.randn(70, 64).bfloat16())
    if packed is not None:
        x = torch.randn(45, 64).bfloat16()
        together = packed(x, None)
        assert all(torch.equal(packed(x[i : i + 1], None)[0], together[i]) for i in range(45))


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("own", [True, False], ids=["own-threads", "openmp-threads"])
def test_threads_change_nothing(kernels, dtype, threads, own):
    """The contexts are per kernel set: the others of this process keep their number."""
    number = torch.get_num_threads()
    try:
        results = []
        for count in (1, threads):
            for _ in range(5):
                kernels.use_threads(count, torch.bfloat16 if own else torch.float32)
                results.append(compute_everything(kernels, dtype))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    finally:
        kernels.use_threads(number, torch.float32)


def compute_everything(kernels, dtype):
    """Large enough to be shared: every operation with more than one piece."""
    shape = {**SMALL, "query_lens": [1, 300, 1], "seq_lens": [40, 300, 5]}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 640, generator=generator).to(dtype)
    residual, weight = x.flip(0).clone(), x[0].clone()
    q = x.view(200, 10, 64).clone()
    angles = torch.rand(200, 64, generator=generator)
    kernels.rotary(q[:, :8], q[:, 8:], torch.arange(200), angles)
    packed = kernels.pack(x[:192].contiguous())
    return [
        kernels.rms_norm(x, weight, 1e-5),
        *kernels.fused_add_rms_norm(x.clone(), residual, weight, 1e-5),
        q,
        kernels.silu_and_mul(x),
        kernels.gelu_tanh_and_mul(x),
        kernels.paged_attention(**make_inputs(ATTENTION, shape, dtype=dtype)),
        *([] if packed is None else [packed(x, None), packed(x[:9], None)]),
    ]


def test_callers_on_several_threads_do_not_disturb_each_other():
    kernels = native_backend("native")
    number = torch.get_num_threads()
    kernels.use_threads(3, torch.bfloat16)
    try:
        expected = compute_everything(kernels, torch.bfloat16)
        different: list[int] = []

        def work() -> None:
            for turn in range(20):
                result = compute_everything(kernels, torch.bfloat16)
                if not all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)):
                    different.append(turn)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not different
    finally:
        kernels.use_threads(number, torch.float32)


FORKED = """
import os, torch
from aserve_kernels import load
kernels = load("cpu")
kernels.use_threads(3, torch.bfloat16)
x = torch.randn(400, 640).bfloat16()
expected = kernels.silu_and_mul(x)
child = os.fork()
if child == 0:
    same = all(torch.equal(kernels.silu_and_mul(x), expected) for _ in range(20))
    helped = not os.path.isdir("/proc/self/task") or len(os.listdir("/proc/self/task")) > 1
    os._exit(0 if same and helped else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(kernels.silu_and_mul(x), expected)
"""


def test_a_forked_child_computes_with_helpers_of_its_own():
    assert subprocess.run([sys.executable, "-c", FORKED], check=False, timeout=60).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_torch_and_the_library_share_one_openmp():
    code = """
import os, torch
from aserve_kernels.cpu import native_kernels
from aserve_kernels.cpu.native.library import load_library
library = load_library(None)
assert not isinstance(library, str), library
kernels = native_kernels(library)
kernels.use_threads(3, torch.float32)
x = torch.randn(600, 640)
x @ x.T
threads = len(os.listdir("/proc/self/task"))
kernels.silu_and_mul(x)
assert len(os.listdir("/proc/self/task")) == threads, "threads of its own beside OpenMP's"
assert library.has_libgomp
assert len({line.split()[-1] for line in open("/proc/self/maps") if "/libgomp" in line}) == 1
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_two_copies_of_openmp_mean_threads_of_its_own(monkeypatch, tmp_path):
    [entry] = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line][:1]
    copy = shutil.copy(entry.split()[-1], tmp_path)
    monkeypatch.setattr(native_library.Path, "read_text", lambda *_, **__: f"{entry}\n0 r 0 0 0 {copy}")
    assert native_library._libgomp_entry() is None


def test_a_float32_weight_beside_bfloat16_costs_one_rounding(kernels):
    x, weight = torch.randn(40, 256).bfloat16(), torch.rand(256) + 0.5
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.double()
    once = (exact.bfloat16().double() - exact).square().mean()
    got = (kernels.rms_norm(x, weight, 0.0).double() - exact).square().mean()
    summed, _ = kernels.fused_add_rms_norm(torch.zeros_like(x), x.clone(), weight, 0.0)
    assert got < 1.01 * once  # a second rounding makes it 2
    assert (summed.double() - exact).square().mean() < 1.01 * once


GUARDED = """
import ctypes, mmap, sys, torch
from tests.kernels.conftest import native_backend

SIZE = 32 * mmap.PAGESIZE
memory = mmap.mmap(-1, SIZE + mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + SIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
packed = native_backend(sys.argv[1]).pack(torch.randn(40, 64).bfloat16())
for tokens in (*range(1, 35), 64, 70):
    count = tokens * 64
    x = torch.frombuffer(memory, dtype=torch.bfloat16, count=count, offset=SIZE - 2 * count).view(tokens, 64)
    x.copy_(torch.randn(tokens, 64))
    assert torch.equal(packed(x, None), packed(x.clone(), None))
"""


@pytest.mark.parametrize("name", ["native", "native-without-amx"])
def test_a_product_reads_nothing_behind_its_input(name):
    """The page behind the input cannot be read: whoever does is ended by a signal."""
    if native_backend(name).pack(torch.zeros(32, 32, dtype=torch.bfloat16)) is None:
        pytest.skip("nothing on this machine multiplies bfloat16")
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, name], check=False, timeout=100, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0
