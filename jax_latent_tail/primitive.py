"""The JAX primitive of the tail: types, batching and lowering.

The latent output loses the group's axes from its varying type, the shard keeps them: so
shard_map's check accepts `out_specs=P()` for the one and refuses it for the other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

from jax_latent_tail import reference
from jax_latent_tail.errors import ArgumentValueError
from jax_latent_tail.reference import AxisName
from jax_latent_tail.spec import Operands, TailSpec

latent_tail_p = Primitive("latent_tail")
latent_tail_p.multiple_results = True


def bind(spec: TailSpec, axis_name: AxisName, operands: Operands) -> list[jax.Array]:
    """Runs the tail; arguments and results as for `reference.tail`."""
    return latent_tail_p.bind(*operands.present(), spec=spec, axis_name=axis_name)


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which x may differ; empty under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def vary_over_group(axis_name: AxisName, operands: Operands) -> Operands:
    """Casts the partials of ranks that all hold the same to vary, as summands do."""
    if not varying_axes(lax.axis_index(axis_name)):  # check_vma=False: nothing is typed
        return operands

    def cast(x: Any) -> Any:
        missing = tuple(name for name in axis_name if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying")

    partials = operands._replace(gamma=None)
    return jax.tree.map(cast, partials)._replace(gamma=operands.gamma)


@latent_tail_p.def_abstract_eval
def _abstract_eval(*avals: Any, spec: TailSpec, axis_name: AxisName) -> list[Any]:
    def result(tokens: Any, columns: int, varying: frozenset[str]) -> Any:
        return tokens.update(
            shape=(tokens.shape[0], columns),
            dtype=jnp.dtype(jnp.bfloat16),
            sharding=tokens.sharding.update(spec=P(tokens.sharding.spec[0], None)),
            manual_axis_type=tokens.manual_axis_type.update(varying=varying),
        )

    operands = spec.operands(*avals)
    results = []
    if spec.latent_dim is not None:
        inputs = operands._replace(shared=None).present()
        varying = frozenset().union(*(x.manual_axis_type.varying for x in inputs))
        tokens = spec.routed_tokens(operands)
        results.append(result(tokens, spec.latent_dim, varying - set(axis_name)))
    if spec.hidden_dim is not None:
        shared = operands.shared
        results.append(result(shared, spec.shard_dim, shared.manual_axis_type.varying))
    return results


def _batch(
    axis_data: Any,
    arrays: Sequence[Any],
    dims: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
) -> tuple[list[jax.Array], list[int | None]]:
    """vmap: a batch of calls is one call with more tokens, for rows do not interact."""
    if axis_data.name in axis_name:
        raise ArgumentValueError(
            "axis_name", f"{axis_name}, of which vmap maps {axis_data.name!r}", "axes of shard_map"
        )
    if all(dim is None for dim in dims):
        outputs = bind(spec, axis_name, spec.operands(*arrays))
        return outputs, [None] * len(outputs)
    size = axis_data.size
    single = spec.operands(*arrays)
    is_batched = spec.operands(*(dim is not None for dim in dims))
    stacked = spec.operands(
        *(
            jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(arrays, dims, strict=True)
        )
    )

    if is_batched.gamma:  # rows with different gammas cannot share a call
        outputs = lax.map(
            lambda arrays: bind(spec, axis_name, spec.operands(*arrays)), stacked.present()
        )
        return outputs, [0] * len(outputs)

    flat = Operands(*(x if x is None else _merge_leading(x) for x in stacked))
    flat = flat._replace(gamma=single.gamma)
    if spec.top_k is not None:
        if is_batched.rows:
            flat = flat._replace(indices=_merge_leading(_indices_into_merged_rows(stacked)))
        else:
            flat = flat._replace(rows=single.rows)
    outputs = [y.reshape(size, y.shape[0] // size, y.shape[1]) for y in bind(spec, axis_name, flat)]
    return outputs, [0] * len(outputs)


def _merge_leading(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _indices_into_merged_rows(stacked: Operands) -> jax.Array:
    """Indices [B, M, K] of rows [B, P, L] as indices of rows [B * P, L]; invalid ones stay so."""
    size, num_rows, _ = stacked.rows.shape
    first_row = num_rows * jnp.arange(size, dtype=jnp.int32)[:, None, None]
    merged = jnp.where(stacked.indices < num_rows, stacked.indices + first_row, size * num_rows)
    return jnp.where(stacked.indices < 0, stacked.indices, merged)


batching.fancy_primitive_batchers[latent_tail_p] = _batch


def _plain(*arrays: jax.Array, spec: TailSpec, axis_name: AxisName) -> list[jax.Array]:
    return reference.tail(spec, axis_name, spec.operands(*arrays))


mlir.register_lowering(latent_tail_p, mlir.lower_fun(_plain, multiple_results=True))
