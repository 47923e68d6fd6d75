"""One of two processes: dispatches a long program, and the second ends at once.

python leaving.py {cpu,cuda}        started by `jax_latent_tail.launch.run`
"""

import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch

IMPLEMENTATION = sys.argv[1]
COLUMNS = 3584 if IMPLEMENTATION == "cuda" else 256

launch.initialize(share_gpus=True)
mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))


def scan(x):
    def layer(x, _):
        y = latent_tail.all_gather_add(x, axis_name="tp", implementation=IMPLEMENTATION)
        return lax.pcast(y[:, :COLUMNS] + y[:, COLUMNS:], "tp", to="varying") / 2, None

    return lax.scan(layer, x, length=5000)[0]


def part(index):
    return jnp.ones((8, COLUMNS), jnp.bfloat16)[index]


ones = jax.make_array_from_callback((8, COLUMNS), jax.NamedSharding(mesh, P("tp")), part)
step = jax.jit(jax.shard_map(scan, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
step = step.lower(ones).compile()
if jax.process_index() == 0:
    time.sleep(2)  # the other is about to end, with all of its calls before it
y = step(ones)
if jax.process_index() == 0:
    print("all ones:", bool((y.addressable_data(0) == 1).all()))
