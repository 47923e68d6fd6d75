"""moe_tail under JAX's transformations, against its steps one by one and a dense model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, normal, random_inputs
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail

TP, TOKENS, LATENT, HIDDEN, EPS = 4, 5, 24, 32, 1e-3

both_implementations = pytest.mark.usefixtures("implementation")

moe_tail = functools.partial(latent_tail.moe_tail, axis_name="tp", eps=EPS)


def steps(routed, shared, gamma, w_up, residual=None, **options):
    """moe_tail as its operations one by one."""
    options = {"axis_name": "tp"} | options
    latent, shard = latent_tail.fused(routed, shared, gamma, eps=EPS, **options)
    product = jnp.dot(latent, w_up, preferred_element_type=jnp.float32)
    columns = (product + shard.astype(jnp.float32)).astype(jnp.bfloat16)
    return latent_tail.all_gather_add(columns, residual, **options)


def sharded(function=moe_tail, mesh=None, residual=True, **options):
    options = {
        "in_specs": (P("tp"), P("tp"), P(), P(None, "tp")) + (P(),) * residual,
        "out_specs": P(),
    } | options
    return jax.shard_map(function, mesh=mesh or make_mesh((TP,)), **options)


def arguments(seed=0, tokens=TOKENS, **options):
    inputs = random_inputs(seed, TP, tokens, LATENT, HIDDEN, draw=normal, **options)
    rng = np.random.default_rng(seed + 100)
    w_up = (normal(rng, LATENT, HIDDEN).astype(np.float32) / 5).astype(bfloat16)
    shared = jnp.asarray(inputs.shared.reshape(-1, HIDDEN))
    arrays = map(jnp.asarray, (inputs.gamma, w_up, normal(rng, tokens, HIDDEN)))
    return (inputs.routed, shared, *arrays)


def assert_near(actual, expected):
    """To an ulp of what was added: the product's sums may be taken in another order."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("tokens", [1, 32, 33])
@pytest.mark.parametrize("max_tokens", [4, 128])
@pytest.mark.parametrize("residual", [True, False])
def test_is_its_steps_for_any_number_of_tokens(tokens, max_tokens, residual):
    arrays = arguments(tokens=tokens)[: 4 + residual]
    options = {"max_tokens": max_tokens}
    actual = jax.jit(sharded(functools.partial(moe_tail, **options), residual=residual))(*arrays)
    expected = jax.jit(sharded(functools.partial(steps, **options), residual=residual))(*arrays)
    assert_near(actual, expected)


@both_implementations
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("top_k", [None, 3])
def test_is_its_steps_under_jit_and_without(top_k, check_vma, wrap):
    arrays = arguments(top_k=top_k)
    actual = wrap(sharded(check_vma=check_vma))(*arrays)
    assert_near(actual, jax.jit(sharded(steps, check_vma=check_vma))(*arrays))


@both_implementations
def test_no_tokens():
    arrays = arguments(tokens=0)
    assert jax.jit(sharded())(*arrays).shape == (0, HIDDEN)
    assert sharded()(*arrays).dtype == jnp.bfloat16
    stacked = [jnp.stack([x, x]) for x in arrays]
    for in_axes in ((0, 0, None, None, 0), (None, None, None, 0, None)):
        call = [s if axis == 0 else x for s, x, axis in zip(stacked, arrays, in_axes, strict=True)]
        assert jax.jit(jax.vmap(sharded(), in_axes))(*call).shape == (2, 0, HIDDEN)


# vmap.


def batch(seeds, in_axes, **options):
    """Arguments, those with an axis different for each seed."""
    each = [arguments(seed, **options) for seed in seeds]
    return [
        each[0][index]
        if axis is None
        else jax.tree.map(
            lambda *xs, axis=axis: jnp.stack(xs, axis), *(call[index] for call in each)
        )
        for index, axis in enumerate(in_axes)
    ]


