"""Ranks behind a notebook: functions that are defined in cells run on several local processes, which wait for the next.

In: a number of ranks, then functions and arguments, pickled by value with cloudpickle. Out: the result of rank 0, or of
all ranks; or an `ObjectRef`, which stands for an object that stays on the ranks and is an argument of later calls.
Text that rank 0 prints is written to the cell while the call runs.
Guarantees: no call hangs past its timeout, and none spoils the next one: ranks that raised in the same lines go on with
their objects, all others are ended and the next call starts new ones. No rank outlives the kernel.
"""

from __future__ import annotations

import ast
import atexit
import codecs
import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import io
import itertools
import linecache
import os
import pickle
import re
import reprlib
import select
import sys
import sysconfig
import threading
import traceback
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.calls import LIBRARY, named
from fsharding.base.errors import ArgumentError, ConfigError, RankError, message, report
from fsharding.base.public import Immutable
from fsharding.mesh.failures import is_network_error, own_rank
from fsharding.testing.failures import Failure, RankFailure, worded
from fsharding.testing.ranks import RankPool

__all__ = ["CallFailure", "ObjectRef", "RankFunction", "Ranks", "load_ipython_extension", "ranks"]

Result = TypeVar("Result")
Frame = tuple[str, int, str]
"""File, line, function."""

