from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from dynaspec.model.kernels import gemm, quantised
from dynaspec.model.kernels.tiles import PANEL, PARTS
from dynaspec.model.linear import LinearFactory, PlainLinear, row_invariant
from dynaspec.model.packed import PackedLinear

CPU = torch.device("cpu")
SHAPES = [(96, 48), (307, 48), (40, 72), (512, 192), (256, 1408), (1, 3)]


def _weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_have_the_same_bits_for_every_number_of_rows_and_threads(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(0)
    weight, bias = _weight(shape, dtype), torch.randn(shape[0]) if biased else None
    layer = PackedLinear(weight, bias, threads)
    x = torch.randn(300, shape[1])
    together = PackedLinear(weight, bias, 1)(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(together.double(), exact, rtol=1e-4, atol=1e-4)
    for rows in (*range(1, 34), 100, 255):
        assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


def kind_of(block: str) -> str:
    """What weights a turn multiplies."""
    if any(name in block for name in ("vpdpbusd", "vpmaddwd")):
        return "integers"
    return "bfloat16" if any(name in block for name in ("\tvpslld\t$16,", "\tvpand", "\tvandps")) else "float32"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 instructions")
def test_loops_over_inputs_take_one_input_a_turn() -> None:
    # LLVM likes to take two, for which sums of 9 to 11 rows need more registers than there are: half as fast.
    (code,) = njit(gemm._share.signatures[0], nogil=True)(gemm._share.py_func).inspect_asm().values()
    loops = [block for block in code.split("\n.LBB") if "vfmadd" in block]
    turns = [block for block in loops if "\tprefetch" in block]
    # Every turn fetches as many lines as its weights have in one of the parts of a panel. Twice as many would be two.
    sizes = {
        "integers": [4 * quantised.INT8_WORDS, 4 * quantised.INT4_WORDS],
        "bfloat16": [2 * PANEL],
        "float32": [4 * PANEL],
    }
    for kind, found in sizes.items():
        lines = {-(-size // (64 * len(PARTS))) for size in found}
        assert {block.count("\tprefetch") for block in turns if kind_of(block) == kind} == lines, kind
        assert sum(kind_of(block) == kind for block in turns) >= (4 if kind == "integers" else gemm._TILE_ROWS)


def test_large_products_are_shared_by_the_team() -> None:
    x = torch.randn(64, 512)
    weight = _weight((1024, 512), torch.bfloat16)
    assert torch.equal(PackedLinear(weight, None, 2)(x), PackedLinear(weight, None, 1)(x))


def test_several_threads_compute_at_once() -> None:
    layer, x = PackedLinear(_weight((1024, 512), torch.float32), None, 2), torch.randn(64, 512)
    expected = layer(x)
    with ThreadPoolExecutor(3) as others:
        found = list(others.map(lambda _: layer(x), range(60)))
    assert all(torch.equal(one, expected) for one in found)


def test_bfloat16_weights_take_half_the_memory_and_float32_weights_lose_nothing() -> None:
    weight = torch.randn(64, 48)
    assert gemm.pack(weight.bfloat16().float().numpy())[0].nbytes == weight.nbytes // 2
    assert gemm.pack(weight.numpy())[0].nbytes == weight.nbytes


@pytest.mark.parametrize("arithmetic", [gemm.FLOAT32, gemm.DOT])
@pytest.mark.parametrize("shape", [(32, 32), (100, 40), (65, 33), (1, 7)])
@pytest.mark.parametrize("rounded", [False, True])
def test_matrices_are_packed_as_documented_however_many_panels_at_a_time(
    rounded: bool, shape: tuple[int, int], arithmetic: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape)
    if rounded or arithmetic == gemm.DOT:
        weight = weight.bfloat16().float()
    monkeypatch.setattr(gemm, "_AT_ONCE", 1)
    by_panel = gemm.pack(weight.numpy(), arithmetic)
    monkeypatch.undo()
    packed, form = gemm.pack(weight.numpy(), arithmetic)
    assert form == by_panel[1] == (gemm.PAIRS if arithmetic == gemm.DOT else gemm.BFLOAT if rounded else gemm.FLOAT)
    np.testing.assert_array_equal(packed, by_panel[0])
    out, width = shape
    words = packed.reshape(len(packed), -1, PANEL if form != gemm.BFLOAT else PANEL // 2)
    bits = np.zeros((len(packed) * PANEL, -(-width // gemm.GROUP) * gemm.GROUP), np.uint32)
    bits[:out, :width] = weight.numpy().view(np.uint32)
    for i in range(len(bits)):
        panel, lane = divmod(i, PANEL)
        if form == gemm.FLOAT:
            np.testing.assert_array_equal(words[panel, :, lane], bits[i, :width])
        elif form == gemm.BFLOAT:
            half = words[panel, :, lane % (PANEL // 2)]
            np.testing.assert_array_equal((half << 16 if lane < PANEL // 2 else half) >> 16, bits[i, :width] >> 16)
        else:
            np.testing.assert_array_equal(words[panel, :, lane], bits[i, ::2] | bits[i, 1::2] >> 16)


def test_rows_that_lie_apart_are_multiplied_right() -> None:
    weight, x = torch.randn(32, 16), torch.randn(5, 40)
    torch.testing.assert_close(PackedLinear(weight, None, 1)(x[:, 3:19]), x[:, 3:19] @ weight.T)


def test_infinite_and_undefined_values_stay_in_their_row() -> None:
    x = torch.randn(3, 16)
    x[1] = float("nan")
    out = PackedLinear(torch.randn(32, 16), None, 1)(x)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_layers_are_packed_on_cpu_in_float32_only() -> None:
    weight = torch.randn(64, 64)
    assert isinstance(LinearFactory(CPU, torch.float32)(weight), PackedLinear)
    assert isinstance(LinearFactory(CPU, torch.bfloat16)(weight.bfloat16()), PlainLinear)


def test_the_original_matrix_is_not_kept() -> None:
    weight = torch.randn(64, 48)
    layer, x = PackedLinear(weight, None, 1), torch.randn(3, 48)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


def test_a_layer_that_depends_on_the_number_of_rows_is_found_out() -> None:
    weight = torch.randn(32, 32)

    def wobbly(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + (1e-6 if len(x) == 8 else 0.0)

    assert not row_invariant(wobbly, 32)
