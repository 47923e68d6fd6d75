"""Inputs of all ranks, and the public operation run on them over CPU devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail


def make_mesh(shape, names=("tp",), devices=None, axis_type=AxisType.Auto):
    devices = jax.devices() if devices is None else devices
    grid = np.array(devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(grid, names, axis_types=(axis_type,) * len(names))


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(bfloat16)


def spread(rng, *shape):
    """Small values among large ones that cancel exactly, so that the order of a sum shows."""
    small = np.ldexp(rng.standard_normal(shape, np.float32), rng.integers(-8, 8, shape))
    large = rng.choice(np.float32([-(2.0**20), 2.0**20]), shape)
    return np.where(rng.random(shape) < 0.5, small, large).astype(bfloat16)


@dataclasses.dataclass
class Inputs:
    """What the ranks of one group hold, stacked: the first axis is the rank."""

    shared: np.ndarray  # [tp, M, H]
    gamma: np.ndarray  # [L]
    rows: np.ndarray  # [tp, M, L], or [tp, P, L] to be finalized
    weights: np.ndarray | None = None  # [tp, M, K]
    indices: np.ndarray | None = None  # [tp, M, K]

    @property
    def tp(self):
        return len(self.shared)

    @property
    def routed(self):
        """The routed argument for shard_map, ranks stacked into the token dimension."""
        if self.indices is None:
            return flat(self.rows)
        return latent_tail.Unfinalized(flat(self.rows), flat(self.weights), flat(self.indices))


def flat(stacked):
    return jnp.asarray(stacked.reshape(-1, stacked.shape[-1]))


def random_inputs(
    seed, tp, num_tokens, latent_dim, hidden_dim, *, top_k=None, num_rows=None, draw=spread
):
    rng = np.random.default_rng(seed)
    shared = draw(rng, tp, num_tokens, hidden_dim)
    gamma = normal(rng, latent_dim)
    if top_k is None:
        return Inputs(shared, gamma, draw(rng, tp, num_tokens, latent_dim))
    num_rows = num_tokens * top_k if num_rows is None else num_rows
    # About a third of the slots belong to other ranks' experts: any negative index says so.
    indices = rng.integers(0, max(num_rows, 1), (tp, num_tokens, top_k), np.int32)
    foreign = (rng.random(indices.shape) < 1 / 3) | (num_rows == 0)
    indices[foreign] = rng.choice([-1, -2, -7, np.iinfo(np.int32).min], foreign.sum())
    rows = draw(rng, tp, num_rows, latent_dim)
    for rank in range(tp):
        unused = np.setdiff1d(np.arange(num_rows), indices[rank])
        rows[rank, unused] = np.nan
    return Inputs(shared, gamma, rows, normal(rng, tp, num_tokens, top_k), indices)


def fused(inputs, mesh=None, **options):
    """Runs `latent_tail.fused` jitted; returns each rank's latent [tp, M, L] and shard."""
    mesh = make_mesh((inputs.tp,)) if mesh is None else mesh
    axis_name = mesh.axis_names[0]
    options.setdefault("max_tokens", max(128, inputs.shared.shape[1]))

    def tail(routed, shared, gamma):
        return latent_tail.fused(routed, shared, gamma, axis_name=axis_name, **options)

    program = jax.jit(
        jax.shard_map(
            tail,
            mesh=mesh,
            in_specs=(P(axis_name), P(axis_name), P()),
            out_specs=(P(), P(None, axis_name)),
        )
    )
    latent, shard = program(inputs.routed, flat(inputs.shared), jnp.asarray(inputs.gamma))
    shards = (
        np.asarray(shard)
        .reshape(shard.shape[0], inputs.tp, shard.shape[1] // inputs.tp)
        .swapaxes(0, 1)
    )
    return per_rank(latent, mesh), shards


def per_rank(replicated, mesh):
    """Each device's own copy of an array that should be the same on all, in mesh order."""
    copies = {copy.device: np.asarray(copy.data) for copy in replicated.addressable_shards}
    return np.stack([copies[device] for device in mesh.devices.flat])