_NAME = "fs.notebook.ranks"
_GRACE = 3.0
"""Seconds: ranks that raise in the same line do so one after the other where they share cores."""
_STREAMS = ("stdout", "stderr")
_PIPE = 65536
"""Bytes: no more are in a pipe at any time."""
_LIBRARIES = (LIBRARY, *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")))
_MOST_FRAMES = 8


# ------------------------------------------------------------------------------------------------ in the rank's process

_main = ModuleType("__main__")
"""Names that `%%ranks` cells have assigned on this rank."""
_objects: dict[str, Any] = {}
"""Objects that `keep` has left on this rank, by the keys of their references."""
_identity = ""
"""Of the ranks that this process is one of; empty in the kernel."""


@dataclasses.dataclass
class _Raised(Exception):
    """An error of the user's function on one rank, as plain data: its class may be of a cell, which pickle cannot name.

    Attributes:
        text: type and text of the error, with its notes.
        frames: the outermost first.
        pickled: the error itself, if that can be pickled.
        network: whether it says that ranks could not talk to each other.
    """

    text: str
    frames: list[Frame]
    pickled: bytes | None
    network: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return _Raised, (self.text, self.frames, self.pickled, self.network)


class _UnsendableError(Exception):
    """Says which type cannot be sent, and why in rows; the function has finished all the same."""

    def __init__(self, kind: str, rows: list[str]) -> None:
        super().__init__(kind, rows)
        self.kind = kind
        self.rows = rows


def _begin(folder: str, working: str, identity: str) -> None:
    """Directs the text of rank 0 to the kernel and drops other ranks' text, for as long as the rank lives."""
    global _identity
    _identity = identity
    # Where a cell of `%%ranks` defines a class, pickle and dataclasses look for it in the module that it names.
    sys.modules["__main__"] = _main
    os.chdir(working)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // torch.distributed.get_world_size()))
    for name in _STREAMS:
        path = os.devnull if own_rank() else Path(folder, name)
        # Line by line: a line is in the cell as soon as it is written.
        setattr(sys, name, open(path, "w", buffering=1, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115


def _perform(call: bytes, released: list[str], key: str | None, everyone: bool) -> bytes:
    """Runs one call on this rank.

    Args:
        call: function, arguments and keyword arguments.
        released: keys of objects that no `ObjectRef` stands for any more.
        key: under which the result stays here; None to send it.
        everyone: whether all ranks send their result, or rank 0 alone.

    Returns:
        The pickled result, or a description of it where it stays here.

    Raises:
        _Raised: whatever the function raises.
        _UnsendableError: the function has returned an object that cannot be pickled.
    """
    for name in released:
        _objects.pop(name, None)
    try:
        fn, args, kwargs = pickle.loads(call)
        result = fn(*args, **kwargs)
        if key is not None:
            _objects[key] = result
            return pickle.dumps(_described(result))
    except BaseException as error:
        raise _as_data(error) from None
    finally:
        for name in _STREAMS:
            getattr(sys, name).flush()
    return _sendable(result) if everyone or own_rank() == 0 else b""


def _execute(source: str, filename: str) -> None:
    """Runs a cell in the names of this rank, and prints its last line if that is an expression that has a value."""
    _remember_lines(source, filename)
    cell = ast.parse(source, filename)
    last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
    # dont_inherit: otherwise the cell has the __future__ imports of this module.
    exec(compile(cell, filename, "exec", dont_inherit=True), _main.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), _main.__dict__)
        if value is not None:
            print(repr(value))


def _remember_lines(source: str, filename: str) -> None:
    """Lets tracebacks and `inspect.getsource` find the lines of a cell that is no file."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def _object_of(identity: str, key: str) -> Any:
    """The object of this rank that a reference by `keep` stands for."""
    if identity != _identity:
        raise _foreign()
    return _objects[key]


def _name_of(identity: str, name: str) -> Any:
    """The object of this rank that `%%ranks` cells have assigned to a name."""
    if identity != _identity:
        raise _foreign()
    if name not in _main.__dict__:
        mend = f"Assign it in a cell that begins with %%ranks: {name} = ..."
        raise ArgumentError(report(f"fs.notebook.Ranks has no {name!r} on these ranks.", mend=mend))
    return _main.__dict__[name]


def _foreign() -> ArgumentError:
    rule = "stands for an object of ranks that have ended, or of another pool."
    return ArgumentError(report(f"fs.notebook.ObjectRef {rule}", mend="Make it again: ref = pool.keep(f, ...)."))


def _same(x: Result) -> Result:
    return x


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{type(x).__name__} {tuple(x.shape)}"
    tensors = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]
    if not tensors:
        return reprlib.repr(x)
    return f"{type(x).__name__} of {len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements"


def _pickled(x: Any) -> bytes:
    """Pickle a value with the functions in it. Their code keeps its file names, which cloudpickle 3.1.3 replaces."""
    import cloudpickle  # lazy: an extra

    class Pickler(cloudpickle.CloudPickler):
        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: _reduced_code}, cast(Any, cloudpickle.CloudPickler.dispatch_table)
        )

    buffer = io.BytesIO()
    Pickler(buffer).dump(x)
    return buffer.getvalue()


def _reduced_code(code: CodeType) -> tuple[Any, ...]:
    import cloudpickle  # lazy: an extra

    make, arguments = cast(Any, cloudpickle.CloudPickler.dispatch_table[CodeType](code))
    return _code_of_file, (make, arguments, code.co_filename)


def _code_of_file(make: Callable[..., CodeType], arguments: Sequence[Any], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _sendable(result: Any) -> bytes:
    cut = [f"{path or 'it'} is a DTensor" for path, x in tree.named_leaves(result).items() if isinstance(x, DTensor)]
    if cut:  # pickle would send rank 0's part, in the form of a full tensor that cannot be gathered
        raise _UnsendableError(type(result).__name__, cut)
    try:
        return _pickled(result)
    except Exception as error:
        raise _UnsendableError(type(result).__name__, [f"{type(error).__name__}: {error}"]) from None


_KEEP = "Leave it on the ranks: ref = pool.keep(f, ...). Or return local tensors, numbers and containers of them."


def _as_data(error: BaseException) -> _Raised:
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [*itertools.dropwhile(lambda frame: frame[0] == __file__, frames)]
    text = "".join(traceback.format_exception_only(error)).rstrip()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    text += "" if cause is None else f"\nafter {''.join(traceback.format_exception_only(cause)).rstrip()}"
    network = isinstance(error, RankError) or is_network_error(error)
    try:
        pickled = _sendable(error)
    except _UnsendableError:
        pickled = None  # the text says it all the same
    return _Raised(text, frames, pickled, network)


# -------------------------------------------------------------------------------------------------------- in the kernel


class CallFailure(RankFailure):
    """The error of a call on the ranks of a notebook: which ranks failed, and in which lines of the cells.

    Attributes:
        errors: rank to its traceback, the first to fail first.
        exceptions: rank to the exception itself; `None` where there is none or it cannot be pickled.

    Example:
        >>> with fs.notebook.ranks(1) as pool:
        ...     try:
        ...         pool(int, "x")
        ...     except fs.notebook.CallFailure as failure:
        ...         failure.exceptions
        {0: ValueError("invalid literal for int() with base 10: 'x'")}
    """

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows; the stack of the kernel is the same for every call, and left out."""
        return f"{type(self).__name__}: {self}".splitlines()


class ObjectRef(Immutable, instead="pool.all(lambda x: setattr(x, {name!r}, ...), ref)"):
    """An object on each rank. As an argument of a call, or a global name of its function, it is the rank's own object.

    The ranks release the object when nothing in the notebook refers to the `ObjectRef` any more.

    Example:
        >>> with fs.notebook.ranks(2) as pool:
        ...     rank = pool.keep(torch.distributed.get_rank)
        ...     print(rank, pool.all(lambda x: x + 10, rank))
        ObjectRef(0) [10, 11]
    """

    @named("fs.notebook.ObjectRef")
    def __init__(self, processes: _Processes, lookup: Callable[[str, str], Any], key: str, text: str) -> None:
        self._processes = processes
        self._lookup = lookup
        self._key = key
        self._text = text

    def __repr__(self) -> str:
        return f"ObjectRef({'of ranks that have ended' if self._processes.ended else self._text})"

    @named("fs.notebook.ObjectRef")
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        rule = f"has no {name!r}: its object is on the ranks."
        mend = f"Read it there: pool(lambda x: x.{name}, ref)."
        raise AttributeError(message(rule, mend=mend))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._processes.ended:
            raise _foreign()
        return self._lookup, (self._processes.identity, self._key)


class RankFunction(Generic[Result]):
    """A function that runs on the ranks when it is called; `Ranks.on_ranks` makes it.

    On a rank it is the plain function, so that functions of cells may call each other.

    Example:
        >>> with fs.notebook.ranks(2) as pool:
        ...     @pool.on_ranks
        ...     def total(x):
        ...         x = x * (torch.distributed.get_rank() + 1)
        ...         torch.distributed.all_reduce(x)
        ...         return x.tolist()
        ...     print(total(torch.ones(2)), total.all(torch.zeros(1)))
        [3.0, 3.0] [[0.0], [0.0]]
    """

    def __init__(self, owner: Ranks, fn: Callable[..., Result]) -> None:
        functools.update_wrapper(self, fn)
        self._owner = owner
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """The result of rank 0; see `Ranks.__call__`."""
        return self._owner(self._fn, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> list[Result]:
        """The results of all ranks; see `Ranks.all`."""
        return self._owner.all(self._fn, *args, **kwargs)

    def keep(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Leaves the results on the ranks; see `Ranks.keep`."""
        return self._owner.keep(self._fn, *args, **kwargs)

    def __repr__(self) -> str:
        return f"RankFunction({getattr(self._fn, '__qualname__', self._fn)}, {self._owner.size} ranks)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._fn,)


class _Processes:
    """Ranks from their start to their end: processes, the pipes of their text, and keys of objects to release."""

    def __init__(self, size: int) -> None:
        self.pool, self.identity, self.ended = RankPool(size), uuid.uuid4().hex, False
        self.released: list[str] = []
        self._keys = itertools.count()
        try:
            self.texts = _Texts(self.pool.folder)
            self.pool.run(_begin, str(self.pool.folder), os.getcwd(), self.identity, timeout=60.0)
        except BaseException:
            self.end()
            raise

    def end(self, *, gently: bool = False) -> None:
        """Ends them, at once or when they have done what they do; ending twice is harmless."""
        self.ended = True
        if gently:
            self.pool.close()
        self.pool.kill()
        if hasattr(self, "texts"):
            self.texts.close()

    def new_key(self) -> str:
        return f"object {next(self._keys)}"

    def reference(self, key: str, text: str) -> ObjectRef:
        """Stands for what `keep` has left under a key; the call after the reference has ended releases it."""
        ref = ObjectRef(self, _object_of, key, text)
        weakref.finalize(ref, self.released.append, key).atexit = False
        return ref

    def take_released(self) -> list[str]:
        """Keys that are to be released now; the garbage collector may add others at any time, between any two lines."""
        return [self.released.pop() for _ in range(len(self.released))]


class Ranks:
    """Local gloo ranks that run functions of cells and keep their objects and process groups between calls.

    `fs.notebook.ranks` makes one and ends the one before it. This class makes pools that stand beside each other.

    Functions and arguments are pickled by value: a rank sees the values that a function's global names have when it is
    called. Rank 0 prints into the cell, the text of other ranks is dropped. Generators of random numbers are seeded
    with 0 when the ranks start, and go on from call to call.
    A call that fails on all ranks in the same lines leaves the ranks as they are. After any other failure they may have
    begun different collectives, so they are ended, and the next call starts new ones.

    Attributes:
        size: how many ranks to start, 1 or more.
        timeout: seconds that a call may take; None for no limit, in a test of pytest for 60. It may be assigned.

    Raises:
        ArgumentError: `size` or `timeout` is not positive.
        ConfigError: cloudpickle is not installed.
        RankError: the ranks do not start.

    Example:
        >>> with fs.notebook.Ranks(1) as one, fs.notebook.Ranks(2) as two:
        ...     print(one.all(torch.distributed.get_world_size), two.all(torch.distributed.get_world_size))
        [1] [2, 2]
    """

    @named("fs.notebook.Ranks")
    def __init__(self, size: int, timeout: float | None = None) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(report(f"{_NAME} cannot start {size!r} ranks.", mend="Give 1 or more, such as 2."))
        if importlib.util.find_spec("cloudpickle") is None:
            mend = "pip install 'fsharding[notebook]'"
            raise ConfigError(report(f"{_NAME} needs cloudpickle to send functions of cells.", mend=mend))
        self.size = size
        self.timeout = timeout
        self._closed = False
        self._processes: _Processes | None = None
        self._ready()
        _OPEN.add(self)

    @named(_NAME)
    def _ready(self) -> _Processes:
        """The processes that the next call runs on, new ones where the earlier ones were ended."""
        if self._closed:
            rule = "got a pool that is closed, by close() or by a later call of fs.notebook.ranks."
            mend = f"pool = {_NAME}({self.size}), and run the cells with @pool.on_ranks again."
            raise CallFailure(message(rule, mend=mend))
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and self.timeout > 0):
            rule = f"cannot wait for timeout={self.timeout!r}."
            raise ArgumentError(message(rule, mend="Give seconds above 0, or None for no limit."))
        processes = self._processes
        if processes is not None and not processes.ended and (dead := processes.pool.dead()):
            processes.end()
            failure = worded("lost ranks between two calls.", dead, _NEW)
            raise CallFailure(str(failure), failure.errors, failure.exceptions)
        if processes is None or processes.ended:
            self._processes = processes = _Processes(self.size)
            # A pool that was never closed and is no longer reachable; at exit `_close_all` is in time, and this is not.
            weakref.finalize(self, processes.end).atexit = False
        return processes

    @named(_NAME)
    def _call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, key: str | None, everyone: bool
    ) -> list[Any]:
        """What each rank has sent, unpickled; None for those that were not asked."""
        if not callable(fn):
            rule = f"runs functions, got {type(fn).__name__}."
            raise ArgumentError(message(rule, mend="Write pool(f, *args), or @pool.on_ranks above a function."))
        name = getattr(fn, "__qualname__", repr(fn))
        processes = self._ready()
        call = _packed(name, fn, args, kwargs)
        released = processes.take_released()
        try:
            with processes.texts.shown():
                replies = processes.pool.attempt(
                    _perform, call, released, key, everyone, timeout=self.timeout, seed=None, grace=_GRACE
                )
        except KeyboardInterrupt as interrupt:
            processes.end()
            text = f"The {self.size} ranks were ended in the middle of {name}. {_NEW}"
            stacks = [_worded_stack(note) for note in getattr(interrupt, "__notes__", [])]
            raise KeyboardInterrupt("\n\n".join([text, *stacks])) from None
        except BaseException:
            processes.end()
            raise
        if failed := {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}:
            raise self._failure(name, processes, failed) from None
        try:
            return [pickle.loads(replies[rank]) if replies[rank] else None for rank in range(self.size)]
        except Exception as error:
            rule = f"cannot read the result of {name} in the notebook."
            raise CallFailure(message(rule, [f"{type(error).__name__}: {error}"], _KEEP)) from None

    def _failure(self, name: str, processes: _Processes, failed: dict[int, Failure]) -> CallFailure:
        """Words it, and ends the ranks unless all of them raised in the same lines."""
        unsendable = [reply.exception for reply in failed.values() if isinstance(reply.exception, _UnsendableError)]
        if len(unsendable) == len(failed):  # all ranks have finished the function
            rule = f"cannot send a {unsendable[0].kind} to the notebook, the result of {name}."
            return CallFailure(message(rule, unsendable[0].rows, _KEEP))
        raised = {rank: reply.exception for rank, reply in failed.items() if isinstance(reply.exception, _Raised)}
        lines = {tuple(frame for frame in error.frames if _is_users(frame[0])) for error in raised.values()}
        in_step = len(raised) == self.size and len(lines) == 1 and not any(e.network for e in raised.values())
        if not in_step:
            processes.end()
        shown = {rank: _shown(reply) for rank, reply in failed.items()}
        mend = _NEW
        if in_step:
            mend = "The ranks go on, with the objects that they keep."
        elif any(reply.late for reply in failed.values()):
            mend = f"Give it more seconds with pool.timeout = ..., or see below where the ranks stand. {_NEW}"
        rule = f"could not finish {name} on {self.size} ranks."
        if done := [str(rank) for rank in range(self.size) if rank not in failed]:
            rule = f"{rule[:-1]}; rank{'s' * (len(done) > 1)} {', '.join(done)} finished it."
        failure = worded(rule, shown, mend)
        return CallFailure(str(failure), failure.errors, failure.exceptions)

    def __call__(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Runs `fn(*args, **kwargs)` on every rank.

        Args:
            fn: any function, also one of a cell or a lambda.
            *args: arguments, the same for every rank; an `ObjectRef` is each rank's own object.
            **kwargs: more of them.

        Returns:
            The result of rank 0.

        Raises:
            CallFailure: a rank raised, died or did not answer in time; or rank 0's result cannot be sent.
            ArgumentError: `fn` or an argument cannot be pickled, or is an `ObjectRef` of ranks that have ended.
            KeyboardInterrupt: the cell was interrupted; the ranks are ended, and its text says where they stood.
        """
        return self._call(fn, args, kwargs, key=None, everyone=False)[0]

    def all(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> list[Result]:
        """Runs `fn` as a call does, and returns the results of all ranks, in rank order."""
        return self._call(fn, args, kwargs, key=None, everyone=True)

    def keep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> ObjectRef:
        """Runs `fn` as a call does, and leaves each rank's result there: a state, a layout, a model.

        Returns:
            A reference to the results, for later calls.
        """
        key = self._ready().new_key()
        text = self._call(fn, args, kwargs, key=key, everyone=False)[0]
        return self._ready().reference(key, text)

    def on_ranks(self, fn: Callable[..., Result]) -> RankFunction[Result]:
        """Makes a function of a cell one that runs on the ranks, as a decorator: `@pool.on_ranks`."""
        return RankFunction(self, fn)

    def execute(self, source: str) -> None:
        """Runs the text of a cell on every rank; `%%ranks` calls it.

        The cell has names of its own on each rank, which later cells see; `pool["name"]` is one of them as an argument
        of a call. The value of its last line is printed.

        Args:
            source: Python, without magics.

        Raises:
            SyntaxError: the text is not Python; nothing has run.
            CallFailure: as from a call.
        """
        filename = f"<%%ranks cell {next(_CELLS)}>"
        ast.parse(source, filename)
        _remember_lines(source, filename)  # in the kernel too, which words the tracebacks
        self._call(_execute, (source, filename), {}, key=None, everyone=False)

    def __getitem__(self, name: str) -> ObjectRef:
        """The object that `%%ranks` cells have assigned to a name, on each rank."""
        return ObjectRef(self._ready(), _name_of, name, name)

    def restart(self) -> None:
        """Ends the ranks and starts new ones: objects are lost, modules are imported anew."""
        if self._processes is not None:
            self._processes.end()
        self._ready()

    @property
    def pids(self) -> list[int]:
        """The process ids in rank order; empty while there are no ranks."""
        return [] if self._processes is None else self._processes.pool.pids

    @property
    def closed(self) -> bool:
        """Whether `close` has been called, or `fs.notebook.ranks` again."""
        return self._closed

    def close(self) -> None:
        """Ends the ranks for good. Closing twice is harmless."""
        self._closed = True
        if self._processes is not None:
            self._processes.end(gently=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @named(_NAME)
    def __reduce__(self) -> NoReturn:
        mend = "Pass what its functions need as arguments; they can call each other, also those with @pool.on_ranks."
        raise ArgumentError(message("cannot send a pool to its own ranks.", mend=mend))

    def __repr__(self) -> str:
        status = "closed" if self._closed else "waiting for calls" if self.pids else "started by the next call"
        return f"Ranks({self.size}, {status})"


_NEW = "The next call starts new ranks; objects that these kept are lost."
_CELLS = itertools.count(1)
_OPEN: weakref.WeakSet[Ranks] = weakref.WeakSet()
_latest: Ranks | None = None
"""The pool that `ranks` has made last, which `%%ranks` uses."""


@atexit.register
def _close_all() -> None:
    for pool in [*_OPEN]:
        pool.close()


@named(_NAME)
def ranks(size: int, timeout: float | None = None) -> Ranks:
    """Starts local ranks behind a notebook, or behind an interpreter that you type into.

    The ranks of an earlier `ranks` are ended first, so that a cell may be run again.

    Args:
        size: how many ranks to start, 1 or more.
        timeout: seconds that a call may take; by default no limit, in a test of pytest 60.

    Returns:
        The pool: `pool(f, *args)` runs `f` on every rank.

    Raises:
        ArgumentError: `size` or `timeout` is not positive.
        ConfigError: cloudpickle is not installed.
        RankError: the ranks do not start.

    Example:
        >>> def init(key):
        ...     return {"w": fs.random.normal(key, (4, 1))}
        >>> def loss_fn(params, batch):
        ...     error = batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]
        ...     return error.square().sum(), error.numel()
        >>> def train(batch):
        ...     state, step = fs.setup(init, loss_fn, fs.adamw(1e-2), fs.random.key(0))
        ...     state, metrics = step(state, batch)
        ...     return int(metrics.weight)
        >>> pool = fs.notebook.ranks(2)
        >>> pool(train, {"x": torch.ones(3, 4), "y": torch.zeros(3, 1)})
        6
        >>> pool.close()
    """
    global _latest
    if _latest is not None:
        _latest.close()
    _latest = None
    _latest = Ranks(size, timeout)
    return _latest


def load_ipython_extension(ipython: Any) -> None:
    """Adds the cell magic `%%ranks`, after `%load_ext fsharding`.

    `%%ranks` runs its cell on all ranks of the latest pool, as `Ranks.execute` does; `%%ranks 2` starts two if there
    is no pool of that size.

    Args:
        ipython: the shell, which IPython passes.

    Example:
        >>> class Shell:
        ...     def register_magic_function(self, fn, kind, name):
        ...         print(f"%%{name} is a {kind} magic")
        >>> fs.notebook.load_ipython_extension(Shell())
        %%ranks is a cell magic
    """
    ipython.register_magic_function(_run_cell, "cell", "ranks")


@named("%%ranks")
def _run_cell(line: str, cell: str) -> None:
    size = line.strip()
    pool = _latest
    if size and not size.isdigit():
        raise ArgumentError(message(f"takes a number of ranks, got {size!r}.", mend="Write %%ranks 2."))
    if size and (pool is None or pool.size != int(size) or pool.closed):
        pool = ranks(int(size))
    if pool is None:
        raise ArgumentError(message("has no ranks.", mend=f"Write %%ranks 2, or pool = {_NAME}(2) before."))
    pool.execute(cell)


@named(_NAME)
def _packed(name: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return _pickled((fn, tuple(args), kwargs))
    except ArgumentError:
        raise
    except Exception as error:
        rule = f"cannot send {name} and its arguments to the ranks."
        mend = "Open files, sockets and generators inside the function, and pass objects of ranks as pool.keep(f, ...)."
        raise ArgumentError(message(rule, [f"{type(error).__name__}: {error}"], mend)) from None


# ------------------------------------------------------------------------------------------------- text, and tracebacks


class _Texts:
    """The pipes through which rank 0 writes into the cell that is running.

    Args:
        folder: where the pipes have their names.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, int] = {}
        for name in _STREAMS:
            os.mkfifo(folder / name, 0o600)
            # Open on both sides here: a rank that ends is no end of the text.
            self._files[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)

    @contextlib.contextmanager
    def shown(self) -> Generator[None]:
        """Copies text to the kernel's own streams while the block runs, and what is left at its end."""
        end, ended = os.pipe()
        # Its context tells ipykernel to which cell the text belongs.
        run = functools.partial(contextvars.copy_context().run, self._copy, end)
        copier = threading.Thread(target=run, name="fsharding-texts", daemon=True)
        copier.start()
        try:
            yield
        finally:
            os.close(ended)
            copier.join()
            os.close(end)

    def _copy(self, end: int) -> None:
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in _STREAMS}
        streams = {name: getattr(sys, name) for name in _STREAMS}
        ending = False
        while not ending:
            # All that the call wrote is in the pipes when it ends, so one more pass is enough: a thread of the rank
            # that never stops writing does not keep the cell.
            ending = end in select.select([*self._files.values(), end], [], [])[0]
            for name, file in self._files.items():
                with contextlib.suppress(BlockingIOError):
                    streams[name].write(decoders[name].decode(os.read(file, _PIPE)))
                    streams[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<frozen ", *_LIBRARIES))


def _shown(reply: Failure) -> Failure:
    """The failure in words of the notebook: its cells, and the lines that the user wrote."""
    raised = reply.exception
    if not isinstance(raised, _Raised):
        return dataclasses.replace(reply, detail=_worded_stack(reply.detail))
    try:
        exception = None if raised.pickled is None else pickle.loads(raised.pickled)
    except Exception:
        exception = None  # its class is in a module that the kernel lacks; the text says it all the same
    lines = [*_frame_lines(raised.frames, "Raised"), *raised.text.splitlines()]
    return Failure(f"raised {raised.text}", "\n".join(lines), exception)


_STACK_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def _worded_stack(stack: str) -> str:
    """A stack as faulthandler writes it, in the form of a traceback; what stands above it stays."""
    frames = [(file, int(line), function) for file, line, function in _STACK_LINE.findall(stack)][::-1]
    if not frames:
        return stack
    above = stack[: cast("re.Match[str]", _STACK_LINE.search(stack)).start()]
    kept = [line for line in above.splitlines() if not line.startswith(("Stack (", "Current thread"))]
    if not any(file == __file__ for file, _, _ in frames):
        return "\n".join([*kept, "  waited for the next call"])
    return "\n".join([*kept, *_frame_lines([f for f in frames if f[0] != "<string>"], "Stands")])


def _frame_lines(frames: list[Frame], verb: str) -> list[str]:
    """The user's lines, then the innermost lines of libraries if it is there that the rank stood."""
    users = [frame for frame in frames if _is_users(frame[0])]
    inner = [*itertools.takewhile(lambda frame: not _is_users(frame[0]), reversed(frames))][:_MOST_FRAMES][::-1]
    lines = [line for frame in users for line in _lines_of(*frame)]
    if inner:
        lines += [f"{verb} in a library:", *(line for frame in inner for line in _lines_of(*frame))]
    return lines


def _lines_of(filename: str, line: int, function: str) -> list[str]:
    source = linecache.getline(filename, line).strip()
    return [f"  {_place(filename)}, line {line}, in {function}", *([f"    {source}"] if source else [])]


def _place(filename: str) -> str:
    """The number of a cell instead of the file that the kernel has invented for it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = None if shell is None else shell.compile.format_code_name(filename)
    return " ".join(named) if named else f"File {filename}"
