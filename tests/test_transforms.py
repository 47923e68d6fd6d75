"""The operation under JAX's transformations, against itself called plainly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import fused, make_mesh, normal, random_inputs
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail

TP = 4
LATENT, HIDDEN = 40, 96


def bits(x):
    return np.asarray(x).view(np.uint16)


def assert_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(a), bits(e))


def sharded(function, mesh=None, **options):
    """A shard_map over tp of a function of (routed, shared, gamma) with the outputs of fused."""
    options = {"in_specs": (P("tp"), P("tp"), P()), "out_specs": (P(), P(None, "tp"))} | options
    return jax.shard_map(function, mesh=mesh or make_mesh((TP,)), **options)


tail = functools.partial(latent_tail.fused, axis_name="tp")


def arguments(seed=0, num_tokens=6, **options):
    inputs = random_inputs(seed, TP, num_tokens, LATENT, HIDDEN, draw=normal, **options)
    shared = jnp.asarray(inputs.shared.reshape(-1, HIDDEN))
    return inputs.routed, shared, jnp.asarray(inputs.gamma)


# What goes round a loop: the latent row becomes the next routed partial of every rank.
def step(carry, gamma):
    routed, shared = carry
    latent, shard = tail(routed, shared, gamma)
    vary = functools.partial(lax.pcast, axis_name=("tp",), to="varying")
    return vary(latent), shared.at[:, : shard.shape[1]].set(shard)


@functools.partial(sharded, out_specs=(P("tp"), P("tp")))
def three_steps(routed, shared, gamma):
    carry = routed, shared
    for _ in range(3):
        carry = step(carry, gamma)
    return carry


@pytest.mark.smoke
def test_eager_equals_jit():
    assert_same(sharded(tail)(*arguments()), jax.jit(sharded(tail))(*arguments()))


def test_scan_equals_calls_in_line():
    @functools.partial(sharded, out_specs=(P("tp"), P("tp")))
    def scanned(routed, shared, gamma):
        carry, _ = lax.scan(lambda c, _: (step(c, gamma), None), (routed, shared), length=3)
        return carry

    assert_same(jax.jit(scanned)(*arguments()), jax.jit(three_steps)(*arguments()))


def test_while_loop_equals_calls_in_line():
    @functools.partial(sharded, out_specs=(P("tp"), P("tp")))
    def looped(routed, shared, gamma):
        def body(state):
            count, carry = state
            return count + 1, step(carry, gamma)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, (routed, shared)))[1]

    assert_same(jax.jit(looped)(*arguments()), jax.jit(three_steps)(*arguments()))


@pytest.mark.parametrize("predicate", [False, True])
def test_cond_takes_one_branch(predicate):
    @functools.partial(sharded, in_specs=(P("tp"), P("tp"), P(), P()))
    def branched(routed, shared, gamma, predicate):
        return lax.cond(
            predicate,
            lambda: tail(routed, shared, gamma),
            lambda: tail(routed + routed, shared, gamma, fp32_internal=True),
        )

    routed, shared, gamma = arguments()
    expected = (
        sharded(tail)(routed, shared, gamma)
        if predicate
        else sharded(functools.partial(tail, fp32_internal=True))(routed + routed, shared, gamma)
    )
    assert_same(jax.jit(branched)(routed, shared, gamma, predicate), expected)


@pytest.mark.parametrize("top_k", [None, 3])
def test_checkpoint_keeps_values_and_gradients(top_k):
    def loss(tail, routed, shared, gamma):
        latent, shard = sharded(tail)(routed, shared, gamma)
        return (latent.astype(jnp.float32) ** 2).sum() + (shard.astype(jnp.float32) ** 3).sum()

    routed, shared, gamma = arguments(top_k=top_k)
    if top_k:
        routed = routed._replace(permuted=jnp.nan_to_num(routed.permuted))
    for function in (tail, jax.checkpoint(tail)):
        value_and_grad = jax.jit(jax.value_and_grad(functools.partial(loss, function), (1, 2)))
        results = value_and_grad(routed, shared, gamma)
        if function is tail:
            expected = results
    for a, e in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)


def test_ahead_of_time_compilation():
    compiled = jax.jit(sharded(tail)).lower(*arguments()).compile()
    assert_same(compiled(*arguments()), sharded(tail)(*arguments()))


def test_donated_inputs():
    expected = sharded(tail)(*arguments())
    donating = jax.jit(sharded(tail), donate_argnums=(0, 1))
    routed, shared, gamma = arguments()
    assert_same(donating(jnp.copy(routed), jnp.copy(shared), gamma), expected)


# vmap. The oracle is the same function, called once per element of the batch.


def batch(seeds, **options):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(arguments(seed, **options) for seed in seeds))


def each(function, batched, in_axes):
    def element(argument, axis, index):
        return argument if axis is None else jax.tree.map(lambda x: x.take(index, axis), argument)

    sizes = {
        jax.tree.leaves(argument)[0].shape[axis]
        for argument, axis in zip(batched, in_axes, strict=True)
        if axis is not None
    }
    outputs = [
        function(*(element(a, axis, i) for a, axis in zip(batched, in_axes, strict=True)))
        for i in range(sizes.pop())
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *outputs)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("in_axes", [(0, 0, None), (0, 0, 0), (0, None, None), (None, 0, None)])
def test_vmap_outside_shard_map(in_axes, top_k):
    batched = batch([1, 2, 3], top_k=top_k)
    call = tuple(
        argument if axis is not None else jax.tree.map(lambda x: x[0], argument)
        for argument, axis in zip(batched, in_axes, strict=True)
    )
    actual = jax.jit(jax.vmap(sharded(tail), in_axes))(*call)
    assert_same(actual, each(sharded(tail), call, in_axes))


def test_vmap_inside_shard_map_over_a_middle_axis():
    routed, shared, gamma = batch([1, 2, 3])
    routed, shared = jnp.moveaxis(routed, 0, 1), jnp.moveaxis(shared, 0, 2)

    @functools.partial(sharded, out_specs=(P(), P(None, None, "tp")))
    def inside(routed, shared, gamma):
        return jax.vmap(tail, in_axes=(1, 2, None), out_axes=0)(routed, shared, gamma)

    expected = each(sharded(tail), (routed, shared, gamma[0]), (1, 2, None))
    assert_same(jax.jit(inside)(routed, shared, gamma[0]), expected)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0), (0, 0, None)])
def test_vmap_of_unreduced_rows_by_parts(in_axes):
    """Rows, weights and indices may be batched one without another."""
    (permuted, weights, indices), shared, gamma = batch([1, 2, 3], top_k=3)
    parts = tuple(
        part if axis is not None else part[0]
        for part, axis in zip((permuted, weights, indices), in_axes, strict=True)
    )
    if in_axes == (0, None, None):  # the shared indices point to rows that others left NaN
        parts = (jnp.nan_to_num(permuted), *parts[1:])

    def call(permuted, weights, indices):
        return sharded(tail)(
            latent_tail.Unfinalized(permuted, weights, indices), shared[0], gamma[0]
        )

    actual = jax.jit(jax.vmap(call, in_axes))(*parts)
    assert_same(actual, each(call, parts, in_axes))


def test_vmap_keeps_an_index_past_the_rows_out_of_the_next_batch_element():
    (permuted, weights, indices), shared, gamma = batch([1, 2], top_k=3)
    indices = indices.at[0, 0, 0].set(permuted.shape[1] // TP)

    def call(routed, shared):
        return sharded(tail)(routed, shared, gamma[0])

    latent, _ = jax.jit(jax.vmap(call))(latent_tail.Unfinalized(permuted, weights, indices), shared)
    assert jnp.isnan(latent[0, 0]).all()
    assert not jnp.isnan(latent[1]).any()


def test_nested_vmap():
    routed, shared, gamma = batch([1, 2, 3])
    twice = (jnp.stack([routed, routed[::-1]]), jnp.stack([shared, shared[::-1]]))
    actual = jax.jit(jax.vmap(jax.vmap(sharded(tail), (0, 0, None)), (0, 0, None)))(
        *twice, gamma[0]
    )
    once = each(sharded(tail), (routed, shared, gamma[0]), (0, 0, None))
    expected = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), once)
    assert_same(actual, expected)


def test_vmap_with_spmd_axis_name():
    mesh = make_mesh((2, TP), ("dp", "tp"))
    routed, shared, gamma = batch([1, 2])
    mapped = jax.vmap(sharded(tail, mesh=mesh), (0, 0, None), spmd_axis_name="dp")
    actual = jax.jit(mapped)(routed, shared, gamma[0])
    expected = [sharded(tail)(routed[i], shared[i], gamma[0]) for i in range(2)]
    assert_same(actual, jax.tree.map(lambda *xs: jnp.stack(xs), *expected))


def test_vmap_over_the_axis_of_the_group_is_refused():
    shared = arguments()[1]
    message = "axis_name is .*; allowed: the name of a mesh axis"
    with pytest.raises(latent_tail.ArgumentValueError, match=message):
        jax.vmap(functools.partial(latent_tail.reduce_scatter, axis_name="v"), axis_name="v")(
            shared.reshape(TP, -1, HIDDEN)
        )

    def shadowed(x, size):
        inner = functools.partial(latent_tail.reduce_scatter, axis_name="tp")
        return jax.vmap(inner, axis_name="tp")(x.reshape(size, -1, HIDDEN))

    for size, message in ((2, "'tp', here an axis of vmap"), (TP, "of which vmap maps 'tp'")):
        inside = functools.partial(shadowed, size=size)
        mapped = jax.shard_map(
            inside, mesh=make_mesh((TP,)), in_specs=P("tp"), out_specs=P(None, "tp")
        )
        with pytest.raises(latent_tail.ArgumentValueError, match=message):
            jax.jit(mapped)(jnp.tile(shared, (2, 1)))
    assert_same(sharded(tail)(*arguments()), fused_once())


@functools.cache
def fused_once():
    inputs = random_inputs(0, TP, 6, LATENT, HIDDEN, draw=normal)
    latents, shards = fused(inputs)
    return latents[0], shards.swapaxes(0, 1).reshape(6, HIDDEN)


def test_nothing_depends_on_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        assert_same(jax.jit(sharded(tail))(*arguments(1)), sharded(tail)(*arguments(1)))
        routed, shared, gamma = arguments(1)
        jax.jit(jax.grad(lambda g: sharded(tail)(routed, shared, g)[0].sum()))(gamma)


def test_vmap_over_an_empty_batch():
    routed, shared, gamma = batch([1, 2])
    latent, shard = jax.jit(jax.vmap(sharded(tail), (0, 0, None)))(routed[:0], shared[:0], gamma[0])
    assert (latent.shape, shard.shape) == ((0, 6, LATENT), (0, 6, HIDDEN))


def test_vmap_where_an_explicit_axis_splits_the_tokens():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, TP),
        ("dp", "tp"),
        axis_types=(AxisType.Explicit, AxisType.Auto),
    )
    routed, shared, gamma = batch([1, 2, 3])
    rows = routed.reshape(3, TP, 6, LATENT).swapaxes(0, 1)
    partial = shared.reshape(3, TP, 6, HIDDEN).swapaxes(0, 1)

    def inside(rows, shared, gamma):
        return jax.vmap(tail, (0, 0, None))(rows[0], shared[0], gamma)

    mapped = sharded(inside, mesh=mesh, out_specs=(P(), P(None, None, "tp")), axis_names={"tp"})
    place = NamedSharding(mesh, P("tp", None, "dp"))
    with jax.set_mesh(mesh):
        actual = jax.jit(mapped)(
            jax.device_put(rows, place),
            jax.device_put(partial, place),
            jax.device_put(gamma[0], NamedSharding(mesh, P())),
        )
    assert_same(actual, each(sharded(tail), (routed, shared, gamma[0]), (0, 0, None)))
