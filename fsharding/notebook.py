"""Ranks behind a notebook: functions that are defined in cells run on several local processes, which wait for the next.

In: a number of ranks, then functions and arguments, pickled by value with cloudpickle. Out: the result of rank 0, or of
all ranks; or a `Kept`, which stands for an object that stays on the ranks and is an argument of later calls.
Text that rank 0 prints is written to the cell while the call runs. Laws: no call hangs past its timeout, and none spoils
the next one: ranks that raised in the same lines go on with their objects, all others are ended and the next call starts
new ones. No rank outlives the kernel.
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
import itertools
import linecache
import os
import pickle
import reprlib
import select
import sys
import sysconfig
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor

from fsharding import tree
from fsharding.errors import ArgumentError, ConfigError, RankError, message
from fsharding.mesh.failures import is_network_error, own_rank
from fsharding.testing.failures import Failure, RankFailure, worded
from fsharding.testing.ranks import RankPool

__all__ = ["CallFailure", "Kept", "OnRanks", "Ranks", "load_ipython_extension", "ranks"]

Result = TypeVar("Result")

_NAME = "fs.notebook.ranks"
_GRACE = 5.0
"""Seconds: ranks that raise in the same line do so one after the other where they share cores."""
_STREAMS = ("stdout", "stderr")
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))
_MOST_FRAMES = 8


# ------------------------------------------------------------------------------------------------ in the rank's process

_NAMES: dict[str, Any] = {"__name__": "__main__"}
"""What `%%ranks` cells have assigned on this rank, and under keys that are no names what `keep` has left here."""


@dataclasses.dataclass
class _Raised(Exception):
    """An error of the user's function on one rank, as plain data: its class may be of a cell, which pickle cannot name.

    Attributes:
        text: type and text of the error, with its notes.
        frames: file, line and function, the outermost first.
        pickled: the error itself, if that can be pickled.
        network: whether it says that ranks could not talk to each other.
    """

    text: str
    frames: list[tuple[str, int, str]]
    pickled: bytes | None
    network: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return _Raised, (self.text, self.frames, self.pickled, self.network)


def _begin(folder: str) -> None:
    """Directs the text of rank 0 to the kernel and that of other ranks to nowhere, for as long as the rank lives."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // torch.distributed.get_world_size()))
    for name in _STREAMS:
        path = os.devnull if own_rank() else Path(folder, name)
        # Line by line: a line is in the cell as soon as it is written.
        setattr(sys, name, open(path, "w", buffering=1, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115


def _perform(call: bytes, released: list[str], key: str | None, everyone: bool) -> bytes:
    """Runs one call on this rank.

    Args:
        call: function, arguments and keyword arguments.
        released: keys of objects that no `Kept` stands for any more.
        key: under which the result stays here; None to send it.
        everyone: whether all ranks send their result, or rank 0 alone.

    Returns:
        The pickled result, or a description of it where it stays here.

    Raises:
        _Raised: whatever the function raises.
    """
    for name in released:
        _NAMES.pop(name, None)
    try:
        fn, args, kwargs = pickle.loads(call)
        result = fn(*args, **kwargs)
        if key is not None:
            _NAMES[key] = result
            return pickle.dumps(_described(result))
        return _sendable(result) if everyone or own_rank() == 0 else b""
    except BaseException as error:
        raise _as_data(error) from None
    finally:
        for name in _STREAMS:
            getattr(sys, name).flush()


def _execute(source: str, filename: str) -> None:
    """Runs a cell in the names of this rank, and prints its last line if that is an expression that has a value."""
    cell = ast.parse(source, filename)
    last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, filename, "exec"), _NAMES)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), _NAMES)
        if value is not None:
            print(repr(value))


def _object_of(key: str) -> Any:
    """The object of this rank that a `Kept` stands for."""
    if key not in _NAMES:
        rule = f"has no {key!r} on these ranks." if key.isidentifier() else "is of ranks that have ended, or of others."
        raise ArgumentError(message("fs.notebook.Kept", rule, mend="Make it again: kept = pool.keep(f, ...)."))
    return _NAMES[key]


def _same(x: Result) -> Result:
    return x


def _described(x: Any) -> str:
    tensors = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]
    if not tensors or isinstance(x, Tensor):
        return f"{type(x).__name__} {tuple(x.shape)}" if isinstance(x, Tensor) else reprlib.repr(x)
    return f"{type(x).__name__} of {len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements"


def _sendable(result: Any) -> bytes:
    import cloudpickle  # lazy: an extra

    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        rule = f"cannot send a {type(result).__name__} to the notebook: {error}"
        raise ArgumentError(message(_NAME, rule, mend=_KEEP)) from None