def one_by_one(function, batched, in_axes, size):
    def element(argument, axis, index):
        return argument if axis is None else jax.tree.map(lambda x: x.take(index, axis), argument)

    calls = (map(element, batched, in_axes, [index] * len(in_axes)) for index in range(size))
    return np.stack([np.asarray(function(*call)) for call in calls])


BATCHED = {
    "tokens": (0, 0, None, None, 0),
    "routed": (0, None, None, None, None),
    "shared": (None, 0, None, None, None),
    "residual": (None, None, None, None, 0),
    "w_up": (None, None, None, 0, None),
    "w_up and tokens": (0, 0, None, 0, 0),
    "w_up and residual": (None, None, None, 0, 0),
    "gamma": (None, None, 0, None, None),
    "everything": (0, 0, 0, 0, 0),
    "other axes": (1, 2, None, None, 1),
    "other axes of everything": (2, 1, 1, 2, 2),
}


@both_implementations
@pytest.mark.parametrize("which", BATCHED)
def test_vmap_outside_shard_map(which):
    in_axes = BATCHED[which]
    batched = batch([1, 2, 3], in_axes)
    actual = jax.jit(jax.vmap(sharded(), in_axes))(*batched)
    assert_near(actual, one_by_one(jax.jit(sharded()), batched, in_axes, 3))


@both_implementations
@pytest.mark.parametrize("in_axes", [(0, 0, None, None, 0), (0, None, None, 0, None)])
def test_vmap_of_unreduced_rows(in_axes):
    batched = batch([1, 2], in_axes, top_k=3)
    actual = jax.jit(jax.vmap(sharded(), in_axes))(*batched)
    assert_near(actual, one_by_one(jax.jit(sharded()), batched, in_axes, 2))


@pytest.mark.parametrize("in_axes", [(0, 0, None, None), (None, None, None, 0)])
def test_vmap_without_a_residual(in_axes):
    batched = batch([1, 2], in_axes)
    function = sharded(residual=False)
    actual = jax.jit(jax.vmap(function, in_axes))(*batched)
    assert_near(actual, one_by_one(jax.jit(function), batched, in_axes, 2))


@both_implementations
@pytest.mark.parametrize(
    "in_axes", [(1, 1, None, None, 1), (1, 1, None, 1, None), (None, None, None, None, 1)]
)
def test_vmap_inside_shard_map_over_a_middle_axis(in_axes):
    batched = batch([1, 2, 3], in_axes)

    def inside(*arrays):
        return jax.vmap(moe_tail, in_axes, out_axes=1)(*arrays)

    # The columns of w_up are its last axis, batched or not.
    specs = (P("tp"), P("tp"), P(), P(None, "tp") if in_axes[3] is None else P(None, None, "tp"))
    actual = jax.jit(sharded(inside, in_specs=(*specs, P())))(*batched)
    expected = one_by_one(jax.jit(sharded()), batched, in_axes, 3)
    assert_near(jnp.moveaxis(actual, 1, 0), expected)


def test_nested_vmap():
    tokens, weights = (0, 0, None, None, 0), (None, None, None, 0, None)
    routed, shared, gamma, _, residual = batch([1, 2, 3], tokens)
    w_up = batch([4, 5], weights)[3]
    twice = jax.jit(jax.vmap(jax.vmap(sharded(), tokens), weights))
    actual = twice(routed, shared, gamma, w_up, residual)
    for index in range(2):
        call = [routed, shared, gamma, w_up[index], residual]
        assert_near(actual[index], one_by_one(jax.jit(sharded()), call, tokens, 3))


@both_implementations
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "in_axes",
    [(0, 0, None, None, 0), (0, 0, None, None, None), (None, None, None, None, 0),
     (None, None, None, 0, None), (0, 0, 0, 0, 0)],
)  # fmt: skip
def test_vmap_with_spmd_axis_name(in_axes, check_vma):
    mesh = make_mesh((2, TP), ("dp", "tp"))
    batched = batch([1, 2], in_axes)
    mapped = jax.vmap(sharded(mesh=mesh, check_vma=check_vma), in_axes, spmd_axis_name="dp")
    actual = jax.jit(mapped)(*batched)
    assert_near(actual, one_by_one(jax.jit(sharded()), batched, in_axes, 2))


