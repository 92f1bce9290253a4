"""Eight CPU devices, strict dtype promotion; both must be set before JAX starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
