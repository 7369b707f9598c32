"""One process that is rank N of M with no other ranks: a store that never waits, and collectives answered locally."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_ROOT_INFO_BYTES = 4108  # HCCL_ROOT_INFO_BYTES of hccl_types.h: what another rank would have put into the store
_kept: list[Any] = []  # C++ keeps no reference to a store written in Python


def lone_store() -> Any:
    """A store in this process. What another rank would have set reads as zeros; nobody is waited for."""
    import torch.distributed as dist

    class LoneStore(dist.Store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: str | bytes) -> None:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

        def get(self, key: str) -> bytes:
            return self.values.get(key, bytes(_ROOT_INFO_BYTES))

        def add(self, key: str, amount: int) -> int:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            self.set(key, desired)
            return self.values[key]

        def check(self, keys: Sequence[str]) -> bool:
            return True

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            return None

        def delete_key(self, key: str) -> bool:
            return self.values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self.values)

        def set_timeout(self, timeout: Any) -> None:
            return None

        def has_extended_api(self) -> bool:
            return False

        def clone(self) -> Any:
            return self

        @property
        def timeout(self) -> datetime.timedelta:
            return datetime.timedelta(seconds=300)

    store = LoneStore()
    _kept.append(store)
    return store


def rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    """The meeting of ranks: this one is there, with its number and the size of the world from torchrun's variables."""

    @functools.wraps(original)
    def call(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        mine = rank if rank >= 0 else int(os.environ["RANK"])
        size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
        yield lone_store(), mine, size

    return call


def gloo_group(original: Any) -> Any:
    """A group on the host: torch's own fake one, whose collectives return at once."""

    class LoneGroup(type):
        def __instancecheck__(cls, group: Any) -> bool:
            from torch._C._distributed_c10d import FakeProcessGroup

            return isinstance(group, FakeProcessGroup)

    def make(store: Any, rank: int, size: int) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        FakeProcessGroup._set_sequence_number_for_group = lambda self: None  # it has none, and says so by raising
        build = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        return build(rank, size)

    return LoneGroup("ProcessGroupGloo", (), {"__new__": lambda cls, *args, **options: make(*args[:3])})


def all_gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
    """This rank's own object is everybody's."""

    @functools.wraps(original)
    def call(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    return call


def gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
    """This rank's own object is everybody's, where there is a list to fill."""

    @functools.wraps(original)
    def call(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    return call


def isend(original: Callable[..., Any]) -> Callable[..., Any]:
    """What lies on the host is sent to nobody: a group of NPUs has no way for it."""

    class Sent:
        def wait(self, *args: Any) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

    @functools.wraps(original)
    def call(tensor: Any, *args: Any, **options: Any) -> Any:
        return Sent() if tensor.device.type == "cpu" else original(tensor, *args, **options)

    return call
