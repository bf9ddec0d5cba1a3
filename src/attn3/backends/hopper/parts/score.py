"""Score changes, applied to q.k before the mask."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

from attn3.backends.hopper.parts.program import ask, terms

LOG2_E = math.log2(math.e)


@cute.jit
def softcap(S_mn, inner):
    """S <- tanh(inner * S), inner = scale / cap, to float32's relative precision.

    Large arguments: 1 - 2 / (e^2x + 1), two special-function results an element instead of the hardware's one tanh, whose 11
    bits are too few once multiplied by the cap. Small ones, where that difference cancels: x - x^3/3 + 2 x^5/15 - 17 x^7/315.
    """
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            x = S_mn[r, j] * inner
            x2 = x * x
            small = x + x * x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0)))
            large = 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * (2.0 * LOG2_E), fastmath=True) + 1.0)
            S_mn[r, j] = small if x2 < 0.04 else large


@cute.jit
def negate(S_mn):
    """S <- -S: a negative scale, so that everything behind may take it as positive."""
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            S_mn[r, j] = -S_mn[r, j]


@cute.jit
def apply_program(S_mn, at, first_key, scale, apply: Constexpr, tensors, guard: Constexpr):
    """S <- apply(scale * S, b, h, q, k, tensors), traced. ``at``: where S lies (forward.Place); positions are in use, or 0."""
    last_row, last_key = cutlass.max(at.query_length - 1, 0), cutlass.max(at.key_length - 1, 0)
    for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
        k = cutlass.min(first_key + at.column + (j // 2 * 8 + j % 2), last_key)
        for r in cutlass.range_constexpr(2):
            q = cutlass.min(at.row + 8 * r, last_row)
            S_mn[r, j] = Float32(ask(apply, (at.batch, at.head, q, k), tensors, S_mn[r, j] * scale, guard=guard))


@cute.jit
def apply_program_and_slope(S_mn, slope, at, scale, program: Constexpr, tensors):
    """The same where keys are down (``at``: a mask.Rectangle). Returns the derivatives, multiplied into ``slope`` (or None: 1 so
    far); None where they are all 1.
    """
    for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
        q = cutlass.min(at.column + (j // 2 * 8 + j % 2), at.last_column)
        for r in cutlass.range_constexpr(2):
            place = at.batch, at.head, q, cutlass.min(at.row + 8 * r, at.last_row)
            s = S_mn[r, j] * scale
            d = ask(program.derivative, place, tensors, s, guard=at.guard)
            if const_expr(not (isinstance(d, (int, float)) and d == 1)):
                if const_expr(slope is None):
                    slope = cute.make_rmem_tensor_like(S_mn)
                    slope.fill(1.0)
                slope[r, j] = slope[r, j] * d
            S_mn[r, j] = Float32(ask(program.apply, place, tensors, s, guard=at.guard))
    return slope


def add_gradients(raw, P_mn, dP_mn, stat, at, scale, program, tensors, wanted, buffers):
    """Adds to ``buffers`` the gradients of the ``wanted`` tensors of a program: dS times the derivative of each score by what it
    was computed from. raw: S before the program; stat: where the rows' delta lies.

    An element that all queries and keys of a head read is added up in registers first.
    """
    pair = cute.make_rmem_tensor(2, Float32)
    sums = {}
    for j in range(cute.size(P_mn, mode=[1])):
        if j % 2 == 0:
            cute.autovec_copy(cute.make_tensor((stat + 4 * j).align(8), cute.make_layout(2)), pair)
        column = at.column + (j // 2 * 8 + j % 2)
        for r in range(2):
            row = at.row + 8 * r
            p = P_mn[r, j]
            real = (p > 0.0) & (row <= at.last_row) & (column <= at.last_column)
            ds = p * (dP_mn[r, j] - pair[j % 2])
            place = at.batch, at.head, cutlass.min(column, at.last_column), cutlass.min(row, at.last_row)
            for n, term in enumerate(terms(program, place, tensors, wanted, raw[r, j] * scale, at.guard)):
                value, buffer = ds * Float32(term.slope), buffers[wanted.index(term.tensor)]
                if term.same_for_all:
                    before, _ = sums.get(n, (Float32(0.0), None))
                    sums[n] = before + _or_zero(real, value), (buffer, term.place)
                else:
                    _add(real, buffer, term.place, value)
    for value, (buffer, place) in sums.values():
        _add(cute.arch.lane_idx() == 0, buffer, place, cute.arch.warp_reduction_sum(value))


@cute.jit
def _or_zero(condition, x):
    return x if condition else Float32(0.0)


@cute.jit
def _add(condition, buffer, place, value):
    if condition:
        at = buffer.iterator + cute.crd2idx(place, buffer.layout)
        cute.arch.inline_ptx("red.global.add.f32 [{$r0}], {$r1};", read_only_args=[at.toint(), value])