_KEEP = "Leave it on the ranks: kept = pool.keep(f, ...). Or return plain tensors, numbers and containers of them."


def _as_data(error: BaseException) -> _Raised:
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [*itertools.dropwhile(lambda frame: frame[0] == __file__, frames)]
    text = "".join(traceback.format_exception_only(error)).rstrip()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    text += "" if cause is None else f"\nafter {''.join(traceback.format_exception_only(cause)).rstrip()}"
    network = isinstance(error, RankError) or is_network_error(error)
    try:
        pickled = _sendable(error)
        pickle.loads(pickled)
    except Exception:
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
        return f"RankError: {self}".splitlines()


class Kept:
    """An object on each rank. As an argument of a call, or a global name of its function, it is the rank's own object.

    The ranks let the object go when nothing in the notebook refers to the `Kept` any more.

    Example:
        >>> with fs.notebook.ranks(2) as pool:
        ...     rank = pool.keep(torch.distributed.get_rank)
        ...     print(rank, pool.all(lambda x: x + 10, rank))
        Kept(0) [10, 11]
    """

    def __init__(self, owner: Ranks, key: str, text: str, released: list[str] | None) -> None:
        self._owner, self._generation, self._key, self._text = owner, owner.generation, key, text
        if released is not None:
            weakref.finalize(self, released.append, key)

    def __repr__(self) -> str:
        return f"Kept({self._text})" if self._owner.generation == self._generation else "Kept(of ranks that have ended)"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        mend = f"Read it there: pool(lambda x: x.{name}, kept)."
        raise AttributeError(message("Kept", f"has no {name!r} in the notebook: its object is on the ranks.", mend=mend))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._owner.generation != self._generation:
            rule = "is of ranks that have ended."
            raise ArgumentError(message("fs.notebook.Kept", rule, mend="Make it again: kept = pool.keep(f, ...)."))
        return _object_of, (self._key,)


