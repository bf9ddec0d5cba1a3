"""The Hopper kernels without a GPU: every tuned row compiles for sm_90a, and its machine code is what was meant."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Iterable

import pytest
import sass
import torch

from attn3 import score_math
from attn3.backends.hopper import config, config_decode, environment
from attn3.backends.hopper.config import BackwardFeatures, BackwardRow, Features, Programs, TunedRow
from attn3.backends.hopper.config_decode import DecodeFeatures
from attn3.backends.hopper.config_fp8 import Fp8Features, choose
from attn3.masks import Causal, Columns, DenseMask, MaskFunction
from attn3.programs import Sizes, lower_mask
from attn3.scores import Alibi, Bias, ScoreFunction, lower_score

MASKS = {"dense": (False, False), "right": (False, True), "left": (True, True)}

needs_compiler = pytest.mark.skipif(
    bool(environment.software_reasons()) or sass.disassembler() is None,
    reason="needs the `hopper` extra and nvdisasm (pip install -e '.[hopper,dev]')",
)


def kinds(row: TunedRow | BackwardRow, every: Iterable[str]) -> list[str]:
    """The kinds of masks with which a row is compiled: all, but one alone (causal, if the row has it) of what a neighbour lent."""
    every = list(every)
    if "nearest" not in row.provenance:
        return every
    return ["right"] if "right" in every else every[:1]


def tuned_features() -> list[Features]:
    """One kernel for each tuned row and mask kind, and the options that change the loops on top of the common rows."""
    options = {kind: {"left": left, "right": right} for kind, (left, right) in MASKS.items()} | {"program": {"mask": "documents"}}
    rows = [
        Features("bfloat16", row.head_dim, row.head_dim_v, **options[kind])
        for row in config.tuned()
        for kind in kinds(row, row.masks)
    ]
    causal = Features("bfloat16", 128, 128, right=True)
    more = [
        replace(causal, dtype="float16"),
        replace(causal, packed=True),
        replace(causal, lse=False),
        replace(causal, packed=True, seqused_q=True, seqused_k=True, head_dim=64, head_dim_v=64),
        replace(causal, softcap=True, sinks=True),
        replace(causal, negative_scale=True, seqused_k=True),
        replace(causal, left=True, packed=True, sinks=True, head_dim=256, head_dim_v=256),
        Features("float16", 72, 72, right=True, packed=True),
        Features("bfloat16", 64, 64, mask="dense", scores="alibi"),
        Features("bfloat16", 256, 256, mask="function"),
        Features("bfloat16", 128, 128, packed=True, seqused_k=True, mask="documents"),
        replace(causal, packed=True, scores="alibi"),
    ]
    return [*rows, *more]


def tuned_backward_features() -> list[BackwardFeatures]:
    rows = [
        BackwardFeatures("bfloat16", row.head_dim, row.head_dim_v, left=MASKS[kind][0], right=MASKS[kind][1])
        for row in config.tuned_backward()
        for kind in kinds(row, MASKS)
    ]
    more = [
        replace(BackwardFeatures("bfloat16", dim, dim, right=True), **options)
        for dim in (64, 128, 256)
        for options in (
            {"deterministic": True},
            {"packed": True, "dlse": True},
            {"softcap": True, "dlse": True},
            {"packed": True, "seqused_q": True, "seqused_k": True, "deterministic": True, "left": True, "softcap": True},
        )
    ]
    programs = [
        BackwardFeatures("bfloat16", 64, 64, mask="dense", scores="alibi"),
        BackwardFeatures("bfloat16", 128, 128, mask="documents"),
        BackwardFeatures("bfloat16", 256, 256, right=True, scores="curve"),
        BackwardFeatures("bfloat16", 128, 128, mask="documents", scores="learned", wanted=(0, 1)),
        BackwardFeatures("bfloat16", 64, 64, packed=True, seqused_q=True, mask="documents"),
        BackwardFeatures("bfloat16", 128, 128, right=True, packed=True, scores="alibi"),
    ]
    return [*rows, *more, *programs, BackwardFeatures("float16", 72, 40, packed=True)]


def fp8_features() -> list[Fp8Features]:
    """Both modes of every tile, dense and causal, and the options that change the loops."""
    common = [
        Fp8Features("bfloat16", d, d, fast=fast, promoted=d < 256 or not fast, right=right, lse=not fast)
        for d in (64, 128, 256)
        for fast in (False, True)
        for right in (False, True)
    ]
    causal = Fp8Features("float16", 128, 128, right=True)
    wide = replace(causal, head_dim=256, head_dim_v=256)
    windowed = replace(causal, left=True, sinks=True, shift=True)
    more = [
        *(replace(f, blocks=True) for f in common if not f.right),
        replace(wide, mean=False, fast=True, lse=False),  # promoted at 256: PV in parts
        replace(wide, promoted=False),
        replace(windowed, negative_scale=True, seqused_q=True, seqused_k=True, channels=True),
        replace(windowed, head_dim=64, head_dim_v=64),
        replace(windowed, head_dim=256, head_dim_v=256, seqused_k=True),
        replace(causal, head_dim=96, head_dim_v=80),
        replace(causal, head_dim=192, head_dim_v=128, mean=False),
    ]
    return [*common, *more]


def decode_features() -> list[DecodeFeatures]:
    """Each way to load, and most options on top of the one with the fewest registers to spare."""
    common = DecodeFeatures("bfloat16", 128, 128, paged=True, right=True)
    every = {"packed": True, "left": True, "sinks": True, "leftpad": True, "out_float32": True}
    return [
        common,
        replace(common, paged=False, rows=True, lse=False, head_dim=72, head_dim_v=40),
        replace(common, box=16, **every),
        replace(common, box=0, softcap=True, invariant=True, **every),
        replace(common, box=0, e4m3=True, k_descale=True, v_descale=True, softcap=True, **every),
        replace(common, box=0, head_dim=256, head_dim_v=256, dtype="float16", negative_scale=True),
    ]


def programs_of(features: Features | BackwardFeatures | Fp8Features) -> Programs:
    """The programs whose names the features of this module have in the place of keys."""
    sizes = Sizes(2, 4, 2, 200, 333, torch.device("cpu"))
    table = torch.zeros(4, 333, dtype=torch.bool)
    masks = {
        "documents": lambda: Columns(torch.zeros(2, 1, 333, 1, dtype=torch.int32), causal=True),
        "function": lambda: MaskFunction(lambda b, h, q, k: (q >= k) & (q // 64 == k // 64) | table[h, k] & ((q - k) % 7 == 3)),
        "dense": lambda: DenseMask(torch.zeros(2, 1, 200, 333, dtype=torch.bool)) & Causal(),
    }
    mask, score = getattr(features, "mask", None), getattr(features, "scores", None)
    bias, slopes = torch.zeros(4, 200, 333), torch.zeros(4)
    scores = {"alibi": Alibi(), "learned": Bias(bias) & Alibi(slopes)}
    scores |= {"curve": ScoreFunction(lambda s, b, h, q, k: 3.0 * score_math.tanh(s * 0.4))}
    return Programs(mask and lower_mask(masks[mask](), sizes), score and lower_score(scores[score], sizes))


def compile_and_read(
    features: Features | BackwardFeatures | Fp8Features | DecodeFeatures, row: BackwardRow | None = None
) -> sass.Sass:
    from attn3.backends.hopper import compile

    with tempfile.TemporaryDirectory() as folder:
        compile.build(features, row, f"--keep-cubin --dump-dir {folder}", programs_of(features))
        (cubin,) = Path(folder).glob("*.cubin")
        return sass.read(cubin)


def products_once(features: Features) -> int:
    """The WGMMA instructions of a kernel that holds each of its loops once.

    The warps of a warpgroup leave the frozen loop at different blocks to re-base their rows, and have to meet again in the same
    instructions. A loop that was unrolled, peeled or rotated for one of its entries would part them.
    """
    row = config.choose(features)
    qk, pv = row.head_dim // 16, row.tile.block_keys // 16
    if features.mask is not None:
        return 2 * (qk + pv) + 2 * qk + pv  # online, with a mask where there is one; frozen, without
    loops = 4 + features.left  # frozen and online, each without and with a mask; online until every row has met a key
    half = features.right and row.tile.block_keys == 128  # one more block half as wide, and its own PV
    return loops * (qk + pv) + 2 * qk + pv + half * (qk + pv + pv // 2)


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize("features", tuned_features(), ids=str)
def test_machine_code(features: Features) -> None:
    code = compile_and_read(features)
    assert code.spills == 0, f"{code.local_loads} loads and {code.local_stores} stores of spilled registers"
    assert code.products == products_once(features), "a loop is there twice, or not at all"
    assert code.products > 2 * code.groups, f"serialised products: {code.products} in {code.groups} groups"
    assert code.register_moves == 2, "the producer must give registers up and the consumers take them"
    assert code.instructions < 8200


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize("features", tuned_backward_features(), ids=str)
def test_backward_machine_code(features: BackwardFeatures) -> None:
    """Counts are over the three kernels of a backward pass; two of them have no products."""
    check_backward(features, compile_and_read(features))


def check_backward(features: BackwardFeatures, code: sass.Sass) -> None:
    assert code.spills == 0, f"{code.local_loads} loads and {code.local_stores} stores of spilled registers"
    assert code.products > 3 * code.groups, f"serialised products: {code.products} in {code.groups} groups"
    assert code.register_moves == 2, "the producer must give registers up and the consumers take them"
    of_scores = 17 if features.wanted else 0  # 16 elements of a bias a thread, and a slope for all of them
    assert (code.reductions - of_scores) % 8 == 0 and code.reductions > of_scores, "dQ is added 16 bytes at a time"
    assert code.instructions < 7000


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize("features", fp8_features(), ids=str)
def test_machine_code_fp8(features: Fp8Features) -> None:
    code = compile_and_read(features)
    assert code.spills == 0, f"{code.local_loads} loads and {code.local_stores} stores of spilled registers"
    assert code.products > 2 * code.groups, f"serialised products: {code.products} in {code.groups} groups"
    assert code.register_moves == 2, "the producer must give registers up and the consumers take them"
    assert code.instructions < 6000
    # the fast mode takes exp2 of the rows' rescaling only
    assert code.exponentials < 24 if features.fast else code.exponentials > 24
    tile, _, _ = choose(features)
    if tile.parts == 1 and not tile.late:
        # else PV is waited for before the row maxima are done, and does not overlap with them
        assert code.maxima_between_waits >= tile.block_keys // 2


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize("features", decode_features(), ids=str)
def test_machine_code_decode(features: DecodeFeatures) -> None:
    code, tile = compile_and_read(features), config_decode.choose(features)
    assert code.spills == 0, f"{code.local_loads} loads and {code.local_stores} stores of spilled registers"
    assert code.products == tile.head_dim // 16 + config_decode.BLOCK // 16, "the loop is there twice, or not at all"
    assert code.groups == 2, "QK and PV: one group of products each"
    assert code.register_moves == 2, "the producer must give registers up and the consumers take them"
    assert code.instructions < 7000


def test_every_row_fits_its_budgets() -> None:
    for row in (*config.tuned(), *config.tuned_backward()):
        row.tile.check(row.head_dim, row.head_dim_v)
        assert row.provenance, row.label


@pytest.mark.parametrize("kind", MASKS)
def test_every_head_dim_has_a_tile(kind: str) -> None:
    left, right = MASKS[kind]
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            row = config.choose(Features("bfloat16", head_dim, head_dim_v, left=left, right=right))
            assert row.head_dim >= head_dim and row.head_dim_v >= head_dim_v


def test_every_head_dim_has_a_backward_tile() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            row = config.choose_backward(BackwardFeatures("bfloat16", head_dim, head_dim_v))
            assert row.head_dim >= head_dim and row.head_dim_v >= head_dim_v


def test_common_head_dims_get_their_own_row() -> None:
    for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (128, 64)):
        row = config.choose(Features("bfloat16", head_dim, head_dim_v))
        assert (row.head_dim, row.head_dim_v) == (head_dim, head_dim_v)


@needs_compiler
def test_indices_into_captured_tensors_are_whole_numbers_and_no_more_than_dimensions() -> None:
    from attn3.backends.hopper import compile, launch
    from attn3.errors import Unsupported
    from attn3.problem import Problem

    table, q = torch.zeros(4, 333), torch.empty(1, 200, 4, 64, dtype=torch.bfloat16)
    for function, message in (
        (lambda s, b, h, q, k: s + table[h, k * 0.5], "whole numbers"),
        (lambda s, b, h, q, k: s + table[h, k, q], "3 indices into a tensor of 2"),
    ):
        p = Problem.of(q, q, q, score=ScoreFunction(function))
        with pytest.raises(Unsupported, match=message):
            compile._compile_visibly(launch.features_of(p), Programs(None, p.score_program))


def test_an_empty_captured_tensor_is_refused_up_front() -> None:
    from attn3.backends.hopper import launch
    from attn3.problem import Problem

    empty, q = torch.zeros(0), torch.empty(1, 200, 4, 64, dtype=torch.bfloat16)
    p = Problem.of(q, q, q, score=ScoreFunction(lambda s, b, h, q, k: s + empty[k]))
    assert any("empty tensor" in reason for reason in launch.program_reasons(p))
