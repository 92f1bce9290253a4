"""Lists the orders in which the gradients of a model's parameters may become ready.

Gradients become ready in the reverse order of use, and the names in a file have the order of
definition. The two differ if a module uses its submodules in another order. They also differ if a
module has parameters of its own and uses them after a submodule: a class token after the patches, a
position bias between two projections, the scale of a whole block at its end.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

Order: TypeAlias = list[str]
# A module: its parameters, as their whole names, and its submodules, whose keys end in a dot.
Module: TypeAlias = dict[str, Any]
# A module's name without numbers, and the keys in it. Modules of one family use their parts in the
# same order.
Family: TypeAlias = tuple[str, ...]
MOST_ORDERS = 200  # the most beginnings of orders that are tested


def reversed_modules(
    names: Sequence[str], model: Mapping[str, Any]
) -> tuple[Mapping[str, Order], Mapping[str, Order]]:
    """Groups parameters by module, the last module first.

    Returns:
      Two mappings, module -> names of its own parameters: in the order in which gradients become
      ready, and in the order of definition.
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
        if any(name.endswith("weight") and len(model[name].shape) == 2 for name in members):
            members = members[::-1]
        ready[module] = members
    return ready, whole


def used_orders(
    groups: Mapping[str, Order],
    model: Mapping[str, Any],
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
    root: Module = {}
    for module, members in groups.items():
        node = root
        for name in filter(None, module.split(".")):
            node = node.setdefault(f"{name}.", {})
        for name in members:
            node[name.rpartition(".")[2]] = name
    tests = itertools.count(1)

    def extended(chosen: Mapping[Family, Order]) -> Iterator[Order]:
        order: Order = []
        undecided = _extend(order, root, "", chosen)
        if next(tests) > MOST_ORDERS or not can_begin(order):
            return
        if undecided is None:
            yield order
            return
        family, module = undecided
        before = chosen.get(family, [])
        tried = []
        for key, part in module.items():
            shapes = jax.tree.map(lambda name: model[name].shape, part)
            if key not in before and shapes not in tried:
                tried.append(shapes)
                yield from extended({**chosen, family: [*before, key]})

    yield from extended({})


def _extend(
    order: Order, module: Module, path: str, chosen: Mapping[Family, Order]
) -> tuple[Family, Module] | None:
    """Adds a module's parameters to an order, as far as the order of its parts is chosen.

    The order is known of a module without submodules, and of a list.

    Returns:
      The family and module whose next part is open; None if all parameters were added.
    """
    family = (re.sub(r"\d+", "#", path), *module)
    is_list = "".join(module).replace(".", "").isdigit()
    keys = list(module)
    if len(keys) > 1 and not is_list and any(isinstance(part, dict) for part in module.values()):
        keys = list(chosen.get(family, []))
        if len(keys) == len(module) - 1:  # the last one is not open
            keys += module.keys() - keys
    for key in keys:
        if isinstance(module[key], str):
            order.append(module[key])
            continue
        undecided = _extend(order, module[key], path + key, chosen)
        if undecided:
            return undecided
    if len(keys) < len(module):
        return family, module
    return None