def test_an_axis_of_the_group_is_refused():
    def shadowed(*arrays):
        return jax.vmap(moe_tail, (None, None, None, 0, None), axis_name="tp")(*arrays)

    routed, shared, gamma, w_up, residual = arguments()
    specs = (P("tp"), P("tp"), P(), P(None, None, "tp"), P())
    with pytest.raises(latent_tail.ArgumentValueError, match="vmap"):
        jax.jit(sharded(shadowed, in_specs=specs))(
            routed, shared, gamma, jnp.stack([w_up] * TP), residual
        )


# Axes that stay automatic or explicit.


def on_two_axes(inside, other, arrays, place):
    """Over tp alone: XLA or explicit types split the tokens over dp.

    Args:
      place: the spec of each array over both axes.
    """
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, TP), ("dp", "tp"), axis_types=(other, AxisType.Auto)
    )
    manual = [P(*(name if name == "tp" else None for name in spec)) for spec in place]
    mapped = jax.shard_map(
        inside, mesh=mesh, in_specs=tuple(manual), out_specs=P(), axis_names={"tp"}
    )
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, place, strict=True)
        ]
        return jax.jit(mapped)(*placed)


def by_rank(x, tokens):
    return x.reshape(*x.shape[:-2], TP, tokens, x.shape[-1])


@both_implementations
@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit])
def test_tokens_that_another_axis_splits(other):
    routed, shared, gamma, w_up, residual = arguments(tokens=6)

    def inside(routed, shared, *others):
        return moe_tail(routed[0], shared[0], *others)

    actual = on_two_axes(
        inside,
        other,
        (by_rank(routed, 6), by_rank(shared, 6), gamma, w_up, residual),
        (P("tp", "dp"), P("tp", "dp"), P(), P(None, "tp"), P("dp")),
    )
    assert_near(actual, jax.jit(sharded())(routed, shared, gamma, w_up, residual))


@both_implementations
@pytest.mark.parametrize("of_w_up", [None, 0])
def test_vmap_where_an_explicit_axis_splits_the_tokens(of_w_up):
    in_axes = (0, 0, None, of_w_up, 0)
    batched = batch([1, 2, 3], in_axes, tokens=6)
    rows, shared = (by_rank(x, 6).swapaxes(0, 1) for x in batched[:2])

    def inside(rows, shared, *others):
        return jax.vmap(moe_tail, in_axes)(rows[0], shared[0], *others)

    columns = P(None, "tp") if of_w_up is None else P(None, None, "tp")
    actual = on_two_axes(
        inside,
        AxisType.Explicit,
        (rows, shared, *batched[2:]),
        (P("tp", None, "dp"), P("tp", None, "dp"), P(), columns, P(None, "dp")),
    )
    assert_near(actual, one_by_one(jax.jit(sharded()), batched, in_axes, 3))


# Derivatives.


def dense(routed, shared, gamma, w_up, residual=0):
    """The same mathematics in fp32 on one device."""
    s = routed.reshape(TP, -1, LATENT).astype(jnp.float32).sum(0)
    latent = s / jnp.sqrt((s * s).mean(-1, keepdims=True) + EPS) * gamma
    z = shared.reshape(TP, -1, HIDDEN).astype(jnp.float32).sum(0)
    return residual + latent @ w_up.astype(jnp.float32) + z


def loss(function, *arrays):
    y = function(*arrays).astype(jnp.float32)
    return (y**2 * np.random.default_rng(1).standard_normal(y.shape)).sum()


def assert_close(actual, expected, bound=2**-5):
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= bound * np.abs(e).max()


def gradients(function, arrays):
    every = tuple(range(len(arrays)))
    return jax.jit(jax.grad(functools.partial(loss, function), every))(*arrays)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_gradients_are_those_of_the_steps_and_of_the_dense_model(residual, check_vma):
    arrays = arguments()[: 4 + residual]
    options = {"residual": residual, "check_vma": check_vma}
    actual = gradients(sharded(**options), arrays)
    assert_close(actual, gradients(sharded(steps, **options), arrays))
    assert_close(actual, gradients(dense, arrays))


