"""Random jitted programs of tails among other operations, compared with NumPy, exactly.

All values are small integers, so that no result depends on the order of a sum, and a summand that
is missing, stale or another call's shows. Run as a program by the tests beside it:

    random_programs.py FIRST_SEED COUNT [REPEATS]
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTHS = {1: (16, 32), 2: (16, 32), 4: (32, 64), 8: (64, 64)}  # L, H by ranks


def wrap(x, np=np):
    """Back to -4..3."""
    return np.mod(x + 4, 8) - 4


class Generator:
    """Draws a program: nested tuples (operation, ...) on values [M, H] of each rank."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def program(self):
        """Independent branches, some of which meet at the end."""
        branches = self.rng.integers(1, 7)
        return tuple(self.chain(2) for _ in range(branches))

    def chain(self, depth):
        return tuple(self.operation(depth) for _ in range(self.rng.integers(1, 5)))

    def operation(self, depth):
        kinds = ["tail", "tail", "finalize", "scatter", "gather", "gather_add", "moe_tail"]
        kinds += ["matmul", "psum"]
        if depth:
            kinds += ["scan", "cond"]
        kind = str(self.rng.choice(kinds))
        if kind in ("matmul", "finalize", "gather_add", "moe_tail"):
            return kind, int(self.rng.integers(1 << 30))
        if kind == "scan":
            return kind, int(self.rng.integers(1, 6)), self.chain(depth - 1)
        if kind == "cond":
            return kind, self.chain(depth - 1), self.chain(depth - 1)
        return (kind,)


def matrix(seed, height, width):
    return np.random.default_rng(seed).integers(-1, 2, (height, width)).astype(np.float32)


def residual(seed, num_tokens, width):
    return np.random.default_rng(seed + 1).integers(-4, 4, (num_tokens, width)).astype(np.float32)


def owned(tp, width):
    """[tp, width]: each column is one rank's."""
    return np.arange(width) % tp == np.arange(tp)[:, None]


