"""What FP8 changes: how P becomes an e4m3 operand, and how a product's bits are kept.

8-bit wgmma takes an A operand whose threads own 4 neighbouring keys, where the accumulator gives them 2 + 2, and wants V with its
keys contiguous. Both are settled where V is transposed: its keys lie in ``attn3.fp8.KEY_ORDER`` in every group of 16, so that P
becomes an operand without a shuffle.

Exponents are shifted by ``P_SHIFT``: P lies in (0, 256], and e4m3 ends at 448, so that the maximum must be the true one.

The tensor core keeps 13 fraction bits of an FP8 accumulator and truncates. A promoted product starts from zero in every block and
is added to O in float32, where the rescaling's multiplication becomes a multiply-add.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from attn3.backends.hopper.parts.mma import rows_view
from attn3.backends.hopper.parts.softmax import add, block_sums
from attn3.fp8 import P_SHIFT

NEG_INF = -float("inf")
ONES = 0x38383838  # four e4m3 ones


class Fp8Rows(NamedTuple):
    """Per-thread state of its two rows, in registers."""

    max: cute.Tensor  # (2) of c S
    sum: cute.Tensor  # (2) of P; of this thread's columns, in the fast mode of the whole row
    alpha: cute.Tensor  # (2) factor for what came before the newest block


def make_rows() -> Fp8Rows:
    new = lambda: cute.make_rmem_tensor(2, Float32)
    return Fp8Rows(new(), new(), new())


@cute.jit
def multiply(tiled_mma, acc, rA, rB, zero_init: Constexpr):
    """Every k step of acc (+)= A B, without fence and commit. An rB of one k step serves them all."""
    atom = cute.make_mma_atom(tiled_mma.op)
    for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not zero_init or kb > 0)
        cute.gemm(atom, acc, rA[None, None, kb], rB[None, None, kb % cute.size(rB, mode=[2])], acc)


@cute.jit
def pin(x):
    """Keeps what follows (a wait) behind the computation of x.

    ptxas moves wgmma waits up over independent arithmetic, which then no longer overlaps with the products: up to 19% of the
    whole kernel on an H200. The sleep is never taken.
    """
    cute.arch.inline_ptx("{ .reg .pred p; setp.gt.f32 p, {$r0}, 0f7F7FFFFF; @p nanosleep.u32 0; }", read_only_args=[x])


def as_fp8_operand(acc):
    """An m64nN accumulator in the order of 8-bit A fragments: (4 keys, 2 rows, 2 halves) for each k32 step."""
    return cute.make_tensor(
        acc.iterator, cute.make_layout((((2, 2), 2, 2), 1, cute.size(acc) // 16), stride=(((1, 4), 2, 8), 0, 16))
    )


@cute.jit
def maximum(S_mn, c, rows: Fp8Rows, guarded: Constexpr):
    """rows.max <- with this block, rows.alpha <- the factor for what came before. Returns each row's maximum - P_SHIFT."""
    base = []
    for r in cutlass.range_constexpr(2):
        top = [S_mn[r, j] for j in range(4)]
        for j in cutlass.range_constexpr(4, cute.size(S_mn, mode=[1])):
            top[j % 4] = cute.arch.fmax(top[j % 4], S_mn[r, j])
        top = cute.arch.fmax(cute.arch.fmax(top[0], top[1]), cute.arch.fmax(top[2], top[3]))
        before = rows.max[r]
        m = cute.arch.warp_reduction_max(cute.arch.fmax(before, top * c), threads_in_group=4)
        rows.max[r] = m
        if const_expr(guarded):
            m = 0.0 if m == NEG_INF else m  # nothing seen yet: avoid inf - inf
        rows.alpha[r] = cute.math.exp2(before - m, fastmath=True)
        base.append(m - float(P_SHIFT))
    return base


@cute.jit
def exponentials(S_mn, c, base, rows: Fp8Rows):
    """S <- 2^(c S - base), added to rows.sum"""
    for r in cutlass.range_constexpr(2):
        S_mn[r, None].store(cute.math.exp2(S_mn[r, None].load() * c - base[r], fastmath=True))
        rows.sum[r] = rows.sum[r] * rows.alpha[r] + add(block_sums(S_mn, r))


@cute.jit
def integer_p(S_mn, c, base, P):
    """P <- e4m3 bits near 2^(c S - base) by integer arithmetic: no exp2, and no conversion to 8 bits, which costs half as much.

    A float's bits are nearly linear in its logarithm: byte = round(8 (x + 7) - 0.46) = round(126 sat(...)); the saturation clamps
    to [0, 448], and float16 with 1024 added holds the integer in its low byte. ``attn3.fp8.integer_p`` is the same in torch.
    """
    words = cute.recast_tensor(P, Int32)
    factor = c * (8 / 126)
    for r in cutlass.range_constexpr(2):
        start = (55.54 - 8.0 * base[r]) * (1 / 126)
        for i in cutlass.range_constexpr(cute.size(S_mn, mode=[1]) // 4):
            words[2 * i + r] = cute.arch.inline_ptx(
                "{ .reg .b32 a, b, m, k; .reg .f32 x, y, z, w; mov.b32 m, 0x57E057E0; mov.b32 k, 0x64006400; "
                "fma.rn.sat.f32 x, {$r0}, {$r4}, {$r5}; fma.rn.sat.f32 y, {$r1}, {$r4}, {$r5}; "
                "fma.rn.sat.f32 z, {$r2}, {$r4}, {$r5}; fma.rn.sat.f32 w, {$r3}, {$r4}, {$r5}; "
                "cvt.rn.f16x2.f32 a, y, x; cvt.rn.f16x2.f32 b, w, z; "
                "fma.rn.f16x2 a, a, m, k; fma.rn.f16x2 b, b, m, k; prmt.b32 {$w0}, a, b, 0x6420; }",
                write_only_types=[Int32],
                read_only_args=[S_mn[r, 4 * i], S_mn[r, 4 * i + 1], S_mn[r, 4 * i + 2], S_mn[r, 4 * i + 3], factor, start],
            )


@cute.jit
def collect(O, T, L, rows: Fp8Rows, old_alpha, new_alpha, promoted: Constexpr):
    """Brings in a finished product. It was made after the maximum had moved by old_alpha; new_alpha came since (None: did not)."""
    O_mn = rows_view(O)
    for r in cutlass.range_constexpr(2):
        if const_expr(promoted):
            O_mn[r, None].store(O_mn[r, None].load() * old_alpha[r] + rows_view(T)[r, None].load())
        elif const_expr(new_alpha is not None):
            O_mn[r, None].store(O_mn[r, None].load() * new_alpha[r])
        if const_expr(L is not None):
            rows.sum[r] = rows.sum[r] * old_alpha[r] + L[2 * r]
