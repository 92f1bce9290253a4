"""Which tensor is which leaf: by a rule, by name, by number, by an answer, or one error."""

import ast
import collections
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import torch_bridge
from tests.helpers.bridge import kernels, linears, norm, params_to_torch, values
from tests.helpers.tables import numbers, rows
from torch_bridge import Checkpoint, CheckpointMismatch, pair, params_from_torch


def model_of(**shapes):
    """Weights by module name, with __ for dots."""
    return {f"{n.replace('__', '.')}.weight": values(*s) for n, s in shapes.items()}


def twins(**shapes):
    """Weights by module name, and their kernels in Flax."""
    return model_of(**shapes), kernels(**{n: (*s[2:], s[1], s[0]) for n, s in shapes.items()})


def squares(text):
    """Makes layers of 4 by 4, of torch's names and behind a bar of their modules in Flax.

    Returns torch's names, Flax's modules, the model and the tree.
    """
    names, modules = (side.split() for side in text.split(" | "))
    model = {f"{name}.weight": values(4, 4) + k for k, name in enumerate(names)}
    like = {}
    for module in sorted(modules):
        node = like
        for word in module.split("/"):
            node = node.setdefault(word, {})
        node["kernel"] = np.zeros((4, 4), np.float32)
    return names, modules, model, like


def there_and_back(model, like, rules=(), **said):
    """Returns the parameters in Flax, and asserts that they come back as they were."""
    params = params_from_torch(model, like, rules=rules, **said)
    assert jax.tree.structure(params) == jax.tree.structure(like)
    for name, value in params_to_torch(params, model, rules=rules, **said).items():
        assert_array_equal(value, model[name], err_msg=name)
    return params


def refused(model, like, rules=(), **said):
    with pytest.raises(CheckpointMismatch) as error:
        params_from_torch(model, like, rules=rules, **said)
    return error.value


ASSUMING = pytest.mark.filterwarnings("ignore:Assumed")
TWO = (0, 1)
WORDS = {"q": "query", "k": "key", "v": "value", "out": "out"}
PAIRED = {  # torch's layers, those of Flax in the same order, and the rules
    "numbers in natural order": (
        "0 2 4 6 8 10 12 14 16 18 20 22 | Dense_0 Dense_1 Dense_2 Dense_3 Dense_4 Dense_5"
        " Dense_6 Dense_7 Dense_8 Dense_9 Dense_10 Dense_11",
        (),
    ),
    "modules of the same name": (
        "left.0 right.0 left.2 right.2 | left/Dense_0 right/Dense_0 left/Dense_1 right/Dense_1",
        (),
    ),
    "projections of attention": (
        "h.0.attn.q_proj h.0.attn.k_proj h.0.attn.v_proj h.0.attn.out_proj"
        " h.1.attn.q_proj h.1.attn.k_proj h.1.attn.v_proj h.1.attn.out_proj"
        " | Block_0/attn/query Block_0/attn/key Block_0/attn/value Block_0/attn/out"
        " Block_1/attn/query Block_1/attn/key Block_1/attn/value Block_1/attn/out",
        {rf"h\.(\d+)\.attn\.{a}_proj": rf"Block_\1/attn/{b}" for a, b in WORDS.items()},
    ),
    "rules with numbers": (
        "h.0.u h.0.v h.1.u h.1.v | block_0/q block_0/p block_1/q block_1/p",
        {r"h\.(\d+)\.u": r"block_\1/q", r"h\.(\d+)\.v": r"block_\1/p"},
    ),
    "a rule for a leaf, of which the other follows": (
        "fast slow | y x",
        [(r"slow\.weight", "x/kernel")],
    ),
    "prefixes of wrappers": ("_orig_mod.module.fc0 _orig_mod.module.fc1 | fc0 fc1", ()),
}


@ASSUMING
@pytest.mark.parametrize("case", PAIRED)
def test_what_belongs_together(case):
    text, rules = PAIRED[case]
    names, modules, model, like = squares(text)
    found = {p.torch_name: "/".join(p.path) for p in pair(model, like, rules, plain=True)}
    for name, module in zip(names, modules, strict=True):
        assert found.pop(f"{name}.weight") == f"{module}/kernel"
    assert not found
    there_and_back(model, like, rules, plain=True)


def test_every_difference_is_listed_at_once():
    model = model_of(a=(3, 2), b=(5, 4), extra=(9, 8, 7, 6)) | {"b.bias": np.ones(5)}
    like = linears(a=(2, 3), b=(4, 6)) | {"norm": {"scale": np.ones(13)}}
    like["b"]["bias"] = np.ones(5)
    error = refused(model, like)
    assert error.missing == ("a/bias (3,)", "norm/scale (13,)")
    assert error.unexpected == ("extra.weight (9, 8, 7, 6)",)
    assert error.mis_shaped == ("b.weight (5, 4) <-> b/kernel (4, 6)",)
    for line in ("a/bias", "norm/scale", "extra.weight", "b.weight (5, 4)"):
        assert line in str(error)
    three = model_of(**{f"layers__{k}": (4, 4) for k in range(3)})
    two = kernels(layers_0=(4, 4), layers_1=(4, 4))
    assert refused(three, two).unexpected == ("layers.2.weight (4, 4)",)


PACKED = {"in_proj_weight": values(24, 8), "out_proj.weight": values(8, 8)}
HEADS = kernels(**dict.fromkeys(("query", "key", "value"), (8, 2, 4)), out=(2, 4, 8))


def test_a_packed_tensor_has_a_leaf_for_every_part():
    error = refused(PACKED, HEADS | {"query": {"bias": np.zeros((2, 4))}})
    assert error.unexpected == ("in_proj_weight (24, 8)",)
    assert error.missing == ("query/bias (2, 4)",)


def test_a_packed_tensor_without_a_bias_fits_a_packed_kernel():
    like = kernels(qkv=(8, 3, 2, 4), out=(2, 4, 8))
    there_and_back({f"attn.{name}": weight for name, weight in PACKED.items()}, like)


ATTENTIONS = {"self_attn": "Attention_0", "multihead_attn": "Attention_1"}


