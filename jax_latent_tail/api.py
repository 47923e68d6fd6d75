"""The public functions: argument checks, casts of varying types, differentiation.

All are called inside `jax.shard_map`, on per-rank views. Names in the shapes: M tokens, L latent
columns, H hidden columns, tp ranks of the group, S = H / tp, K expert rows per token, P rows of
unreduced expert output. Arrays are bf16 unless said otherwise; JAX owns inputs and outputs as
those of any other operation.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_latent_tail import primitive, reference
from jax_latent_tail.errors import ArgumentTypeError, ArgumentValueError, UnavailableError
from jax_latent_tail.reference import AxisName
from jax_latent_tail.spec import DEFAULT_MAX_TOKENS, Operands, TailSpec

# None leaves the choice to the package; the native ones are not part of this version.
_IMPLEMENTATIONS = (None, "xla")
_NATIVE_IMPLEMENTATIONS = ("cpu", "cuda")


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
    nor on the implementation; the normalised rows agree to one bf16 ulp across implementations
    and to the bit across ranks. Reverse-mode differentiable; forward mode raises TypeError.

    Args:
      routed: [M, L], this rank's partial rows; or `Unfinalized`, whose rows are first summed
        over the slots in ascending order in fp32 and rounded once.
      shared: [M, H], this rank's partial rows; tp divides H.
      gamma: [L], scale of the RMSNorm, the same on every rank of the group.
      axis_name: mesh axis or axes of the group, major first, bound by the enclosing shard_map.
      eps: added to the mean square, > 0.
      fp32_internal: False rounds the reduced row, and the squares of its elements, to bf16
        before the row sum; True keeps both in fp32.
      max_tokens: most tokens for which a native implementation keeps a workspace; calls with
        more take the plain one. Part of a call's identity: the same on every rank.
      implementation: None chooses; "xla" insists on plain collectives.

    Returns:
      (latent, shard), a plain tuple so that `out_specs=(P(), P(None, axis_name))` fits:
      latent [M, L], equal on all ranks of the group, and shard [M, S], columns
      r * S .. (r + 1) * S of the sum of shared on rank r.

    Raises:
      ArgumentTypeError, ArgumentValueError: while tracing, for an argument that is not allowed.
      UnavailableError: `implementation` cannot run here.
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
    _check_options(eps, fp32_internal, max_tokens, implementation)
    operands = _check_arrays(arrays)
    spec = TailSpec(
        tp=lax.axis_size(axis_name),
        latent_dim=None if operands.gamma is None else operands.gamma.shape[0],
        hidden_dim=None if operands.shared is None else operands.shared.shape[1],
        top_k=None if operands.indices is None else operands.indices.shape[1],
        eps=float(eps),
        fp32_internal=fp32_internal,
        max_tokens=max_tokens,
    )
    for name, operand in zip(Operands._fields, operands, strict=True):
        _check_varying(name, operand, axis_name)
    operands = primitive.vary_over_group(axis_name, operands)
    return _jitted(spec, axis_name, *operands.present())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(spec: TailSpec, axis_name: AxisName, *arrays: jax.Array) -> list[jax.Array]:
    return primitive.bind(spec, axis_name, spec.operands(*arrays))


def _forward(
    spec: TailSpec, axis_name: AxisName, *arrays: jax.Array
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    # Through the custom_vjp function again, so that this pass can be differentiated too.
    return _differentiable(spec, axis_name, *arrays), arrays


def _backward(
    spec: TailSpec, axis_name: AxisName, arrays: tuple[jax.Array, ...], cotangents: list[jax.Array]
) -> tuple[Any, ...]:
    def unfused(*arrays: jax.Array) -> list[jax.Array]:
        return reference.unfused(spec, axis_name, spec.operands(*arrays))

    _, pullback = jax.vjp(unfused, *arrays)
    return pullback(cotangents)


_differentiable.defvjp(_forward, _backward)

# Eager shard_map hashes the parameters of what it evaluates, which fails for a custom_vjp under
# forward mode before JAX's own, clear refusal of that: as one jitted call it gets there.
_jitted = jax.jit(_differentiable, static_argnums=(0, 1), inline=True)


def _check_axis_name(axis_name: Any) -> AxisName:
    allowed = "the name of a mesh axis of the enclosing shard_map, or a tuple of such names"
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError("axis_name", repr(axis_name), allowed)
    if len(set(names)) < len(names):
        raise ArgumentValueError("axis_name", repr(axis_name), "each name once")
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for name in names:
        if name not in manual:
            bound = ", ".join(map(repr, manual)) or "none"
            raise ArgumentValueError("axis_name", repr(name), f"{allowed}; bound here: {bound}")
    return names


def _check_options(eps: Any, fp32_internal: Any, max_tokens: Any, implementation: Any) -> None:
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.number):
        raise ArgumentTypeError("eps", f"a {type(eps).__name__}", "a Python or NumPy number")
    if not (math.isfinite(eps) and eps > 0):
        raise ArgumentValueError("eps", eps, "a finite number > 0")
    if not isinstance(fp32_internal, bool):
        raise ArgumentTypeError("fp32_internal", repr(fp32_internal), "True or False")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer):
        raise ArgumentTypeError("max_tokens", repr(max_tokens), "an integer")
    if max_tokens < 1:
        raise ArgumentValueError("max_tokens", max_tokens, "an integer >= 1")
    if implementation in _NATIVE_IMPLEMENTATIONS:
        raise UnavailableError(
            f"implementation={implementation!r} is not part of this version of jax_latent_tail; "
            f"available: {_IMPLEMENTATIONS}"
        )
    if implementation not in _IMPLEMENTATIONS:
        raise ArgumentValueError(
            "implementation", repr(implementation), f"one of {_IMPLEMENTATIONS}"
        )


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


def _check_varying(name: str, x: Any, axis_name: AxisName) -> None:
    if x is None:
        return
    if jax.typeof(x).manual_axis_type.unreduced:
        raise ArgumentTypeError(name, f"of type {jax.typeof(x)}", "an array that is not unreduced")
    shared_axes = primitive.varying_axes(x) & set(axis_name)
    if name == "gamma" and shared_axes:
        raise ArgumentValueError(
            "gamma",
            f"varying over {sorted(shared_axes)}",
            f"the same array on every rank of {axis_name}: in_specs without these axes",
        )
