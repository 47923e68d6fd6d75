"""The JAX primitives: types, differentiation, batching and lowering.

Results that are equal on all ranks of the group lose the group's axes from their varying type, the
others keep them: so shard_map's check accepts `out_specs=P()` for the former and refuses it for
the latter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_latent_tail import choice, native, reference
from jax_latent_tail.errors import ArgumentValueError
from jax_latent_tail.spec import DEFAULT_MAX_TOKENS, AxisName, Operands, TailSpec, gather_spec

latent_tail_p = Primitive("latent_tail")
latent_tail_p.multiple_results = True

all_gather_add_p = Primitive("all_gather_add")
up_gather_add_p = Primitive("up_gather_add")


def latent_tail(
    spec: TailSpec, axis_name: AxisName, operands: Operands, implementation: str | None = None
) -> list[jax.Array]:
    """Arguments and results as for `reference.tail`; `implementation` as for `api.fused`."""
    if spec.top_k is not None and operands.rows.shape[0] == 0:
        operands = operands._replace(rows=_one_row_of_nan(operands.rows))
    arrays = operands.present()
    params = {"spec": spec, "axis_name": axis_name, "implementation": implementation}
    types = _latent_tail_types(*map(jax.typeof, arrays), **params)
    if types[0].shape[0] == 0:
        return [_no_rows(result) for result in types]
    return latent_tail_p.bind(*arrays, **params)


def all_gather_add(
    axis_name: AxisName,
    *arrays: jax.Array,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """Arguments, x and perhaps a residual, and result as for `reference.all_gather_add`."""
    spec = gather_spec(lax.axis_size(axis_name), arrays[0].shape[1], len(arrays) > 1, max_tokens)
    params = {"spec": spec, "axis_name": axis_name, "implementation": implementation}
    result = _all_gather_add_type(*map(jax.typeof, arrays), **params)
    if result.shape[0] == 0:
        return _no_rows(result)
    return all_gather_add_p.bind(*arrays, **params)


def up_gather_add(
    axis_name: AxisName,
    *arrays: jax.Array,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """`all_gather_add` of `reference.up_projection`; the arguments of that, and perhaps a residual.

    As one native call for few tokens on GPUs, otherwise as these two operations. `max_tokens` and
    `implementation` are what the gather has.
    """
    has_residual = len(arrays) > 3
    tp, (latent_dim, shard_dim) = lax.axis_size(axis_name), arrays[1].shape
    params = {
        "spec": gather_spec(tp, shard_dim, has_residual, max_tokens, latent_dim),
        "axis_name": axis_name,
        "gather": gather_spec(tp, shard_dim, has_residual, max_tokens),
        "implementation": implementation,
    }
    result = _up_gather_add_type(*map(jax.typeof, arrays), **params)
    if result.shape[0] == 0:
        return _no_rows(result)
    return up_gather_add_p.bind(*arrays, **params)


def _one_row_of_nan(rows: jax.Array) -> jax.Array:
    """Serves as well as no expert row: an index that is not negative gives NaN either way.

    XLA gathers from at least one row, and jaxlib 0.11.2 crashes on a custom call's empty operand.
    """
    varying = tuple(sorted(jax.typeof(rows).manual_axis_type.varying))
    row = jnp.full((1, rows.shape[1]), jnp.nan, rows.dtype)
    return lax.pcast(row, varying, to="varying")


def _no_rows(result: Any) -> jax.Array:
    """The result where there are no tokens: XLA's collectives of nothing fail here and there."""
    varying = tuple(sorted(result.manual_axis_type.varying))
    return lax.pcast(jnp.zeros(result.shape, result.dtype), varying, to="varying")


# Types of the results.


@latent_tail_p.def_abstract_eval
def _latent_tail_types(
    *avals: Any, spec: TailSpec, axis_name: AxisName, implementation: str | None
) -> list[Any]:
    operands = spec.operands(*avals)
    results = []
    if spec.latent_dim is not None:
        varying = _varying(operands._replace(shared=None).present()) - set(axis_name)
        results.append(_rows_like(spec.routed_tokens(operands), spec.latent_dim, varying))
    if spec.hidden_dim is not None:
        results.append(_rows_like(operands.shared, spec.shard_dim, _varying([operands.shared])))
    return results


