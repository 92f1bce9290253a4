"""Eight CPU devices, strict dtype promotion; both must be set before JAX starts."""

import jax
from hypothesis import settings

# A GPU that happens to be there is used; the replicas are CPU devices otherwise.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example of a shape compiles, so a deadline would time the compiler; and a gate that
# lands or refuses work must not depend on the day's random seeds.
settings.register_profile("jaxcomp", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("jaxcomp")
