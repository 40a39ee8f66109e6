"""A bounded cache of what several threads load, each thing once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LoadingCache(Generic[Key, Value]):
    """Keeps the most recently used values up to a number of bytes.

    Whoever asks first for a value loads it; others that ask meanwhile wait for the same load.
    """

    def __init__(self, load: Callable[[Key], Value], size_of: Callable[[Value], int], limit: int) -> None:
        self._load, self._size_of, self._limit = load, size_of, limit
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._loading: dict[Key, Future[Value]] = {}
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """The number of bytes that are kept now."""
        return self._bytes

    def clear(self) -> None:
        """Keep nothing of what is there; what is being loaded is kept when it comes."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def get(self, key: Key) -> Value:
        """The value of a key, loaded by this thread if nobody has or does."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            future = self._loading.get(key)
            mine = future is None
            if future is None:
                future = self._loading[key] = Future()
        return self._load_for(key, future) if mine else future.result()

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._values or key in self._loading

    def _load_for(self, key: Key, future: Future[Value]) -> Value:
        try:
            value = self._load(key)
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._loading[key]
            self._keep(key, value)
        future.set_result(value)
        return value

    def _keep(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._bytes += self._size_of(value)
        while self._bytes > self._limit and self._values:
            _, old = self._values.popitem(last=False)
            self._bytes -= self._size_of(old)
