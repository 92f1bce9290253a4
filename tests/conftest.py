"""Eight CPU devices, strict dtype promotion, quick compilation; all set before JAX starts."""

import gc

import xla

xla.compile_quickly()

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A GPU that happens to be there is used; the replicas are CPU devices otherwise.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example of a shape compiles, so a deadline would time the compiler; and a gate that
# lands or refuses work must not depend on the day's random seeds.
settings.register_profile("jaxcomp", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("jaxcomp")


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module():
    """Compiled programs and their constants are gigabytes by the end of a suite that keeps them."""
    yield
    jax.clear_caches()
    gc.collect()
