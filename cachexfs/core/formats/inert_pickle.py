"""Reads a pickle without executing any of it.

Role: the safe half of the DCP reader. It walks the opcodes of protocols 2 to 5 and keeps only what the
caller declared: objects of *kept* classes with their attributes, dictionaries, strings and integers.
Every other admitted class becomes the one object ``INERT``, together with its arguments and its state;
a class that is not admitted ends the reading. Nothing from the file is imported, called, hashed,
compared or printed, so no constructor, ``__setstate__``, ``__hash__`` or deep structure can do harm.

Not a subclass of ``pickle.Unpickler``: that one still allocates what a length field says, grows its memo
to any index, and hashes nested tuples recursively (a few hundred bytes exhaust memory or the C stack).
Here an opcode costs a bounded number of bytes, and nesting is data in a list.

Concurrency: none; pure; one call may take seconds (rate: ``docs/formats.md``). Called by ``dcp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError

from cachexfs.core.formats.base import ForeignError, FormatError, shown


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one pickle; memory stays below about eight times its size, plus 80 MB."""

    bytes_max: int = 1 << 30
    stack_items_max: int = 1 << 20  # the pickler flushes every 1000 items; this is for odd ones
    depth_max: int = 1000  # marks open at once
    memo_items_max: int = 150_000_000  # real files: 0.12 a byte
    dict_items_max: int = 50_000_000
    integer_bytes_max: int = 32
    objects_free: int = 1_000_000  # strings, dictionaries, kept objects: so many always,
    bytes_per_object_min: int = 12  # and one more for so many bytes (real files: 32)


class Inert:
    """Stands for anything that nobody asked for."""

    __slots__ = ()


INERT = Inert()
USED = Inert()
"""In a dictionary whose items went into an object: it is not to be read again."""


class Kept:
    """An object of a kept class; ``value`` is what ``Keep`` made of its attributes, None without any."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.value: object = None


class PickledClass:
    """A class or function that the file names; ``kind`` as ``Admit`` gave it."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


DICT = "dict"
INERT_KIND = "inert"

Admit = Callable[[str, str], "str | None"]
"""(module, name) -> ``INERT_KIND``, ``DICT``, another string for a kept class, or None: refused."""
Keep = Callable[[str, "list[object]"], object]
"""(kind, ``[name, value, name, value, ...]``) -> what to keep of such an object's attributes."""

_MARK, _STOP, _POP, _POP_MARK, _DUP = b"(.012"
_MEMOIZE, _BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT = b"\x94hjqr"
_NONE, _TRUE, _FALSE, _INT1, _INT2, _INT4 = b"N\x88\x89KMJ"
_STR1, _STR4, _STR8 = b"\x8cX\x8d"
_TUPLE0, _TUPLE1, _TUPLE2, _TUPLE3, _TUPLE = b")\x85\x86\x87t"
_DICT0, _LIST0, _SET0, _DICT, _LIST, _FROZENSET = b"}]\x8fdl\x91"
_SETITEM, _SETITEMS, _APPEND, _APPENDS, _ADDITEMS = b"suae\x90"
_NEWOBJ, _NEWOBJ_EX, _REDUCE, _BUILD, _GLOBAL, _STACK_GLOBAL = b"\x81\x92Rbc\x93"
_FRAME, _LONG1, _LONG4, _FLOAT, _BINPERSID = b"\x95\x8a\x8bGQ"
_BYTES1, _BYTES4, _BYTES8, _BYTEARRAY8 = b"CB\x8e\x96"

# Runs that the pickler writes for nearly every object, done in one step (they halve the time).
_RUN_NEW_STATE = b"\x81\x94}\x94("  # after EMPTY_TUPLE: NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_RUN_TUPLE_CALL = b"\x94\x85\x94R\x94"  # after TUPLE2: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
_RUN_BYTES = 5

_U2, _U4, _I4 = Struct("<H"), Struct("<I"), Struct("<i")
_CHECK_EVERY_BYTES = 1 << 14
_GLOBAL_NAME_BYTES_MAX = 1024