def test_what_fits_several_is_listed_with_a_rule():
    _, _, model, like = squares("fast slow | x y")
    error = refused(model, like)
    assert error.ambiguous[0].startswith("fast, slow (4, 4) could be x, y: say which is which")
    assert "rules={'fast': 'x'}" in error.ambiguous[0]
    assert "plain=True" not in str(error)
    assert "neither a leaf nor a module" in str(refused(model, like, {"slow": "z"}))
    words = {"fc1": "x", "out2": "y"}  # whose numbers are no numbers of blocks
    model = model_of(**{f"enc1__{k}__{n}": (4, 4) for k in range(12) for n in words})
    like = {f"layer_{k}": kernels(x=(4, 4), y=(4, 4)) for k in range(12)}
    (line,) = refused(model, like).ambiguous
    assert r"enc\d+\.\d+\.out\d+ (4, 4) could be layer_\d+/x|" in line
    rules = {rf"enc1\.(\d+)\.{n}": rf"layer_\1/{leaf}" for n, leaf in words.items()}
    there_and_back(model, like, rules, conv1d="")
    model = {f"{k}.{a}.{n}": w for a in ATTENTIONS for k in TWO for n, w in PACKED.items()}
    like = {f"Block_{k}": dict.fromkeys(ATTENTIONS.values(), HEADS) for k in TWO}
    assert "could be Block_0/Attention_0, " in str(refused(model, like))
    rules = {rf"(\d)\.{a}": rf"Block_\1/{b}" for a, b in ATTENTIONS.items()}
    paths = {p.path: p.torch_name for p in pair(model, like, rules)}
    assert paths["Block_1", "Attention_1", "key", "kernel"].startswith("1.multihead_attn")


def test_the_rule_that_an_error_shows_for_the_root_is_one():
    tensors = {"weight": values(4, 4), "b.weight": values(4, 4) + 1}
    like = kernels(c=(4, 4), d=(4, 4))
    lines = refused(tensors, like, conv1d="").ambiguous
    rule = ast.literal_eval(re.search(r"rules=(\{.*\})\.", lines[0])[1])
    there_and_back(tensors, like, rule, conv1d="")


def test_names_that_become_one_are_refused():
    model = {"_orig_mod.fc.weight": values(4, 3), "fc.weight": -values(4, 3), "fc.bias": values(4)}
    like = linears(fc=(3, 4))
    for convert in (
        lambda: params_from_torch(model, like),
        lambda: params_to_torch(like, model),
        lambda: torch_bridge.to_flax(Checkpoint(model), like),
    ):
        with pytest.raises(ValueError, match="names become equal") as error:
            convert()
        assert error.value.ambiguous == ("_orig_mod.fc.weight and fc.weight",)


def test_leaves_of_one_name_are_refused():
    leaf = {"kernel": np.zeros((3, 4))}
    like = collections.OrderedDict([(0, leaf), ("0", leaf)])
    assert refused({"0.weight": values(4, 3)}, like).ambiguous == ("0/kernel",)


OTHER_SCHEMES = {  # numbers that may run another way
    "from one": "layers.1.fc layers.2.fc | layers_0/dense layers_1/dense",
    "of another word": "h.0.fc h.1.fc | block_0/fc block_1/fc",
    "of blocks with other layers": "blocks.0.a blocks.1.a | blocks_0/b blocks_1/b",
    "in nested calls": "0 2 | Dense_0 Dense_1",
    "of modules in modules": "0.0 0.1 1.0 1.1 | a_0/b_0/fc a_0/b_1/fc a_1/b_0/fc a_1/b_1/fc",
}


@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_numbers_of_another_scheme_are_asked_about_and_plain_is_not_the_advice(scheme):
    _, _, model, like = squares(OTHER_SCHEMES[scheme])
    error = refused(model, like)
    assert error.message.startswith("Neither names nor shapes tell how some layers correspond.")
    assert any("say which is which" in line for line in error.ambiguous)
    assert "plain=True" not in error.message


OTHER_COUNTS = {
    "two numbers and one": "convs1.0 convs1.1 convs2.0 convs2.1 | Conv_0 Conv_1 Conv_2 Conv_3",
    "one number and two": "0 2 4 6"
    " | Block_0/Dense_0 Block_0/Dense_1 Block_1/Dense_0 Block_1/Dense_1",
    "two by three and three by two": "convs0.0 convs0.1 convs0.2 convs1.0 convs1.1 convs1.2"
    " | Block_0/Conv_0 Block_0/Conv_1 Block_1/Conv_0 Block_1/Conv_1 Block_2/Conv_0 Block_2/Conv_1",
}


@ASSUMING
@pytest.mark.parametrize("case", OTHER_COUNTS)
def test_numbers_that_count_in_another_way_are_asked_about_in_spite_of_plain(case):
    names, modules, model, like = squares(OTHER_COUNTS[case])
    error = refused(model, like, plain=True)
    (line,) = error.ambiguous
    assert f"say which is which, as with rules={{{re.escape(names[0])!r}: " in line
    assert "count in the same way on both sides" in error.message
    rules = dict(zip(map(re.escape, names), modules, strict=True))
    there_and_back(model, like, rules, plain=True)


@ASSUMING
def test_numbers_that_are_equal_or_go_on_together_do_not_count():
    _, _, model, like = squares("encoder.3.layer1.conv1 encoder.3.layer2.conv2 | Conv_0 Conv_1")
    there_and_back(model, like, plain=True)


def test_layers_of_equal_names_say_which_block_is_which():
    names = "blocks.0.fc blocks.0.a blocks.1.fc blocks.1.a"
    _, _, model, like = squares(f"{names} | blocks_0/fc blocks_0/b blocks_1/fc blocks_1/b")
    found = {p.torch_name: "/".join(p.path) for p in pair(model, like, conv1d="")}
    assert found["blocks.1.a.weight"] == "blocks_1/b/kernel"


def test_a_layer_that_fits_in_another_block_only_is_refused():
    model = model_of(**{f"blocks__{k}__fc": (4, 4) for k in TWO})
    model |= model_of(blocks__0__a=(3, 4), blocks__1__a=(5, 4))
    like = {"blocks_0": kernels(fc=(4, 4), b=(4, 5)), "blocks_1": kernels(fc=(4, 4), b=(4, 3))}
    error = refused(model, like, conv1d="")
    assert error.missing == ("blocks_0/b/kernel (4, 5)", "blocks_1/b/kernel (4, 3)")
    assert error.unexpected == ("blocks.0.a.weight (3, 4)", "blocks.1.a.weight (5, 4)")


def test_the_only_whole_assignment_needs_no_answer():
    # The first fits two places, of which the others leave it one.
    model = {"a.weight": values(4, 6), "b.weight": values(4, 6), "b.bias": values(4)}
    model |= {"c.weight": values(6, 4), "c.bias": values(6)}
    like = kernels(x=(6, 4)) | linears(y=(6, 4), z=(4, 6))
    params = there_and_back(model, like)
    assert_array_equal(params["y"]["kernel"], model["b.weight"].T)


# --- rules that name a tensor and a leaf ------------------------------------------------------


