"""THE comparer: a result, or gradients, against the float64 oracle, under an error budget.

Largest error at most twice that of the same-precision PyTorch run (float32 arithmetic, probabilities rounded to the input
dtype, result rounded to the output dtype) plus 4 ulp of the largest value; the root mean square error likewise, with half an ulp
of the root mean square value as its floor. What has one right answer is compared exactly:
shapes, dtypes, the -inf pattern of lse, zeros in rows that see no key. The oracle's numbers are finite, so the results have to be.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn3.fp8 import dequantized
from attn3.problem import Problem
from attn3.reference import reference


def compare(problem: Problem, out: Tensor, lse: Tensor, *, slack: float = 1.0) -> None:
    """Raises AssertionError with every finding. ``slack`` multiplies the budget of a case that is ill-conditioned on purpose."""
    findings = _layout(problem, out, lse)
    if not findings:
        dtype = problem.q.dtype if problem.fp8 is None else problem.out_dtype
        # e4m3 tensors are judged as the numbers that they stand for
        plain = problem if problem.fp8 is None else dequantized(problem)
        exact_out, exact_lse = reference(plain)
        if dtype == torch.float64:
            low_out, low_lse = exact_out, exact_lse
        else:
            round_p = torch.float8_e4m3fn if problem.fp8 is not None else None if dtype == torch.float32 else dtype
            low_out, low_lse = reference(plain, compute_dtype=torch.float32, round_p=round_p)
        # float64 has no higher-precision run to measure its own error with: sums of thousands of terms lose a few bits
        ulps = 256 if dtype == torch.float64 else 4
        findings += _numbers("out", out, exact_out, low_out.to(out.dtype), 2 * slack, ulps)
        if problem.fp8 is None:
            findings += _numbers("lse", lse, exact_lse, low_lse.float(), 2 * slack, 4)
        elif problem.return_lse:
            findings += _lse_fp8(lse, exact_lse, slack)
        # out is (…, rows, heads, dim) and lse (…, heads, rows); with a sink, a row without keys has a finite lse but still out 0
        unseen = reference(dataclasses.replace(plain, sinks=None))[1] if problem.sinks is not None else exact_lse
        nonzero = (out.transpose(-3, -2)[torch.isneginf(unseen)] != 0).sum().item()
        if nonzero:
            findings.append(f"out: {nonzero} elements of rows that see no key are not exactly 0")
    if findings:
        raise AssertionError("\n".join([problem.describe(), *findings]))


def compare_grads(
    problem: Problem, grads: tuple[Tensor | None, ...], dout: Tensor | None, dlse: Tensor | None, *, slack: float = 1.0
) -> None:
    """The gradients of q, k, v, sinks (None without sinks) and of the tensors of the score, where they are given, for given
    gradients of out and lse (None: nothing depends on it)."""
    p, dtype = problem, problem.q.dtype
    inputs = {name: t for name, t in (("q", p.q), ("k", p.k), ("v", p.v), ("sinks", p.sinks)) if t is not None}
    of_score = () if p.score is None else p.score.tensors
    inputs |= {f"score{i}": t for i, t in enumerate(of_score[: len(grads) - 4])}
    names = ("q", "k", "v", "sinks", *(f"score{i}" for i in range(len(grads) - 4)))
    given = dict(zip(names, grads, strict=True))
    findings = []
    for name, t in inputs.items():
        got = given[name]
        if got is None or got.shape != t.shape or got.dtype != t.dtype or got.device != t.device:
            what = "None" if got is None else f"{tuple(got.shape)} {got.dtype} {got.device}"
            findings.append(f"d{name}: is {what}, should be like {name}, {tuple(t.shape)} {t.dtype} {t.device}")
    if p.sinks is None and given["sinks"] is not None:
        findings.append("dsinks: there are no sinks, should be None")
    if not findings:
        exact, lse = _reference_grads(p, inputs, dout, dlse, torch.float64, None)
        low = exact
        if dtype != torch.float64:
            low, _ = _reference_grads(p, inputs, dout, dlse, torch.float32, None if dtype == torch.float32 else dtype)
        for name in inputs:
            # a sink's gradient is a sum over products with out, which has q's dtype; its own dtype promises too much
            floor = max(dtype, given[name].dtype, key=lambda d: torch.finfo(d).eps)
            # dS takes rowsum(dO * O) from out as it was stored, rounded, which the plain run does not: an ulp on the mean, not half
            got, plain = given[name].to(floor), low[name].to(floor)
            # and the terms of that sum cancel; each is as exact as the float32 lse
            sums = name not in ("q", "k", "v")
            ulps = 256 if dtype == torch.float64 else 32 if sums else 4
            findings += _numbers(f"d{name}", got, exact[name], plain, 2 * slack, ulps, ulps / 8 if sums else 1.0)
        rows = given["q"].transpose(-3, -2)[torch.isneginf(lse)]
        keys = ((exact["k"] == 0) & (exact["v"].abs().amax(-1, keepdim=True) == 0)).all(-1)
        for name, dead in (("dq", rows), ("dk", given["k"][keys]), ("dv", given["v"][keys])):
            nonzero = (dead != 0).sum().item()  # NaN included
            if nonzero:
                findings.append(f"{name}: {nonzero} elements of what sees nothing or is not seen are not exactly 0")
    if findings:
        raise AssertionError("\n".join([problem.describe(), *findings]))


def _reference_grads(
    problem: Problem, inputs: dict[str, Tensor], dout: Tensor | None, dlse: Tensor | None, dtype: torch.dtype,
    round_p: torch.dtype | None,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Gradients by name, and the lse of the keys alone."""
    leaves = {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in inputs.items()}
    of_problem = {name: t for name, t in leaves.items() if not name.startswith("score")}
    if len(of_problem) < len(leaves):
        of_problem["score"] = problem.score.with_tensors([leaves.get(f"score{i}", t) for i, t in enumerate(problem.score.tensors)])
    out, lse = reference(dataclasses.replace(problem, **of_problem), compute_dtype=dtype, round_p=round_p)
    with torch.no_grad():
        alone = lse if problem.sinks is None else reference(dataclasses.replace(problem, sinks=None))[1]
    pairs = [(a, d.to(dtype)) for a, d in ((out, dout), (lse, dlse)) if d is not None and a.requires_grad]
    if not pairs:  # nothing in use
        return {name: torch.zeros_like(t) for name, t in leaves.items()}, alone
    results, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True)
    return {
        name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), found, strict=True)
    }, alone.detach()


