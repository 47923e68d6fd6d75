"""The public functions: argument checks and casts of varying types.

All are called inside `jax.shard_map`, on per-rank views. Names in the shapes: M tokens, L latent
columns, H hidden columns, tp ranks of the group, S = H / tp, K expert rows per token, P rows of
unreduced expert output. Arrays are bf16 unless said otherwise; JAX owns inputs and outputs as
those of any other operation.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_latent_tail import primitive
from jax_latent_tail.checks import (
    check_axis_names,
    check_count,
    check_implementation,
    check_options,
)
from jax_latent_tail.errors import ArgumentTypeError, ArgumentValueError
from jax_latent_tail.spec import DEFAULT_MAX_TOKENS, AxisName, Operands, TailSpec

_Arrays = TypeVar("_Arrays")


class Unfinalized(NamedTuple):
    """Expert rows that have not been summed per token yet.

    Attributes:
      permuted: [P, L] bf16, this rank's expert output rows, in any order.
      weights: [M, K] bf16, routing weights.
      indices: [M, K] int32, the row of `permuted` for each token and slot. A negative index skips
        the slot: neither its weight nor any row is read. An index >= P makes the token's row NaN.
    """

    permuted: jax.Array
    weights: jax.Array
    indices: jax.Array


jax.export.register_namedtuple_serialization(
    Unfinalized, serialized_name="jax_latent_tail.Unfinalized"
)


def fused(
    routed: jax.Array | Unfinalized,
    shared: jax.Array,
    gamma: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    eps: float = 1e-6,
    fp32_internal: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """AllReduce + RMSNorm of the routed rows and ReduceScatter of the shared ones.

    Sums over ranks are taken in rank order in fp32, so their bits depend neither on the platform
    nor on the implementation, save that subnormals may become zeros; the normalised rows agree to
    one bf16 ulp across implementations and to the bit across ranks. Differentiable in both modes,
    to any order; the derivative is that of the mathematics, without the roundings.

    Args:
      routed: [M, L], this rank's partial rows; or `Unfinalized`, whose rows are first summed
        over the slots in ascending order in fp32 and rounded once.
      shared: [M, H], this rank's partial rows; tp divides H.
      gamma: [L], scale of the RMSNorm, the same on every rank of the group; under
        check_vma=False that cannot be checked.
      axis_name: mesh axis or axes of the group, major first, bound by the enclosing shard_map.
      eps: added to the mean square in fp32; a positive number that fp32 holds as a normal one.
      fp32_internal: False rounds the reduced row, and the squares of its elements, to bf16
        before the row sum; True keeps both in fp32.
      max_tokens: most tokens for which a native implementation keeps a workspace; calls with
        more take the plain one. Part of a call's identity: the same on every rank.
      implementation: None chooses; "cuda" and "cpu" insist on the native call of that platform,
        "xla" on plain collectives.

    Returns:
      (latent, shard), a plain tuple so that `out_specs=(P(), P(None, axis_name))` fits:
      latent [M, L], equal on all ranks of the group, and shard [M, S], columns
      r * S .. (r + 1) * S of the sum of shared on rank r.

    Raises:
      ArgumentTypeError, ArgumentValueError: while tracing, for an argument that is not allowed.
      UnavailableError: while lowering, if `implementation` was insisted on and cannot serve this
        call.
      RendezvousError, DisagreementError: while lowering for the kernel, if not every process of
        the group came, or they lowered different calls.
    """
    latent, shard = _call(
        {"routed": routed, "gamma": gamma, "shared": shared},
        axis_name=axis_name,
        eps=eps,
        fp32_internal=fp32_internal,
        max_tokens=max_tokens,
        implementation=implementation,
    )
    return latent, shard


def all_reduce_rms_norm(
    routed: jax.Array | Unfinalized,
    gamma: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    eps: float = 1e-6,
    fp32_internal: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """The routed half of `fused` alone: arguments, errors and latent [M, L] as there."""
    (latent,) = _call(
        {"routed": routed, "gamma": gamma},
        axis_name=axis_name,
        eps=eps,
        fp32_internal=fp32_internal,
        max_tokens=max_tokens,
        implementation=implementation,
    )
    return latent


def reduce_scatter(
    shared: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """The shared half of `fused` alone: arguments, errors and shard [M, S] as there."""
    (shard,) = _call(
        {"shared": shared},
        axis_name=axis_name,
        max_tokens=max_tokens,
        implementation=implementation,
    )
    return shard


def all_gather_add(
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    axis_name: str | tuple[str, ...],
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """The columns of all ranks side by side, plus a residual.

    Args:
      x: [M, S], this rank's columns.
      residual: [M, tp * S], the same on every rank of the group; added in fp32, with one rounding.
      axis_name, max_tokens, implementation: as for `fused`.

    Returns:
      [M, tp * S], equal on all ranks of the group: columns r * S .. (r + 1) * S are rank r's x.

    Raises:
      As for `fused`.
    """
    axis_name = _check_axis_name(axis_name)
    max_tokens = check_count("max_tokens", max_tokens)
    check_implementation(implementation)
    _check_array("x", x, "bfloat16", ndim=2)
    if x.shape[1] == 0:
        raise ArgumentValueError("x", "without columns", "rows of at least one column")
    x = _vary_over_group(axis_name, x)
    call = functools.partial(
        primitive.all_gather_add, axis_name, max_tokens=max_tokens, implementation=implementation
    )
    if residual is None:
        return call(x)
    _check_residual(residual, (x.shape[0], x.shape[1] * lax.axis_size(axis_name)), axis_name)
    return call(x, residual)


def moe_tail(
    routed: jax.Array | Unfinalized,
    shared: jax.Array,
    gamma: jax.Array,
    w_up: jax.Array,
    residual: jax.Array | None = None,
    *,
    axis_name: str | tuple[str, ...],
    eps: float = 1e-6,
    fp32_internal: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    implementation: str | None = None,
) -> jax.Array:
    """The whole end of a latent MoE layer: `fused`, the up-projection, and `all_gather_add`.

    Args:
      routed, shared, gamma: as for `fused`.
      w_up: [L, S], this rank's columns of the up-projection. Products are accumulated in fp32, and
        rounded once after the shard of the shared half is added.
      residual: [M, H], as for `all_gather_add`.
      axis_name, eps, fp32_internal, max_tokens, implementation: as for `fused`. What is insisted on
        is `fused` and the gather; the product may be part of the latter, or XLA's.

    Returns:
      [M, H], equal on all ranks of the group: residual + columns of (latent @ w_up + shard).

    Raises:
      As for `fused`.
    """
    latent, shard = fused(
        routed,
        shared,
        gamma,
        axis_name=axis_name,
        eps=eps,
        fp32_internal=fp32_internal,
        max_tokens=max_tokens,
        implementation=implementation,
    )
    _check_array("w_up", w_up, "bfloat16", ndim=2)
    shape = (latent.shape[1], shard.shape[1])
    if w_up.shape != shape:
        raise ArgumentValueError("w_up", f"of shape {w_up.shape}", f"{shape}: [L, H / tp]")
    names = _check_axis_name(axis_name)
    arrays = [latent, _vary_over_group(names, w_up), shard]
    if residual is not None:
        _check_residual(residual, (latent.shape[0], shared.shape[1]), names)
        arrays.append(residual)
    return primitive.up_gather_add(
        names,
        *arrays,
        max_tokens=int(max_tokens),
        implementation=implementation,
    )


def _call(
    arrays: dict[str, Any],
    *,
    axis_name: str | tuple[str, ...],
    max_tokens: int,
    implementation: str | None,
    eps: float = 1e-6,
    fp32_internal: bool = False,
) -> list[jax.Array]:
    """Checks everything, then runs the halves whose arrays are there."""
    axis_name = _check_axis_name(axis_name)
    check_options(eps, fp32_internal, max_tokens, implementation)
    operands = _check_arrays(arrays)
    spec = TailSpec(
        tp=lax.axis_size(axis_name),
        latent_dim=None if operands.gamma is None else operands.gamma.shape[0],
        hidden_dim=None if operands.shared is None else operands.shared.shape[1],
        top_k=None if operands.indices is None else operands.indices.shape[1],
        eps=float(eps),
        fp32_internal=bool(fp32_internal),
        max_tokens=int(max_tokens),
    )
    if operands.gamma is not None:
        _check_equal_on_all_ranks("gamma", operands.gamma, axis_name)
    partials = _vary_over_group(axis_name, operands._replace(gamma=None))
    operands = partials._replace(gamma=operands.gamma)
    return primitive.latent_tail(spec, axis_name, operands, implementation)


def _varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which x may differ; empty under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def _vary_over_group(axis_name: AxisName, partials: _Arrays) -> _Arrays:
    """Casts each array of a pytree that is typed equal on all ranks to one that varies."""
    if not _varying_axes(lax.axis_index(axis_name)):  # check_vma=False: nothing is typed
        return partials

    def cast(x: Any) -> Any:
        missing = tuple(name for name in axis_name if name not in _varying_axes(x))
        return lax.pcast(x, missing, to="varying")

    return jax.tree.map(cast, partials)


# Checks.


def _check_axis_name(axis_name: Any) -> AxisName:
    allowed = "the name of a mesh axis of the enclosing shard_map, or a tuple of such names"
    names = check_axis_names(axis_name, allowed)
    mesh = jax.sharding.get_abstract_mesh()
    for name in names:
        if name not in mesh.manual_axes:
            bound = ", ".join(map(repr, mesh.manual_axes)) or "none"
            raise ArgumentValueError("axis_name", repr(name), f"{allowed}; bound here: {bound}")
        if lax.axis_size(name) != mesh.shape[name]:
            raise ArgumentValueError("axis_name", f"{name!r}, here an axis of vmap", allowed)
    return names


def _check_arrays(arrays: dict[str, Any]) -> Operands:
    """Checks dtypes and shapes of the arrays by the names that the user gave them."""
    operands = Operands()
    num_tokens = None
    if "routed" in arrays:
        routed = arrays["routed"]
        if isinstance(routed, Unfinalized):
            names = ("routed.permuted", "routed.weights", "routed.indices")
            for name, x, dtype in zip(
                names, routed, ("bfloat16", "bfloat16", "int32"), strict=True
            ):
                _check_array(name, x, dtype, ndim=2)
            rows, weights, indices = routed
            if weights.shape != indices.shape or weights.shape[1] == 0:
                raise ArgumentValueError(
                    "routed.weights",
                    f"of shape {weights.shape} beside indices of shape {indices.shape}",
                    "equal shapes [M, K] with K >= 1",
                )
            operands = Operands(rows, weights, indices)
            num_tokens, latent_dim = indices.shape[0], rows.shape[1]
        else:
            _check_array("routed", routed, "bfloat16", ndim=2)
            operands = Operands(routed)
            num_tokens, latent_dim = routed.shape
        if latent_dim == 0:
            raise ArgumentValueError("routed", "without columns", "rows of at least one column")
        _check_array("gamma", arrays["gamma"], "bfloat16", ndim=1)
        if arrays["gamma"].shape[0] != latent_dim:
            raise ArgumentValueError(
                "gamma", f"of shape {arrays['gamma'].shape}", f"({latent_dim},), as routed is wide"
            )
        operands = operands._replace(gamma=arrays["gamma"])
    if "shared" in arrays:
        shared = arrays["shared"]
        _check_array("shared", shared, "bfloat16", ndim=2)
        if shared.shape[1] == 0:
            raise ArgumentValueError("shared", "without columns", "rows of at least one column")
        if num_tokens is not None and shared.shape[0] != num_tokens:
            raise ArgumentValueError(
                "shared", f"of {shared.shape[0]} tokens", f"the {num_tokens} tokens of routed"
            )
        operands = operands._replace(shared=shared)
    return operands


def _check_array(name: str, x: Any, dtype: str, ndim: int) -> None:
    allowed = f"a {dtype} array with {ndim} dimension{'s' if ndim > 1 else ''}"
    if not isinstance(x, jax.Array | np.ndarray):
        raise ArgumentTypeError(name, f"a {type(x).__name__}", allowed)
    if x.dtype != jnp.dtype(dtype):
        raise ArgumentTypeError(name, f"of dtype {x.dtype}", allowed)
    if x.ndim != ndim:
        raise ArgumentValueError(name, f"of shape {x.shape}", allowed)
    if jax.typeof(x).manual_axis_type.unreduced:
        raise ArgumentTypeError(name, f"of type {jax.typeof(x)}", f"{allowed}, not unreduced")


def _check_residual(residual: Any, shape: tuple[int, int], axis_name: AxisName) -> None:
    _check_array("residual", residual, "bfloat16", ndim=2)
    if residual.shape != shape:
        raise ArgumentValueError("residual", f"of shape {residual.shape}", f"{shape}: [M, tp * S]")
    _check_equal_on_all_ranks("residual", residual, axis_name)


def _check_equal_on_all_ranks(name: str, x: Any, axis_name: AxisName) -> None:
    varying = sorted(_varying_axes(x) & set(axis_name))
    if varying:
        raise ArgumentValueError(
            name,
            f"varying over {varying}",
            f"the same array on every rank of {axis_name}: in_specs without these axes",
        )
