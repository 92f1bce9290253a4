"""The conversions of the command line: whole checkpoints, from file to file, in little memory."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import new_folder
from torch_bridge._base.framework import import_torch
from torch_bridge._base.terminal import printable
from torch_bridge._cli.arguments import imported, imported_tree
from torch_bridge._cli.progress import steps
from torch_bridge._convert.algorithms import MOMENTS, UnusedState
from torch_bridge._convert.params import leaves_without_values
from torch_bridge._convert.to_flax import to_flax
from torch_bridge._convert.to_torch import to_torch
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import layout_of
from torch_bridge._hook.load import load
from torch_bridge._job.save import write_document
from torch_bridge._pairing.leaves import COLLECTIONS, flatten_tree, leaves_by_path, without_values
from torch_bridge._pairing.pair import find_or_check_pairs
from torch_bridge._pairing.pairs import Packing, Pair

# orbax writes a NamedTuple as a dictionary; the set of its fields identifies the class.
_STATES: dict[frozenset[str], Any] = {
    frozenset(state._fields): state for state in (PowerSGDState, UnusedState, *MOMENTS)
}


def convert_to_flax(options: argparse.Namespace) -> None:
    """Converts torch files to an orbax directory (``to-flax``)."""
    _check_out(options)
    with steps(3) as begin:
        begin(f"reading {len(options.files)} file(s)")
        checkpoint = _loaded(options, options.files)
        # Imported here, because this import takes seconds.
        from torch_bridge._cli.files import write_flax

        apply = _imported_apply(options)
        params = imported_tree(options.params)
        config: dict[str, Any] = {}
        # The arguments of jaxcomp.powersgd with which the run continues.
        for record in checkpoint.powersgd[:1]:
            kwargs = powersgd_kwargs_from_torch(record, hook=checkpoint.hook)
            if "comm_dtype" in kwargs:
                kwargs["comm_dtype"] = np.dtype(kwargs["comm_dtype"]).name
            config["powersgd"] = kwargs
        begin("converting")
        empty = leaves_without_values(params)
        if empty:
            raise CheckpointMismatch(
                "The torch file has no values for some leaves, and --params has only their shapes, "
                "which cannot be saved. Let --params return values for them. For random states "
                "return those of a whole model, nnx.state(make_model()).",
                missing=empty,
            )
        run = to_flax(
            checkpoint,
            params,
            apply=apply,
            layout=options.layout,
            missing_ranks=options.missing_ranks,
            param_names=options.param_names,
            consume=True,
            **options.pairing,
        )
        # `to-torch` needs these again.
        config["pairs"] = [dataclasses.asdict(pair) for pair in run.pairs]
        config["param_names"] = options.param_names
        config["layout"] = options.layout and options.layout.to_json()
        # As in a TrainState, the other collections of linen variables stand beside `params`.
        state = {"step": np.int32(run.step), "opt_state": run.opt_state}
        of_variables = flatten_tree(run.params).collections
        state.update(run.params if of_variables else {"params": run.params})
        begin("writing")
        write_flax(options.out, state, config, force=options.force)
    size = sum(map(np.size, jax.tree.leaves(state["params"])))
    line = f"{printable(str(options.out))}: step {run.step}, {size:,} values"
    if run.difference is not None:
        line += f", outputs {run.difference:.0e} off where a control is {run.control:.0e}"
    print(line)


def convert_to_torch(options: argparse.Namespace) -> None:
    """Converts a directory of ``to-flax`` or of a training script to a torch file (``to-torch``).

    Both are orbax directories with ``params`` and ``opt_state``.
    """
    import_torch()  # fails before large files are read
    if not options.checkpoint.exists():
        raise CheckpointMismatch(f"{options.checkpoint} does not exist.")
    _check_out(options)
    with steps(3) as begin:
        begin("reading")
        like = _loaded(options, options.like)
        from torch_bridge._cli.files import FlaxFile

        apply = _imported_apply(options)
        example = like.recorded_example if apply else None
        if apply:
            apply = functools.partial(_apply_to_variables, apply)
        file = FlaxFile(options.checkpoint)
        variables = _parts(file.shapes)[-1]
        pairs = None
        answers = options.pairing
        if not apply and not any(answers.values()):  # as `to-flax` has paired them
            pairs = _pairs_in(file.config)
        pairs = find_or_check_pairs(like.model, variables, pairs, answers, apply, example).pairs
        layout = options.layout
        if layout is None and file.config.get("layout") is not None:
            layout = BucketLayout.from_json(file.config["layout"])
        layout = layout_of(like, layout, pairs)  # needs the values of the errors
        for record in like.powersgd:  # the rest needs only the shapes of the errors
            record.error_dict.update(without_values(record.error_dict))
        like = dataclasses.replace(like, layout=layout, optimizer=without_values(like.optimizer))
        run = _parts(file.read())
        begin("converting")
        # `pop` leaves the only references to the call, which frees each part after its conversion.
        document = to_torch(
            run.pop(),
            run.pop(),
            like,
            param_names=options.param_names or file.config.get("param_names"),
            pairs=pairs,
        )
        begin("writing")
        with new_folder(options.out.parent):
            write_document(options.out, document)
    print(f"{printable(str(options.out))}: {len(document['state_dict'])} tensors")


def _pairs_in(config: Mapping[str, Any]) -> tuple[Pair, ...] | None:
    """Returns the pairs that ``to-flax`` wrote; None if there are none.

    Raises:
      CheckpointMismatch: The entry is not a list of pairs.
    """
    entries = config.get("pairs")
    if entries is None:
        return None
    pairs = []
    try:
        for entry in entries:
            pair = Pair(**_as_tuples(entry))
            if pair.packing is not None:
                pair = dataclasses.replace(pair, packing=Packing(*pair.packing))
            pairs.append(pair)
    except (TypeError, AttributeError) as error:
        raise CheckpointMismatch(
            "The Flax checkpoint's `config` is damaged: its `pairs` are not those that to-flax "
            "wrote. Convert the torch file again."
        ) from error
    return tuple(pairs)


def _as_tuples(value: Any) -> Any:
    """Makes tuples of the lists that JSON has in their place."""
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    if isinstance(value, dict):
        return dict(zip(value, map(_as_tuples, value.values()), strict=True))
    return value


def _loaded(options: argparse.Namespace, files: Sequence[str]) -> Checkpoint:
    """Reads torch files; refuses them if ``--apply`` is passed and no file holds an example."""
    checkpoint = load(files, max_bytes=options.max_bytes)
    if options.apply is not None and checkpoint.example is None:
        raise CheckpointMismatch(
            "The file has no example for --apply. Save it again with "
            "torch_bridge.save_checkpoint(..., example=inputs), or leave --apply out and answer "
            "the questions that names and shapes leave open.",
            parameters=("plain", "rules", "flatten", "unflatten", "conv1d", "conv_transpose"),
        )
    return checkpoint


def _imported_apply(options: argparse.Namespace) -> Callable[..., Any] | None:
    """Imports the function of ``--apply``, if there is one."""
    if options.apply is None:
        return None
    apply = imported(options.apply)
    if not callable(apply):
        raise argparse.ArgumentTypeError(
            f"{options.apply} is a {type(apply).__name__}, and must be apply(params, *inputs)."
        )
    return apply


def _apply_to_variables(apply: Callable[..., Any], variables: Any, *inputs: Any) -> Any:
    """Calls `apply` with the variables or, if that fails, with their parameters alone.

    A file always holds variables, ``{"params": ...}``. But the user's `apply` takes parameters, if
    ``--params`` of ``to-flax`` was a tree of parameters.
    """
    try:
        return apply(variables, *inputs)
    except Exception:  # it is the user's code, so it may raise anything
        if variables.keys() != {"params"}:
            raise
    return apply(variables["params"], *inputs)


def _parts(tree: Any) -> list[Any]:
    """Returns the state of the Optax chain, and the variables that it belongs to."""
    if not isinstance(tree, dict) or not {"params", "opt_state"} <= tree.keys():
        raise CheckpointMismatch(
            "The Flax checkpoint must have the entries params and opt_state, as a TrainState has. "
            "Convert another in Python with torch_bridge.to_torch."
        )
    variables = {}
    for name in COLLECTIONS:
        if name in tree:
            variables[name] = tree[name]
    if isinstance(tree["params"], dict) and isinstance(tree["params"].get("params"), dict):
        variables = tree["params"]  # the script saved all that init returned as "params"
    # orbax writes an nnx.Variable as the dictionary {"value": ...}.
    leaves = leaves_by_path(variables)
    of_nnx = bool(leaves) and all(path[-1] == "value" for path in leaves)
    return [_as_made(tree["opt_state"], of_nnx), _as_made(variables, of_nnx, {})]


def _as_made(node: Any, of_nnx: bool, states: Mapping[Any, Any] = _STATES) -> Any:
    """Rebuilds the NamedTuples of a tree from a file, and removes nnx's ``value`` entries."""
    if isinstance(node, list | tuple):
        return [_as_made(part, of_nnx, states) for part in node]
    if not isinstance(node, dict):
        return node
    if of_nnx and node.keys() == {"value"}:
        return node["value"]
    fields = {}
    for name, part in node.items():
        fields[name] = _as_made(part, of_nnx, states)
    state = states.get(frozenset(fields))
    return state(**fields) if state else fields


def _check_out(options: argparse.Namespace) -> None:
    """Refuses a wrong --out before the work begins; `write_flax` looks into an existing folder."""
    out = options.out
    to_folder = options.command == "to-flax"
    if to_folder and out.suffix == ".msgpack":  # earlier versions wrote a msgpack file
        raise CheckpointMismatch(
            f"{out} would be an orbax directory. Name a folder, or write a msgpack file of what "
            "torch_bridge.to_flax returns with flax.serialization.to_bytes."
        )
    if not os.path.lexists(out):  # a link to a missing file counts as existing
        return
    if to_folder and not out.is_dir():
        raise CheckpointMismatch(f"{out} is a file. --out must be a folder here.")
    if out.is_dir() and not to_folder:
        raise CheckpointMismatch(f"{out} is a folder. --out must be a file here.")
    if not (to_folder or options.force):
        raise CheckpointMismatch(f"{out} is there already. Pass --force to overwrite it.")