def part(problem: Problem, out: Tensor, lse: Tensor, b: int) -> tuple[Problem, Tensor, Tensor]:
    """One sequence of a call, for spot checks of what is too big to check as a whole."""
    p, one = problem, slice(b, b + 1)
    changes = {name: None if t is None else t[one] for name, t in (("seqused_q", p.seqused_q), ("seqused_k", p.seqused_k))}
    if not p.packed:
        return dataclasses.replace(p, q=p.q[one], k=p.k[one], v=p.v[one], **changes), out[one], lse[one]
    (start_q, end_q), (start_k, end_k) = p.cu_seqlens_q[b : b + 2].tolist(), p.cu_seqlens_k[b : b + 2].tolist()
    of_q, of_k = slice(start_q, end_q), slice(start_k, end_k)
    changes |= {"cu_seqlens_q": p.cu_seqlens_q[b : b + 2] - start_q, "cu_seqlens_k": p.cu_seqlens_k[b : b + 2] - start_k}
    smaller = dataclasses.replace(p, q=p.q[of_q], k=p.k[of_k], v=p.v[of_k], **changes)
    return smaller, out[of_q], lse[:, of_q].contiguous()


def _layout(problem: Problem, out: Tensor, lse: Tensor) -> list[str]:
    findings = []
    wanted = [("out", out, problem.out_shape(), problem.out_dtype), ("lse", lse, problem.lse_shape(), torch.float32)]
    if not problem.return_lse:
        wanted.pop()
    for name, got, shape, dtype in wanted:
        if tuple(got.shape) != tuple(shape):
            findings.append(f"{name}: shape {tuple(got.shape)}, should be {tuple(shape)}")
        if got.dtype != dtype:
            findings.append(f"{name}: dtype {got.dtype}, should be {dtype}")
        if got.device != problem.q.device:
            findings.append(f"{name}: on {got.device}, should be on {problem.q.device}")
        if not got.is_contiguous():
            findings.append(f"{name}: strides {got.stride()}, should be contiguous")
    return findings


