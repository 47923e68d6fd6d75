"""`import jax_latent_tail` is light: no back end, no CUDA, no compiler."""

import subprocess
import sys
import textwrap

import pytest

import jax_latent_tail

PROGRAM = """
    import sys
    import jax_latent_tail as latent_tail
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
    heavy = {"cutlass", "cuda", "cuda.bindings", "tqdm", "platformdirs"}
    heavy |= {f"jax_latent_tail.{name}" for name in ("bench", "launch")}
    kernels = ("collective", "export", "harness", "protocol", "ptx")
    heavy |= {f"jax_latent_tail.kernels.{name}" for name in kernels}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


@pytest.mark.smoke
def test_import_starts_no_backend_and_loads_nothing_heavy():
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_the_public_names_are_there():
    for name in jax_latent_tail.__all__:
        assert hasattr(jax_latent_tail, name)
    public = {n for n in vars(jax_latent_tail) if not n.startswith("_")}
    modules = {"api", "checks", "choice", "communicator", "errors", "lifecycle", "native"}
    modules |= {"primitive", "reference", "spec", "version"}
    others = {n for n in public - set(jax_latent_tail.__all__) if n not in modules}
    assert others <= {"bench", "launch", "kernels"}
