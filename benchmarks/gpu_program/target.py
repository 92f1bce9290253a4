"""Makes a mesh of GPUs that are not present; XLA can compile for them.

XLA needs a description of the GPU: `h200.txtpb`, made from NVIDIA's data sheet and the table of
compute capabilities in the CUDA programming guide.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

AXIS = "data"
NEEDED = (
    "XLA's compiler for NVIDIA GPUs is not installed. Take an environment of its own (5.6 GB): "
    'pip install "jax[cuda12]" optax, or jax[cuda13]; no GPU and no driver are needed.'
)


def compiler_found() -> bool:
    """Returns whether a plugin for NVIDIA GPUs is installed; no GPU is necessary."""
    names = ("xla_cuda12", "xla_cuda13")
    try:
        return any(importlib.util.find_spec(f"jax_plugins.{name}") for name in names)
    except ModuleNotFoundError:
        return False


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """Makes a mesh of GPUs of one host along `AXIS`.

    Raises:
      RuntimeError: If the compiler is not installed; the message says what to install.
    """
    if not compiler_found():
        raise RuntimeError(NEEDED)
    # The plugin's own check asks for a driver. Registering its compiler looks for one too, and logs
    # that there is none.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    xla_bridge: Any = importlib.import_module("jax._src.xla_bridge")
    xla_bridge.discover_pjrt_plugins()
    description = Path(__file__).with_name("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=description, topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(topology, (devices,), (AXIS,))


def placed(tree: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """Places the shapes of a tree on a mesh; per-replica shapes get an axis of replicas.

    Args:
      tree: The shapes of one replica, also of a batch.
      specs: A PartitionSpec for each leaf of a state, or one for all leaves of another tree.
      mesh: The mesh.
    """
    of_state = not isinstance(specs, jax.P)
    if not of_state:
        specs = jax.tree.map(lambda _: specs, tree)

    def one(x: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
        shape = x.shape
        if tuple(spec):
            replicas = mesh.shape[AXIS]
            shape = (replicas, *shape) if of_state else (replicas * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, tree, specs)
