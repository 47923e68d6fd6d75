"""The contract of the tail in plain JAX collectives.

`tail` is what every implementation must reproduce: bit for bit in the reduced sums, within one
bf16 ulp in the normalised rows. It is the default lowering of the primitive on every platform.
`unfused` is the same mathematics as anyone would write it, without promises about bits: it is
differentiated in place of `tail`, and it is the pipeline that the benchmarks compare with.

What makes `tail` exact under XLA, which folds `0 + x`, keeps bf16 products in fp32 and may
reorder a reduction: sums over ranks and slots are unrolled additions, the sign of a zero sum is
set by a select, and every rounding is a `reduce_precision`, which XLA never removes.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_latent_tail.spec import AxisName, Operands, TailSpec

Implementation = Callable[[TailSpec, AxisName, Operands], list[jax.Array]]

# Up to here every rank receives all contributions and norms all rows itself: one collective
# fewer, which counts for few tokens on accelerators. Above, each rank sums and norms a tp-th of the
# rows, which CPU devices that share cores would prefer from about M = tp on (docs/benchmarks.md).
ONE_SHOT_MAX_TOKENS = 8


def _with_auto_axes(implementation: Implementation) -> Implementation:
    """Leaves explicit axes outside the group to XLA, for the steps have no unambiguous types.

    Only the tokens of the results stay explicitly sharded, as those of the inputs are.
    """

    @functools.wraps(implementation)
    def wrapped(spec: TailSpec, axis_name: AxisName, operands: Operands) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = tuple(name for name, axis_type in types if axis_type == AxisType.Explicit)
        if not explicit:
            return implementation(spec, axis_name, operands)
        tokens = (spec.routed_tokens(operands), operands.shared)
        automatic = jax.sharding.auto_axes(
            lambda *arrays: implementation(spec, axis_name, spec.operands(*arrays)),
            axes=explicit,
            out_sharding=[P(jax.typeof(x).sharding.spec[0], None) for x in tokens if x is not None],
        )
        return automatic(*operands.present())

    return wrapped


@_with_auto_axes
def tail(spec: TailSpec, axis_name: AxisName, operands: Operands) -> list[jax.Array]:
    """Computes the tail under the contract, inside shard_map.

    Args:
      spec: the call.
      axis_name: mesh axes of the group, major first.
      operands: this rank's arrays, as `spec` says.

    Returns:
      latent [M, L] bf16, equal on all ranks, where the spec has a routed half; then this rank's
      shard [M, S] bf16 where it has a shared one.
    """
    outputs = []
    if spec.latent_dim is not None:
        if spec.top_k is None:
            contribution = operands.rows
        else:
            contribution = round_to_bf16(_finalize(operands)).astype(jnp.bfloat16)
        one_shot = contribution.shape[0] <= ONE_SHOT_MAX_TOKENS
        reduce_and_norm = _all_reduce_one_shot if one_shot else _all_reduce_two_shot
        outputs.append(reduce_and_norm(spec, axis_name, contribution, operands.gamma))
    if spec.hidden_dim is not None:
        slices = operands.shared.reshape(-1, spec.tp, spec.shard_dim).swapaxes(0, 1)
        partials = lax.all_to_all(slices, axis_name, split_axis=0, concat_axis=0)
        outputs.append(round_to_bf16(_positive_zero(_ordered_sum(partials))).astype(jnp.bfloat16))
    return outputs


@_with_auto_axes
def unfused(spec: TailSpec, axis_name: AxisName, operands: Operands) -> list[jax.Array]:
    """psum, RMSNorm and psum_scatter in fp32; arguments and results as for `tail`."""
    outputs = []
    if spec.latent_dim is not None:
        contribution = _fp32(operands.rows) if spec.top_k is None else _finalize(operands)
        x = lax.psum(contribution, axis_name)
        inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + spec.eps)
        outputs.append((x * inverse_rms * _fp32(operands.gamma)[None, :]).astype(jnp.bfloat16))
    if spec.hidden_dim is not None:
        z = lax.psum_scatter(_fp32(operands.shared), axis_name, scatter_dimension=1, tiled=True)
        outputs.append(z.astype(jnp.bfloat16))
    return outputs


def all_gather_add(
    axis_name: AxisName, x: jax.Array, residual: jax.Array | None = None
) -> jax.Array:
    """The columns [M, S] of all ranks side by side [M, tp * S], plus the residual in fp32."""
    gathered = lax.all_gather(x, axis_name, axis=1, tiled=True)
    if residual is None:
        return gathered
    return round_to_bf16(_fp32(gathered) + _fp32(residual)).astype(jnp.bfloat16)


def unfused_all_gather_add(
    axis_name: AxisName, x: jax.Array, residual: jax.Array | None = None
) -> jax.Array:
    """The same as a psum, to be differentiated: an all_gather's result would vary by its type."""
    num_tokens, columns = x.shape
    total = jnp.zeros((num_tokens, lax.axis_size(axis_name) * columns), jnp.float32)
    first_column = lax.axis_index(axis_name) * columns
    total = lax.psum(lax.dynamic_update_slice(total, _fp32(x), (0, first_column)), axis_name)
    if residual is not None:
        total = total + _fp32(residual)
    return total.astype(jnp.bfloat16)