# A tensor, its shape, a leaf, and whether that lies the other way round; LayerNorm((T, D)) has a
# matrix.
COUPLED = rows("""
tok.table | 4 4 | tok/embedding | kept
pos.weight | 6 4 | vit/pos_embedding | kept
norm.weight | 4 4 | norm/scale | kept
fc.weight | 3 4 | fc/w | turned
fc.matrix | 3 4 | fc/kernel | turned
conv.weight | 5 4 3 3 | conv/w | turned
""")


@pytest.mark.parametrize(("name", "shape", "path", "way"), COUPLED)
def test_rule_couples_a_tensor_and_a_leaf_of_different_layers(name, shape, path, way):
    weight = values(*numbers(shape))
    model = {name: weight, "last.weight": np.ones((2, 7)), "last.bias": np.ones(2)}
    expected = weight
    if way == "turned":
        expected = weight.transpose(*range(2, weight.ndim), 1, 0)
    module, leaf = path.split("/")
    like = linears(last=(7, 2)) | {module: {leaf: np.zeros(expected.shape)}}
    params = there_and_back(model, like, {name.replace(".", r"\."): path})
    assert_array_equal(params[module][leaf], expected)


def test_a_weight_behind_an_axis_of_length_one_keeps_the_order_of_its_places():
    model = {"conv.weight": values(1, 5, 4, 3, 3)}  # as StyleGAN's, which a layer modulates
    params = there_and_back(model, kernels(conv=(3, 3, 4, 5)))
    expected = model["conv.weight"][0].transpose(2, 3, 1, 0)
    assert_array_equal(params["conv"]["kernel"], expected)


