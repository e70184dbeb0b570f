"""Uninitialised memory that shows: floating point tensors come out of the empty functions full of NaN."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return wrapper


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every float tensor from torch.empty, empty_like, empty_strided and Tensor.new_empty* starts as NaN."""
    with contextlib.ExitStack() as stack:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _filled(getattr(owner, name))))
        yield