def unfused_up_gather_add(
    axis_name: AxisName,
    latent: jax.Array,
    w_up: jax.Array,
    shard: jax.Array,
    residual: jax.Array | None = None,
) -> jax.Array:
    """The up-projection and the gather, to be differentiated."""
    columns = jnp.dot(latent, w_up, preferred_element_type=jnp.float32) + _fp32(shard)
    return unfused_all_gather_add(axis_name, columns, residual)


def up_projection(latent: jax.Array, w_up: jax.Array, shard: jax.Array) -> jax.Array:
    """latent [M, L] @ w_up [L, S] + shard [M, S] in fp32, with one rounding to bf16."""
    up = jnp.dot(latent, w_up, preferred_element_type=jnp.float32)
    return round_to_bf16(up + _fp32(shard)).astype(jnp.bfloat16)


def _finalize(operands: Operands) -> jax.Array:
    """The fp32 sums [M, L] of weighted expert rows, over slots in ascending order."""
    terms = []
    for index, weight in zip(operands.indices.T, operands.weights.T, strict=True):
        # Both factors are cleared, so that neither value nor gradient sees a skipped slot's.
        skipped = (index < 0)[:, None]
        row = jnp.where(skipped, 0, _take_rows(operands.rows, index))
        weight = jnp.where(skipped, 0, weight[:, None])
        terms.append(_fp32(row) * _fp32(weight))
    return _ordered_sum(terms)


def _take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], where a row that does not exist is NaN: a caller's error must show."""
    return rows.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _all_reduce_one_shot(
    spec: TailSpec, axis_name: AxisName, contribution: jax.Array, gamma: jax.Array
) -> jax.Array:
    contributions = lax.all_gather(contribution, axis_name)
    return _rms_norm(spec, _positive_zero(_ordered_sum(contributions)), gamma)


def _all_reduce_two_shot(
    spec: TailSpec, axis_name: AxisName, contribution: jax.Array, gamma: jax.Array
) -> jax.Array:
    num_tokens = contribution.shape[0]
    padding = -num_tokens % spec.tp
    padded = jnp.pad(contribution, ((0, padding), (0, 0)))
    blocks = padded.reshape(spec.tp, -1, spec.latent_dim)
    contributions = lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
    own_rows = _rms_norm(spec, _positive_zero(_ordered_sum(contributions)), gamma)
    return lax.all_gather(own_rows, axis_name, tiled=True)[:num_tokens]


def _rms_norm(spec: TailSpec, s: jax.Array, gamma: jax.Array) -> jax.Array:
    """RMSNorm of fp32 rows s [..., L] with the roundings of the contract."""
    if spec.fp32_internal:
        x, square = s, s * s
    else:
        x = round_to_bf16(s)
        square = round_to_bf16(x * x)
    mean_square = jnp.sum(square, axis=-1, keepdims=True) / s.shape[-1]
    y = x * lax.rsqrt(mean_square + spec.eps) * _fp32(gamma)[None, :]
    return round_to_bf16(y).astype(jnp.bfloat16)


def _ordered_sum(terms: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """The fp32 sum of terms[0], terms[1], ... in this order."""
    total = _fp32(terms[0])
    for index in range(1, len(terms)):
        total = total + _fp32(terms[index])
    return total


def _positive_zero(total: jax.Array) -> jax.Array:
    """What the sum would be from +0: only terms that are all -0 make a difference."""
    return jnp.where(total == 0, 0, total)


def round_to_bf16(x: jax.Array) -> jax.Array:
    """fp32 values rounded to bf16, still fp32: a plain pair of casts XLA may drop."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