def _numbers(name: str, got: Tensor, exact: Tensor, low: Tensor, factor: float, ulps: int, mean_ulps: float = 0.5) -> list[str]:
    if not exact.numel():
        return []
    ulp = torch.finfo(got.dtype).eps
    got, low = got.double(), low.double()
    empty = torch.isneginf(exact)
    if not torch.isfinite(exact[~empty]).all():
        return [f"{name}: the oracle itself is not finite; the case is badly made"]
    if not torch.equal(torch.isneginf(got), empty):
        wrong = torch.isneginf(got) != empty
        return [f"{name}: -inf in the wrong places, {_where(wrong)}"]
    got, exact, low = (t.masked_fill(empty, 0.0) for t in (got, exact, low))
    broken = ~torch.isfinite(got)
    if broken.any():
        return [f"{name}: NaN or inf, {_where(broken)}"]
    largest = exact.abs().max().item()
    low_errors = (low - exact).abs()
    low_errors = low_errors[torch.isfinite(low_errors)]  # the plain run may overflow where a careful one does not
    low_error = low_errors.max().item() if low_errors.numel() else 0.0
    limit = factor * low_error + ulps * ulp * max(largest, 1e-3)
    if name == "lse":
        limit += 2e-5 * (1 + largest)  # kernels take exponents in base 2 with an approximate unit
    errors = (got - exact).abs()
    worst = errors.max().item()
    if worst > limit:
        return [
            f"{name}: error {worst:.3e} above the budget {limit:.3e} (plain run {low_error:.3e}, largest value {largest:.3e}),"
            f" {_where(errors > limit)}"
        ]
    if name == "lse" or not low_errors.numel():
        return []
    # a fault that is small everywhere (a key too many among thousands) hides below 4 ulp of the largest value, but not in the mean
    plain = _root_mean_square(low_errors)
    usual = factor * plain + ulps / 4 * mean_ulps * ulp * _root_mean_square(exact) + 1e-3 * ulp
    mean = _root_mean_square(errors)
    if mean <= usual:
        return []
    return [f"{name}: root mean square error {mean:.3e} above the budget {usual:.3e} (plain run {plain:.3e})"]


def _lse_fp8(got: Tensor, exact: Tensor, slack: float) -> list[str]:
    """2e-3 as it is; and where scores are large, what truncated sums over head_dim lose of them."""
    if not torch.equal(torch.isneginf(got), torch.isneginf(exact)):
        return ["lse: -inf in the wrong places"]
    errors = (got - exact).nan_to_num(0.0, 0.0, 0.0).abs() / (1 + exact.nan_to_num(0.0, 0.0, 0.0).abs() / 2)
    worst = errors.max().item() if errors.numel() else 0.0
    wrong = not worst <= 2e-3 * slack or got.isnan().any()
    return [f"lse: error {worst:.1e} relative to 1 + |lse| / 2, above {2e-3 * slack:.1e}"] if wrong else []


def _root_mean_square(t: Tensor) -> float:
    if not t.numel():
        return 0.0
    largest = t.abs().max().item()  # squares of values near the largest float would overflow
    return largest * (t / largest).square().mean().sqrt().item() if largest else 0.0


def _where(wrong: Tensor) -> str:
    places = wrong.nonzero()
    first, last = tuple(places[0].tolist()), tuple(places[-1].tolist())
    return f"{places.shape[0]} of {wrong.numel()} elements, first {first}, last {last}"