@pytest.mark.parametrize("argument", range(5))
def test_gradient_by_one_argument_alone(argument):
    arrays = arguments()
    actual, expected = (
        jax.jit(jax.grad(functools.partial(loss, function), argument))(*arrays)
        for function in (sharded(), dense)
    )
    assert_close([actual], [expected])


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("residual", [True, False])
def test_forward_mode(residual, wrap):
    primals = arguments()[: 4 + residual]
    rng = np.random.default_rng(7)
    tangents = tuple(jnp.asarray(normal(rng, *x.shape)) for x in primals)
    function = sharded(residual=residual)
    actual = wrap(lambda p, t: jax.jvp(function, p, t))(primals, tangents)
    for expected in (dense, sharded(steps, residual=residual)):
        assert_close(actual, jax.jit(lambda p, t, f=expected: jax.jvp(f, p, t))(primals, tangents))


def test_gradient_of_gradient():
    arrays = arguments()

    def norm(function, *arrays):
        squares = jax.grad(functools.partial(loss, function), (0, 1, 2, 3, 4))(*arrays)
        return sum((g.astype(jnp.float32) ** 2).sum() for g in squares)

    actual, expected = (
        jax.jit(jax.grad(functools.partial(norm, function), (0, 1, 2, 3, 4)))(*arrays)
        for function in (sharded(), dense)
    )
    assert_close(actual, expected)


def test_hessian_vector_product_forward_over_reverse():
    arrays = arguments()
    tangents = tuple(x / 2 for x in arrays)

    def product(function):
        grad = jax.grad(functools.partial(loss, function), (0, 1, 2, 3, 4))
        return jax.jit(lambda p, t: jax.jvp(grad, p, t)[1])(arrays, tangents)

    assert_close(product(sharded()), product(dense))


@pytest.mark.parametrize("which", ["tokens", "residual", "w_up", "everything"])
def test_gradient_of_vmap_and_vmap_of_gradient(which):
    in_axes = BATCHED[which]
    batched = batch([1, 2], in_axes)
    every = (0, 1, 2, 3, 4)

    def of_sum(function):
        return gradients(jax.vmap(function, in_axes), batched)

    assert_close(of_sum(sharded()), of_sum(dense))

    def each(function):
        grad = jax.grad(functools.partial(loss, function), every)
        return jax.jit(jax.vmap(grad, in_axes))(*batched)

    assert_close(each(sharded()), each(dense))


@pytest.mark.parametrize("which", ["tokens", "residual", "w_up"])
def test_gradient_of_vmap_with_spmd_axis_name(which):
    in_axes = BATCHED[which]
    batched = batch([1, 2], in_axes)
    mesh = make_mesh((2, TP), ("dp", "tp"))
    mapped = jax.vmap(sharded(mesh=mesh), in_axes, spmd_axis_name="dp")
    assert_close(gradients(mapped, batched), gradients(jax.vmap(dense, in_axes), batched))


def test_checkpoint_keeps_values_and_gradients():
    arrays = arguments()
    every = (0, 1, 2, 3, 4)
    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, sharded(function)), every))(*arrays)
        for function in (moe_tail, jax.checkpoint(moe_tail))
    ]
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, e)


# Export.


@pytest.mark.parametrize("tokens", [4, 33])
def test_an_exported_program_with_its_gradient(tokens):
    mesh = make_mesh((TP,))
    places = (P("tp"), P("tp"), P(), P(None, "tp"), P())
    arrays = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in zip(arguments(tokens=tokens), places, strict=True)
    ]
    program = jax.jit(sharded(mesh=mesh))
    restored = export.deserialize(export.export(program)(*arrays).serialize(vjp_order=1))
    assert_near(restored.call(*arrays), program(*arrays))
    assert_close(gradients(restored.call, arrays), gradients(program, arrays))
