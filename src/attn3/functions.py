"""Functions that a user wrote, taken apart: what they capture, when two are the same, and how to run one over other tensors.

A mask or score function is compiled into kernels by its ``key``: the bytecode with its constants and names, and what it captures.
Captured tensors are arguments of the kernel, so the key holds no more of them than rank, dtype and which sizes are 1; captured
Python numbers are compiled in, so the key holds them. A fresh lambda of the same code therefore has the same key.

Tensors are found in closure cells, defaults, globals that the code loads, ``functools.partial``, tuples, lists and dicts of
these, functions called from there, and attributes of captured objects that the code names (``self.table``).
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any, Callable, Hashable, Iterable

import torch
from torch import Tensor

_LOOKED_INTO = (tuple, list, dict, functools.partial, types.FunctionType)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class UserFunction:
    """``key`` equal for functions that behave alike, ``tensors`` in the order of their discovery."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.tensors: tuple[Tensor, ...] = ()
        self._indices: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # addresses are told apart below: none may be given away meanwhile
        self._objects: dict[int, tuple[int, set[str]]] = {}  # number, attributes that have been looked at
        self.key: Hashable = self._key(function, ())

    def bind(self, tensors: Iterable[Any]) -> Callable[..., Any]:
        """The function with ``tensors`` in the places of those it captured; they may be anything that is indexed alike.

        Those that have ``guarded()`` are asked for a version that may be indexed with anything: a kernel's tensors check nothing.
        """
        tensors = tuple(t.guarded() if hasattr(t, "guarded") else t for t in tensors)
        if all(new is old for new, old in zip(tensors, self.tensors, strict=True)):
            return self.function
        return _Rebinding(self._indices, tensors).of(self.function, ())

    def uses(self, parameter: int) -> bool:
        """Can the result depend on this positional parameter? True when that cannot be told."""
        code = getattr(self.function, "__code__", None)
        if not isinstance(self.function, types.FunctionType) or parameter >= code.co_argcount:
            return True
        return code.co_varnames[parameter] in _names(code)[2]

    def _capture(self, t: Tensor) -> int:
        index = self._indices.get(id(t))
        if index is None:
            index = self._indices[id(t)] = len(self.tensors)
            self.tensors += (t,)
        return index

    def _key(self, value: Any, attributes: tuple[str, ...]) -> Hashable:
        if isinstance(value, Tensor):
            return "tensor", self._capture(value), value.dtype, tuple(size == 1 for size in value.shape)
        if isinstance(value, _NUMBERS):
            return type(value).__name__, repr(value)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if _opaque(value):
            return "opaque", _Same(value)
        self._alive.append(value)
        if isinstance(value, types.MethodType):
            names = _names(value.__func__.__code__)[1] if isinstance(value.__func__, types.FunctionType) else ()
            return "method", self._key(value.__func__, ()), self._key(value.__self__, names)
        if not isinstance(value, _LOOKED_INTO):
            return self._key_of_object(value, attributes)
        if id(value) in self._seen:  # functions that call each other
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, (tuple, list)):
            return type(value).__name__, *(self._key(item, attributes) for item in value)
        if isinstance(value, dict):
            return "dict", *((self._key(k, ()), self._key(v, attributes)) for k, v in value.items())
        if isinstance(value, functools.partial):
            return "partial", self._key(value.func, ()), self._key(value.args, ()), self._key(value.keywords, ())
        return self._key_of_function(value)

    def _key_of_function(self, function: types.FunctionType) -> Hashable:
        code = function.__code__
        loaded, attributes, _ = _names(code)
        captured = [(name, self._key(cell, attributes)) for name, cell in _cells(function)]
        defaults = self._key(function.__defaults__, attributes), self._key(function.__kwdefaults__, attributes)
        known = function.__globals__
        return "function", _code_key(code), *captured, defaults, *(
            (name, self._key(known[name], attributes)) for name in loaded if name in known
        )  # fmt: skip

    def _key_of_object(self, value: Any, attributes: tuple[str, ...]) -> Hashable:
        number, known = self._objects.setdefault(id(value), (len(self._objects), set()))
        found = []
        call = _call_of(value)
        if isinstance(call, types.FunctionType):
            attributes = (*attributes, *_names(call.__code__)[1])
            if "__call__" not in known:
                known.add("__call__")
                found.append(("__call__", self._key(call, ())))
        for name, item in _attributes(value, attributes):
            if name not in known:
                known.add(name)
                found.append((name, self._key(item, attributes)))
        # without attributes that the code names nothing tells two objects apart but what they are
        return "object", number, type(value).__qualname__ if known else _Same(value), *found


