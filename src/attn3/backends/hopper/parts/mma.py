"""WGMMA: issuing a product, and the register layouts of its operands.

An m64nN accumulator gives each thread two rows, r and r + 8, and N/4 of their columns: register ``4j + 2r + c`` holds column
``8j + 2 (lane % 4) + c``. For 16-bit types the A operand of the next product has the same thread map, so the softmax's result
becomes an operand without moving a single value between threads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Int32
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def issue(tiled_mma, acc, rA, rB, zero_init: Constexpr):
    """acc (+)= A B for one warpgroup: fence, every k step, commit. The caller waits."""
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh atom: ACCUMULATE is a field of its value
    warpgroup.fence()
    for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not zero_init or kb > 0)
        cute.gemm(atom, acc, rA[None, None, kb], rB[None, None, kb], acc)
    warpgroup.commit_group()


@cute.jit
def pack(src, dst):
    """dst <- src in 16 bits, two values at a time.

    A vector conversion of 80, 96, 176 … values is emitted as scalar conversions plus byte permutes, which split the PV
    product's wgmma group; pairs by hand do not.
    """
    words = cute.recast_tensor(dst, Int32)
    kind = "bf16x2" if dst.element_type is BFloat16 else "f16x2"
    for i in cutlass.range_constexpr(cute.size(dst) // 2):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[src[2 * i + 1], src[2 * i]]
        )


def rows_view(acc):
    """(row, column) view of an m64nN accumulator: 2 rows x N/4 columns of this thread."""
    n8 = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, n8)), stride=(2, (1, 4))))


def as_a_operand(p):
    """An accumulator's registers, already 16-bit, as the A fragments of N/16 k steps: a pure relabelling."""
    n16 = cute.size(p) // 8
    return cute.make_tensor(p.iterator, cute.make_layout(((2, 2, 2), 1, n16), stride=((1, 2, 4), 0, 8)))
