"""Fingerprints of trees: every flipped bit shows, and nothing else does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

TREE = {
    "float32": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "bfloat16": np.asarray(jnp.linspace(-1, 1, 5, dtype=jnp.bfloat16)),
    "int8": np.arange(-3, 4, dtype=np.int8),
    "bool": np.array([True, False]),
    "float64": np.linspace(0, 1, 3),
    "int64": np.array(2**40 + 1),
    "complex64": np.array([1 + 2j, -3j], np.complex64),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("name", [name for name in TREE if name not in ("bool", "empty")])
def test_every_flipped_bit_names_the_leaf(name):
    saved = jaxcomp.fingerprint(TREE)
    raw = TREE[name].tobytes()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        leaf = np.frombuffer(bytes(damaged), TREE[name].dtype).reshape(TREE[name].shape)
        with pytest.raises(jaxcomp.FingerprintMismatch) as found:
            jaxcomp.check_fingerprint(TREE | {name: leaf}, saved)
        assert f"These leaves are not what was saved: ['{name}']." in str(found.value)


def test_host_and_device_arrays_have_the_same_fingerprint():
    host = {name: leaf for name, leaf in TREE.items() if leaf.dtype.itemsize < 8}
    host |= {"complex64": TREE["complex64"], "count": 3}
    placed = jax.tree.map(jnp.asarray, host) | {"count": 3}
    assert jaxcomp.fingerprint(placed) == jaxcomp.fingerprint(host)
    jaxcomp.check_fingerprint(placed, jaxcomp.fingerprint(host))


def test_leaves_may_lie_on_different_devices():
    first, second = jax.devices()[:2]
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    host = {"w": np.arange(8.0, dtype=np.float32), "b": np.ones(3, np.int8), "step": 7}
    spread = jax.sharding.NamedSharding(mesh, jax.P("x"))
    placed = {"w": jax.device_put(host["w"], spread), "b": jax.device_put(host["b"], second)}
    placed |= {"step": 7, "key": jax.device_put(jax.random.key(0), first)}
    found = jaxcomp.fingerprint(placed)
    assert {name: value for name, value in found.items() if "key" not in name} == (
        jaxcomp.fingerprint(host)
    )


def test_what_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"\['name'\] is 'lm'. Leave these out"):
        jaxcomp.fingerprint({"name": "lm", "w": np.ones(2)})


def test_order_shape_and_dtype_count():
    x = np.arange(6, dtype=np.float32)
    others = (x[::-1], x.reshape(2, 3), x.view(np.int32), -x, np.zeros(6, np.float32))
    assert len({tuple(jaxcomp.fingerprint(y).values()) for y in (x, *others)}) == 6
    assert jaxcomp.fingerprint(np.float32(0)) != jaxcomp.fingerprint(np.float32(-0.0))


def test_missing_and_new_leaves_are_named():
    saved = jaxcomp.fingerprint({"a": 1, "b": 2.0})
    with pytest.raises(jaxcomp.FingerprintMismatch) as found:
        jaxcomp.check_fingerprint({"a": 1, "c": 2.0}, saved)
    assert "saved and are missing: ['b']. These were not saved: ['c']." in str(found.value)


def test_a_training_state_with_keys_and_no_leaves():
    params = {"w": jnp.ones((8, 4))}
    state = optax.adam(1e-3).init(params), jax.random.key(1), optax.EmptyState()
    saved = jaxcomp.fingerprint(state)
    jaxcomp.check_fingerprint(state, saved)
    with pytest.raises(jaxcomp.FingerprintMismatch):
        jaxcomp.check_fingerprint((state[0], jax.random.key(2), state[2]), saved)
    assert jaxcomp.fingerprint({}) == {}
