"""What a tail costs inside jitted programs on ranks that share a GPU; compare with raw replay.

    python jax_bench.py [--tokens M...]       started by `jax_latent_tail.launch.run`
    python jax_bench.py --processes N         starts them, under MPS

Raw replay of the same kernel: python -m jax_latent_tail.kernels.bench

Columns, us per layer, the best of several rounds over all ranks' clocks:
  scan       a scan of bare tails as XLA runs it by default
  scan+      the same with latent_tail.compiler_options()
  slope N    (368 layers - 184 layers) / 184 of a scan with unroll=N: without the cost of a run
  layer      a captured body of two GEMMs and elementwise work, by default
  layer+     the same with latent_tail.compiler_options()
  tail       what the tail adds to `layer`: the same body with and without it
  tail+      what it adds to `layer+`
  moe_tail N (2 N layers - N layers) / N of moe_tails in one program without a loop; N stripes, each
             an array of its own
  gemm N     the same where the up-projection is a GEMM of XLA, and the gather a call of its own
  floor      reading all ranks' stripes of one layer from the memory of the shared GPU
"""

import argparse
import contextlib
import sys
import time

import jax
import jax.numpy as jnp
import jax_ranks as ranks
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import launch, spec
from jax_latent_tail.kernels import processes
from jax_latent_tail.kernels.bench import MEMORY_BYTES_PER_US

LAYERS = 184
MOE_LAYERS = 24


def chain(with_tail, with_gemm, length, unroll):
    def scan(rows, shared, gamma, down, up):
        def layer(rows, _):
            if with_gemm:
                hidden = jnp.tanh(jnp.dot(rows, down, preferred_element_type=jnp.float32))
                out = jnp.dot(hidden.astype(rows.dtype), up, preferred_element_type=jnp.float32)
                rows = (out + jnp.sin(rows.astype(jnp.float32))).astype(jnp.bfloat16)
            if with_tail:
                latent, _ = ranks.tail(rows, shared, gamma)
                rows = lax.pcast(latent, "tp", to="varying")
            return rows, None

        return lax.scan(layer, rows, length=length, unroll=unroll)[0]

    return scan


def moe_chain(turns):
    """`turns` times a layer for each stripe, one after the other."""

    def layers(rows, shared, gamma, stripes, x):
        for w_up in stripes * turns:
            # Ties the calls to the layer before, or XLA would make equal ones once.
            x, of_rows, of_shared = lax.optimization_barrier((x, rows, shared))
            x = latent_tail.moe_tail(
                of_rows, of_shared, gamma, w_up, x, axis_name="tp", implementation="cuda"
            )
        return x

    return layers


@contextlib.contextmanager
def projecting_up_to(most):
    """What is lowered in it has a call that computes the up-projection of so many tokens."""
    real, spec.most_projected_tokens = spec.most_projected_tokens, lambda *sizes: most
    try:
        yield
    finally:
        spec.most_projected_tokens = real


def seconds(step, arguments, rounds=40):
    for _ in range(4):
        jax.block_until_ready(step(*arguments))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        best = min(best, time.perf_counter() - start)
    return best


def measure_tail(num_tokens):
    inputs = ranks.inputs_of(0, num_tokens, draw=ranks.normal)
    rng = np.random.default_rng(0)
    # Small enough that the ranks, which share the GPU, do not wait for each other's memory traffic.
    weights = [ranks.normal(rng, *shape) for shape in ((ranks.L, 256), (256, ranks.L))]
    arguments = (*ranks.operands(inputs), *(ranks.put(weight, P()) for weight in weights))

    def time_of(with_tail=True, with_gemm=False, length=LAYERS, unroll=1, options=None):
        step = ranks.program(
            chain(with_tail, with_gemm, length, unroll),
            (ranks.SHARDED, ranks.SHARDED, P(), P(), P()),
            ranks.SHARDED,
            compiler_options=options,
        )
        return seconds(step, arguments) * 1e6

    def slope(unroll):
        longer = time_of(length=2 * LAYERS, unroll=unroll)
        return (longer - time_of(length=LAYERS, unroll=unroll)) / LAYERS

    plus = latent_tail.compiler_options()
    layer = time_of(with_gemm=True) / LAYERS
    layer_plus = time_of(with_gemm=True, options=plus) / LAYERS
    without = time_of(with_tail=False, with_gemm=True) / LAYERS
    without_plus = time_of(with_tail=False, with_gemm=True, options=plus) / LAYERS
    return {
        "scan": time_of() / LAYERS,
        "scan+": time_of(options=plus) / LAYERS,
        **{f"slope {unroll}": slope(unroll) for unroll in (8, 23, 46)},
        "layer": layer,
        "layer+": layer_plus,
        "tail": layer - without,
        "tail+": layer_plus - without_plus,
    }


def measure_moe_tail(num_tokens):
    inputs = ranks.inputs_of(0, num_tokens, draw=ranks.normal)
    rng, columns = np.random.default_rng(0), P(None, "tp")

    def stripe(layer):
        key = jax.random.fold_in(jax.random.key(layer), lax.axis_index("tp"))
        shape = (ranks.L, ranks.H // jax.device_count())
        return jax.random.normal(key, shape, jnp.bfloat16) / 64

    make = ranks.program(stripe, P(), columns)
    arguments = (
        *ranks.operands(inputs),
        [make(ranks.put(np.int32(layer), P())) for layer in range(MOE_LAYERS)],
        ranks.put(ranks.normal(rng, num_tokens, ranks.H), P()),
    )

    def time_of(turns):
        step = ranks.program(
            moe_chain(turns),
            (ranks.SHARDED, ranks.SHARDED, P(), columns, P()),
            P(),
            compiler_options=latent_tail.compiler_options(),
        )
        return seconds(step, arguments) * 1e6

    def slope():
        return (time_of(2) - time_of(1)) / MOE_LAYERS

    with projecting_up_to(spec.MOST_PROJECTED_TOKENS):  # whatever would be chosen
        in_one = slope()
    with projecting_up_to(0):
        apart = slope()
    return {
        f"moe_tail {MOE_LAYERS}": in_one,
        f"gemm {MOE_LAYERS}": apart,
        "floor": 2 * ranks.L * ranks.H / MEMORY_BYTES_PER_US,
    }


MEASURES = {"tail": measure_tail, "moe_tail": measure_moe_tail}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--processes", type=int)
    arguments = parser.parse_args()
    if arguments.processes and not launch.is_member():
        with processes.mps() as daemon:
            env = {name: value for name, value in daemon.items() if value is not None}
            env |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            texts = launch.run(sys.argv, arguments.processes, timeout_s=300, env=env)
        print("\n".join(line for line in texts[0].splitlines() if line.startswith("|")))
        return
    launch.initialize(share_gpus=True)
    for num_tokens in arguments.tokens:
        times = {}
        for what in arguments.what:
            times |= MEASURES[what](num_tokens)
        if num_tokens == arguments.tokens[0]:
            print(f"| N | M | {' | '.join(times)} |\n|---|---|{'---|' * len(times)}")
        figures = " | ".join(f"{value:.2f}" for value in times.values())
        print(f"| {jax.device_count()} | {num_tokens} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
