"""FP8: the arithmetic in e4m3, what is quantised how, and that nothing is lost over long contexts. The case table has the rest."""

from __future__ import annotations

import math

import pytest
import sass
import torch
from torch import Tensor

import attn3
import attn3.registry
from attn3 import FP8, AttentionError, Unsupported, fp8
from attn3.backends.hopper import environment, quantize
from attn3.backends.hopper.config_fp8 import QuantizeFeatures
from attn3.backends.hopper.quantize import parts_of
from attn3.flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from attn3.ops import quantize as quantized_problem
from attn3.problem import Problem
from attn3.reference import reference

PLAIN = FP8(scaling="tensor", rotate=False, center_k=False, center_v=False)


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def rms(t: Tensor) -> float:
    return t.double().square().mean().sqrt().item()


# What an H200's m64n128k32 gives: one accumulator or product, then smaller ones.
@pytest.mark.parametrize(
    ("first", "more", "result"),
    [
        (1.0, [2**-7 * 2**-6], 1 + 2**-13),
        (1.0, [2**-7 * 2**-7], 1.0),
        (1.75, [2**-7 * 2**-6], 1.75 + 2**-13),
        (1.75, [2**-7 * 2**-7], 1.75),
        (256.0, [2**-5], 256 + 2**-5),
        (256.0, [2**-6], 256.0),
        (1.0, [2**-7 * 2**-7] * 31, 1.0),
        (1.0, [1.5 * 2**-7 * 2**-6], 1 + 2**-13),
        (-1.0, [-(2**-7) * 2**-7], -1.0),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["accumulator", "product"])
def test_the_tensor_core_truncates(first, more, result, inside):
    terms = [*([first] if inside else []), *more]
    a, b = torch.zeros(1, 1, 64), torch.ones(1, 64, 1)
    a[0, 0, : len(terms)] = torch.tensor(terms)
    acc = None if inside else torch.tensor([[[first]]])
    if len(terms) > 32:
        pytest.skip("the terms do not fit one step")
    assert fp8.tensor_core_product(a, b, acc).item() == result


def test_cancelling_products_of_one_step():
    a, b = torch.zeros(1, 1, 32), torch.ones(1, 32, 1)
    for small, kept in ((2.0**-5, 2.0**-5), (2.0**-6, 0.0)):
        a[0, 0, :3] = torch.tensor([448.0, -448.0, small])
        assert fp8.tensor_core_product(a, b).item() == kept


def test_a_product_without_truncation_is_exact():
    a, b = (torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float() for shape in ((3, 5, 70), (3, 70, 9)))
    assert torch.equal(fp8.tensor_core_product(a, b), a @ b)


@pytest.mark.parametrize(("keys", "measured"), [(128, -6.2e-4), (512, -5.9e-3), (4096, -7.1e-2)])
def test_the_bias_of_a_chain_is_that_of_the_gpu(keys, measured):
    generator = torch.Generator().manual_seed(0)
    p = (256 * torch.rand(1, 256, keys, generator=generator)).to(fp8.E4M3).float()
    v = torch.randn(1, keys, 32, generator=generator).abs().to(fp8.E4M3).float()
    exact = p.double() @ v.double()
    bias = ((fp8.tensor_core_product(p, v) - exact).mean() / exact.mean()).item()
    assert bias == pytest.approx(measured, rel=0.1)


def test_integer_probabilities():
    x = torch.linspace(-20, 8, 20001)[:, None]
    p = fp8.integer_p(x, 1.0, torch.zeros(1, 1))
    assert p.max() == 256 and (p.diff(dim=0) >= 0).all()
    ordinary = x > -5  # above e4m3's subnormals
    ratio = (p / torch.exp2(x))[ordinary]
    assert (ratio - 1).abs().max() < 0.1 and abs(ratio.mean() - 1) < 5e-3
    assert rms(ratio - 1) < 0.035
    assert fp8.integer_p(torch.tensor([[-math.inf]]), 1.0, torch.zeros(1, 1)) == 0


@pytest.mark.parametrize("dim", [64, 72, 96, 128, 192, 256])
def test_rotation_is_orthogonal(dim):
    q, k = normal((5, dim), (7, dim), dtype=torch.float32)
    rotated = fp8.rotated(q, 3) @ fp8.rotated(k, 3).T
    torch.testing.assert_close(rotated, q @ k.T, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(fp8.rotated(q, 3) @ fp8.rotated(k, 4).T, q @ k.T, atol=1.0)
    width = dim & -dim
    spike = torch.zeros(dim)
    spike[dim // 2] = 1.0
    assert fp8.rotated(spike, 0).abs().max() == pytest.approx(width**-0.5)


def lengthy(kind: str, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal((1, 16, 1, dim), (1, keys, 1, dim), (1, keys, 1, dim))
    if kind == "one":
        v = torch.ones_like(v)
    elif kind == "one and noise":
        v = v + 1
    else:  # stretches of equal values whose differences from the mean do not cancel on the way up and down
        level = torch.tensor([0.0] * 7 + [8.0]).repeat_interleave(keys // 8)
        v = level[None, :, None, None].expand(v.shape).to(v.dtype).contiguous()
    return q, k, v


def lost(q: Tensor, k: Tensor, v: Tensor, precision: FP8, backend: str = "cpu") -> float:
    """The relative error of what the columns of V have in common."""
    out = attn3.attention(q, k, v, precision=precision, backend=backend)
    exact, _ = reference(Problem.of(q, k, v))
    return abs((out.double() - exact).mean().item() / exact.mean().item())


LENGTHS = [(4096, 64), (4096, 128), (4096, 256), (16384, 128), (65536, 64), (131072, 64)]


@pytest.mark.parametrize(("keys", "dim"), LENGTHS)
@pytest.mark.parametrize("kind", ["one", "one and noise"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_nothing_fades_over_long_contexts(kind, keys, dim, mode):
    assert lost(*lengthy(kind, keys, dim), FP8(mode)) < 3e-3


@pytest.mark.parametrize(("keys", "dim"), LENGTHS[:4])
@pytest.mark.parametrize("precision", [FP8(), FP8("fast"), FP8("fast", center_v=False)], ids=repr)
def test_stretches_of_equal_values_do_not_fade(keys, dim, precision):
    if dim == 256 and precision == FP8("fast"):  # documented: the mean is out as a whole only
        assert lost(*lengthy("stretches", keys, dim), precision) > 0.02
    else:
        assert lost(*lengthy("stretches", keys, dim), precision) < 3e-3


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_mean_that_stays_inside_is_promoted(mode):
    assert lost(*lengthy("one and noise", 4096, 256), FP8(mode, center_v=False)) < 3e-3
    fast = quantized_problem(Problem.of(*lengthy("one", 64, 256), return_lse=False), FP8("fast")).fp8
    assert fast.promoted(128) and not fast.promoted(256)


def test_without_promotion_and_centering_it_would_fade(monkeypatch):
    monkeypatch.setattr(fp8.Scales, "promoted", lambda self, head_dim_v: False)
    assert lost(*lengthy("one", 4096, 64), FP8(center_v=False)) > 0.05
    assert lost(*lengthy("one and noise", 4096, 128), FP8(center_v=False)) > 0.03
    assert lost(*lengthy("one", 4096, 64), FP8()) < 3e-3  # each of the two is enough here


def paper_inputs(rows: int, keys: int, heads: int, dim: int, seed: int = 0) -> list[Tensor]:
    """N(0, 1) + N(0, 100) Bernoulli(0.001)"""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda make, n: make(1, n, heads, dim, generator=generator)
    return [
        (draw(torch.randn, n) + 10 * draw(torch.randn, n) * (draw(torch.rand, n) < 0.001)).bfloat16() for n in (rows, keys, keys)
    ]


def test_rotation_halves_the_error_on_outliers(monkeypatch):
    monkeypatch.setenv("ATTN3_FP8_FLOAT32", "1")
    q, k, v = paper_inputs(2048, 2048, 2, 128)
    exact, _ = reference(Problem.of(q, k, v))
    error = {p: rms(attn3.attention(q, k, v, precision=p, backend="cpu") - exact) for p in (PLAIN, FP8(), FP8("fast"))}
    assert error[PLAIN] / error[FP8()] > 1.9  # an H200 gives 2.04 at this size, 2.7 at 8192 keys
    assert error[PLAIN] / error[FP8("fast")] > 1.85
    assert error[FP8()] < 8.5e-3


def test_centering_removes_offsets():
    q, k, v = normal((1, 64, 2, 64), (1, 500, 2, 64), (1, 500, 2, 64), dtype=torch.float32)  # so is the output
    k = k + 20 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    v = v + 8
    exact, lse = reference(Problem.of(q, k, v))
    error = lambda p: rms(attn3.attention(q, k, v, precision=p, backend="cpu") - exact)
    assert error(FP8()) < 0.25 * error(FP8(center_k=False))
    assert error(FP8()) < 0.8 * error(FP8(center_v=False))


def test_lse_is_corrected_for_the_mean_of_k():
    q, k, v = normal((2, 70, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    k = k + 2
    out, lse = attn3.attention(q, k, v, precision=FP8(), return_lse=True, backend="cpu")
    _, exact = reference(Problem.of(q, k, v))
    assert (lse - exact).abs().max() < 0.3  # q itself is rounded; without the correction it is off by several units


@pytest.mark.parametrize("scaling", ["head", "block", "tensor"])
def test_what_is_kept_is_what_one_call_uses(scaling):
    q, k, v = normal((2, 200, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    precision = FP8(scaling=scaling)
    want = attn3.attention(q, k, v, precision=precision, return_lse=True, backend="cpu")
    got = attn3.attention(*attn3.quantize(q, k, v, precision), return_lse=True, backend="cpu")
    cache = attn3.quantize(None, k, v, precision)
    later = attn3.attention(attn3.quantize(q, None, None, precision).q, cache.k, cache.v, return_lse=True, backend="cpu")
    for a, b, c in zip(want, got, later, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert cache.q is None and got[0].dtype == torch.bfloat16


@pytest.mark.parametrize("scaling", ["head", "block"])
def test_packed_sequences_are_quantised_one_by_one(scaling):
    lengths_q, lengths_k = (150, 0, 70), (300, 5, 129)
    q, k, v = normal((220, 4, 64), (434, 2, 64), (434, 2, 64))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    precision = FP8(scaling=scaling)
    packed = attn3.quantize(q, k, v, precision, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out = attn3.varlen_attention(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="cpu")
    for b in (0, 2):
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = attn3.quantize(q[None, of_q], k[None, of_k], v[None, of_k], precision)
        assert torch.equal(packed.k.data[of_k].view(torch.uint8), alone.k.data[0].view(torch.uint8))
        want = attn3.attention(*alone, backend="cpu")
        torch.testing.assert_close(out[of_q], want[0], rtol=0, atol=1e-2)


def test_quantised_numbers_are_close_and_never_saturate():
    q, k, v = paper_inputs(300, 300, 2, 64)
    for precision in (FP8(), FP8(scaling="block"), PLAIN, FP8(scale_v_channels=True)):
        quantised = attn3.quantize(q, k, v, precision)
        for t in quantised:
            values = t.data.float()
            assert values.isfinite().all() and values.abs().max() == 448
        problem = quantized_problem(Problem.of(q, k, v), precision)
        plain = fp8.dequantized(problem)
        q_and_k = [fp8.rotated(t.double(), precision.seed) if precision.rotate else t.double() for t in (q, k)]
        for got, want in zip((plain.q, plain.k, plain.v), (*q_and_k, v.double()), strict=True):
            assert rms(got - want) < 0.03 * rms(want)


def test_transposed_values_lie_in_the_order_of_the_kernel():
    q, k, v = normal((2, 5, 2, 16), (2, 37, 2, 16), (2, 37, 2, 16))
    problem = quantized_problem(Problem.of(q, k, v, seqused_k=torch.tensor([37, 20], dtype=torch.int32)), FP8())
    got = fp8.transposed(problem)
    assert tuple(got.shape) == fp8.transposed_shape(v) == (2, 2, 16, 48)
    values = problem.v.view(torch.uint8)
    for position in range(48):
        key = position // 16 * 16 + fp8.KEY_ORDER[position % 16]
        for b, used in enumerate((37, 20)):
            want = values[b, key] if key < used else torch.zeros_like(values[b, 0])
            assert torch.equal(got[b, :, :, position], want)
    assert sorted(fp8.KEY_ORDER) == list(range(16))


def test_zeros_and_one_row():
    zero = torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
    out, lse = attn3.attention(zero, zero, zero, precision=FP8(), return_lse=True, backend="cpu")
    assert not out.any() and torch.allclose(lse, torch.tensor(math.log(3.0)))
    (v,) = normal((1, 1, 2, 64))
    torch.testing.assert_close(attn3.attention(v, v, v, precision=FP8(), backend="cpu"), v)  # the mean is the value


@pytest.mark.parametrize("scaling", ["head", "block", "tensor"])
@pytest.mark.parametrize("keys", [1, 3, 7, 300])
def test_what_rounding_leaves_after_the_mean_becomes_zeros(keys, scaling):
    q, k, v = normal((1, 5, 2, 64), (1, 1, 2, 64), (1, 1, 2, 64))
    k, v = (t.expand(1, keys, 2, 64).contiguous() for t in (k, v))
    for t in attn3.quantize(q, k, v, FP8(scaling=scaling))[1:]:
        assert not t.data.float().any() and (t.scale == fp8.ZERO_SCALE).all()
    channels = attn3.quantize(q, k, v, FP8(scale_v_channels=True)).v
    assert not channels.data.float().any()
    out = attn3.attention(q, k, v, precision=FP8(scaling=scaling), backend="cpu")
    torch.testing.assert_close(out, v[:, :1].expand_as(out))


@pytest.mark.parametrize(
    ("rows", "dim", "units"), [(1, 64, 1), (16384, 128, 16), (333, 64, 600), (70000, 128, 3), (1 << 20, 64, 1)]
)
def test_parts_of_the_quantising_kernel(rows, dim, units):
    parts = parts_of(rows, dim, units, 132)
    assert 1 <= parts <= min(128, -(-rows // 128))
    assert parts == 16 or (rows, dim, units) != (16384, 128, 16)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_rotation_by_products_is_the_rotation(dim):
    """The kernel's factorisation, lane by lane: products over bits 0, 1, 3, 4, additions over 2 and 5, sums of products above."""
    (x,) = normal((16, dim), dtype=torch.float32)
    signs, pieces = fp8.signs(dim, 0, x.device), dim // 32
    out = torch.zeros(16, dim)
    for half in range(dim // 64):
        acc = torch.zeros(2, 2, 16, 16)  # bit 2, bit 5, row, n
        for i in range(pieces):
            sign = (-1) ** (half & i // 2).bit_count()
            for f in range(2):
                a, b = torch.zeros(16, 16), torch.zeros(16, 16)  # (row, k), (k, n)
                for lane in range(32):
                    g, q = lane // 4, lane % 4
                    for r in range(2):
                        piece = x[g + 8 * r, 32 * i + 8 * q : 32 * i + 8 * q + 8] * signs[32 * i + 8 * q : 32 * i + 8 * q + 8]
                        for k in range(2):  # of one register: fragment words a0, a1 (k = 0) and a2, a3
                            a[g + 8 * r, 8 * k + 2 * q : 8 * k + 2 * q + 2] = piece[4 * f + 2 * k : 4 * f + 2 * k + 2]
                    low = (q & g // 2).bit_count() % 2
                    pair = torch.tensor([(-1.0) ** low, (-1.0) ** (low + g)])
                    for j in range(2):
                        for register in range(2):
                            b[8 * register + 2 * q : 8 * register + 2 * q + 2, 8 * j + g] = pair * sign * (-1) ** (j & register)
                acc[f, i % 2] += a @ b
        for two in range(2):
            for five in range(2):
                total = acc[0, 0] + (-1) ** two * acc[1, 0] + (-1) ** five * (acc[0, 1] + (-1) ** two * acc[1, 1])
                for j in range(2):
                    for q in range(4):
                        column = 64 * half + 32 * five + 8 * q + 4 * two + 2 * j
                        out[:, column : column + 2] = total[:, 8 * j + 2 * q : 8 * j + 2 * q + 2]
    torch.testing.assert_close(out * dim**-0.5, fp8.rotated(x, 0), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- on a Hopper GPU


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [t.cuda() for t in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [4096, 16384, 65536, 131072])
@pytest.mark.parametrize("kind", ["one", "one and noise", "stretches"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_nothing_fades_on_hopper(kind, keys, dim, mode):
    if kind == "stretches" and dim == 256 and mode == "fast":
        pytest.skip("V's mean is out as a whole only; FP8(center_v=False) promotes, see the next test")
    q, k, v = on_gpu(*lengthy(kind, keys, dim))
    assert lost(q, k, v, FP8(mode), "hopper") < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one", "one and noise", "stretches"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_mean_that_stays_inside_is_promoted_on_hopper(kind, mode):
    for dim in (64, 128, 256):
        assert lost(*on_gpu(*lengthy(kind, 16384, dim)), FP8(mode, center_v=False), "hopper") < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "heads", "ratio", "largest"), [(8192, 16, 2.5, 9.5e-3), (16384, 8, 2.85, 1e-2)])
def test_the_papers_experiment(keys, heads, ratio, largest):
    """2.6 to 2.7 and 3.0 to 3.1 times less error than per-tensor scales: a few outliers decide, so that samples differ by 5%."""
    total = {PLAIN: 0.0, FP8(): 0.0}
    for seed in range(3):
        q, k, v = on_gpu(*paper_inputs(keys, keys, heads, 128, seed))
        exact, _ = reference(Problem.of(q[:, ::8], k, v))
        for p in total:
            total[p] += rms(attn3.attention(q, k, v, precision=p, backend="hopper")[:, ::8] - exact) ** 2 / 3
    assert math.sqrt(total[PLAIN] / total[FP8()]) > ratio
    assert math.sqrt(total[FP8()]) < largest


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("precision", [FP8(), FP8("fast"), FP8(scaling="block"), FP8("fast", center_v=False)], ids=repr)
def test_the_emulation_is_the_kernel(dim, precision):
    """Both stand for the same arithmetic: they differ by far less than either does from the exact answer."""
    q, k, v = on_gpu(*normal((2, 300, 4, dim), (2, 1000, 2, dim), (2, 1000, 2, dim)))
    problem = quantized_problem(Problem.of(q, k, v, mask=attn3.Causal(), return_lse=precision.mode == "exact"), precision)
    ours, emulated = (attn3.registry.backends()[name].forward(problem) for name in ("hopper", "cpu"))
    exact, _ = reference(fp8.dequantized(problem))
    assert rms(ours[0] - emulated[0]) < 0.5 * rms(emulated[0] - exact)
    if problem.return_lse:
        assert (ours[1] - emulated[1]).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("precision", [FP8(), FP8(rotate=False, center_k=False, center_v=False)], ids=repr)
@pytest.mark.parametrize("used", [None, (0, 1, 333)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_quantising_kernels(dim, precision, used, dtype):
    """The same numbers as the torch arithmetic gives, but for roundings that fall to the other side."""
    q, k, v = on_gpu(*normal((3, 130, 4, dim), (3, 333, 2, dim), (3, 333, 2, dim), dtype=dtype))
    seqused_k = None if used is None else torch.tensor(used, dtype=torch.int32, device="cuda")
    if used is not None:
        for b, n in enumerate(used):
            k[b, n:], v[b, n:] = math.nan, math.inf
    problem = Problem.of(q, k + 1, v + 2, seqused_k=seqused_k)
    hopper = attn3.registry.backends()["hopper"]
    assert hopper.can_quantize(problem, precision)
    pairs = [(hopper.quantize_q(problem, precision), fp8.quantize_q(problem, precision))]
    pairs += zip(hopper.quantize_kv(problem, precision), fp8.quantize_kv(problem, precision), strict=True)
    for (data, scale, mean, _), (want, want_scale, want_mean, _) in pairs:
        torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
        assert (mean is None) == (want_mean is None)
        if mean is not None:
            torch.testing.assert_close(mean, want_mean, rtol=1e-4, atol=1e-5)
        assert (data.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 2e-3
        torch.testing.assert_close(data.float(), want.float(), rtol=0.13, atol=2**-8)
    v8, _, _, v_t = pairs[2][0]
    kept = fp8.with_scales(problem, precision, pairs[0][0], pairs[1][0], (v8, pairs[2][0][1], pairs[2][0][2], None))
    assert torch.equal(v_t, fp8.transposed(kept))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 129, 3, 1), (1, 5000, 3, 3), (300, 70, 2, 1), (1, 16384, 4, 2)], ids=str)
@pytest.mark.parametrize("ctas", [1, 2, 9])
def test_the_quantising_kernels_in_parts(dim, shape, ctas, monkeypatch):
    """Into however many parts heads are cut; every call gives the same bits, captured or not."""
    batch, rows, heads, kv_heads = shape
    monkeypatch.setattr(quantize, "_CTAS", ctas)
    q, k, v = on_gpu(*normal((batch, rows, heads, dim), (batch, rows, kv_heads, dim), (batch, rows, kv_heads, dim)))
    problem = Problem.of(q, k + 1, v + 2)
    hopper = attn3.registry.backends()["hopper"]
    call = lambda: (hopper.quantize_q(problem, FP8()), *hopper.quantize_kv(problem, FP8()))
    found = [call() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(call())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for one in found[1:]:
        for got, first in zip(one, found[0], strict=True):
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, first, strict=True) if b is not None
            )
    for (data, scale, mean, _), (want, want_scale, want_mean, _) in zip(
        found[0], (fp8.quantize_q(problem, FP8()), *fp8.quantize_kv(problem, FP8())), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
        if mean is not None:
            torch.testing.assert_close(mean, want_mean, rtol=1e-4, atol=1e-5)
        assert (data.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 2e-3
    kept = fp8.with_scales(problem, FP8(), found[0][0], found[0][1], (*found[0][2][:3], None))
    assert torch.equal(found[0][2][3], fp8.transposed(kept))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_hopper_repeats_bitwise_and_is_captured(mode):
    kept = attn3.quantize(*on_gpu(*normal((2, 700, 8, 128), (2, 900, 2, 128), (2, 900, 2, 128))), FP8(mode))
    call = lambda: attn3.attention(*kept, mask=attn3.Causal(), backend="hopper")
    want = call()
    assert all(torch.equal(call(), want) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "best"}, "mode"), ({"scaling": "row"}, "scaling"), ({"rotate": 1}, "rotate"), ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"), ({"center_v": None}, "center_v"), ({"scale_v_channels": "yes"}, "scale_v_channels"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, name):
    with pytest.raises(AttentionError, match=f"FP8 {name} is"):
        FP8(**options)


def small(dtype=torch.bfloat16):
    return normal((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), dtype=dtype)


def test_caches_splits_and_other_output_dtypes_are_refused_up_front():
    q, k, v = small()
    quantized = attn3.quantize(q, k, v)
    keys = attn3.Keys(torch.full((q.shape[0],), 3, dtype=torch.int32))
    for changes, words in (({"keys": keys}, "KV cache"), ({"num_splits": 2}, "num_splits is 2")):
        with pytest.raises(Unsupported, match=words):
            quantized_problem(Problem.of(q, k, v, **changes), FP8())
    with pytest.raises(Unsupported, match="num_splits is 2"):
        *tensors, scales = fp8.scales_of(*quantized, None)
        Problem.of(*tensors, fp8=scales, num_splits=2)
    for tensors, precision in (((q, k, v), FP8()), (quantized, None)):
        with pytest.raises(Unsupported, match="out_dtype is torch.float32"):
            attn3.attention(*tensors, precision=precision, out_dtype=torch.float32)
    assert attn3.attention(*quantized, out_dtype=q.dtype).dtype == q.dtype
    with pytest.raises(AttentionError, match="q is QuantizedTensor"):
        attn3.decode(quantized.q, attn3.CacheView(k, v, keys))
    with pytest.raises(AttentionError, match="q has dtype torch.float8_e4m3fn"):
        attn3.decode(quantized.q.data, attn3.CacheView(quantized.k.data, quantized.v.data, keys))


def test_gradients_are_refused_up_front():
    q, k, v = small()
    with pytest.raises(Unsupported, match="no backward pass; leave precision out"):
        attn3.attention(q, k.requires_grad_(), v, precision=FP8())
    with torch.no_grad():
        attn3.attention(q, k, v, precision=FP8())
    sinks = torch.zeros(2, requires_grad=True)
    with pytest.raises(Unsupported, match="no backward pass"):
        attn3.attention(*attn3.quantize(q, k.detach(), v), sinks=sinks)
    with pytest.raises(Unsupported, match="no backward pass"):
        torch.func.grad(lambda q: attn3.attention(q, k.detach(), v, precision=FP8()).sum().float())(q.detach())
    with pytest.raises(Unsupported, match="torch.func"):
        torch.func.vmap(lambda q: attn3.attention(q, k.detach(), v, precision=FP8()))(q.detach()[None])


def test_fast_has_no_lse():
    q, k, v = small()
    with pytest.raises(Unsupported, match="log-sum-exp"):
        attn3.attention(q, k, v, precision=FP8("fast"), return_lse=True)
    with pytest.raises(Unsupported, match="log-sum-exp"):
        attn3.attention(*attn3.quantize(q, k, v, FP8("fast")), return_lse=True)


def test_other_backends_say_so():
    with pytest.raises(Unsupported, match="FP8"):
        attn3.attention(*small(), precision=FP8(), backend="sdpa")


def test_wrong_calls_are_named():
    q, k, v = small()
    quantised = attn3.quantize(q, k, v)
    with pytest.raises(AttentionError, match="precision is 'fp8'"):
        attn3.attention(q, k, v, precision="fp8")
    with pytest.raises(AttentionError, match="float64"):
        attn3.attention(*small(torch.float64), precision=FP8())
    with pytest.raises(AttentionError, match="k is Tensor beside quantised"):
        attn3.attention(quantised.q, k, v)
    with pytest.raises(AttentionError, match="q is Tensor beside quantised"):
        attn3.attention(q, quantised.k, quantised.v)
    with pytest.raises(AttentionError, match="seed=1"):
        attn3.attention(quantised.q, *attn3.quantize(q, k, v, FP8(seed=1))[1:])
    with pytest.raises(AttentionError, match="leave precision out"):
        attn3.attention(*quantised, precision=FP8(seed=1))
    with pytest.raises(AttentionError, match="no scales"):
        attn3.attention(*(t.to(torch.float8_e4m3fn) for t in (q, k, v)))
    with pytest.raises(AttentionError, match="quantised together"):
        attn3.quantize(q, k, None)
    with pytest.raises(AttentionError, match="float8_e4m3fn"):
        Problem.of(q, k, v, fp8=quantized_problem(Problem.of(q, k, v), FP8()).fp8)
    two = attn3.quantize(*normal((2, 5, 2, 16), (2, 7, 2, 16), (2, 7, 2, 16)))
    wrong = [fp8.QuantizedTensor(one.data, other.scale, one.mean, one.precision, one.dtype)
             for one, other in zip(quantised, two, strict=True)]  # fmt: skip
    with pytest.raises(AttentionError, match=r"q's scale has shape \(2, 2\)"):
        attn3.attention(*wrong)


# ------------------------------------------------------------------------------------------------------------ FA3's names


@pytest.fixture
def e4m3():
    tensors = normal((3, 20, 8, 64), (3, 50, 2, 64), (3, 50, 2, 64), dtype=torch.float32)
    return [t.to(torch.float8_e4m3fn) for t in tensors]


def test_descales_are_those_of_fa3(e4m3):
    generator = torch.Generator().manual_seed(1)
    descales = [0.5 + torch.rand(3, 2, generator=generator) for _ in range(3)]
    out, lse = flash_attn_func(*e4m3, None, True, None, *descales, return_attn_probs=True)
    q, k, v = (t.double() for t in e4m3)
    q = (q.unflatten(2, (2, 4)) * descales[0][:, None, :, None, None]).flatten(2, 3)  # one number for a KV head's query heads
    k, v = (t * d[:, None, :, None] for t, d in ((k, descales[1]), (v, descales[2])))
    want, want_lse = reference(Problem.of(q, k, v, mask=attn3.Causal()))
    assert out.dtype == torch.bfloat16 and rms(out - want) < 0.03 * rms(want)
    assert (lse - want_lse).abs().max() < 2e-3
    again = flash_attn_func(*e4m3, None, True, None, *(d.T.contiguous().T for d in descales))
    assert torch.equal(again, out)


def test_one_descale_for_all(e4m3):
    one = torch.tensor(0.75)
    want = flash_attn_func(*e4m3, q_descale=torch.full((3, 2), 0.75))
    for descale in (one, 0.75, one.expand(3, 2), one.expand(3, 1).expand(3, 2), torch.tensor([0.75])):
        assert torch.equal(flash_attn_func(*e4m3, q_descale=descale), want)
    assert torch.equal(flash_attn_func(*e4m3), flash_attn_func(*e4m3, k_descale=1, v_descale=torch.ones(3, 2)))


def test_a_descale_of_zero(e4m3):
    zero = torch.zeros(3, 2)
    out, lse = flash_attn_func(*e4m3, q_descale=zero, k_descale=zero, v_descale=zero, return_attn_probs=True)
    assert not out.any() and torch.allclose(lse, torch.tensor(math.log(50.0)))


def test_varlen_and_packed_descales(e4m3):
    q, k, v = (t.flatten(0, 1) for t in e4m3)
    cu_q, cu_k = (torch.arange(0, 3 * n + 1, n, dtype=torch.int32) for n in (20, 50))
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), torch.rand(3, 3, 2), strict=True))
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 50, causal=True, **descales)
    want = flash_attn_func(*e4m3, causal=True, **descales)
    torch.testing.assert_close(out.unflatten(0, (3, 20)), want)
    qkv = torch.cat([t[:, :20].view(torch.uint8) for t in e4m3], 2).view(torch.float8_e4m3fn)
    packed = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=8, **descales)
    torch.testing.assert_close(packed, flash_attn_func(e4m3[0], *(t[:, :20] for t in e4m3[1:]), causal=True, **descales))


def test_bad_descales_are_named(e4m3):
    for bad in (torch.ones(2, 3), torch.ones(3), torch.ones(3, 8), torch.ones(3, 2, dtype=torch.int32), "1"):
        with pytest.raises(AttentionError, match="k_descale"):
            flash_attn_func(*e4m3, k_descale=bad)
    with pytest.raises(AttentionError, match="v_descale is given and v has dtype torch.bfloat16"):
        flash_attn_func(*(t.bfloat16() for t in e4m3), v_descale=torch.ones(3, 2))
    with pytest.raises(AttentionError, match="k is .*bfloat16 and another of q, k, v float8"):
        flash_attn_func(e4m3[0], e4m3[1].bfloat16(), e4m3[2])


# ------------------------------------------------------------------------------------------------------------ dispatcher


@pytest.mark.parametrize("precision", [FP8(), FP8("fast", "block"), FP8(scale_v_channels=True, center_k=False)], ids=repr)
def test_ops(precision):
    q, k, v = normal((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))
    tests = ("test_schema", "test_faketensor")
    names = ("scaling", "rotate", "seed", "center_k", "center_v", "scale_v_channels")
    options = {name: getattr(precision, name) for name in names}
    torch.library.opcheck(torch.ops.attn3.quantize_fp8.default, (q, k, v), options, test_utils=tests)
    cu = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 30, 60], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], **options}
    flat = tuple(t.flatten(0, 1) for t in (q, k, v))
    torch.library.opcheck(torch.ops.attn3.quantize_fp8.default, flat, packed, test_utils=tests)
    p = quantized_problem(Problem.of(q, k, v, return_lse=False), precision)
    s = p.fp8
    inputs = (p.q, p.k, p.v, s.q, s.k, s.v, s.k_mean, s.v_mean, s.v_t)
    more = {"blocks": s.blocks, "mode": s.mode, "out_dtype": s.out_dtype, "return_lse": s.mode == "exact", "scale": 0.25}
    # (the schema check multiplies its inputs, which e4m3 cannot)
    torch.library.opcheck(torch.ops.attn3.forward_fp8.default, inputs, more, test_utils="test_faketensor")


def test_compiled():
    q, k, v = normal((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))
    call = lambda q, k, v: attn3.attention(q, k, v, mask=attn3.Causal(), precision=FP8(), return_lse=True)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, call(q, k, v), strict=True))


# ------------------------------------------------------------------------------------------------------- machine code


@pytest.mark.compile
@pytest.mark.skipif(bool(environment.software_reasons()) or sass.disassembler() is None, reason="needs the compiler and nvdisasm")
@pytest.mark.parametrize("kind", [(True, False, False), (True, True, False), (False, True, True)], ids=["q", "k", "v"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_machine_code_of_the_quantising_kernel(dim, kind, tmp_path):
    from attn3.backends.hopper import compile

    compile.build(QuantizeFeatures("bfloat16", dim, *kind), options=f"--keep-cubin --dump-dir {tmp_path}")
    (cubin,) = tmp_path.glob("*.cubin")
    code = sass.read(cubin)
    assert code.spills == 0, f"{code.local_loads} loads and {code.local_stores} stores of spilled registers"
    assert code.instructions < 6500
