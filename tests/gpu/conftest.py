"""GPU tests need a CUDA device, cuda-bindings and cubins (see run.sh); elsewhere they skip."""

import os

import pytest


def _missing() -> str:
    try:
        from cuda.bindings import driver

        status = driver.cuInit(0)[0]
    except Exception as error:  # not installed, or installed without a driver
        return f"no CUDA driver: {error}"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"no CUDA device: {status.name}"
    return ""


MISSING = _missing()


def pytest_configure(config):
    if MISSING and os.environ.get("JAX_LATENT_TAIL_REQUIRE_GPU"):
        raise pytest.UsageError(f"GPU tests cannot run: {MISSING}")


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if MISSING and str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def device():
    from jax_latent_tail.kernels import harness

    return harness.Device()


@pytest.fixture(scope="session")
def load(device):
    """Loads a variant by the parts of its key; all are loaded once."""
    from jax_latent_tail.kernels import harness, store
    from jax_latent_tail.kernels.variant import KernelVariant, arch_for

    loaded = {}

    def get(tp, latent=3584, hidden=7168, top_k=0, fp32_internal=False, trigger=False):
        variant = KernelVariant(
            arch_for(*device.capability), tp, latent, hidden, top_k, fp32_internal, trigger=trigger
        )
        if variant not in loaded:
            loaded[variant] = harness.Loaded(store.find(variant))
        return loaded[variant]

    return get