@all_gather_add_p.def_abstract_eval
def _all_gather_add_type(
    *avals: Any, spec: TailSpec, axis_name: AxisName, implementation: str | None
) -> Any:
    assert spec.hidden_dim is not None
    return _rows_like(avals[0], spec.hidden_dim, _varying(avals) - set(axis_name))


@up_gather_add_p.def_abstract_eval
def _up_gather_add_type(
    *avals: Any, spec: TailSpec, axis_name: AxisName, gather: TailSpec, implementation: str | None
) -> Any:
    assert spec.hidden_dim is not None
    return _rows_like(avals[2], spec.hidden_dim, _varying(avals) - set(axis_name))


def _varying(avals: Sequence[Any]) -> frozenset[str]:
    return frozenset().union(*(aval.manual_axis_type.varying for aval in avals))


def _rows_like(tokens: Any, columns: int, varying: frozenset[str]) -> Any:
    """bf16 rows for each token of the aval `tokens`, split over explicit axes as those are."""
    return tokens.update(
        shape=(tokens.shape[0], columns),
        dtype=jnp.dtype(jnp.bfloat16),
        sharding=tokens.sharding.update(spec=P(tokens.sharding.spec[0], None)),
        manual_axis_type=tokens.manual_axis_type.update(varying=varying),
    )


# Differentiation: the tangents are those of the same mathematics in plain collectives, which JAX
# transposes for reverse mode. Their primal part, a psum, is computed beside the operation.


