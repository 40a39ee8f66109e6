"""The pool: bounded, each thing opened once, nothing closed under anybody's hands."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from wsi_trainer.view.scene import Pool


class Thing:
    def __init__(self, number: int) -> None:
        self.number, self.closed = number, False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def test_keeps_those_used_last() -> None:
    opened: list[int] = []
    pool = Pool(lambda number: (opened.append(number), Thing(number))[1], 2)
    for number in (0, 1, 0, 2, 0, 1):
        with pool.lease(number) as thing:
            assert thing.number == number and not thing.closed
    assert opened == [0, 1, 2, 1]
    assert pool.opened == 2


def test_many_threads_never_see_a_closed_thing() -> None:
    things: list[Thing] = []
    lock = threading.Lock()

    def open_one(number: int) -> Thing:
        with lock:
            things.append(Thing(number))
            return things[-1]

    pool = Pool(open_one, 3)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            number = chance.randrange(10)
            with pool.lease(number) as thing, pool.lease(chance.randrange(10)) as other:
                assert thing.number == number and not thing.closed and not other.closed

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.opened <= 3
    assert sum(not thing.closed for thing in things) == pool.opened
    pool.close()
    assert all(thing.closed for thing in things)


def test_what_cannot_be_opened_is_tried_again() -> None:
    tries = []

    def fail(number: int) -> Thing:
        tries.append(number)
        raise OSError("gone")

    pool = Pool(fail, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"), pool.lease(0):
            pass
    assert tries == [0, 0] and pool.opened == 0
