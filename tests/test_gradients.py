"""Reverse mode against a dense float32 model of the same mathematics on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh, normal
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail

TP, TOKENS, LATENT, HIDDEN, EPS = 4, 5, 24, 32, 1e-3


def dense(routed, shared, gamma):
    """Stacked partials of all ranks [tp, M, .] to latent [M, L] and shared [M, H], in fp32."""
    if isinstance(routed, latent_tail.Unfinalized):
        routed = jax.vmap(dense_finalize)(*routed)
    s = routed.astype(jnp.float32).sum(axis=0)
    latent = s / jnp.sqrt((s * s).mean(axis=-1, keepdims=True) + EPS) * gamma
    return latent, shared.astype(jnp.float32).sum(axis=0)


def dense_finalize(permuted, weights, indices):
    picked = jnp.where((indices >= 0)[..., None], permuted[jnp.maximum(indices, 0)], 0)
    return (jnp.where(indices >= 0, weights, 0)[..., None].astype(jnp.float32) * picked).sum(axis=1)


def merge(x):
    return x.reshape(-1, x.shape[-1])


def distributed(mesh, check_vma=True):
    """The same function of stacked partials through the operation."""

    def tail(routed, shared, gamma):
        return latent_tail.fused(routed, shared, gamma, axis_name="tp", eps=EPS)

    mapped = jax.shard_map(
        tail,
        mesh=mesh,
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=(P(), P(None, "tp")),
        check_vma=check_vma,
    )
    return lambda routed, shared, gamma: mapped(jax.tree.map(merge, routed), merge(shared), gamma)


def inputs(top_k=None):
    rng = np.random.default_rng(0)
    shared = jnp.asarray(normal(rng, TP, TOKENS, HIDDEN))
    gamma = jnp.asarray(normal(rng, LATENT))
    if top_k is None:
        return jnp.asarray(normal(rng, TP, TOKENS, LATENT)), shared, gamma
    indices = jnp.asarray(rng.integers(-3, TOKENS * top_k, (TP, TOKENS, top_k)), jnp.int32)
    permuted = jnp.asarray(normal(rng, TP, TOKENS * top_k, LATENT))
    weights = jnp.asarray(normal(rng, TP, TOKENS, top_k))
    return latent_tail.Unfinalized(permuted, weights, indices), shared, gamma


def loss(function, *arguments):
    rng = np.random.default_rng(1)
    latent, shared = function(*arguments)
    return (latent * rng.standard_normal(latent.shape)).sum() + (
        shared.astype(jnp.float32) ** 2 * rng.standard_normal(shared.shape)
    ).sum()


def gradients(function, *arguments):
    """Gradients by the floating-point arguments, as a flat list."""
    leaves, tree = jax.tree.flatten(arguments)
    where = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of_leaves(*floats):
        full = list(leaves)
        for i, leaf in zip(where, floats, strict=True):
            full[i] = leaf
        return loss(function, *jax.tree.unflatten(tree, full))

    argnums = tuple(range(len(where)))
    return jax.jit(jax.grad(of_leaves, argnums))(*(leaves[i] for i in where))


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        # bf16 gradients of bf16 outputs: a few roundings of 2^-9 each, relative to the largest.
        assert np.abs(a - e).max() <= 2**-6 * np.abs(e).max()


@pytest.mark.smoke
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("top_k", [None, 3])
def test_gradients_match_the_dense_model(top_k, check_vma):
    arguments = inputs(top_k)
    actual = gradients(distributed(make_mesh((TP,)), check_vma=check_vma), *arguments)
    assert_close(actual, gradients(dense, *arguments))


def test_gradient_taken_inside_shard_map():
    """Each rank differentiates its own loss; the sum of them is the gradient of their sum."""
    mesh = make_mesh((TP,))
    routed, shared, gamma = inputs()

    def grad_inside(routed, shared, gamma):
        def own_loss(routed, shared, gamma):
            latent, shard = latent_tail.fused(routed, shared, gamma, axis_name="tp", eps=EPS)
            return (latent.astype(jnp.float32) ** 2).sum() + jax.lax.psum(
                (shard.astype(jnp.float32) ** 2).sum(), "tp"
            )

        return jax.grad(own_loss, (0, 1, 2))(routed, shared, gamma)

    actual = jax.jit(
        jax.shard_map(
            grad_inside,
            mesh=mesh,
            in_specs=(P("tp"), P("tp"), P()),
            out_specs=(P("tp"), P("tp"), P()),
        )
    )(merge(routed), merge(shared), gamma)

    def dense_loss(routed, shared, gamma):
        latent, total = dense(routed, shared, gamma)
        return (latent**2).sum() + (total**2).sum()

    expected = jax.grad(dense_loss, (0, 1, 2))(routed, shared, gamma)
    assert_close(actual, [merge(expected[0]), merge(expected[1]), expected[2]])


def test_gradients_over_dp_and_tp():
    """dp splits the tokens; the gradient of gamma is summed over dp by the casts."""
    mesh = make_mesh((2, TP), ("dp", "tp"))
    rng = np.random.default_rng(3)
    routed = jnp.asarray(normal(rng, TP, 2 * TOKENS, LATENT))
    shared = jnp.asarray(normal(rng, TP, 2 * TOKENS, HIDDEN))
    gamma = jnp.asarray(normal(rng, LATENT))

    def tail(routed, shared, gamma):
        return latent_tail.fused(routed[0], shared[0], gamma, axis_name="tp", eps=EPS)

    mapped = jax.shard_map(
        tail,
        mesh=mesh,
        in_specs=(P("tp", "dp"), P("tp", "dp"), P()),
        out_specs=(P("dp"), P("dp", "tp")),
    )
    assert_close(gradients(mapped, routed, shared, gamma), gradients(dense, routed, shared, gamma))


def test_gradients_where_only_the_shared_rows_differ_over_dp():
    mesh = make_mesh((2, TP), ("dp", "tp"))
    routed, shared, gamma = inputs()
    halves = jnp.concatenate([shared, 2 * shared], axis=1)

    def tail(routed, shared, gamma):
        return latent_tail.fused(routed[0], shared[0], gamma, axis_name="tp", eps=EPS)

    mapped = jax.shard_map(
        tail,
        mesh=mesh,
        in_specs=(P("tp"), P("tp", "dp"), P()),
        out_specs=(P(), P("dp", "tp")),
    )
    assert_close(gradients(mapped, routed, halves, gamma), gradients(dense, routed, halves, gamma))


def test_gradient_of_gradient():
    arguments = inputs()

    def norm_of_gradient(function, *arguments):
        return sum((g.astype(jnp.float32) ** 2).sum() for g in gradients_eager(function, arguments))

    def gradients_eager(function, arguments):
        return jax.grad(functools.partial(loss, function), (0, 1, 2))(*arguments)

    second = functools.partial(jax.grad(norm_of_gradient, (1, 2, 3)), distributed(make_mesh((TP,))))
    expected = functools.partial(jax.grad(norm_of_gradient, (1, 2, 3)), dense)
    assert_close(jax.jit(second)(*arguments), jax.jit(expected)(*arguments))


def test_gradient_of_a_zero_sum_is_not_lost():
    """The select that makes a zero sum +0 must not cut the gradient there."""
    routed, shared, gamma = inputs()
    routed, shared = jnp.zeros_like(routed), jnp.zeros_like(shared)

    def linear(function, routed, shared, gamma):
        latent, total = function(routed, shared, gamma)
        return latent.astype(jnp.float32).sum() + total.astype(jnp.float32).sum()

    function = distributed(make_mesh((TP,)))
    actual = jax.grad(functools.partial(linear, function), (0, 1))(routed, shared, gamma)
    expected = jax.grad(functools.partial(linear, dense), (0, 1))(routed, shared, gamma)
    assert np.abs(np.asarray(expected[0], np.float32)).min() > 0
    assert_close(actual, expected)


def test_nan_rows_of_skipped_slots_leave_all_gradients_finite():
    routed, shared, gamma = inputs(top_k=3)
    routed = routed._replace(
        permuted=routed.permuted.at[:, 0].set(jnp.nan),
        indices=jnp.where(routed.indices == 0, -1, routed.indices),
    )
    for gradient in gradients(distributed(make_mesh((TP,))), routed, shared, gamma):
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, None), (0, 0, 0)])
def test_gradient_of_vmap_with_spmd_axis_name(batched):
    mesh = make_mesh((2, TP), ("dp", "tp"))
    stacked = [
        jnp.stack([x, 2 * x]) if axis == 0 else x for x, axis in zip(inputs(), batched, strict=True)
    ]

    def mapped(function, **options):
        return lambda *arguments: jax.vmap(function, batched, **options)(*arguments)

    actual = gradients(mapped(distributed(mesh), spmd_axis_name="dp"), *stacked)
    assert_close(actual, gradients(mapped(dense), *stacked))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_forward_mode(wrap, top_k):
    primals = inputs(top_k)
    rng = np.random.default_rng(7)
    tangents = jax.tree.map(
        lambda x: (
            jnp.asarray(normal(rng, *x.shape))
            if x.dtype == jnp.bfloat16
            else np.zeros(x.shape, jax.dtypes.float0)
        ),
        primals,
    )
    function = distributed(make_mesh((TP,)))
    actual = wrap(lambda p, t: jax.jvp(function, p, t))(primals, tangents)
    expected = jax.jvp(dense, primals, tangents)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_hessian_vector_product_forward_over_reverse():
    arguments = inputs()
    tangents = tuple(x / 2 for x in arguments)

    def product(function):
        grad = jax.grad(functools.partial(loss, function), (0, 1, 2))
        return jax.jit(lambda p, t: jax.jvp(grad, p, t)[1])(arguments, tangents)

    assert_close(product(distributed(make_mesh((TP,)))), product(dense))


def test_vmap_of_gradient():
    function = distributed(make_mesh((TP,)))
    routed, shared, gamma = inputs()
    grad = jax.grad(functools.partial(loss, function), (0, 1, 2))
    batched = jax.vmap(grad, (0, None, None))(jnp.stack([routed, 2 * routed]), shared, gamma)
    for index, scale in enumerate((1, 2)):
        assert_close([g[index] for g in batched], grad(scale * routed, shared, gamma))
