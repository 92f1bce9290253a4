"""Finds for each torch tensor its Flax leaf.

The way of a tensor, ``layers.0.fc.weight`` of shape (8, 4), to ``layers_0/Dense_0/kernel``:

1. `layers.layers_of` puts it into a `Layer` with its bias, and divides the Flax tree likewise.
2. `kinds.join` says how two layers could be one: for each tensor its leaf, and for each form of the
   weight, such as (out, in) or (in, out), a `Pair` with the axes to move.
3. `match.Match` decides which two layers are one: by the user's rules (`rules.Ruled`), by equal
   names, and where only one choice is left by shapes. The others stay open.
4. Without an example, `questions` answers with the user's options and asks the rest: `decide`
   raises one error with all questions and problems.
5. With an example, only rules and the user's other options are binding. `search.Search` completes
   them to a `Reading`, first with equal names and the likeliest answers, then without, runs the
   Flax model on it (`evidence`), and changes the reading until the outputs are torch's. `proposals`
   lists the changes, the likeliest first, from what the model does (`trace`). If the example says
   what torch's layers were applied to, `locate.Locator` locates layers after each run, and says
   which changes may locate more. At the end similar readings are run as a check.
6. `Reading.pairs` returns the `Pair` of each tensor. `Pair.to_flax` and `Pair.to_torch` convert it.
"""