class _EndError(Exception):
    """STOP was met."""


def read_pickle(data: bytes, admit: Admit, keep: Keep, limits: Limits) -> object:
    """The object that ``data`` holds: str, int, bool, None, ``()``, ``Kept``, a ``PickledClass``,
    ``INERT``, or a dictionary as a flat list ``[key, value, key, value, ...]`` (repeated keys stay).

    Bytes after the end mark do not count, as in Python. Raises ``FormatError`` for anything that is not
    such a pickle, and nothing else; ``keep`` may raise it too.
    """
    return _Machine(data, admit, keep, limits).run()


class _Machine:
    """State of one reading. ``stack`` and ``memo`` hold what ``read_pickle`` may return."""

    def __init__(self, data: bytes, admit: Admit, keep: Keep, limits: Limits) -> None:
        self.data = data
        self.admit = admit
        self.keep = keep
        self.limits = limits
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: list[object] = []
        self.classes: dict[tuple[str, str], PickledClass] = {}
        self.objects = 0
        self.dict_items = 0

    def run(self) -> object:
        data, end = self.data, len(self.data)
        if end > self.limits.bytes_max:
            raise FormatError(f"{end} bytes long; the limit is {self.limits.bytes_max}")
        if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
            raise ForeignError("not a pickle of protocol 2 to 5")
        pos = 2
        try:
            while pos < end:
                pos = self.steps(pos, min(end, pos + _CHECK_EVERY_BYTES))
                self.check()
        except _EndError:
            if len(self.stack) != 1 or self.marks:
                raise FormatError("the pickle ends in the middle of an object") from None
            return self.stack[0]
        except UnicodeDecodeError:
            raise FormatError("damaged: text that is not UTF-8") from None
        except (IndexError, StructError):
            raise FormatError("cut short or damaged") from None
        raise FormatError(f"cut short: no end mark in {end} bytes")

    def check(self) -> None:
        """The limits; between two checks nothing grows by more than 16 Ki items."""
        limits = self.limits
        if len(self.stack) > limits.stack_items_max:
            raise FormatError(f"more than {limits.stack_items_max} unfinished items")
        if len(self.marks) > limits.depth_max:
            raise FormatError(f"nested more than {limits.depth_max} deep")
        if len(self.memo) > limits.memo_items_max or self.dict_items > limits.dict_items_max:
            raise FormatError(f"more than {limits.dict_items_max} dictionary items, or too many objects")
        if self.objects > limits.objects_free + len(self.data) // limits.bytes_per_object_min:
            raise FormatError("more objects than a file of its size holds")

    def steps(self, pos: int, end: int) -> int:
        """Executes opcodes from ``pos`` until ``end`` is reached; returns where it stopped.

        Here stand the frequent opcodes in the order of their frequency in real files.
        """
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push, remember = stack.append, memo.append
        unpack_u2, unpack_u4, unpack_i4 = _U2.unpack_from, _U4.unpack_from, _I4.unpack_from
        while pos < end:
            op = data[pos]
            pos += 1
            if op == _MEMOIZE:
                remember(stack[-1])
            elif op == _BINGET:
                push(memo[data[pos]])
                pos += 1
            elif op == _LONG_BINGET:
                push(memo[unpack_u4(data, pos)[0]])
                pos += 4
            elif op == _INT1:
                push(data[pos])
                pos += 1
            elif op == _TUPLE0:
                if data[pos : pos + _RUN_BYTES] == _RUN_NEW_STATE:
                    stack[-1] = made = self.made(stack[-1], True)
                    state: list[object] = []
                    push(state)
                    memo += (made, state)
                    marks.append(len(stack))
                    self.objects += 1
                    pos += _RUN_BYTES
                else:
                    push(())
            elif op == _SETITEMS:
                if data[pos] == _BUILD:
                    pos += 1
                    self.build_from_items()
                else:
                    self.set_items(self.popped_items())
            elif op == _TUPLE2:
                stack.pop()
                if data[pos : pos + _RUN_BYTES] == _RUN_TUPLE_CALL:
                    stack.pop()
                    stack[-1] = made = self.made(stack[-1], False)
                    memo += (INERT, INERT, made)
                    pos += _RUN_BYTES
                else:
                    stack[-1] = INERT
            elif op == _INT2:
                push(unpack_u2(data, pos)[0])
                pos += 2
            elif op == _INT4:
                push(unpack_i4(data, pos)[0])
                pos += 4
            elif op == _BUILD:
                self.build(stack.pop())
            else:
                pos = self.less_frequent(op, pos)
        return pos

    def less_frequent(self, op: int, pos: int) -> int:
        """One opcode without or with a fixed argument; ``pos`` is after it. Returns the next position."""
        stack = self.stack
        if op in (_FALSE, _TRUE):
            stack.append(op == _TRUE)
        elif op == _STR1:
            size = self.data[pos]
            pos += 1 + size
            stack.append(str(self.data[pos - size : pos], "utf-8", "surrogatepass"))
            self.objects += 1
        elif op == _MARK:
            self.marks.append(len(stack))
        elif op == _TUPLE1:
            stack[-1] = INERT
        elif op == _TUPLE3:
            del stack[-2:]
            stack[-1] = INERT
        elif op in (_TUPLE, _LIST, _FROZENSET):
            self.popped_items()
            stack.append(INERT)
        elif op in (_LIST0, _SET0):
            stack.append(INERT)
        elif op in (_REDUCE, _NEWOBJ):
            args = stack.pop()
            stack[-1] = self.made(stack[-1], isinstance(args, tuple))
        elif op == _NONE:
            stack.append(None)
        elif op == _DICT0:
            stack.append([])
            self.objects += 1
        elif op == _APPEND:
            stack.pop()
            self.dropped_into(stack[-1])
        elif op in (_APPENDS, _ADDITEMS):
            self.popped_items()
            self.dropped_into(stack[-1])
        elif op == _SETITEM:
            items = stack[-2:]
            del stack[-2:]
            self.set_items(items)
        elif op == _STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            stack.append(self.named_class(module, name))
        elif op == _STOP:
            raise _EndError
        else:
            return self.sized(op, pos)
        return pos

    def sized(self, op: int, pos: int) -> int:
        """One opcode with a length, a memo index or a line as its argument."""
        data, stack = self.data, self.stack
        if op in (_STR4, _STR8):
            size, pos = self.length(pos, 4 if op == _STR4 else 8)
            stack.append(str(data[pos : pos + size], "utf-8", "surrogatepass"))
            self.objects += 1
            return pos + size
        if op in (_LONG1, _LONG4):
            size, pos = self.length(pos, 1 if op == _LONG1 else 4)
            if size > self.limits.integer_bytes_max:
                raise FormatError(f"an integer of {size} bytes")
            stack.append(int.from_bytes(data[pos : pos + size], "little", signed=True))
            return pos + size
        if op in (_BYTES1, _BYTES4, _BYTES8, _BYTEARRAY8):
            size, pos = self.length(pos, {_BYTES1: 1, _BYTES4: 4}.get(op, 8))
            stack.append(INERT)
            return pos + size
        if op in (_BINPUT, _LONG_BINPUT):
            index = data[pos] if op == _BINPUT else _U4.unpack_from(data, pos)[0]
            self.put(index)
            return pos + (1 if op == _BINPUT else 4)
        if op == _FRAME:
            _, pos = self.length(pos, 8)
            return pos
        if op == _FLOAT:
            stack.append(INERT)
            return pos + 8
        if op == _GLOBAL:
            return self.global_lines(pos)
        self.rare(op)
        return pos

    def rare(self, op: int) -> None:
        """What the pickler writes for recursive or unusual objects; anything else is refused."""
        stack = self.stack
        if op == _POP:
            stack.pop()
        elif op == _POP_MARK:
            self.popped_items()
        elif op == _DUP:
            stack.append(stack[-1])
        elif op == _DICT:
            items = self.popped_items()
            stack.append([])
            self.objects += 1
            self.set_items(items)
        elif op == _BINPERSID:  # torch.save: a reference to a tensor's storage
            stack[-1] = INERT
        elif op == _NEWOBJ_EX:
            stack.pop()
            stack.pop()
            stack[-1] = self.made(stack[-1], False)
        else:
            raise FormatError(f"opcode 0x{op:02x}, which no checkpoint needs")

    def length(self, pos: int, width: int) -> tuple[int, int]:
        """The length written in ``width`` bytes at ``pos``, checked against what is left, and where it
        ends. Nothing is allocated for a length that the file does not back."""
        size = int.from_bytes(self.data[pos : pos + width], "little")
        if size > len(self.data) - pos - width:
            raise FormatError(f"cut short: {size} bytes announced at byte {pos}")
        return size, pos + width

    def put(self, index: int) -> None:
        """Numbered memo entry; picklers number without gaps, so that the memo cannot be blown up."""
        if index < len(self.memo):
            self.memo[index] = self.stack[-1]
        elif index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            raise FormatError(f"damaged: memo entry {index} after {len(self.memo)}")

    def popped_items(self) -> list[object]:
        """Takes what lies above the last mark off the stack, and the mark."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise FormatError("damaged: a mark without its object")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def set_items(self, items: list[object]) -> None:
        """Items of the dictionary on top of the stack."""
        target = self.stack[-1]
        if len(items) % 2:
            raise FormatError("damaged: a dictionary key without a value")
        if isinstance(target, list):
            self.dict_items += len(items)
            target += items
        else:
            self.dropped_into(target)

    def dropped_into(self, target: object) -> None:
        if target is not INERT:
            raise FormatError("damaged: items for something that holds none")

    def build_from_items(self) -> None:
        """SETITEMS and BUILD in one: the attributes of the object below a fresh dictionary."""
        items = self.popped_items()
        state = self.stack.pop()
        if self.stack[-1] is INERT and type(state) is list and not state:
            state.append(USED)
            return
        self.stack.append(state)
        self.set_items(items)
        self.build(self.stack.pop())

    def build(self, state: object) -> None:
        """The attributes of the object on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Kept):
            if target.value is not None or not isinstance(state, list):
                raise FormatError(f"a {target.kind} with a state of an unknown kind")
            target.value = self.keep(target.kind, state)
            state[:] = (USED,)
        elif target is not INERT:
            raise FormatError("damaged: attributes for something that has none")

    def made(self, made_by: object, no_args: bool) -> object:
        """What calling or instantiating ``made_by`` stands for."""
        if not isinstance(made_by, PickledClass):
            raise FormatError("it calls something that is not a class")
        kind = made_by.kind
        if kind == INERT_KIND:
            return INERT
        self.objects += 1
        if kind == DICT:
            return [] if no_args else INERT
        if not no_args:
            raise FormatError(f"a {kind} made in an unknown way")
        return Kept(kind)

    def named_class(self, module: object, name: object) -> PickledClass:
        if not isinstance(module, str) or not isinstance(name, str):
            raise FormatError("damaged: a class name that is not text")
        found = self.classes.get((module, name))
        if found is None:
            kind = self.admit(module, name)
            if kind is None:
                raise FormatError(f"it names {shown(module)} {shown(name)}, which no checkpoint needs")
            found = self.classes[module, name] = PickledClass(kind)
        return found

    def global_lines(self, pos: int) -> int:
        """GLOBAL of protocols 2 and 3: module and name, each ended by a newline."""
        lines = self.data[pos : pos + _GLOBAL_NAME_BYTES_MAX].split(b"\n", 2)
        if len(lines) < 3:
            raise FormatError("damaged: a class name without an end")
        module, name = lines[0], lines[1]
        self.stack.append(self.named_class(module.decode(), name.decode()))
        return pos + len(module) + len(name) + 2
