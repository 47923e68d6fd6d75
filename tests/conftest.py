"""Eight CPU devices for every test of this process, set before JAX starts."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")


@pytest.fixture(params=["xla", "cpu"])
def implementation(request, monkeypatch):
    """Every call of the test on plain collectives, and then on the native back end."""
    from jax_latent_tail import choice

    real = choice.choose

    def choose(platform, spec, *arguments, insisted=None, **options):
        if not spec.projects:  # that is a call on GPUs only
            insisted = insisted or request.param
        return real(platform, spec, *arguments, insisted=insisted, **options)

    monkeypatch.setattr(choice, "choose", choose)
    return request.param
