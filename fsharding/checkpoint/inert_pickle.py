"""Pickles read as data: a machine of its own runs the few opcodes that a state dict needs, and builds inert values.

In: bytes, and a function that says what a global stands for. Out: numbers, strings, lists, tuples, `Pairs` and `Made`.
No class of anybody is looked up, called or changed. Dicts stay pairs, because hashing a key can take for ever: twenty
bytes make a tuple of two references to a tuple of two references, and so on, and its hash visits each of them.
Guarantee: reading takes time and memory in proportion to the bytes, and leaves nothing changed, whatever the bytes are.
"""

from __future__ import annotations

import _compat_pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Find", "Global", "Made", "Pairs", "named", "unpickled"]

Find: TypeAlias = Callable[[str, str], Any]
"""The value of a global, given its module and name; raises a `ValueError` for one that is refused."""


class Global(NamedTuple):
    """A name in a pickle, of which nothing is ever looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Pairs(list[tuple[Any, Any]]):
    """A dict of a pickle: keys and values in order, not yet compared with each other."""


class Made:
    """A call that a pickle asks for, which never happens: the callee, its arguments, and the state set afterwards.

    Attributes:
        kind: what `Find` gave for the callee.
        args: of the call.
        state: of the object; None where the pickle sets none.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Any, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None


def named(pairs: object) -> dict[str, Any]:
    """A dict of a pickle whose keys are strings.

    Raises:
        ValueError: it is something else, or has a key twice.
    """
    if not isinstance(pairs, Pairs) or not all(isinstance(key, str) for key, _ in pairs):
        raise ValueError("it has no table of names where one belongs")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("it has one name twice")
    return result


def unpickled(data: bytes | bytearray, find: Find, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle of protocol 2 to 5, as far as a state dict needs them.

    Args:
        data: the pickle; what follows its end is not looked at.
        find: what its globals stand for.
        persistent: what its persistent ids stand for; without it there may be none.

    Raises:
        ValueError: the pickle is broken, or needs more than is built here; or from one of the two functions.
    """
    return _Machine(data, find, persistent).run()


class _Machine:
    """Runs a pickle. `stack` holds what was built since the last mark, and `marked` the stacks below the marks."""

    def __init__(self, data: bytes | bytearray, find: Find, persistent: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.find = find
        self.persistent = persistent
        self.at = self.protocol = self.made = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self.data
        steps = _STEPS
        try:
            while (code := data[self.at]) != _STOP:
                self.at += 1
                steps[code](self)
                # A list, tuple or object takes fifty times the byte that asks for it, so their share is bounded.
                if self.made > _FREE + self.at // _BYTES_EACH:
                    raise ValueError("its pickle has more lists, tuples and objects than state dicts of its size")
            value = self.stack.pop()
        except (IndexError, KeyError, struct.error) as error:
            raise ValueError(f"its pickle is broken at byte {self.at:,}") from error
        return value

    def take(self, count: int) -> bytes | bytearray:
        """The next bytes, all of them."""
        start = self.at
        self.at = self.at + count
        if self.at > len(self.data):
            raise IndexError
        return self.data[start : self.at]

    def number(self, form: struct.Struct) -> Any:
        """The next number."""
        start = self.at
        self.at = start + form.size
        return form.unpack_from(self.data, start)[0]

    def line(self) -> str:
        """The text up to the end of the line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        start = self.at
        self.at = end + 1
        return self.data[start:end].decode()

    def items(self) -> list[Any]:
        """Pops the values built since the last mark, and the mark."""
        result = self.stack
        self.stack = self.marked.pop()
        return result

    def top(self, kind: type[Any]) -> Any:
        """The last value, which has to be of a kind."""
        if type(result := self.stack[-1]) is not kind:
            raise ValueError(f"its pickle is broken at byte {self.at:,}: no {kind.__name__} is there to be filled")
        return result


_STOP = ord(".")
_FREE = 10_000
_BYTES_EACH = 5
"""How many lists, tuples and objects a pickle may have: torch's have one for every 6 to 11 bytes."""
_U8, _U16, _I32, _U32, _U64 = map(struct.Struct, ("<B", "<H", "<i", "<I", "<Q"))
_F64 = struct.Struct(">d")


# Each function runs one opcode; see pickletools of Python for what they are meant to do.
def _unknown(m: _Machine) -> None:
    raise ValueError(f"its pickle has the opcode {m.data[m.at - 1]:#04x}, which no state dict needs")


def _proto(m: _Machine) -> None:
    m.protocol = m.number(_U8)
    if m.protocol > 5:
        raise ValueError(f"its pickle has protocol {m.protocol}; known are those up to 5")


def _frame(m: _Machine) -> None:
    m.take(8)


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    def new(m: _Machine) -> None:
        m.made += 1
        m.stack.append(make())

    return new


# Numbers and references are most of a pickle, so these two do not call `number`.
def _number(form: struct.Struct) -> Callable[[_Machine], None]:
    size = form.size
    read = form.unpack_from

    def number(m: _Machine) -> None:
        m.stack.append(read(m.data, m.at)[0])
        m.at += size

    return number


def _long(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(m.number(_U8)), "little", signed=True))


