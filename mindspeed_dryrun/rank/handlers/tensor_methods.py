"""Replaces a method of the framework's tensors for a while, wherever the framework keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_WRITTEN_TO = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of this class can be set


@contextmanager
def replaced_method(tensor_class: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """`make` gets the method and returns the one that is called meanwhile."""
    owner, method = owner_of(tensor_class, name), getattr(tensor_class, name)
    real = owner.__dict__.get(name)
    setattr(owner, name, make(method))
    try:
        yield
    finally:
        if real is None:
            delattr(owner, name)
        else:
            setattr(owner, name, real)


def owner_of(tensor_class: type, name: str) -> Any:
    """The class that has the method (MindSpore's is one in C++), or, where its attributes cannot be set, the one above it.

    PyTorch's methods belong to `torch._C.TensorBase`, which is immutable; `torch.Tensor` is above it.
    """
    above = tensor_class
    for base in tensor_class.__mro__:
        if name in base.__dict__:
            return base if base.__flags__ & _WRITTEN_TO else above
        above = base
    raise AttributeError(f"{tensor_class.__name__} has no {name}.")
