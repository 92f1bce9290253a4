"""The tree that a pickle says, as values: each call by a constructor of ours, each key checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_bridge._read.unpickle import Call
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, brief, expect

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, Global})
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEEPEST = 100
# Bytes of memory: of a list or tuple and what is remembered of it, of what it holds, of an entry of
# a dictionary or set; and for each value that a file shows once more, as every walk meets it again.
_CONTAINER, _SLOT, _ITEM, _AGAIN = 224, 16, 160, 64
# Hashing a key costs time in proportion to its size, every time, and numbers can be chosen to
# collide. These many comparisons, of 16 384 keys with each other, take half a second.
_MAX_KEY_BITS, _MAX_KEY_PARTS = 64, 8
_MAX_COMPARISONS, _TUPLE_COMPARISON = 1 << 27, 16


class Values:
    """Makes the values of one file, charged to a budget.

    `constructors` maps a global to what a call of it gives; where the file sets attributes of what
    was called, they are passed as `state`.
    """

    def __init__(self, budget: Budget) -> None:
        self.constructors: Mapping[str, Callable[..., Any]] = {}
        self._budget = budget
        self._known: dict[int, tuple[Any, int] | None] = {}  # None: it is being made
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
        value = self._called(node) if kind is Call else kind(self._parts(node))
        self._depth -= 1
        size = self._met - before + 1 if isinstance(value, _CONTAINERS) else 1
        self._known[id(node)] = value, size
        self._met = before + size
        return value

    def _parts(self, nodes: Any) -> list[Any]:
        self._budget.claim(_SLOT * len(nodes))
        self._met += len(nodes)
        return list(map(self.of, nodes))

    def _called(self, call: Call) -> Any:
        if call.name not in self.constructors:
            # On the list as a value (a hook, a dtype), but never to be called.
            raise Forbidden(f"{call.name} (called)")
        args = self._parts(call.args)
        more = {}
        # The attributes of a dictionary (``_metadata`` of a state_dict) are not needed.
        if call.state is not ... and not call.name.startswith("collections."):
            more["state"] = self.of(call.state)
        try:
            value = self.constructors[call.name](*args, **more)
        except Malformed:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise Malformed(f"arguments that {call.name} cannot have") from error
        if call.items:
            parts = map(self.of, call.items)
            self.mapping(zip(parts, parts, strict=True), expect(value, dict, "with entries"))
        return value

    def mapping(self, pairs: Iterable[Any], into: Any = None) -> dict[Any, Any]:
        """A dictionary of checked keys, or one with more of them."""
        made = {} if into is None else into
        for key, value in pairs:
            made[self._key(key, len(made))] = value
            self._met += 1
        return made

    def _key(self, key: Any, position: int) -> Any:
        """`key`, which may join a dictionary or set that has `position` entries.

        Text and bytes are hashed with a secret of the process, and 0, 1, 2, ... never meet each
        other; any other key may be compared with all such keys before it.
        """
        self._budget.claim(_ITEM)
        if isinstance(key, str | bytes) or (type(key) is int and key == position):
            return key
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _MAX_KEY_PARTS or not all(map(_is_cheap, parts)):
            raise Malformed(f"{brief(key)} as a dictionary key: too large, or none at all")
        cost = _TUPLE_COMPARISON if parts is key else 1
        self._comparisons += cost * min(position, self._chosen)
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