def _text(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(form)).decode())


def _bytes(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(bytes(m.take(m.number(form))))


def _mark(m: _Machine) -> None:
    m.made += 1
    m.marked.append(m.stack)
    m.stack = []


def _tuple(m: _Machine) -> None:
    result = tuple(m.items())
    m.made += 1
    m.stack.append(result)


def _last(count: int) -> Callable[[_Machine], None]:
    def make(m: _Machine) -> None:
        if len(m.stack) < count:
            raise IndexError
        m.made += 1
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return make


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.top(list).append(value)


def _extend(m: _Machine) -> None:
    values = m.items()
    m.top(list).extend(values)


def _set_item(m: _Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    _filled(m).append((key, value))


def _set_items(m: _Machine) -> None:
    values = m.items()
    if len(values) % 2:
        raise IndexError
    _filled(m).extend(zip(values[::2], values[1::2], strict=True))


def _filled(m: _Machine) -> Pairs:
    """The dict to be filled: the last value, or the pairs of an object that is one, such as an `OrderedDict`."""
    last = m.stack[-1]
    if isinstance(last, Made):
        if not isinstance(last.state, Pairs):
            last.state = Pairs()
        return last.state
    return m.top(Pairs)


def _global(m: _Machine) -> None:
    module = m.line()
    name = m.line()
    if m.protocol < 3:  # which has the names of Python 2
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    m.stack.append(m.find(module, name))


def _stack_global(m: _Machine) -> None:
    name = m.stack.pop()
    module = m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError(f"its pickle is broken at byte {m.at:,}: a name is no text")
    m.stack.append(m.find(module, name))


def _call(m: _Machine) -> None:
    args = m.stack.pop()
    kind = m.stack.pop()
    if not isinstance(args, tuple):
        raise ValueError(f"its pickle is broken at byte {m.at:,}: arguments are no tuple")
    m.made += 1
    m.stack.append(Made(kind, args))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    if not isinstance(last := m.stack[-1], Made):
        raise ValueError(f"its pickle sets attributes of {last if isinstance(last, Global) else 'what has none'}")
    # An OrderedDict has its pairs already, and may have attributes, which are ignored.
    last.state = state if last.state is None else last.state


def _persistent(m: _Machine) -> None:
    if m.persistent is None:
        raise ValueError("its pickle has a persistent id, which nothing here has")
    m.stack.append(m.persistent(m.stack.pop()))


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _put(form: struct.Struct) -> Callable[[_Machine], None]:
    def put(m: _Machine) -> None:
        m.memo[m.number(form)] = m.stack[-1]

    return put


def _get(form: struct.Struct) -> Callable[[_Machine], None]:
    size = form.size
    read = form.unpack_from

    def get(m: _Machine) -> None:
        m.stack.append(m.memo[read(m.data, m.at)[0]])
        m.at += size

    return get


_KNOWN: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _proto, b"\x95": _frame, b"(": _mark,
    b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False), b")": _constant(()),
    b"]": _new(list), b"}": _new(Pairs), b"\x8f": _new(list),
    b"K": _number(_U8), b"M": _number(_U16), b"J": _number(_I32), b"G": _number(_F64), b"\x8a": _long,
    b"\x8c": _text(_U8), b"X": _text(_U32), b"\x8d": _text(_U64),
    b"C": _bytes(_U8), b"B": _bytes(_U32), b"\x8e": _bytes(_U64),
    b"t": _tuple, b"\x85": _last(1), b"\x86": _last(2), b"\x87": _last(3), b"\x91": _tuple,
    b"a": _append, b"e": _extend, b"\x90": _extend, b"s": _set_item, b"u": _set_items,
    b"c": _global, b"\x93": _stack_global, b"R": _call, b"\x81": _call, b"b": _build, b"Q": _persistent,
    b"\x94": _memoize, b"q": _put(_U8), b"r": _put(_U32), b"h": _get(_U8), b"j": _get(_U32),
}  # fmt: skip
_STEPS = [_KNOWN.get(bytes([code]), _unknown) for code in range(256)]