def slots(seed, num_tokens):
    """Weights and indices [M, 2] into the rows x, -x; about a third of the slots skipped."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 4, (num_tokens, 2)).astype(np.float32)
    indices = rng.permutation(2 * num_tokens).reshape(num_tokens, 2).astype(np.int32)
    indices[rng.random(indices.shape) < 1 / 3] = -1
    return weights, indices


# What it means: `values` [tp, M, H].


def interpret(chain, values, flag):
    for operation in chain:
        values = step(operation, values, flag)
    return values


def step(operation, values, flag):
    kind, *arguments = operation
    tp, num_tokens, width = values.shape
    latent_dim, _ = WIDTHS[tp]
    total = values.sum(axis=0)
    if kind == "matmul":
        return wrap(values @ matrix(arguments[0], width, width))
    if kind == "psum":
        return wrap(np.broadcast_to(total, values.shape))
    if kind == "scan":
        for _ in range(arguments[0]):
            values = interpret(arguments[1], values, flag)
        return values
    if kind == "cond":
        return interpret(arguments[0 if flag else 1], values, flag)
    if kind in ("gather", "gather_add"):
        gathered = values[:, :, : width // tp].swapaxes(0, 1).reshape(num_tokens, width)
        if kind == "gather_add":
            gathered = gathered + residual(arguments[0], num_tokens, width)
        return wrap(gathered + values)
    if kind == "moe_tail":
        # Each column of the sum is one rank's 1 or -1, so that normalised rows are the same.
        signs = np.where(values[:, :, :latent_dim] < 0, -1, 1)
        latent = (signs * owned(tp, latent_dim)[:, None]).sum(axis=0)
        output = latent @ matrix(arguments[0], latent_dim, width) + total
        return wrap(output + residual(arguments[0], num_tokens, width) + values)
    shards = total.reshape(num_tokens, tp, -1).swapaxes(0, 1)
    scattered = np.tile(shards, tp)
    if kind == "scatter":
        return wrap(scattered)
    routed = values[:, :, :latent_dim]
    if kind == "finalize":
        weights, indices = slots(arguments[0], num_tokens)
        permuted = np.concatenate([routed, -routed, np.zeros_like(routed[:, :1])], axis=1)
        routed = (permuted[:, indices] * (weights * (indices >= 0))[None, :, :, None]).sum(axis=2)
    latent = np.sign(routed.sum(axis=0))
    return wrap(np.tile(latent, width // latent_dim) + scattered)


# The same in JAX, within shard_map: a rank's value [M, H].


def trace(chain, value, flag):
    for operation in chain:
        value = trace_step(operation, value, flag)
    return value


def trace_step(operation, value, flag):
    import jax.numpy as jnp
    from jax import lax

    import jax_latent_tail as latent_tail

    kind, *arguments = operation
    num_tokens, width = value.shape
    tp = lax.axis_size("tp")
    latent_dim, _ = WIDTHS[tp]

    def varying(x):
        return lax.pcast(x, "tp", to="varying")

    if kind == "matmul":
        weights = jnp.asarray(matrix(arguments[0], width, width), jnp.bfloat16)
        product = jnp.matmul(value, weights, preferred_element_type=jnp.float32)
        return wrap(product, jnp).astype(jnp.bfloat16)
    if kind == "psum":
        return varying(wrap(lax.psum(value.astype(jnp.float32), "tp"), jnp).astype(jnp.bfloat16))
    if kind == "scan":
        return lax.scan(
            lambda carry, _: (trace(arguments[1], carry, flag), None), value, length=arguments[0]
        )[0]
    if kind == "cond":
        return lax.cond(
            flag,
            lambda x: trace(arguments[0], x, flag),
            lambda x: trace(arguments[1], x, flag),
            value,
        )
    options = {"axis_name": "tp", "implementation": "cpu"}
    if kind == "scatter":
        shard = latent_tail.reduce_scatter(value, **options)
        return wrap(jnp.tile(shard, tp), jnp)
    if kind in ("gather", "gather_add"):
        added = ()
        if kind == "gather_add":
            added = (jnp.asarray(residual(arguments[0], num_tokens, width), jnp.bfloat16),)
        gathered = latent_tail.all_gather_add(value[:, : width // tp], *added, **options)
        return wrap(varying(gathered) + value, jnp)
    routed = value[:, :latent_dim]
    gamma = jnp.ones(latent_dim, jnp.bfloat16)
    if kind == "moe_tail":
        rank = lax.axis_index("tp")
        signs = jnp.where(routed < 0, -1, 1) * jnp.asarray(owned(tp, latent_dim))[rank]
        weights = matrix(arguments[0], latent_dim, width).reshape(latent_dim, tp, -1)
        output = latent_tail.moe_tail(
            signs.astype(jnp.bfloat16),
            value,
            gamma,
            jnp.asarray(weights, jnp.bfloat16)[:, rank],
            jnp.asarray(residual(arguments[0], num_tokens, width), jnp.bfloat16),
            **options,
        )
        return wrap(varying(output) + value, jnp)
    if kind == "finalize":
        weights, indices = slots(arguments[0], num_tokens)
        permuted = jnp.concatenate([routed, -routed, jnp.full_like(routed[:1], jnp.nan)])
        routed = latent_tail.Unfinalized(
            permuted, jnp.asarray(weights, jnp.bfloat16), jnp.asarray(indices)
        )
    latent, shard = latent_tail.fused(routed, value, gamma, **options)
    signs = varying(jnp.tile(jnp.sign(latent), width // latent_dim))
    return wrap(signs + jnp.tile(shard, tp), jnp)


def check(seed, mesh, repeats):
    """Compiles the program of this seed and compares every run with NumPy."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from ml_dtypes import bfloat16

    tp = mesh.devices.size
    generator = Generator(seed)
    program = generator.program()
    num_tokens = int(generator.rng.integers(1, 12))
    _, width = WIDTHS[tp]

    def body(values, flag):
        value = values.reshape(values.shape[1:])
        results = [trace(chain, value, flag) for chain in program]
        return jax.numpy.stack(results)[:, None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(None, "tp")))
    for repeat in range(repeats):
        shape = (tp, num_tokens, width)
        values = generator.rng.integers(-4, 4, shape).astype(np.float32)
        flag = bool(generator.rng.integers(2))
        placed = [
            jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index]
            )
            for x, spec in ((values.astype(bfloat16), P("tp")), (np.asarray(flag), P()))
        ]
        results = run(*placed)
        expected = np.stack([interpret(chain, values, flag) for chain in program])
        for part in results.addressable_shards:
            actual = np.asarray(part.data, np.float32)
            np.testing.assert_array_equal(
                actual, expected[part.index], err_msg=f"seed {seed}, run {repeat}"
            )


def main():
    from jax_latent_tail import launch

    launch.initialize()
    import jax
    from harness import make_mesh

    first, count, repeats = (int(text) for text in (*sys.argv[1:], "4")[:3])
    mesh = make_mesh((jax.device_count(),))
    for seed in range(first, first + count):
        check(seed, mesh, repeats)
        print(f"seed {seed}", flush=True)
    print(f"{count} programs exact")


if __name__ == "__main__":
    main()
