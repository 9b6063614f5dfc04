"""Buckets in order: how many are in flight, and when one is finished."""

import pytest

from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.counters import following
from fsharding.comm.handles import Handle


class Bucket:
    """A bucket that notes in a list when it is started, waited for, taken and released."""

    def __init__(self, name, size, log, fails=False):
        self.name, self.bytes, self.log, self.fails = name, size, log, fails

    def start(self):
        self.log.append(f"start {self.name}")
        return Handle(self, lambda result: self.log.append(f"take {result[0]}"))

    def wait(self, timeout=None):
        self.log.append(f"wait {self.name}")
        return [self.name]

    def release(self, timeout=None):
        self.log.append(f"release {self.name} {timeout.total_seconds():g}")
        if self.fails:
            raise RuntimeError("a member is gone")


def add(queue, *buckets):
    """The handle of the last bucket."""
    return [queue.add(bucket.bytes, bucket.start) for bucket in buckets][-1]


def test_as_many_are_in_flight_as_there_is_room_for():
    log = []
    queue = BucketQueue(10)
    last = add(queue, Bucket("a", 4, log), Bucket("b", 5, log), Bucket("c", 2, log), Bucket("d", 30, log))
    assert log == ["start a", "start b"]
    queue.advance()
    assert log[2:] == ["wait a", "take a", "start c"], "d is larger than the limit: it waits until it is alone"
    queue.advance()
    queue.advance()
    assert log[5:] == ["wait b", "take b", "wait c", "take c", "start d"]
    queue.advance()
    assert len(log) == 10 and not last.is_ready(), "nobody waits for room, so nothing is waited for"
    last.wait()
    assert log[10:] == ["wait d", "take d"] and last.is_ready()


def test_the_first_ones_are_finished_without_the_others():
    log = []
    queue = BucketQueue(0)
    first, last = add(queue, Bucket("a", 1, log)), add(queue, Bucket("b", 1, log), Bucket("c", 1, log))
    first.wait()
    assert log == ["start a", "wait a", "take a", "start b"] and first.is_ready() and not last.is_ready()
    last.wait()
    assert log[4:] == ["wait b", "take b", "start c", "wait c", "take c"]
    first.wait()
    assert len(log) == 9


def test_after_a_failure_all_are_released():
    log = []
    queue = BucketQueue(2)
    add(queue, Bucket("a", 1, log, fails=True), Bucket("b", 1, log), Bucket("c", 1, log))
    queue.release()
    assert log == ["start a", "start b", "release a 1", "release b 1"]


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
def test_events_follow_the_calls(limit):
    queue = BucketQueue(limit)
    with following() as events:
        add(queue, *(Bucket(str(i), 1, []) for i in range(4))).wait()
    assert [event.what for event in events].count("start") == 4 == [event.what for event in events].count("wait")
    flying, most = 0, 0
    for what, name in events:
        assert name == "bucket"
        flying += 1 if what == "start" else -1
        most = max(most, flying)
    assert most == max(1, min(limit, 4))