def test_axes_of_length_one_keep_their_place_among_the_others():
    model = {"conv.weight": values(1, 4, 3, 3), "pos": values(1, 8, 6, 6)}
    like = {"conv": {"w": np.zeros((3, 3, 4, 1))}, "pos": np.zeros((1, 6, 6, 8))}
    params = there_and_back(model, like)
    expected = model["conv.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(params["conv"]["w"], expected)
    np.testing.assert_array_equal(params["pos"], model["pos"].transpose(0, 2, 3, 1))


def test_bare_parameters_and_leaves_of_the_same_names():
    model = {"norms.0.scale": values(4), "tok.embedding": values(6, 4)}
    like = {"norms_0": {"scale": np.zeros(4)}, "tok": {"embedding": np.zeros((6, 4))}}
    params = there_and_back(model, like)
    assert_array_equal(params["norms_0"]["scale"], model["norms.0.scale"])
    square = {"fc.kernel": values(4, 4)}  # stored (in, out) or (out, in)
    tree = {"fc": {"kernel": np.zeros((4, 4))}}
    assert refused(square, tree).parameters == ("rules", "turned", "ignore", "apply")
    for turned, expected in (
        ({}, square["fc.kernel"]),
        ({r"fc\.kernel": (1, 0)}, square["fc.kernel"].T),
    ):
        params = params_from_torch(square, tree, turned=turned)
        assert_array_equal(params["fc"]["kernel"], expected)


def test_a_rule_that_sends_a_convolution_where_nothing_fits_is_refused():
    model = {"a.weight": values(8, 3, 3, 3), "a.bias": values(8)}
    like = {"Conv_0": {"kernel": values(1, 1, 8, 16), "bias": values(16)}}
    with pytest.raises(CheckpointMismatch, match=r"a\.weight .* <-> Conv_0/kernel"):
        torch_bridge.pair(model, like, rules={"a": "Conv_0"})


def test_one_rule_takes_the_matrices_of_a_recurrent_layer_apart():
    of_input = values(4, 3)
    of_state = values(4, 4)  # a square one, too: torch keeps them (out, in)
    model = {"rnn.weight_ih_l0": of_input, "rnn.weight_hh_l0": of_state}
    like = {"rnn": {"ih": np.zeros((3, 4)), "hh": np.zeros((4, 4))}}
    params = there_and_back(model, like, {r"rnn\.weight_(..)_l0": r"rnn/\1"})
    assert_array_equal(params["rnn"]["ih"], of_input.T)
    assert_array_equal(params["rnn"]["hh"], of_state.T)


def convolution_and_bare_leaves():
    """Makes a convolution and a Linear, whose leaves in Flax have names of their own."""
    model = model_of(conv=(8, 3, 3, 3), fc=(5, 32)) | {"fc.bias": values(5)}
    like = kernels(conv=(3, 3, 3, 8))
    like["fc"] = {"w": np.zeros((32, 5)), "b": np.zeros(5)}
    return model, like


def test_rules_for_the_leaves_of_a_layer_behind_a_map():
    model, like = convolution_and_bare_leaves()
    rules = {r"fc\.weight": "fc/w", r"fc\.bias": "fc/b"}
    params = there_and_back(model, like, rules, flatten={"fc": (8, 2, 2)})
    by_channel = model["fc.weight"].reshape(5, 8, 2, 2)
    expected = by_channel.transpose(2, 3, 1, 0).reshape(32, 5)
    assert_array_equal(params["fc"]["w"], expected)
    assert_array_equal(params["fc"]["b"], model["fc.bias"])


def test_what_a_rule_leaves_over_is_paired_if_it_is_the_only_one():
    model, like = convolution_and_bare_leaves()
    rules = {r"fc\.weight": "fc/w"}
    params = params_from_torch(model, like, rules=rules, flatten={"fc": None})
    assert_array_equal(params["fc"]["b"], model["fc.bias"])


def test_rules_that_scatter_a_layer_or_meet_in_one_leaf_are_refused():
    model = model_of(a=(4, 3), b=(4, 3)) | {"a.bias": values(4), "b.bias": values(4)}
    like = linears(x=(3, 4), y=(3, 4))
    scattered = {r"a\.weight": "x/kernel", r"a\.bias": "y/bias", "b": "y"}
    error = refused(model, like, scattered)
    assert "let one rule name the whole layer" in error.ambiguous[0]
    meeting = {r"a\.weight": "x/kernel", r"a\.bias": "x/kernel", "b": "y"}
    error = refused(model, like, meeting)
    assert error.mis_shaped == ("a.bias (4,) <-> x/kernel (3, 4)",)


def test_rules_that_swap_two_leaves_are_followed_and_not_corrected():
    model = {"n.weight": values(4), "n.bias": values(4) + 1}
    swapped = {r"n\.weight": "n/bias", r"n\.bias": "n/scale"}
    params = there_and_back(model, {"n": norm(4)}, swapped)
    assert_array_equal(params["n"]["bias"], model["n.weight"])


@pytest.mark.parametrize("names", [("fc", "x.b"), ("x.b", "fc")])
def test_a_rule_gives_a_layer_the_bias_that_lies_elsewhere(names):
    model = {"fc.weight": values(3, 2), "x.b": values(3)}
    rules = {name: {"fc": "a", "x.b": "a/bias"}[name] for name in names}
    state = {name: value for key in names for name, value in model.items() if key in name}
    params = there_and_back(state, linears(a=(2, 3)), rules)
    assert_array_equal(params["a"]["kernel"].T, model["fc.weight"])
    assert_array_equal(params["a"]["bias"], model["x.b"])


def test_rule_takes_a_packed_linear_apart():
    model = model_of(h__0__c_attn=(24, 8), h__0__c_proj=(8, 8))
    model |= {"h.0.c_attn.bias": values(24), "h.0.c_proj.bias": values(8)}
    heads = {"kernel": np.ones((8, 2, 4)), "bias": np.ones((2, 4))}
    out = {"kernel": np.ones((2, 4, 8)), "bias": np.ones(8)}
    like = {"h_0": {"query": heads, "key": heads, "value": heads, "out": out}}
    refused(model, like)
    rules = {
        r"h\.(\d+)\.c_attn": r"1*(h_\1/query|h_\1/key|h_\1/value)",
        r"h\.(\d+)\.c_proj": r"h_\1/out",
    }
    params = there_and_back(model, like, rules, conv1d="")
    expected = model["h.0.c_attn.weight"][8:16].T.reshape(8, 2, 4)
    assert_array_equal(params["h_0"]["key"]["kernel"], expected)
    later = [*rules.items(), (r".*attn", "h_0/out"), (r"h.*", "a|b")]  # of which none decides
    assert pair(model, like, later, conv1d="") == pair(model, like, rules, conv1d="")
    whole = [(r"h\.0\.c_attn", "all"), *rules.items()]
    assert (
        len(refused(model, like | linears(all=(8, 24)), whole, conv1d="").missing) == 6
    )  # sent once, to the first
    straight = {"c_attn.weight": values(8, 24)}  # which no rule takes apart
    error = refused(straight, kernels(q=(8, 8), k=(8, 8), v=(8, 8)), {"c_attn": "q|k|v"})
    assert len(error.mis_shaped) == 3


def rows_of(weight, *shape):
    """Divides the rows of a weight as in `shape`; -1 is the width of a head."""
    return weight.reshape(*shape, weight.shape[-1])


def by_head(weight):
    """Takes queries, keys and values from the rows of 2 heads, each (query, key, value)."""
    return rows_of(weight, 2, 3, -1).swapaxes(0, 1).reshape(3, -1, weight.shape[1])


def by_group(weight):
    """Takes them from 2 groups of rows, each of 2 heads of queries, a key and a value."""
    groups = rows_of(weight, 2, 4, -1)
    q = groups[:, :2]
    k = groups[:, 2]
    v = groups[:, 3]
    return [part.reshape(-1, weight.shape[1]) for part in (q, k, v)]


SPELLED = {  # the rows of the packed weight, the Flax tree, the rule, and the parts
    "one after the other": (24, dict.fromkeys("qkv", 8), "1*(q|k|v)", lambda w: np.split(w, 3)),
    "in another order": (24, dict.fromkeys("qkv", 8), "1*(v|k|q)", lambda w: np.split(w, 3)[::-1]),
    "by head": (24, dict.fromkeys("qkv", 8), "2*(q|k|v)", by_head),
    "by group": (32, {"q": 16, "k": 8, "v": 8}, "2*(q|k|v)", by_group),
    "by group, said": (32, {"q": 16, "k": 8, "v": 8}, "2*(q|q|k|v)", by_group),
    "unequal parts": (
        32,
        {"q": 16, "k": 8, "v": 8},
        "1*(q|k|v)",
        lambda w: np.split(w, [16, 24]),
    ),
    "four gates": (
        16,
        dict.fromkeys("ifgo", 4),
        "1*(i|o|f|g)",
        lambda w: np.split(w, 4)[:1] + np.split(w, 4)[2:] + np.split(w, 4)[1:2],
    ),
}


@pytest.mark.parametrize("case", SPELLED)
def test_a_rule_says_the_order_of_packed_rows(case):
    rows, widths, path, take = SPELLED[case]
    model = {"packed.weight": values(rows, 8), "packed.bias": values(rows)}
    like = linears(**{name: (8, width) for name, width in widths.items()})
    params = there_and_back(model, like, {"packed": path})
    biases = take(model["packed.bias"][:, None])
    for name, weight, bias in zip(widths, take(model["packed.weight"]), biases, strict=True):
        assert_array_equal(params[name]["kernel"].T, weight)
        assert_array_equal(params[name]["bias"], bias[:, 0])


@pytest.mark.parametrize(
    ("path", "take"),
    [
        (
            "qkv[0]|qkv[2]|qkv[1]",
            lambda w: np.concatenate(np.split(w, 3))[[*range(8), *range(16, 24), *range(8, 16)]],
        ),
        ("2*(qkv[0]|qkv[1]|qkv[2])", lambda w: np.concatenate(by_head(w))),
    ],
)
def test_a_rule_says_the_order_of_rows_in_one_packed_layer(path, take):
    model = {"packed.weight": values(24, 8)}
    params = there_and_back(model, kernels(qkv=(8, 24)), {"packed": path})
    assert_array_equal(params["qkv"]["kernel"].T, take(model["packed.weight"]))


def test_blocks_of_one_part_are_said_one_after_the_other():
    model = {"packed.weight": values(32, 8)}
    rules = {"packed": "2*(qkv[0]|qkv[0]|qkv[1]|qkv[2])"}
    params = there_and_back(model, kernels(qkv=(8, 32)), rules)
    parts = np.concatenate(by_group(model["packed.weight"]))
    assert_array_equal(params["qkv"]["kernel"].T, parts)


def test_a_rule_without_the_order_of_the_rows_names_what_is_assumed():
    model = model_of(packed=(24, 8))
    like = kernels(q=(8, 8), k=(8, 8), v=(8, 8))
    with pytest.warns(UserWarning, match="packed: all rows of a part follow each other") as caught:
        params_from_torch(model, like, rules={"packed": "q|k|v"})
    assert "'12*(query|key|value)' if each of 12 heads" in str(caught[0].message)
    like = kernels(a=(8, 8), b=(8, 8), c=(8, 8), d=(8, 8))
    rules = {"in_proj": "a|b|c", "out_proj": "d"}
    there_and_back(PACKED, like, rules, conv1d="")  # torch's own order


def test_what_seems_packed_on_both_sides_is_named():
    # 24 outputs, of which the next layer reads 8 and none reads all; the MLP has no such layer.
    model, like = twins(qkv=(24, 8), proj=(8, 8), up=(32, 8), down=(8, 32), head=(10, 8))
    said = {"conv1d": "", "flatten": {}, "unflatten": {}}
    with pytest.warns(UserWarning, match="qkv: if the outputs are several parts") as caught:
        params_from_torch(model, like, **said)
    assert "rules={'qkv': '1*(qkv[0]|qkv[1])'}" in str(caught[0].message)
    there_and_back(model, like, {"qkv": "1*(qkv[0]|qkv[1]|qkv[2])"}, **said)


@pytest.mark.parametrize("shape", [(12, 36), (12, 36, 3)])
def test_a_rule_orders_no_rows_of_a_weight_that_is_stored_in_out(shape):
    model = {"packed.weight": values(*shape)}
    like = kernels(qkv=(*shape[2:], *shape[:2]))
    with pytest.raises(CheckpointMismatch, match=r"packed is stored \(in, out\)"):
        params_from_torch(model, like, rules={"packed": "2*(qkv[0]|qkv[1]|qkv[2])"})


WRONG_ORDERS = rows("""
5*(q|k|v) | 15 equal blocks of rows, and it has 24
q|k|q | names a Flax layer twice
q[0]|k[1]|v[2] | must name every part of one Flax layer once
q[0]|q[2] | must name every part of one Flax layer once
q[a] | q[a], which is neither a leaf nor a module
""")


@pytest.mark.parametrize(("path", "text"), WRONG_ORDERS)
def test_a_wrong_order_of_packed_rows_is_refused(path, text):
    like = kernels(q=(8, 8), k=(8, 8), v=(8, 8))
    with pytest.raises(ValueError, match=re.escape(text)):
        pair(model_of(packed=(24, 8)), like, {"packed": path})


# --- options ----------------------------------------------------------------------------------


CONV = (8, 3, 3, 3)
FC = (10, 128)
FLAT = twins(conv0=CONV, fc=FC)  # of 16 places a channel


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"flatten": "fc"}, ValueError, "`flatten` must map regular expressions to shapes"),
        ({"flatten": {"fc": (8, -4, -4)}}, ValueError, "`flatten` must map"),
        ({"flatten": {"fc": (8, "4", 4)}}, ValueError, "`flatten` must map"),
        ({"rules": "fc"}, ValueError, "`rules` must map regular expressions to paths"),
        ({"ignore": "("}, ValueError, "`ignore`: .* is not a regular expression"),
        ({"rules": {"fc": r"\2"}}, ValueError, "`rules`: the path .* cannot be used"),
        ({"flatten": {"fc": (8, 4, 5)}}, CheckpointMismatch, r"with flatten=\(8, 4, 5\)"),
        ({"flaten": {"fc": None}}, TypeError, "no argument 'flaten'"),
    ],
)
def test_options_of_another_form_are_refused_in_one_sentence(options, kind, message):
    model, like = FLAT
    for convert in (params_from_torch, torch_bridge.pair):
        with pytest.warns(UserWarning, match="fc reads 128 .* perhaps .8, 4, 4.") as warned:
            convert(model, like, flatten={"fc": (4, 4, 8)})
        assert warned[0].filename == __file__
    params = params_from_torch(model, like, flatten={"fc": [8, 4, 4]})
    for convert in (
        lambda: params_from_torch(model, like, **options),
        lambda: torch_bridge.to_flax(Checkpoint(model), like, **options),
        lambda: torch_bridge.to_torch(params, (), Checkpoint(model), **options),
    ):
        with pytest.raises(kind, match=message):
            convert()


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"unflatten": {"fc": None, "f": (2, 5)}, "flatten": {"fc": None}}, ("unflatten: f",)),
        (
            {"rules": {"fc": "fc", "op": "fc"}, "flatten": {"f": None}, "conv1d": "doun"},
            ("rules: op", "flatten: f", "conv1d: doun"),
        ),
    ],
)
def test_patterns_that_match_or_move_nothing_are_listed(options, idle):
    error = refused(*FLAT, **options)
    assert error.unexpected == idle
    assert error.parameters == tuple(sorted(line.partition(":")[0] for line in idle))


