"""Mask and score programs as kernels trace them, run on the CPU: the DSL compiles the same code for the host."""

from typing import Any, Callable

import pytest
import torch

from attn3 import score_math
from attn3.programs import ScoreProgram, Sizes
from attn3.scores import Alibi, Bias, Score, ScoreFunction, lower_score

cutlass = pytest.importorskip("cutlass", reason="needs the `hopper` extra (pip install -e '.[hopper,dev]')")
cute = cutlass.cute

pytestmark = pytest.mark.compile
BATCH, HEADS, ROWS, KEYS = 2, 4, 5, 6


def dynamic(t: torch.Tensor) -> Any:
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(t.detach()).mark_layout_dynamic(leading_dim=t.dim() - 1) if t.dim() else from_dlpack(t.detach().view(1))


READS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "negative": (lambda t, i: t[i - 10], (7,)),
    "constant": (lambda t, i: t[-2, i] + t[5, 1] + t[-9, 0], (3, 40)),
    "one after another": (lambda t, i: t[i - 4][1][i - 30], (3, 2, 5)),
}


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", READS)
def test_indices_of_user_functions_stay_inside(name: str, integer: torch.dtype) -> None:
    from attn3.backends.hopper.parts.program import ask

    read, shape = READS[name]
    table, numbers, out = torch.randn(shape), torch.arange(30).to(integer), torch.full((30,), torch.nan)

    @cute.jit
    def host(t: cute.Tensor, numbers: cute.Tensor, out: cute.Tensor):
        for i in cutlass.range(30):
            out[i] = ask(lambda b, h, q, k, c: read(c[0].guarded(), c[1][q]), (0, 0, i, 0), (t, numbers))

    host(dynamic(table), dynamic(numbers), dynamic(out))

    class Nearest:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def __getitem__(self, at: Any) -> Any:
            at, t = at if isinstance(at, tuple) else (at,), self.t
            for i in at:
                i, size = int(i), t.shape[0]
                t = t[min(max(i + size if i < 0 else i, 0), size - 1)]
            return Nearest(t) if t.dim() else t

    assert torch.equal(out, torch.stack([read(Nearest(table), i) for i in numbers]))


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def twice() -> Score:
    table, factor = leaf(HEADS, 9), torch.tensor(0.7).requires_grad_()
    return ScoreFunction(lambda s, b, h, q, k: factor * s * table[h, (q - k) % 9] * table[-1][k] + abs(table[h, q]) / (2.0 + s * s))


def told() -> Score:
    """The second function's own rule is used for what the first one has captured."""
    table = leaf(KEYS)
    first, second = ScoreFunction(lambda s, b, h, q, k: s * table[k]), lambda s, b, h, q, k: s * s
    return first & ScoreFunction(second, derivative=lambda s, b, h, q, k: 2.0 * s)


def chosen() -> Score:
    low, high = leaf(1), leaf(KEYS, seed=1)
    return ScoreFunction(
        lambda s, b, h, q, k: score_math.where(q < k, score_math.maximum(s, low[0]), torch.where(s > 0.0, high[k], s))
    )


SCORES: dict[str, Callable[[], Score]] = {
    "bias": lambda: Bias(leaf(BATCH, HEADS, ROWS, KEYS)),
    "bias of keys": lambda: Bias(leaf(KEYS)),
    "bias of heads": lambda: Bias(leaf(1, HEADS, 1, 1)),
    "slopes": lambda: Alibi(leaf(HEADS)),
    "slopes of sequences": lambda: Alibi(leaf(BATCH, HEADS)),
    "read twice": twice,
    "derivative given": told,
    "chosen": chosen,
    "all": lambda: Bias(leaf(ROWS, KEYS)) & Alibi(leaf(HEADS)) & twice() & told(),
}


def program_of(score: Score) -> ScoreProgram:
    return lower_score(score, Sizes(BATCH, HEADS, HEADS, ROWS, KEYS, torch.device("cpu")))