class OnRanks(Generic[Result]):
    """A function that runs on the ranks when it is called; `Ranks.run` makes it.

    On a rank it is the plain function, so that functions of cells may call each other.

    Example:
        >>> with fs.notebook.ranks(2) as pool:
        ...     @pool.run
        ...     def total(x):
        ...         x = x * (torch.distributed.get_rank() + 1)
        ...         torch.distributed.all_reduce(x)
        ...         return x.tolist()
        ...     print(total(torch.ones(2)), total.all(torch.zeros(1)))
        [3.0, 3.0] [[0.0], [0.0]]
    """

    def __init__(self, owner: Ranks, fn: Callable[..., Result]) -> None:
        functools.update_wrapper(self, fn)
        self._owner, self._fn = owner, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """The result of rank 0; see `Ranks.__call__`."""
        return self._owner(self._fn, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> list[Result]:
        """The results of all ranks; see `Ranks.all`."""
        return self._owner.all(self._fn, *args, **kwargs)

    def keep(self, *args: Any, **kwargs: Any) -> Kept:
        """Leaves the results on the ranks; see `Ranks.keep`."""
        return self._owner.keep(self._fn, *args, **kwargs)

    def __repr__(self) -> str:
        return f"OnRanks({getattr(self._fn, '__qualname__', self._fn)}, {self._owner.size} ranks)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._fn,)


class Ranks:
    """Local gloo ranks that run functions of cells and keep their objects and process groups between calls.

    Functions and arguments are pickled by value: a rank sees the values that a function's global names have when it is
    called. Rank 0 prints into the cell, the text of other ranks is dropped. Random numbers are not seeded.
    A call that fails on all ranks in the same lines leaves the ranks as they are. After any other failure they may have
    begun different collectives, so they are ended, and the next call starts new ones.

    Attributes:
        size: number of ranks.
        timeout: seconds that a call may take; None for no limit, in a test of pytest for 60. It may be assigned.
        generation: a text that is another one each time ranks have started; empty while there are none.

    Example:
        >>> with fs.notebook.ranks(2) as pool:
        ...     pool.all(lambda x: x + torch.distributed.get_rank(), 10)
        [10, 11]
    """

    def __init__(self, size: int, timeout: float | None = None) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(message(_NAME, f"cannot start {size!r} ranks.", mend="Give 1 or more, such as 2."))
        if importlib.util.find_spec("cloudpickle") is None:
            mend = "pip install 'fsharding[notebook]'"
            raise ConfigError(message(_NAME, "needs cloudpickle to send functions of cells.", mend=mend))
        self.size, self.timeout, self.generation = size, timeout, ""
        self._closed, self._keys = False, itertools.count()
        self._pool: RankPool | None = None
        self._start()
        _OPEN.add(self)

    # Invariant: `_pool`, `_texts` and `generation` change together, in `_start` and `_end`.
    def _start(self) -> RankPool:
        self._pool = pool = RankPool(self.size)
        self._texts, self._released, self.generation = _Texts(pool.folder), [], uuid.uuid4().hex
        try:
            pool.run(_begin, str(pool.folder), timeout=60.0)
        except BaseException:
            self._end()
            raise
        return pool

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.kill()
            self._texts.close()
            self._pool, self.generation = None, ""

    def _ready(self) -> RankPool:
        if self._closed:
            raise CallFailure(message(_NAME, "got a pool that is closed.", mend=f"pool = {_NAME}({self.size})"))
        if self._pool is not None and (dead := self._pool.dead()):
            self._end()
            failure = worded(_NAME, "lost ranks between two calls.", dead, _NEW)
            raise CallFailure(str(failure), failure.errors, failure.exceptions)
        return self._pool or self._start()

    def _call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, key: str | None, everyone: bool
    ) -> list[Any]:
        """What each rank has sent, unpickled; None for those that were not asked."""
        name = getattr(fn, "__qualname__", repr(fn))
        if not callable(fn):
            rule = f"runs functions, got {type(fn).__name__}."
            raise ArgumentError(message(_NAME, rule, mend="Write pool(f, *args), or @pool.run above a function."))
        pool = self._ready()
        call = _packed(name, fn.__wrapped__ if isinstance(fn, OnRanks) else fn, args, kwargs)
        released, self._released[:] = [*self._released], []
        try:
            with self._texts.shown():
                replies = pool.attempt(
                    _perform, call, released, key, everyone, timeout=self.timeout, seed=None, grace=_GRACE
                )
        except KeyboardInterrupt:
            self._end()
            raise KeyboardInterrupt(f"the {self.size} ranks were ended in the middle of {name}. {_NEW}") from None
        except BaseException:
            self._end()
            raise
        if failed := {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}:
            raise self._failure(name, failed) from None
        try:
            return [pickle.loads(replies[rank]) if replies[rank] else None for rank in range(self.size)]
        except Exception as error:
            rule = f"cannot read the result of {name} in the notebook: {type(error).__name__}: {error}"
            raise CallFailure(message(_NAME, rule, mend=_KEEP)) from None

    def _failure(self, name: str, failed: dict[int, Failure]) -> CallFailure:
        raised = {rank: reply.exception for rank, reply in failed.items() if isinstance(reply.exception, _Raised)}
        lines = {tuple(frame for frame in error.frames if _is_users(frame[0])) for error in raised.values()}
        in_step = len(raised) == self.size and len(lines) == 1 and not any(e.network for e in raised.values())
        if not in_step:
            self._end()
        shown: dict[int, Failure] = {}
        for rank, reply in failed.items():
            exception = raised.get(rank)
            if exception is None:
                shown[rank] = reply
            else:
                kept = None if exception.pickled is None else pickle.loads(exception.pickled)
                shown[rank] = Failure(f"raised {exception.text}", _traceback(exception), kept)
        mend = _NEW
        if in_step:
            mend = "The ranks go on, with the objects that they keep."
        elif any(reply.late for reply in failed.values()):
            mend = f"Give it more seconds with pool.timeout = ..., or see below where the ranks stand. {_NEW}"
        failure = worded(_NAME, f"could not finish {name} on {self.size} ranks.", shown, mend)
        return CallFailure(str(failure), failure.errors, failure.exceptions)

    def __call__(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Runs `fn(*args, **kwargs)` on every rank.

        Args:
            fn: any function, also one of a cell or a lambda.
            *args: arguments, the same for every rank; a `Kept` is each rank's own object.
            **kwargs: more of them.

        Returns:
            The result of rank 0.

        Raises:
            CallFailure: a rank raised, died or did not answer in time; or rank 0's result cannot be sent.
            ArgumentError: `fn` or an argument cannot be pickled, or is a `Kept` of ranks that have ended.
            KeyboardInterrupt: the cell was interrupted; the ranks are ended.
        """
        return self._call(fn, args, kwargs, key=None, everyone=False)[0]

    def all(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> list[Result]:
        """Runs `fn` as a call does, and returns the results of all ranks, in rank order."""
        return self._call(fn, args, kwargs, key=None, everyone=True)

    def keep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Kept:
        """Runs `fn` as a call does, and leaves each rank's result there: a state, a layout, a model.

        Returns:
            What stands for the results in later calls.
        """
        key = f"kept {next(self._keys)}"
        text = self._call(fn, args, kwargs, key=key, everyone=False)[0]
        return Kept(self, key, text, self._released)

    def run(self, fn: Callable[..., Result]) -> OnRanks[Result]:
        """Makes a function of a cell one that runs on the ranks, as a decorator: `@pool.run`."""
        return OnRanks(self, fn)

    def execute(self, source: str) -> None:
        """Runs the text of a cell on every rank; `%%ranks` calls it.

        The cell has names of its own on each rank, which later cells see; `pool["name"]` is one of them as an argument
        of a call. The value of its last line is printed.

        Raises:
            SyntaxError: the text is not Python; nothing has run.
            CallFailure: as from a call.
        """
        filename = f"<%%ranks cell {next(_CELLS)}>"
        ast.parse(source, filename)
        # Tracebacks are worded in the kernel, which finds the lines here.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        self._call(_execute, (source, filename), {}, key=None, everyone=False)

    def __getitem__(self, name: str) -> Kept:
        """The object that `%%ranks` cells have assigned to a name."""
        return Kept(self, name, name, None)

    def restart(self) -> None:
        """Ends the ranks and starts new ones: objects are gone, modules are imported anew."""
        self._end()
        self._ready()

    @property
    def pids(self) -> list[int]:
        """The process ids in rank order; empty while there are no ranks."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """Ends the ranks for good. Closing twice is harmless."""
        if self._pool is not None:
            self._pool.close()
        self._end()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        status = "closed" if self._closed else "waiting for calls" if self._pool else "started by the next call"
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


def ranks(size: int, timeout: float | None = None) -> Ranks:
    """Starts local ranks behind a notebook or any other interactive session.

    The ranks of an earlier `ranks` are ended first, so that a cell may be run again.

    Args:
        size: number of ranks.
        timeout: seconds that a call may take; by default no limit, in a test of pytest 60.

    Returns:
        The pool: `pool(f, *args)` runs `f` on every rank.

    Raises:
        ArgumentError: `size` is no positive integer.
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
    """Adds the cell magic `%%ranks`, after `%load_ext fsharding.notebook`.

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


def _run_cell(line: str, cell: str) -> None:
    size, pool = line.strip(), _latest
    if size and not size.isdigit():
        raise ArgumentError(message("%%ranks", f"takes a number of ranks, got {size!r}.", mend="Write %%ranks 2."))
    if size and (pool is None or pool.size != int(size) or repr(pool).endswith("closed)")):
        pool = ranks(int(size))
    if pool is None:
        raise ArgumentError(message("%%ranks", "has no ranks.", mend=f"Write %%ranks 2, or pool = {_NAME}(2) before."))
    pool.execute(cell)


def _packed(name: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    import cloudpickle  # lazy: an extra

    try:
        return cloudpickle.dumps((fn, tuple(args), kwargs))
    except ArgumentError:
        raise
    except Exception as error:
        rule = f"cannot send {name} and its arguments to the ranks."
        mend = "Open files, sockets and generators inside the function, and pass objects of ranks as pool.keep(f, ...)."
        raise ArgumentError(message(_NAME, rule, [f"{type(error).__name__}: {error}"], mend)) from None


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
        streams, ending = {name: getattr(sys, name) for name in _STREAMS}, False
        while True:
            waiting = [*self._files.values(), *([] if ending else [end])]
            ready = select.select(waiting, [], [], 0.0 if ending else None)[0]
            if ending and not ready:
                return
            ending = ending or end in ready
            for name, file in self._files.items():
                if file in ready:
                    streams[name].write(decoders[name].decode(os.read(file, 65536)))
                    streams[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<frozen ", *_LIBRARIES))


def _traceback(raised: _Raised) -> str:
    """The user's lines, then the error, then the innermost lines of libraries if it was raised there."""
    users = [frame for frame in raised.frames if _is_users(frame[0])]
    inner = [*itertools.takewhile(lambda frame: not _is_users(frame[0]), reversed(raised.frames))][:_MOST_FRAMES]
    lines = [line for frame in users for line in _frame_lines(*frame)] + raised.text.splitlines()
    if users and inner:
        lines += ["Raised in a library:", *(line for frame in reversed(inner) for line in _frame_lines(*frame))]
    return "\n".join(lines)


def _frame_lines(filename: str, line: int, function: str) -> list[str]:
    source = linecache.getline(filename, line).strip()
    return [f"  {_place(filename)}, line {line}, in {function}", *([f"    {source}"] if source else [])]


def _place(filename: str) -> str:
    """The number of a cell instead of the file that the kernel has invented for it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = None if shell is None else cast("Any", shell).compile.format_code_name(filename)
    return " ".join(named) if named else f"File {filename}"