def test_a_shape_for_a_layer_that_reads_no_map_is_refused():
    error = refused(*FLAT, flatten={"conv0": (8, 4, 4), "fc": None})
    (line,) = error.mis_shaped
    assert line == "flatten={'conv0': (8, 4, 4)}: none of these reads values in a row"


def test_arguments_of_another_type_are_refused_in_one_sentence():
    model, like = FLAT
    for convert in (
        lambda value: torch_bridge.to_flax(value, like),
        lambda value: torch_bridge.to_torch(like, (), value),
    ):
        for value in ("checkpoint.pt", model):
            with pytest.raises(TypeError, match=r"Pass what torch_bridge\.load returned"):
                convert(value)
    for value in ("x.pt", Checkpoint(model)):
        with pytest.raises(TypeError, match=r"state dict or module is needed.* attribute `model`"):
            params_from_torch(value, like)
    for value in (None, 3, [None]):
        with pytest.raises(TypeError, match="`paths` must be one path"):
            torch_bridge.load(value)


# --- weights stored (in, out) -----------------------------------------------------------------


def test_one_question_for_all_square_matrices():
    model = model_of(fc0=(8, 8), fc1=(8, 8), out=(4, 4), wide=(8, 24), up=(8, 24))
    like = kernels(fc0=(8, 8), fc1=(2, 4, 8), out=(4, 4), wide=(8, 24), up=(24, 8))
    error = refused(model, like)
    assert [line.split(":")[0] for line in error.ambiguous] == [r"fc\d+|out"]
    assert error.parameters == ("rules", "conv1d", "ignore", "apply")
    params = there_and_back(model, like, conv1d=r"fc\d+")
    for name, turned in {"fc0": False, "out": True, "wide": False, "up": True}.items():
        weight = model[f"{name}.weight"]
        assert_array_equal(params[name]["kernel"], weight.T if turned else weight)


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4)])
def test_the_order_of_a_cubic_norm_is_asked_about_in_spite_of_plain(shape):
    model = {"norm.weight": values(*shape), "norm.bias": values(*shape) + 1}
    like = {"norm": {"scale": np.zeros(shape), "bias": np.zeros(shape)}}
    last = (*range(1, len(shape)), 0)
    for options in ({}, {"plain": True}):
        error = refused(model, like, **options)
        assert f"else turned={{'norm': {last}}}" in error.ambiguous[0]
        assert error.message.startswith("plain=True does not") == bool(options)
    kept = there_and_back(model, like, turned={})
    assert_array_equal(kept["norm"]["bias"], model["norm.bias"])
    moved_last = there_and_back(model, like, turned={"norm": last})
    assert_array_equal(moved_last["norm"]["scale"], model["norm.weight"].transpose(last))


