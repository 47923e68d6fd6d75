"""What the up-projection and the gather of one rank cost where it has the GPU to itself.

    python jax_stripe.py [--columns S...] [--tokens M...]

Ranks that share a GPU read each other's stripes too. Here one rank computes the columns of a stripe
as wide as those of a larger group (S = 896 of 7168 at tp 8), and gathers from nobody.

Columns, us per layer of a jitted program of 24 layers, each with a stripe of its own:
  one call        as `moe_tail` makes it for few tokens
  product, gather the same as XLA's product and `all_gather_add`
  memory          reading the stripe
"""

import argparse

import jax
import jax.numpy as jnp
import jax_ranks as ranks
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_bench import MOE_LAYERS, seconds

import jax_latent_tail as latent_tail
from jax_latent_tail import primitive, spec
from jax_latent_tail.kernels.bench import MEMORY_BYTES_PER_US


def layers(times):
    def run(latent, shard, x, *stripes):
        for w_up in stripes * times:
            # Ties the call to the layer before.
            x, of_latent, of_shard = lax.optimization_barrier((x, latent, shard))
            x = primitive.up_gather_add(
                ("tp",), of_latent, w_up, of_shard, x, implementation="cuda"
            )
        return x

    return run


def measure(columns, num_tokens, most_projected):
    spec.most_projected_tokens = lambda *sizes: most_projected
    key = jax.random.key(num_tokens)
    draw = jax.jit(lambda shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=0)
    stripes = [draw((ranks.L, columns)) / 64 for _ in range(MOE_LAYERS)]
    rows = draw((num_tokens, columns))
    arguments = (draw((num_tokens, ranks.L)), rows, rows, *stripes)
    specs = (P(), P(None, "tp"), P(), *[P(None, "tp")] * MOE_LAYERS)

    def time_of(times):
        step = ranks.program(
            layers(times), specs, P(), compiler_options=latent_tail.compiler_options()
        )
        return seconds(step, arguments) * 1e6

    return (time_of(3) - time_of(1)) / (2 * MOE_LAYERS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", type=int, nargs="+", default=[896, 1792, 3584])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    arguments = parser.parse_args()
    most = spec.MOST_PROJECTED_TOKENS  # whatever the sizes
    print("| S | M | one call | product, gather | memory |\n|---|---|---|---|---|")
    for columns in arguments.columns:
        for num_tokens in arguments.tokens:
            one, two = (measure(columns, num_tokens, limit) for limit in (most, 0))
            memory = 2 * ranks.L * columns / MEMORY_BYTES_PER_US
            print(
                f"| {columns} | {num_tokens} | {one:.2f} | {two:.2f} | {memory:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
