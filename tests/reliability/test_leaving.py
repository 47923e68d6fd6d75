"""A process that ends with calls under way still takes its part in them."""

from jax_latent_tail import launch

PROGRAM = """
import time
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
import jax_latent_tail as latent_tail
from jax_latent_tail import launch

launch.initialize()
mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))

def scan(x):
    def layer(x, _):
        y = latent_tail.all_gather_add(x, axis_name="tp", implementation="cpu")
        return lax.pcast(y[:, :256] + y[:, 256:], "tp", to="varying") / 2, None
    return lax.scan(layer, x, length=5000)[0]

step = jax.jit(jax.shard_map(scan, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
ones = jax.make_array_from_callback(
    (8, 256), jax.NamedSharding(mesh, P("tp")), lambda i: jnp.ones((8, 256), jnp.bfloat16)[i]
)
y = step(ones)
if jax.process_index() == 0:
    print("all ones:", bool((y.addressable_data(0) == 1).all()))
"""


def test_the_others_get_their_results(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {"JAX_PLATFORMS": "cpu", "JAX_LATENT_TAIL_DEADLINE": "20"}
    texts = launch.run([str(script)], 2, timeout_s=100, env=env)
    assert "all ones: True" in texts[0], texts