def test_a_norm_of_a_map_has_its_channels_last_and_torchs_matrix():
    model = {"norm.weight": values(4, 3, 3), "norm.bias": values(4, 3, 3) + 1}
    like = {"norm": {"scale": np.zeros((3, 3, 4)), "bias": np.zeros((3, 3, 4))}}
    params = there_and_back(model, like)
    assert_array_equal(params["norm"]["bias"], np.moveaxis(model["norm.bias"], 0, -1))
    for one in pair(model, like):
        rows, cols = one.matrix_axes()
        assert rows == (2,)
        matrix = params["norm"][one.path[-1]].transpose(*rows, *cols).reshape(4, -1)
        torch_matrix = model[one.torch_name].reshape(4, -1)
        assert_array_equal(matrix, torch_matrix[:, one.column_order(cols)])


@pytest.mark.parametrize(
    ("option", "shape"), [("conv1d", (4, 4)), ("conv_transpose", (4, 4, 3, 3))]
)
def test_an_empty_pattern_names_no_layer_and_not_the_one_without_a_name(option, shape):
    model = {"weight": np.zeros(shape)}
    like = {"kernel": np.zeros((*shape[2:], 4, 4))}
    with pytest.warns(UserWarning, match=rf"\(else {option}=\)"):
        assert pair(model, like, **{option: ""}) == pair(model, like, plain=True)


# Models of square weights, the other arguments, and what of them plain=True assumes.
ASSUMED = {
    "only square matrices": (model_of(a=(4, 4)), kernels(a=(4, 4)), "a: stored (out, in)"),
    "only square kernels": (
        {"up.weight": values(4, 4, 2, 2)},
        kernels(up=(2, 2, 4, 4)),
        "up: not a ConvTranspose",
    ),
    "a bare matrix": (
        {"table": values(4, 4)},
        {"table": np.zeros((4, 4))},
        "table: torch's order of axes",
    ),
    "equal layers": (
        {f"{k}.weight": values(4) for k in TWO},
        {f"RMSNorm_{k}": {"scale": np.zeros(4)} for k in TWO},
        "0, 1 and RMSNorm_0, RMSNorm_1 are called in the order of their numbers",
    ),
    "a picture": (
        model_of(fc=(5, 192)),
        kernels(fc=(192, 5)),
        "fc reads no flattened map (else flatten={'fc': (3, 8, 8)}",
    ),
}


@pytest.mark.parametrize("case", ASSUMED)
def test_plain_names_what_it_assumes(case):
    model, like, line = ASSUMED[case]
    with pytest.warns(UserWarning, match="Only a run on an example proves it") as caught:
        params_from_torch(model, like, plain=True)
    (warning,) = caught
    assert line in str(warning.message)
    assert warning.filename == __file__


SHOWN = {  # a square weight, and another one that shows its form
    "conv1d": (model_of(a=(4, 4), b=(8, 4)), model_of(a=(4, 4), b=(4, 8)), (4, 8)),
    "conv_transpose": (
        {"a.0.weight": values(4, 4, 2, 2), "a.1.weight": values(8, 4, 2, 2)},
        {"a.0.weight": values(4, 4, 2, 2), "a.1.weight": values(4, 8, 2, 2)},
        (2, 2, 4, 8),
    ),
}


@pytest.mark.parametrize("option", SHOWN)
def test_plain_takes_a_form_that_others_show_and_asks_if_they_show_the_unusual_one(option):
    usual, unusual, shape = SHOWN[option]
    names = [name.removesuffix(".weight").replace(".", "_") for name in usual]
    like = kernels(**dict.fromkeys(names, shape))
    like[names[0]]["kernel"] = np.zeros((*shape[:-2], 4, 4))
    there_and_back(usual, like, plain=True)
    if option == "conv_transpose":
        like[names[1]]["kernel"] = np.zeros((2, 2, 4, 8))
    (line,) = refused(unusual, like, plain=True).ambiguous
    assert f"Pass {option}='' if none" in line
    there_and_back(unusual, like, plain=True, **{option: "a.*"})


def test_plain_asks_about_kernels_that_flax_names_a_transposed_convolution():
    model = {"0.weight": values(4, 4, 2, 2)}
    like = kernels(ConvTranspose_0=(2, 2, 4, 4))
    assert (
        "the name in Flax, is of a ConvTranspose" in refused(model, like, plain=True).ambiguous[0]
    )


# --- a flatten --------------------------------------------------------------------------------


def moved(array, shape):
    """Rows in torch's order of the map (C, H, W), in that of Flax."""
    return array[np.arange(len(array)).reshape(shape).transpose(1, 2, 0).ravel()]


def recurrent():
    """Makes an LSTM that reads the map, and one behind it."""
    model, like = twins(conv0=CONV)
    for layer, width in enumerate((128, 6)):
        sides = {"i": width, "h": 6}
        model |= {f"lstm.weight_{s}h_l{layer}": values(24, n) for s, n in sides.items()}
        gates = {f"{s}{g}": (n, 6) for s, n in sides.items() for g in "ifgo"}
        like[f"lstm_{layer}"] = kernels(**gates)
    return model, like


def norm_elsewhere():
    vectors = {"norm.weight": values(128), "norm.bias": values(128) + 1}
    return FLAT[0] | vectors, FLAT[1] | {"norm": norm(128)}


def behind_a_norm():
    """Makes a norm over all axes of the map, and the layer behind it."""
    conv, fc = ({f"{name}.weight": FLAT[0][f"{name}.weight"]} for name in ("conv0", "fc"))
    return conv | {"norm.weight": values(8, 4, 4)} | fc, FLAT[1] | {
        "norm": {"scale": np.zeros((4, 4, 8))}
    }


def several_beside_a_convolution():
    """Lists models with layers that have several values for each channel of a convolution."""
    heads = twins(conv=CONV, value_conv=(1, 8, 1, 1), mean=FC, variance=(9, 128))
    decoder = twins(fc=(128, 10), conv=(4, 8, 3, 3))
    return {
        "a Linear": (FLAT, ["fc"], "flatten"),
        "an LSTM": (recurrent(), ["lstm.l0"], "flatten"),
        "a Linear behind a norm of the map": (behind_a_norm(), ["fc"], "flatten"),
        "two heads": (heads, ["mean", "variance"], "flatten"),
        "a decoder": (decoder, ["fc"], "unflatten"),
    }


