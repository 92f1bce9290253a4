"""Lists the orders in which the gradients of a model's parameters may become ready.

Gradients become ready in the reverse order of use, and the names in a file have the order of
definition. The two differ where a module uses its submodules in another order, or uses parameters
that it has itself behind its submodules: a class token behind the patches, a position bias between
two projections, the scale of a whole block at its end.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Order: TypeAlias = list[str]
Family: TypeAlias = tuple[str, ...]
MOST_ORDERS = 200  # the most beginnings of orders that are tested


class Module(NamedTuple):
    """A module of a torch model.

    Attributes:
      items: The names of the module's own parameters and of its submodules, in the reverse order of
        definition.
      family: The module's name without numbers, and the items' names in it. Modules of one family
        use their items in the same order. It is () for a module whose order is known: one without
        submodules, or a list.
    """

    items: list[str]
    family: Family


def reversed_modules(
    names: Sequence[str], model: Mapping[str, np.ndarray]
) -> tuple[Mapping[str, Order], Mapping[str, Order]]:
    """Groups parameters by module, the last module first.

    Returns:
      Module -> names of its own parameters, twice: with the parameters in the order in which
      gradients become ready, and in the order of definition.
    """
    modules = collections.defaultdict(list)
    for name in names:
        modules[name.rpartition(".")[0]].append(name)
    ready = {}
    whole = {}
    for module, members in reversed(modules.items()):
        whole[module] = members
        # autograd computes the gradient of a Linear's bias before that of its weight, but of a
        # convolution or a normalisation the weight's gradient first.
        if any(name.endswith("weight") and model[name].ndim == 2 for name in members):
            members = members[::-1]
        ready[module] = members
    return ready, whole


def used_orders(
    groups: Mapping[str, Order],
    model: Mapping[str, np.ndarray],
    can_begin: Callable[[Order], bool],
) -> Iterator[Order]:
    """Yields the orders that pass a test, for modules that use their parts in any order.

    Modules with equal parts have the same order. The order is extended by one part after the other,
    the likeliest first, as long as the test passes. Members of a list, and parts of equal shapes in
    one module, such as query and key, are used in the order of definition.

    Args:
      groups: Module -> its own parameters, in the reverse order of definition.
      model: The model's tensors by name.
      can_begin: Returns True if the order may begin so. It is called `MOST_ORDERS` times at most.
    """
    modules = _tree(groups)
    shapes = _shapes(groups, model)
    tests = itertools.count(1)

    def extended(chosen: Mapping[Family, Order]) -> Iterator[Order]:
        order: Order = []
        name = _extend(order, "", modules, chosen)
        if next(tests) > MOST_ORDERS or not can_begin(order):
            return
        if name is None:
            yield order
            return
        family = modules[name].family
        before = chosen.get(family, [])
        tried = set()
        for item, path in zip(family[1:], modules[name].items, strict=True):
            if item not in before and shapes[path] not in tried:
                tried.add(shapes[path])
                yield from extended({**chosen, family: [*before, item]})

    yield from extended({})


def _tree(groups: Mapping[str, Order]) -> dict[str, Module]:
    """Returns all modules by name; the root's name is ""."""
    items = collections.defaultdict(dict)  # of each module, without values
    for module, members in groups.items():
        path = module.split(".") if module else []
        for length in range(len(path)):
            items[".".join(path[:length])].setdefault(".".join(path[: length + 1]))
        items[module].update(dict.fromkeys(members))
    modules = {}
    for module, parts in items.items():
        last = [part.rpartition(".")[2] for part in parts]
        is_leaf = groups.get(module, []) == list(parts)
        family: Family = ()
        if len(parts) > 1 and not is_leaf and not all(map(str.isdigit, last)):
            family = (re.sub(r"\d+", "#", module), *last)
        modules[module] = Module(list(parts), family)
    return modules


def _shapes(groups: Mapping[str, Order], model: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns for each parameter and module the shapes of all parameters in it, by their names."""
    shapes = collections.defaultdict(list)
    for name in itertools.chain(*groups.values()):
        path = name.split(".")
        for length in range(1, len(path) + 1):
            inner = ".".join(path[length:])
            shapes[".".join(path[:length])].append((inner, model[name].shape))
    return {path: tuple(members) for path, members in shapes.items()}


def _extend(
    order: Order, name: str, modules: Mapping[str, Module], chosen: Mapping[Family, Order]
) -> str | None:
    """Adds a module's parameters to an order, as far as the order of its parts is chosen.

    Returns:
      The module whose next part is open; None if all parameters were added.
    """
    module = modules.get(name)
    if module is None:
        order.append(name)  # a parameter
        return None
    items = module.items
    if module.family:
        prefix = f"{name}." if name else ""
        items = [prefix + item for item in chosen.get(module.family, [])]
        if len(items) == len(module.items) - 1:  # the last one is not open
            items += [item for item in module.items if item not in items]
    for item in items:
        inner = _extend(order, item, modules, chosen)
        if inner is not None:
            return inner
    if len(items) < len(module.items):
        return name
    return None
