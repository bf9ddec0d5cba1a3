"""Masks and scores written as text, for the command line: ``Documents([600, 424]) & Causal()``, ``Alibi() & Softcap(30)``.

The text is read, never run: names of attn3's own masks and scores, numbers, lists, ``&`` and ``|``.
"""

from __future__ import annotations

import ast
from typing import Any, Callable

import torch

from attn3.errors import AttentionError
from attn3.masks.base import Causal, Full, Mask, Window
from attn3.masks.patterns import Chunked, Dilated, Documents, PrefixLM
from attn3.scores import Alibi, Score, Softcap


def mask(text: str, device: torch.device | str = "cpu") -> Mask:
    """Raises ``AttentionError`` for what is no mask."""
    names = {kind.__name__: kind for kind in (Full, Causal, Window, Chunked, Dilated, PrefixLM)}
    names["Documents"] = lambda lengths: Documents.of_lengths(lengths, device)
    return _read("mask", text, names, Mask)


def score(text: str) -> Score:
    """Raises ``AttentionError`` for what is no score."""
    return _read("score", text, {"Softcap": Softcap, "Alibi": Alibi}, Score)


def _read(what: str, text: str, names: dict[str, Callable[..., Any]], kind: type) -> Any:
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body, names)
    except AttentionError:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise AttentionError(f"{what} is {text!r}, which is none ({error}); write {', '.join(names)} joined by & and |") from None
    if not isinstance(found, kind):
        raise AttentionError(f"{what} is {text!r}, which is none; write {', '.join(names)} joined by & and |")
    return found


def _value(node: ast.AST, names: dict[str, Callable[..., Any]]) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _value(node.left, names), _value(node.right, names)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        keywords = {k.arg: _value(k.value, names) for k in node.keywords if k.arg is not None}
        return names[node.func.id](*(_value(a, names) for a in node.args), **keywords)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, names) for item in node.elts]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, type(None))):
        return node.value
    raise ValueError(f"`{ast.unparse(node)}` is not understood")
