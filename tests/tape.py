"""A stand-in for a graph of a device: the operations of a call on their very tensors, carried out again one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs


class Tape:
    """A `StepGraph` without a device. As in a graph of CUDA, whatever the host computed is as it was when recorded.

    Results of operations go to the tensors that the recorded ones have made, so that memory is where it was.
    """

    def __init__(self):
        self.rows: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def warm_up(self, run):
        return run()

    def record(self, run):
        with _Recording(self.rows):
            return run()

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self.rows:
                again = func(*args, **kwargs)
                for old, new in zip(fs.tree.leaves(result), fs.tree.leaves(again), strict=True):
                    if isinstance(new, torch.ScriptObject):
                        dist.Work.unbox(new).wait()
                    elif isinstance(new, Tensor) and not shares(old, fs.tree.leaves([args, kwargs])):
                        old.copy_(new)


def shares(x, others):
    place = x.untyped_storage()._cdata
    return any(isinstance(y, Tensor) and y.untyped_storage()._cdata == place for y in others)


class _Recording(TorchDispatchMode):
    def __init__(self, rows):
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" not in func.name():  # its numbers mean nothing, and neither do new ones
            self._rows.append((func, args, kwargs or {}, result))
        return result