@pytest.mark.parametrize("name", SCORES)
def test_terms_are_the_gradients_of_what_a_score_has_captured(name: str) -> None:
    from attn3.backends.hopper.parts.program import ask, terms

    program = program_of(SCORES[name]())
    s, ds = leaf(BATCH, HEADS, ROWS, KEYS, seed=2), leaf(BATCH, HEADS, ROWS, KEYS, seed=3).detach()
    wanted = tuple(i for i, t in enumerate(program.tensors) if t.requires_grad)
    sums = [torch.zeros(program.tensors[i].shape) for i in wanted]
    new, slope = torch.empty_like(ds), torch.empty_like(ds)

    @cute.jit
    def host(s: cute.Tensor, ds: cute.Tensor, new: cute.Tensor, slope: cute.Tensor, tensors: tuple, sums: tuple):
        for b in cutlass.range(BATCH):
            for h in cutlass.range(HEADS):
                for q in cutlass.range(ROWS):
                    for k in cutlass.range(KEYS):
                        place = (b, h, q, k)
                        new[place] = cutlass.Float32(ask(program.apply, place, tensors, s[place]))
                        slope[place] = cutlass.Float32(ask(program.derivative, place, tensors, s[place]))
                        for term in terms(program, place, tensors, wanted, s[place]):
                            buffer = sums[wanted.index(term.tensor)]
                            buffer[term.place] = buffer[term.place] + ds[place] * cutlass.Float32(term.slope)

    host(*map(dynamic, (s, ds, new, slope)), tuple(map(dynamic, program.tensors)), tuple(map(dynamic, sums)))

    b, h, q, k = (torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(ds.shape))
    want = program.apply(s, b, h, q, k, program.tensors)
    torch.testing.assert_close(new, want.detach())
    of_s, *of_tensors = torch.autograd.grad(want, [s, *(program.tensors[i] for i in wanted)], ds)
    torch.testing.assert_close(slope * ds, of_s)
    for got, exact in zip(sums, of_tensors, strict=True):  # float32, added up in different orders
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-4)


def test_what_all_queries_and_keys_read_is_told_apart() -> None:
    from attn3.backends.hopper.parts.program import terms

    found = {}

    @cute.jit
    def host(x: cute.Tensor, tensors: tuple, name: cutlass.Constexpr, program: cutlass.Constexpr):
        for i in cutlass.range(1):
            wanted = tuple(j for j, t in enumerate(program.tensors) if t.requires_grad)
            some = terms(program, (i, i, i, i), tensors, wanted, x[i])
            found[name] = [term.same_for_all for term in some]

    for name in ("bias", "bias of heads", "slopes", "slopes of sequences", "bias of keys"):
        program = program_of(SCORES[name]())
        host(dynamic(torch.zeros(1)), tuple(map(dynamic, program.tensors)), name, program)
    assert found == {
        "bias": [False], "bias of heads": [True], "slopes": [True], "slopes of sequences": [True], "bias of keys": [False],
    }  # fmt: skip


@pytest.mark.parametrize("by_key", [False, True], ids=["rows_are_queries", "rows_are_keys"])
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("mask", ["windowed", "columns_1", "columns_2", "plain"])
def test_bits_of_a_block(mask: str, columns: int, by_key: bool) -> None:
    """A thread's two rows of columns: what each of them sees of a mask, at every place in the sequence and behind its end."""
    from attn3.backends.hopper.parts import mask as part
    from attn3.masks import Causal, Columns, Documents, Window
    from attn3.programs import lower_mask

    queries, keys = 21, 26
    seeded = torch.Generator().manual_seed(0)
    ends = torch.randint(0, queries + 1, (1, 1, keys, 2), generator=seeded, dtype=torch.int32).sort(-1)[0]
    ids = [torch.arange(n, dtype=torch.int32)[None] // 9 for n in (queries, keys)]
    chosen = {
        "windowed": Documents(*ids) & Window(7, 3), "columns_1": Columns(ends[..., :1].contiguous(), causal=True) & Causal(),
        "columns_2": Columns(ends, causal=True), "plain": Documents(*ids),
    }[mask]  # fmt: skip
    program = lower_mask(chosen, Sizes(1, 1, 1, queries, keys, torch.device("cpu")))
    height, width = (keys, queries) if by_key else (queries, keys)
    spots = [(row, first) for row in (0, 4, 11, 18, height - 1, height + 3) for first in (0, 2, 6, 10, 24)]
    out = torch.zeros(len(spots), 2, dtype=torch.int32)

    @cute.jit
    def host(rows: cute.Tensor, firsts: cute.Tensor, out: cute.Tensor, tensors: tuple):
        for i in cutlass.range(len(spots)):
            bits = cute.make_rmem_tensor(2, cutlass.Int32)
            at = part.Rectangle(0, 0, rows[i], firsts[i], height - 1, width - 1, by_key, False)
            part.look(bits, columns, at, program.visible, tensors)
            out[i, 0], out[i, 1] = bits[0], bits[1]

    rows, firsts = (torch.tensor(x, dtype=torch.int32) for x in zip(*spots, strict=True))
    host(dynamic(rows), dynamic(firsts), dynamic(out), tuple(dynamic(t.contiguous()) for t in program.tensors))
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    seen = program.visible(0, 0, q, k, program.tensors).expand(queries, keys)
    seen = seen.T if by_key else seen
    for (row, first), got in zip(spots, out.tolist(), strict=True):
        for r in range(2):
            places = [(row + 8 * r, first + j // 2 * 8 + j % 2) for j in range(columns)]
            want = [i < height and j < width and bool(seen[i, j]) for i, j in places]
            assert [got[r] >> j & 1 == 1 for j in range(columns)] == want, (row, first, r)
