"""The tree that a pickle says, as values: each call by a constructor of ours, each key checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._read.opcodes import DICT, SET
from torch_bridge._read.unpickle import Made, Named
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, brief

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEEPEST = 100
# Bytes of memory: of a list or tuple and what is remembered of it, of what it holds, of an entry of
# a dictionary or set; and for each value that a file shows once more, as every walk meets it again.
_CONTAINER, _SLOT, _ITEM, _AGAIN = 224, 16, 160, 64
# Hashing a key costs time in proportion to its size, every time, and numbers can be chosen to
# collide. These many comparisons, of 16 384 keys with each other, take half a second.
_MAX_KEY_BITS, _MAX_KEY_PARTS = 64, 8
_MAX_COMPARISONS, _TUPLE_COMPARISON = 1 << 27, 16

Constructor = Callable[..., Any]


class Values:
    """Makes the values of one file, charged to a budget.

    `constructors` maps a global to what a call of it gives; `builders` one that has a state to
    what makes the value of what its constructor gave and that state.
    """

    def __init__(self, budget: Budget) -> None:
        self.constructors: Mapping[str, Constructor] = {}
        self.builders: Mapping[str, Constructor] = {}
        self._budget = budget
        self._known: dict[int, tuple[Any, int] | None] = {}  # None: it is being made
        self._globals: dict[str, Global] = {}
        self._depth = self._met = self._chosen = self._comparisons = 0

    def of(self, node: Any) -> Any:
        """The value of a node; one that the file shows twice is made once.

        Raises:
          Malformed: It is none that a checkpoint has, or takes more than the budget.
          Forbidden: It is a call of what may not be called.
        """
        kind = type(node)
        if kind in _ATOMS:
            return node
        if kind is Named:
            return self._globals.setdefault(node.name, Global(node.name))
        if id(node) in self._known:
            known = self._known[id(node)]
            if known is None:
                raise Malformed("a container that holds itself")
            value, size = known
            self._budget.claim(_AGAIN * size)
            self._met += size
            return value
        if self._depth == _DEEPEST:
            raise Malformed(f"more than {_DEEPEST} containers in each other")
        self._budget.claim(_CONTAINER)
        self._known[id(node)] = None
        self._depth += 1
        before = self._met
        value = self._made(node) if kind is Made else kind(self._parts(node))
        self._depth -= 1
        size = self._met - before + 1 if isinstance(value, _CONTAINERS) else 1
        self._known[id(node)] = value, size
        self._met = before + size
        return value

    def _parts(self, nodes: Sequence[Any]) -> list[Any]:
        self._budget.claim(_SLOT * len(nodes))
        self._met += len(nodes)
        return list(map(self.of, nodes))

    def _made(self, node: Made) -> Any:
        try:
            if node.name == DICT:
                return self._filled(node)
            if node.name == SET:
                return self.set_of(self._parts(node.items))
            if node.name not in self.constructors:
                # On the list as a value (a hook, a dtype), but never to be called.
                raise Forbidden(f"{node.name} (called)")
            value = self.constructors[node.name](*self._parts(node.args))
            if node.items and not isinstance(value, dict):
                raise Malformed(f"entries in a {type(value).__name__}")
            if node.items:
                value |= self._filled(node)
            if node.state is ...:
                return value
            if builder := self.builders.get(node.name):
                return builder(value, self.of(node.state))
            if not isinstance(value, dict):  # whose own attributes are not needed
                raise Malformed(f"attributes of a {type(value).__name__}")
            return value
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise Malformed(f"arguments that {node.name} cannot have") from error

    def _filled(self, node: Made) -> dict[Any, Any]:
        values = map(self.of, node.items)
        return self.mapping(zip(values, values, strict=True))

    # --- dictionaries and sets --------------------------------------------------------------

    def mapping(self, pairs: Iterable[Any]) -> dict[Any, Any]:
        """A dictionary of checked keys."""
        made: dict[Any, Any] = {}
        for key, value in pairs:
            self._budget.claim(_ITEM)
            made[self._key(key, len(made))] = value
            self._met += 1
        return made

    def set_of(self, values: Iterable[Any]) -> set[Any]:
        """A set of checked values."""
        made: set[Any] = set()
        for value in values:
            self._budget.claim(_ITEM)
            made.add(self._key(value, len(made)))
        return made

    def _key(self, key: Any, position: int) -> Any:
        """`key`, which may join a dictionary or set that has `position` entries.

        Text and bytes are hashed with a secret of the process, and 0, 1, 2, ... never meet each
        other; any other key may be compared with all such keys before it.
        """
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return key
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _MAX_KEY_PARTS or not all(map(_is_cheap, parts)):
            raise Malformed(f"{brief(key)} as a dictionary key: too large, or none at all")
        weight = 1 if parts is not key else _TUPLE_COMPARISON
        self._comparisons += weight * min(position, self._chosen)
        self._chosen += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise Malformed(
                "a dictionary or set of more than 16384 numbers as keys, or 4096 tuples, other "
                "than 0, 1, 2, ... in order: such keys can be chosen so that reading them takes "
                "hours. If you trust the file, read it with torch.load and save it with text as "
                "keys (str(key)) or with the keys in a tensor"
            )
        return key


def _is_cheap(key: Any) -> bool:
    if isinstance(key, int):
        return key.bit_length() <= _MAX_KEY_BITS
    return key is None or isinstance(key, float | str | bytes | Global)