def _jvp_latent_tail(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    implementation: str | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    def unfused(*arrays: jax.Array) -> list[jax.Array]:
        return reference.unfused(spec, axis_name, spec.operands(*arrays))

    outputs = latent_tail(spec, axis_name, spec.operands(*primals), implementation)
    return outputs, _tangents(unfused, primals, tangents)


def _jvp_all_gather_add(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    unfused = functools.partial(reference.unfused_all_gather_add, axis_name)
    y = all_gather_add(
        axis_name, *primals, max_tokens=spec.max_tokens, implementation=implementation
    )
    return y, _tangents(unfused, primals, tangents)


def _jvp_up_gather_add(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    gather: TailSpec,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    unfused = functools.partial(reference.unfused_up_gather_add, axis_name)
    y = up_gather_add(
        axis_name, *primals, max_tokens=gather.max_tokens, implementation=implementation
    )
    return y, _tangents(unfused, primals, tangents)


def _tangents(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The output tangents of `function`; inputs whose tangent is zero are constants to it."""
    moving = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*arrays: Any) -> Any:
        every = dict(enumerate(primals)) | dict(zip(moving, arrays, strict=True))
        return function(*every.values())

    _, output_tangents = jax.jvp(
        of_moving, [primals[index] for index in moving], [tangents[index] for index in moving]
    )
    return output_tangents


ad.primitive_jvps[latent_tail_p] = _jvp_latent_tail
ad.primitive_jvps[all_gather_add_p] = _jvp_all_gather_add
ad.primitive_jvps[up_gather_add_p] = _jvp_up_gather_add


# vmap: a batch of calls is one call with more tokens, for rows do not interact.


def _batch_latent_tail(
    axis_data: Any,
    arrays: Sequence[Any],
    dims: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    implementation: str | None,
) -> tuple[list[jax.Array], list[int | None]]:
    _refuse_axis_of_group(axis_data, axis_name)

    def call(operands: Operands) -> list[jax.Array]:
        return latent_tail(spec, axis_name, operands, implementation)

    if all(dim is None for dim in dims):
        outputs = call(spec.operands(*arrays))
        return outputs, [None] * len(outputs)
    size = axis_data.size
    single = spec.operands(*arrays)
    is_batched = spec.operands(*(dim is not None for dim in dims))
    stacked = spec.operands(*_stacked(arrays, dims, size, axis_name))

    if is_batched.gamma or _tokens_are_split(stacked._replace(gamma=None).present()):
        # Rows with different gammas cannot share a call, nor can those of tokens that are split
        # over an explicit mesh axis be merged.
        outputs = lax.map(lambda arrays: call(spec.operands(*arrays)), stacked.present())
        return outputs, [0] * len(outputs)

    merged = Operands(*(x if x is None else _merge_leading(x) for x in stacked))
    merged = merged._replace(gamma=single.gamma)
    if spec.top_k is not None:
        if is_batched.rows:
            merged = merged._replace(indices=_merge_leading(_indices_into_merged_rows(stacked)))
        else:
            merged = merged._replace(rows=single.rows)
    tokens = spec.routed_tokens(stacked) if stacked.shared is None else stacked.shared
    num_tokens = tokens.shape[1]
    outputs = [_split_leading(y, size, num_tokens) for y in call(merged)]
    return outputs, [0] * len(outputs)


def _batch_all_gather_add(
    axis_data: Any,
    arrays: Sequence[Any],
    dims: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    implementation: str | None,
) -> tuple[jax.Array, int | None]:
    _refuse_axis_of_group(axis_data, axis_name)
    call = functools.partial(
        all_gather_add, axis_name, max_tokens=spec.max_tokens, implementation=implementation
    )
    if all(dim is None for dim in dims):
        return call(*arrays), None
    size = axis_data.size
    stacked = _stacked(arrays, dims, size, axis_name)
    if _tokens_are_split(stacked):
        return lax.map(lambda arrays: call(*arrays), stacked), 0
    y = call(*map(_merge_leading, stacked))
    return _split_leading(y, size, stacked[0].shape[1]), 0


def _batch_up_gather_add(
    axis_data: Any,
    arrays: Sequence[Any],
    dims: Sequence[Any],
    *,
    spec: TailSpec,
    axis_name: AxisName,
    gather: TailSpec,
    implementation: str | None,
) -> tuple[jax.Array, int | None]:
    _refuse_axis_of_group(axis_data, axis_name)
    call = functools.partial(
        up_gather_add, axis_name, max_tokens=gather.max_tokens, implementation=implementation
    )
    if all(dim is None for dim in dims):
        return call(*arrays), None
    size = axis_data.size
    latent, w_up, shard, *residual = _stacked(arrays, dims, size, axis_name)
    num_tokens = latent.shape[1]
    if _tokens_are_split([latent, shard, *residual]):
        return lax.map(lambda arrays: call(*arrays), (latent, w_up, shard, *residual)), 0
    if dims[1] is not None:  # stripes of their own: a batch of products, and one gather
        columns = jax.vmap(reference.up_projection)(latent, w_up, shard)
        y = all_gather_add(
            axis_name,
            *map(_merge_leading, (columns, *residual)),
            max_tokens=gather.max_tokens,
            implementation=implementation,
        )
    else:
        latent, shard, *residual = map(_merge_leading, (latent, shard, *residual))
        y = call(latent, arrays[1], shard, *residual)
    return _split_leading(y, size, num_tokens), 0


def _refuse_axis_of_group(axis_data: Any, axis_name: AxisName) -> None:
    if axis_data.name in axis_name:
        raise ArgumentValueError(
            "axis_name", f"{axis_name}, of which vmap maps {axis_data.name!r}", "axes of shard_map"
        )


def _stacked(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], size: int, axis_name: AxisName
) -> tuple[jax.Array, ...]:
    """All arrays with the batch in front, varying alike outside the group.

    Under vmap's spmd_axis_name the batched ones alone vary over that axis.
    """
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(arrays, dims, strict=True)
    ]
    outer = _varying([jax.typeof(x) for x in stacked]) - set(axis_name)

    def cast(x: jax.Array) -> jax.Array:
        return lax.pcast(x, tuple(sorted(outer - _varying([jax.typeof(x)]))), to="varying")

    return tuple(map(cast, stacked))


def _merge_leading(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _split_leading(x: jax.Array, *sizes: int) -> jax.Array:
    return x.reshape(*sizes, *x.shape[1:])


def _tokens_are_split(stacked: Sequence[jax.Array]) -> bool:
    """Whether an explicit mesh axis splits the tokens of arrays [B, M, ...]."""
    return any(jax.typeof(x).sharding.spec[1] is not None for x in stacked)


def _indices_into_merged_rows(stacked: Operands) -> jax.Array:
    """Indices [B, M, K] of rows [B, P, L] as indices of rows [B * P, L]; invalid ones stay so."""
    size, num_rows, _ = stacked.rows.shape
    first_row = num_rows * jnp.arange(size, dtype=jnp.int32)[:, None, None]
    merged = jnp.where(stacked.indices < num_rows, stacked.indices + first_row, size * num_rows)
    return jnp.where(stacked.indices < 0, stacked.indices, merged)


batching.fancy_primitive_batchers[latent_tail_p] = _batch_latent_tail
batching.fancy_primitive_batchers[all_gather_add_p] = _batch_all_gather_add
batching.fancy_primitive_batchers[up_gather_add_p] = _batch_up_gather_add


# Lowering: plain collectives on any platform, and the native library's calls where it can serve.


def _plain_latent_tail(
    *arrays: jax.Array, spec: TailSpec, axis_name: AxisName, implementation: str | None
) -> list[jax.Array]:
    del implementation  # chosen already
    return reference.tail(spec, axis_name, spec.operands(*arrays))


def _plain_all_gather_add(
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    spec: TailSpec,
    axis_name: AxisName,
    implementation: str | None,
) -> jax.Array:
    del spec, implementation
    return reference.all_gather_add(axis_name, x, residual)


def _plain_up_gather_add(
    latent: jax.Array,
    w_up: jax.Array,
    shard: jax.Array,
    *residual: jax.Array,
    spec: TailSpec,
    axis_name: AxisName,
    gather: TailSpec,
    implementation: str | None,
) -> jax.Array:
    del spec
    return all_gather_add(
        axis_name,
        reference.up_projection(latent, w_up, shard),
        *residual,
        max_tokens=gather.max_tokens,
        implementation=implementation,
    )


_LOWER_PLAIN = {
    latent_tail_p: mlir.lower_fun(_plain_latent_tail, multiple_results=True),
    all_gather_add_p: mlir.lower_fun(_plain_all_gather_add, multiple_results=False),
    up_gather_add_p: mlir.lower_fun(_plain_up_gather_add, multiple_results=False),
}


def _lower(
    primitive: Primitive,
    platform: str | None,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    """`platform` is None for those without a native implementation."""
    module = ctx.module_context
    spec: TailSpec = params["spec"]
    insisted = params["implementation"]
    if spec.projects and insisted == platform:
        insisted = None  # it may be two operations, of which the gather is then insisted on
    chosen = choice.choose(
        platform or "/".join(module.platforms),
        spec,
        ctx.avals_out[0].shape[0],
        getattr(module.axis_context, "mesh", None),
        params["axis_name"],
        exporting=module.lowering_parameters.for_export,
        stream=getattr(ctx.jaxpr_eqn_ctx, "compute_type", None),
        insisted=insisted,
    )
    if chosen.implementation == "xla":
        return _LOWER_PLAIN[primitive](ctx, *operands, **params)
    assert chosen.table is not None
    attributes = native.attributes(chosen.table, spec)
    if chosen.implementation == "cpu":
        names = native.module_attribute(module.module)
        native.load("cpu").end_cpu_series(**names)
        attributes |= names
    call = jax.ffi.ffi_lowering(native.target(chosen.implementation))
    return call(ctx, *operands, **attributes)


for _primitive in _LOWER_PLAIN:
    if choice.lowered_per_devices is not None:
        choice.lowered_per_devices.add(_primitive)
    mlir.register_lowering(_primitive, functools.partial(_lower, _primitive, None))
    for _platform in choice.NATIVE_PLATFORMS:
        mlir.register_lowering(
            _primitive, functools.partial(_lower, _primitive, _platform), platform=_platform
        )