@pytest.mark.parametrize("case", several_beside_a_convolution())
def test_a_likely_map_is_not_without_a_word(case):
    (model, like), names, option = several_beside_a_convolution()[case]
    error = refused(model, like)
    assert error.message.startswith("A layer beside a convolution has several values for each")
    with pytest.warns(UserWarning, match="no flattened map") as caught:
        params_from_torch(model, like, plain=True)
    for name in names:
        assert f"{option}={{{name!r}: (8, 4, 4)}}" in str(caught[0].message)
    for maps in ({}, dict.fromkeys(names, (8, 4, 4))):
        there_and_back(model, like, plain=True, **{option: maps})


def joined_maps():
    """Makes a norm of the width of joined maps, and the layer behind it."""
    growing = {f"grow{k}": (k, 8, 3, 3) for k in (60, 61)}
    model, like = twins(conv0=CONV, **growing, fc=FC)
    vectors = {"norm.weight": values(128), "norm.bias": values(128)}
    head = {"fc.weight": model.pop("fc.weight")}
    return model | vectors | head, like | {"norm": norm(128)}


POOLED = {
    "one value a channel": twins(conv=CONV, fc=(10, 8)),
    "joined maps with a norm": joined_maps(),
    "behind another layer": twins(conv=CONV, up=(64, 8), down=(8, 64)),
}


@pytest.mark.parametrize("case", POOLED)
def test_plain_gives_no_warning_where_no_map_is_likely(case):
    there_and_back(*POOLED[case], plain=True)


WIDE = (24, 3, 3, 3)
NARROW = (8, 24, 3, 3)
MAPS = {  # architectures.py has more
    "not square": (twins(conv=CONV, fc=(10, 96)), ["fc"], (8, 3, 4)),
    "declared before": (twins(fc=FC, conv0=WIDE, conv1=NARROW), ["fc"], (8, 4, 4)),
    "declared between": (twins(conv0=WIDE, fc=(10, 56), conv1=NARROW), ["fc"], (8, 7, 1)),
    "a layer as wide as the map": (
        twins(conv=CONV, fc=FC, hidden=(128, 10), last=(3, 128)),
        ["fc", "last"],
        (8, 4, 4),
    ),
    "recurrent": (recurrent(), ["lstm.l0"], (8, 4, 4)),
    "a norm elsewhere": (norm_elsewhere(), ["fc", "norm"], (8, 4, 4)),
}


@pytest.mark.parametrize("case", MAPS)
def test_a_map_that_may_be_something_else_is_asked_about(case):
    (model, like), names, shape = MAPS[case]
    error = refused(model, like)
    asked = [line.split()[0] for line in error.ambiguous]
    assert asked == [name for name in names if name != "norm"]
    assert ("norm may belong to the same map" in error.ambiguous[0]) == ("norm" in names)
    assert error.parameters == ("rules", "flatten", "ignore", "apply")
    pooled, params = (
        there_and_back(model, like, flatten=dict.fromkeys(names, said)) for said in (None, shape)
    )
    for leaf, plain in zip(jax.tree.leaves(params), jax.tree.leaves(pooled), strict=True):
        reads_the_map = len(leaf) == math.prod(shape)
        assert_array_equal(leaf, moved(plain, shape) if reads_the_map else plain)
    if case == "a norm elsewhere":
        there_and_back(model, like, flatten={"fc": None})  # so that there is no map


def test_a_norm_before_a_map_follows_it_unless_it_is_left_out():
    vectors = {"norm.weight": values(128), "norm.bias": values(128) + 1}
    conv, fc = ({f"{name}.weight": FLAT[0][f"{name}.weight"]} for name in ("conv0", "fc"))
    model = conv | vectors | fc
    like = FLAT[1] | {"norm": norm(128)}
    for said, order in (({}, moved(np.arange(128), (8, 4, 4))), ({"norm": None}, np.arange(128))):
        params = there_and_back(model, like, flatten={"fc": (8, 4, 4), **said})
        assert_array_equal(params["norm"]["bias"], vectors["norm.bias"][order])


# --- ties and statistics ----------------------------------------------------------------------


def test_a_head_with_the_values_of_the_embedding_is_tied():
    weight = values(11, 6)
    embedding = {"Embed_0": {"embedding": np.zeros((11, 6))}}
    # In a file without shared storage:
    there_and_back({"tok_emb.weight": weight, "head.weight": weight.copy()}, embedding)
    untied = embedding | kernels(Dense_0=(6, 11))
    rules = {"tok_emb": "Embed_0", "head": "Dense_0"}
    there_and_back({"tok_emb.weight": weight, "head.weight": weight + 1}, untied, rules)
    names = ("tok_emb.weight", "head.weight")  # one in torch, two in Flax
    found = {p.torch_name: p.aliases for p in pair(dict.fromkeys(names, weight), untied, rules)}
    assert found == dict(zip(names, [names[1:], names[:1]], strict=True))


def test_parameters_alone_leave_no_place_for_running_statistics():
    model = {f"bn.{kind}": values(8) for kind in ("weight", "bias", "running_mean", "running_var")}
    like = {"bn": norm(8)}
    assert all(not found.is_buffer for found in pair(model, like))
    error = refused(model, like)
    assert len(error.unexpected) == 2
    params = there_and_back(model, like, ignore=r".*running_(mean|var)")  # those of `model` stay
    for convert in (  # which would lose them, or leave old ones
        lambda: torch_bridge.to_flax(Checkpoint(model), like),
        lambda: torch_bridge.to_torch(params, (), Checkpoint(model)),
    ):
        with pytest.raises(CheckpointMismatch, match="no place for running statistics"):
            convert()


# --- properties -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple),
    transposed=st.booleans(),
    data=st.data(),
)
def test_round_trip_and_column_order(shape, transposed, data):
    a, b, *spatial = shape
    flax_shape = (*spatial, a, b) if transposed and spatial else (*spatial, b, a)
    seed = data.draw(st.integers(0, 2**31))
    weight = np.random.default_rng(seed).normal(size=shape)
    (found,) = pair(
        {"c.weight": weight},
        {"c": {"kernel": np.ones(flax_shape)}},
        conv_transpose=".*" if transposed else "-",
        conv1d="",
        turned={},
        flatten={},
        unflatten={},
    )
    leaf = found.to_flax(weight)
    assert leaf.shape == flax_shape
    assert_array_equal(found.to_torch(leaf), weight)
    rows, cols = found.matrix_axes()
    matrix = leaf.transpose(*rows, *cols).reshape(shape[0], -1)
    columns = found.column_order(cols)
    assert_array_equal(matrix, weight.reshape(shape[0], -1)[:, columns])


