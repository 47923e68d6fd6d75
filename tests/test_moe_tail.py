"""all_gather_add and moe_tail: values, types, transformations, gradients, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import fused, make_mesh, normal, per_rank, random_inputs
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail

TP, TOKENS, LATENT, HIDDEN = 4, 5, 24, 32

both_implementations = pytest.mark.usefixtures("implementation")

gather = functools.partial(latent_tail.all_gather_add, axis_name="tp")
moe_tail = functools.partial(latent_tail.moe_tail, axis_name="tp", eps=1e-3)


def sharded_gather(mesh=None, **options):
    specs = {"in_specs": (P(None, "tp"), P()), "out_specs": P()}
    return jax.shard_map(gather, mesh=mesh or make_mesh((TP,)), **(specs | options))


def sharded_moe_tail(mesh=None):
    return jax.shard_map(
        moe_tail,
        mesh=mesh or make_mesh((TP,)),
        in_specs=(P("tp"), P("tp"), P(), P(None, "tp"), P()),
        out_specs=P(),
    )


def random_columns(seed=0):
    rng = np.random.default_rng(seed)
    return normal(rng, TOKENS, HIDDEN), normal(rng, TOKENS, HIDDEN)


@both_implementations
@pytest.mark.smoke
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_gathers_columns_and_adds_the_residual_with_one_rounding(tp):
    x, residual = random_columns()
    mesh = make_mesh((tp,))
    actual = per_rank(jax.jit(sharded_gather(mesh))(x, residual), mesh)
    expected = (x.astype(np.float32) + residual.astype(np.float32)).astype(bfloat16)
    for rank in actual:
        np.testing.assert_array_equal(rank.view(np.uint16), expected.view(np.uint16))


@both_implementations
def test_without_a_residual_the_bits_are_those_of_the_columns():
    x, _ = random_columns()
    x[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
    mapped = jax.shard_map(gather, mesh=make_mesh((TP,)), in_specs=P(None, "tp"), out_specs=P())
    actual = np.asarray(jax.jit(mapped)(x))
    np.testing.assert_array_equal(actual.view(np.uint16), x.view(np.uint16))


@both_implementations
def test_gathers_within_groups_of_a_larger_mesh():
    mesh = make_mesh((2, TP), ("dp", "tp"))
    x, residual = random_columns()
    x, residual = np.concatenate([x, -x]), np.concatenate([residual, residual])
    mapped = sharded_gather(mesh, in_specs=(P("dp", "tp"), P("dp")), out_specs=P("dp"))
    actual = np.asarray(jax.jit(mapped)(x, residual))
    expected = (x.astype(np.float32) + residual.astype(np.float32)).astype(bfloat16)
    np.testing.assert_array_equal(actual.view(np.uint16), expected.view(np.uint16))


@both_implementations
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 2)])
def test_vmap_of_all_gather_add(in_axes):
    x, residual = random_columns()
    stacks = []
    for array, axis in zip((x, residual), in_axes, strict=True):
        stack = np.stack([array, -2 * array, 3 * array])
        stacks.append(array if axis is None else np.moveaxis(stack, 0, axis))
    actual = jax.jit(jax.vmap(sharded_gather(), in_axes))(*stacks)
    for index in range(3):
        call = [
            stack if axis is None else np.take(stack, index, axis)
            for stack, axis in zip(stacks, in_axes, strict=True)
        ]
        np.testing.assert_array_equal(
            np.asarray(actual[index]), np.asarray(sharded_gather()(*call))
        )


@both_implementations
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_all_gather_add(check_vma):
    x, residual = map(jnp.asarray, random_columns())
    weights = np.random.default_rng(1).standard_normal(x.shape)

    def loss(function, x, residual):
        return (function(x, residual).astype(jnp.float32) ** 2 * weights).sum()

    mapped = sharded_gather(check_vma=check_vma)
    actual = jax.jit(jax.grad(functools.partial(loss, mapped), (0, 1)))(x, residual)
    expected = jax.grad(functools.partial(loss, jnp.add), (0, 1))(x, residual)
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        assert np.abs(a - e).max() <= 2**-6 * np.abs(e).max()


def moe_inputs(top_k=None):
    inputs = random_inputs(3, TP, TOKENS, LATENT, HIDDEN, draw=normal, top_k=top_k)
    rng = np.random.default_rng(4)
    w_up = (normal(rng, LATENT, HIDDEN).astype(np.float32) / 5).astype(bfloat16)
    return inputs, w_up, normal(rng, TOKENS, HIDDEN)


def call_of(inputs, w_up, residual):
    shared = jnp.asarray(inputs.shared.reshape(-1, HIDDEN))
    return inputs.routed, shared, jnp.asarray(inputs.gamma), w_up, residual


@both_implementations
@pytest.mark.parametrize("top_k", [None, 3])
def test_moe_tail_is_its_three_steps(top_k):
    inputs, w_up, residual = moe_inputs(top_k)
    mesh = make_mesh((TP,))
    actual = per_rank(jax.jit(sharded_moe_tail(mesh))(*call_of(inputs, w_up, residual)), mesh)
    for rank in actual[1:]:
        np.testing.assert_array_equal(rank.view(np.uint16), actual[0].view(np.uint16))

    latents, shards = fused(inputs, eps=1e-3)
    shared = shards.swapaxes(0, 1).reshape(TOKENS, HIDDEN)
    up = latents[0].astype(np.float64) @ w_up.astype(np.float64) + shared.astype(np.float64)
    expected = up.astype(np.float32).astype(bfloat16).astype(np.float64) + residual.astype(
        np.float64
    )
    # One ulp more where the product itself lay between two bf16 values.
    assert (oracle.ulps(actual[0], expected) > 1).mean() <= 0.02
    np.testing.assert_allclose(actual[0].astype(np.float64), expected, rtol=2**-7, atol=2**-6)


@both_implementations
def test_gradient_of_moe_tail():
    inputs, w_up, residual = moe_inputs()
    arguments = call_of(inputs, w_up, residual)

    def dense(routed, shared, gamma, w_up, residual):
        s = routed.reshape(TP, TOKENS, LATENT).astype(jnp.float32).sum(0)
        latent = s / jnp.sqrt((s * s).mean(-1, keepdims=True) + 1e-3) * gamma
        z = shared.reshape(TP, TOKENS, HIDDEN).astype(jnp.float32).sum(0)
        return residual + latent @ w_up.astype(jnp.float32) + z

    def loss(function, *arguments):
        return (function(*arguments).astype(jnp.float32) ** 2).sum()

    every = tuple(range(5))
    actual = jax.jit(jax.grad(functools.partial(loss, sharded_moe_tail()), every))(*arguments)
    expected = jax.grad(functools.partial(loss, dense), every)(*map(jnp.asarray, arguments))
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        assert np.abs(a - e).max() <= 2**-5 * np.abs(e).max()


@pytest.mark.parametrize(
    ("argument", "value", "error", "says"),
    [
        ("x", jnp.ones((TOKENS, HIDDEN)), latent_tail.ArgumentTypeError, "bfloat16"),
        ("x", jnp.ones((HIDDEN,), bfloat16), latent_tail.ArgumentValueError, "2 dimensions"),
        (
            "residual",
            jnp.ones((TOKENS, HIDDEN), bfloat16),
            latent_tail.ArgumentValueError,
            r"\(5, 128\)",
        ),
        ("residual", jnp.ones((TOKENS, 4 * HIDDEN)), latent_tail.ArgumentTypeError, "bfloat16"),
    ],
)
def test_bad_input_of_all_gather_add(argument, value, error, says):
    call = {
        "x": jnp.ones((TOKENS, HIDDEN), bfloat16),
        "residual": jnp.ones((TOKENS, TP * HIDDEN), bfloat16),
    } | {argument: value}
    mapped = jax.shard_map(
        lambda call: gather(**call), mesh=make_mesh((TP,)), in_specs=P(), out_specs=P()
    )
    with pytest.raises(error, match=says) as caught:
        jax.eval_shape(mapped, call)
    assert caught.value.argument == argument


def test_a_residual_that_varies_over_the_group():
    mapped = sharded_gather(in_specs=(P(None, "tp"), P("tp")))
    x, residual = random_columns()
    with pytest.raises(latent_tail.ArgumentValueError, match="residual is varying over"):
        jax.eval_shape(mapped, x, np.tile(residual, (TP, 1)))


@pytest.mark.parametrize(
    ("argument", "value", "error", "says"),
    [
        ("w_up", jnp.ones((LATENT, 8)), latent_tail.ArgumentTypeError, "bfloat16"),
        ("w_up", [[1.0] * 8] * LATENT, latent_tail.ArgumentTypeError, "a list"),
        ("w_up", jnp.ones((LATENT,), bfloat16), latent_tail.ArgumentValueError, "2 dimensions"),
        ("w_up", jnp.ones((LATENT - 1, 8), bfloat16), latent_tail.ArgumentValueError, r"\(24, 8\)"),
        ("w_up", jnp.ones((8, LATENT), bfloat16), latent_tail.ArgumentValueError, r"\(24, 8\)"),
        ("w_up", jnp.ones((LATENT, HIDDEN), bfloat16), latent_tail.ArgumentValueError, "H / tp"),
        ("residual", jnp.ones((TOKENS, HIDDEN)), latent_tail.ArgumentTypeError, "bfloat16"),
        ("residual", 1.0, latent_tail.ArgumentTypeError, "a float"),
        ("residual", jnp.ones((HIDDEN,), bfloat16), latent_tail.ArgumentValueError, "2 dimensions"),
        ("residual", jnp.ones((TOKENS, 8), bfloat16), latent_tail.ArgumentValueError, r"\(5, 32\)"),
        ("residual", jnp.ones((4, HIDDEN), bfloat16), latent_tail.ArgumentValueError, r"\(5, 32\)"),
        ("max_tokens", 0, latent_tail.ArgumentValueError, ">= 1"),
        ("implementation", "gemm", latent_tail.ArgumentValueError, "'xla'"),
        ("axis_name", "ep", latent_tail.ArgumentValueError, "bound here: 'tp'"),
    ],
)
def test_bad_input_of_moe_tail(argument, value, error, says):
    call = {
        "routed": jnp.ones((TOKENS, LATENT), bfloat16),
        "shared": jnp.ones((TOKENS, HIDDEN), bfloat16),
        "gamma": jnp.ones((LATENT,), bfloat16),
        "w_up": jnp.ones((LATENT, HIDDEN // TP), bfloat16),
        "residual": jnp.ones((TOKENS, HIDDEN), bfloat16),
    }

    def mapped(changes):
        return jax.shard_map(
            lambda: moe_tail(**(call | changes)), mesh=make_mesh((TP,)), in_specs=(), out_specs=P()
        )

    with pytest.raises(error, match=says) as caught:
        jax.eval_shape(mapped({argument: value}))
    assert caught.value.argument == argument
    assert jax.eval_shape(mapped({})).shape == (TOKENS, HIDDEN)


def test_a_residual_of_moe_tail_that_varies_over_the_group():
    inputs, w_up, residual = moe_inputs()
    mapped = jax.shard_map(
        moe_tail,
        mesh=make_mesh((TP,)),
        in_specs=(P("tp"), P("tp"), P(), P(None, "tp"), P("tp")),
        out_specs=P(),
    )
    with pytest.raises(latent_tail.ArgumentValueError, match="residual is varying over"):
        jax.eval_shape(mapped, *call_of(inputs, w_up, np.tile(residual, (TP, 1))))


def test_a_w_up_that_is_equal_on_all_ranks_is_each_ranks_stripe():
    inputs, w_up, residual = moe_inputs()
    stripe = w_up[:, : HIDDEN // TP]
    mapped = jax.shard_map(
        moe_tail,
        mesh=make_mesh((TP,)),
        in_specs=(P("tp"), P("tp"), P(), P(), P()),
        out_specs=P(),
    )
    actual = jax.jit(mapped)(*call_of(inputs, stripe, residual))
    expected = sharded_moe_tail()(*call_of(inputs, np.tile(stripe, (1, TP)), residual))
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@both_implementations
@pytest.mark.parametrize("top_k", [None, 2])
def test_no_tokens_survive_differentiation(top_k):
    inputs = random_inputs(5, TP, 0, LATENT, HIDDEN, top_k=top_k, num_rows=3)
    arguments = call_of(inputs, moe_inputs()[1], np.zeros((0, HIDDEN), bfloat16))
    routed, *others = arguments

    def loss(rows, *others):
        call = rows if top_k is None else routed._replace(permuted=rows)
        return sharded_moe_tail()(call, *others).astype(jnp.float32).sum()

    rows = routed if top_k is None else routed.permuted
    for wrap in (jax.jit, lambda f: f):
        gradients = wrap(jax.grad(loss, (0, 1, 2, 3, 4)))(rows, *others)
        for gradient, array in zip(gradients, (rows, *others), strict=True):
            assert gradient.shape == array.shape
            assert not np.asarray(gradient).any()
