"""A process that ends with calls under way still takes its part in them."""

from pathlib import Path

from jax_latent_tail import launch

PROGRAM = Path(__file__).with_name("leaving.py")


def test_the_others_get_their_results():
    env = {"JAX_PLATFORMS": "cpu", "JAX_LATENT_TAIL_DEADLINE": "20"}
    texts = launch.run([str(PROGRAM), "cpu"], 2, timeout_s=100, env=env)
    assert "all ones: True" in texts[0], texts