def test_a_linear_of_one_value_is_not_a_norm():
    model = model_of(**{"0": (1, 1)}) | {"0.bias": values(1) + 1}
    model |= {"1.weight": values(1) + 2, "1.bias": values(1) + 3}
    like = linears(Dense_0=(1, 1)) | {"LayerNorm_0": norm(1)}
    params = there_and_back(model, like, plain=True)
    assert params["LayerNorm_0"]["bias"] == model["1.bias"]


KINDS = {  # torch's tensors and Flax's leaves, and the sizes in torch
    "Dense": "weight:kernel:ab bias:bias:a",
    "Conv": "weight:kernel:abhw bias:bias:a",
    "LayerNorm": "weight:scale:a bias:bias:a",
    "BatchNorm": "weight:scale:a bias:bias:a running_mean:mean:a running_var:var:a",
    "Embed": "weight:embedding:ab",
}


SIZES = st.integers(1, 4)


@ASSUMING
@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=6), data=st.data())
def test_random_stacks_there_and_back(kinds, data):
    """Torch numbers all layers of a Sequential together, linen each kind by itself."""
    model = {}
    like = {"params": {}, "batch_stats": {}}
    for k, kind in enumerate(kinds):
        # An embedding has a name that no Linear has, as in every model with both.
        prefix = f"embed.{k}" if kind == "Embed" else str(k)
        sizes = {"h": 3, "w": 2, "a": data.draw(SIZES), "b": data.draw(SIZES)}
        module = f"{kind}_{kinds[:k].count(kind)}"
        for entry in KINDS[kind].split():
            tensor, leaf, axes = entry.split(":")
            shape = [sizes[axis] for axis in axes]
            model[f"{prefix}.{tensor}"] = values(*shape)
            if leaf != "embedding":
                shape = (*shape[2:], *shape[1::-1])
            collection = "batch_stats" if leaf in ("mean", "var") else "params"
            leaves = like[collection].setdefault(module, {})
            leaves[leaf] = np.zeros(shape)
    there_and_back(model, like, plain=True)


def test_column_order_of_packed_flattened_and_unflattened_weights():
    weight = PACKED["in_proj_weight"]
    parts = {p.path[0]: p for p in pair(PACKED, HEADS)}
    leaf = parts["key"].to_flax(weight)
    columns = parts["key"].column_order((0,))
    assert_array_equal(leaf.reshape(8, 8).T, weight[8:16][:, columns])
    assert parts["key"].rows == (8, 16)
    with pytest.raises(CheckpointMismatch, match="torch_matrix_dims"):
        parts["key"].column_order((0, 1))
    for option, shape in (("flatten", (5, 12)), ("unflatten", (12, 5))):
        weight = values(*shape)
        said = {option: {"fc": (3, 2, 2)}}
        (found,) = pair({"fc.weight": weight}, kernels(fc=shape[::-1]), **said)
        rows = moved(np.arange(12), (3, 2, 2)) if option == "unflatten" else np.arange(5)
        columns = found.column_order((0,))
        assert_array_equal(found.to_flax(weight).T, weight[rows][:, columns])


def test_a_leaf_that_no_tensor_is_left_for_is_missing():
    error = refused(model_of(a=(3, 2)), kernels(x=(2, 3), y=(2, 3)))
    assert error.missing == ("1 of x, y",)
    assert "apply= and example=" not in error.message
    several = {f"{name}.weight": np.full((3, 2), place) for place, name in enumerate("abc")}
    error = refused(several, kernels(x=(2, 3)))
    assert error.unexpected == ("2 of a, b, c",)


@pytest.mark.parametrize("option", ["flatten", "unflatten"])
def test_a_convolution_over_patches_may_be_a_dense(option):
    weight = values(16, 3, 4, 4)  # of a Conv, or of a ConvTranspose with 16 inputs
    model = {"patch.weight": weight}
    like = kernels(patch=(48, 16) if option == "flatten" else (16, 48))
    error = refused(model, like)
    assert error.ambiguous[0].startswith("patch ")
    assert f"{option}={{'patch': (3, 4, 4)}}" in error.ambiguous[0]
    params = there_and_back(model, like, **{option: {"patch": (3, 4, 4)}})
    matrix = weight.transpose(0, 2, 3, 1).reshape(16, 48)
    kernel = params["patch"]["kernel"]
    assert_array_equal(kernel.T if option == "flatten" else kernel, matrix)
    (found,) = pair(model, like, **{option: {"patch": (3, 4, 4)}})
    columns = found.column_order((0,) if option == "flatten" else (1,))
    assert_array_equal(matrix, weight.reshape(16, 48)[:, columns])
    as_it_is = there_and_back(model, like, **{option: {}})["patch"]["kernel"]
    assert_array_equal(as_it_is.T if option == "flatten" else as_it_is, weight.reshape(16, 48))


def test_values_beside_a_map_are_not_without_a_word():
    model, like = twins(conv=(4, 2, 3, 3), fc=(8, 69))  # reads 4 maps of 4 x 4, and 5 other values
    said = {"flatten": {"fc": [(4, 4, 4), (5,)]}}
    assert f"pass flatten={said['flatten']}" in refused(model, like).ambiguous[0]
    with pytest.warns(UserWarning, match="fc reads no flattened map"):
        params_from_torch(model, like, plain=True)
    kernel = there_and_back(model, like, **said)["fc"]["kernel"]
    order = [*moved(np.arange(64), (4, 4, 4)), *range(64, 69)]
    assert_array_equal(kernel, model["fc.weight"].T[order])
    pooled = twins(conv=(4, 2, 3, 3), fc=(8, 9))  # pooled maps, and 5 other values
    there_and_back(*pooled)
    cubes = twins(conv=(4, 2, 3, 3, 3), fc=(8, 4 * 64))
    beside = twins(conv=(4, 2, 3, 3, 3), fc=(8, 4 * 64 + 2))
    assert "{'fc': (4, 4, 4, 4)}" in refused(*cubes).ambiguous[0]
    assert "{'fc': [(4, 4, 4, 4), (2,)]}" in refused(*beside).ambiguous[0]


def test_parameters_of_several_layers_in_one():
    model = {"weight": values(3, 6, 5), "bias": values(3, 6)}
    like = {"kernel": np.zeros((3, 5, 6)), "bias": np.zeros((3, 6))}
    params = there_and_back(model, like)
    assert_array_equal(params["kernel"], model["weight"].transpose(0, 2, 1))
    assert_array_equal(params["bias"], model["bias"])