class _Rebinding:
    """The same walk as ``UserFunction``'s, building a copy of what holds a tensor."""

    def __init__(self, indices: dict[int, int], tensors: tuple[Any, ...]) -> None:
        self.indices, self.tensors, self.made = indices, tensors, {}
        self.alive: list[Any] = []

    def of(self, value: Any, attributes: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            return self.tensors[self.indices[id(value)]] if id(value) in self.indices else value
        if isinstance(value, (*_NUMBERS, types.ModuleType)) or _opaque(value):
            return value
        self.alive.append(value)
        if isinstance(value, types.MethodType):
            names = _names(value.__func__.__code__)[1] if isinstance(value.__func__, types.FunctionType) else ()
            return types.MethodType(self.of(value.__func__, ()), self.of(value.__self__, names))
        if not isinstance(value, _LOOKED_INTO):
            return self._object(value, attributes)
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, (tuple, list)):
            items = [self.of(item, attributes) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: self.of(v, attributes) for k, v in value.items()}
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func, ()), *self.of(value.args, ()), **self.of(value.keywords, ()))
        return self._function(value)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        loaded, attributes, _ = _names(function.__code__)
        known = {name: function.__globals__[name] for name in loaded if name in function.__globals__}
        known["__builtins__"] = function.__globals__.get("__builtins__", __builtins__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = types.FunctionType(function.__code__, known, function.__name__, None, cells or None)
        self.made[id(function)] = copy  # before what it captures, which may be itself
        copy.__defaults__ = self.of(function.__defaults__, attributes)
        copy.__kwdefaults__ = self.of(function.__kwdefaults__, attributes)
        values = dict(_cells(function))
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name in values:
                cell.cell_contents = self.of(values[name], attributes)
        for name in [n for n in known if n != "__builtins__"]:
            known[name] = self.of(known[name], attributes)
        return copy

    def _object(self, value: Any, attributes: tuple[str, ...]) -> Any:
        call = _call_of(value)
        own = None
        if isinstance(call, types.FunctionType):
            attributes = (*attributes, *_names(call.__code__)[1])
            own = call
        found = dict(_attributes(value, attributes))
        stand_in = self.made.get(id(value))
        if stand_in is None:
            if not found and own is None:
                return value
            self.made[id(value)] = stand_in = _StandIn(value)
        for name, item in found.items():
            if name not in stand_in.__dict__:
                stand_in.__dict__[name] = item  # until it is known, for what refers to it
                stand_in.__dict__[name] = self.of(item, attributes)
        if own is not None and "_call" not in stand_in.__dict__:
            stand_in.__dict__["_call"] = own
            stand_in.__dict__["_call"] = types.MethodType(self.of(own, ()), stand_in)
        return stand_in


class _StandIn:
    """An object with some attributes replaced."""

    def __init__(self, original: Any) -> None:
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __call__(self, *args: Any) -> Any:
        return self.__dict__["_call"](*args)


class _Same:
    """Equal to itself alone, and keeps what it stands for alive, so that its address is not given away."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return getattr(self.value, "__qualname__", repr(self.value))


def _call_of(value: Any) -> Any:
    """What runs when an object is called."""
    if isinstance(value, torch.nn.Module):
        return type(value).forward
    return next((vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None)


def _opaque(value: Any) -> bool:
    """What is never looked into: types, builtins, and torch's own functions unless they hold something."""
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return True
    of_torch = isinstance(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] == "torch"
    return of_torch and not value.__closure__


def _cells(function: types.FunctionType) -> list[tuple[str, Any]]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    return found


def _attributes(value: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The attributes of an object that some code names; methods of it included."""
    missing = object()
    found = ((name, getattr(value, name, missing)) for name in dict.fromkeys(names))
    return [(name, item) for name, item in found if item is not missing]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """(globals loaded, attributes loaded, local names read) of a code object and the functions defined in it."""
    loaded: dict[str, None] = {}
    attributes: dict[str, None] = {}
    local = set(code.co_cellvars)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes[step.argval] = None
        elif "FAST" in step.opname and "STORE_FAST" != step.opname:
            local.update((step.argval,) if isinstance(step.argval, str) else step.argval or ())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            loaded |= dict.fromkeys(inner[0])
            attributes |= dict.fromkeys(inner[1])
    return tuple(loaded), tuple(attributes), frozenset(local)


@functools.lru_cache(maxsize=4096)
def _code_key(code: types.CodeType) -> Hashable:
    constants = tuple(_code_key(c) if isinstance(c, types.CodeType) else _constant_key(c) for c in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


def _constant_key(value: Any) -> Hashable:
    """1, 1.0 and True are equal and not the same constant."""
    if isinstance(value, (tuple, frozenset)):
        return type(value).__name__, *sorted((_constant_key(v) for v in value), key=repr if isinstance(value, frozenset) else _zero)
    return type(value).__name__, repr(value)


def _zero(_: object) -> int:
    return 0
