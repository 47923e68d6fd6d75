"""Meshes and varying-axes types: who is in a group, and what shard_map may conclude."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import flat, fused, make_mesh, normal, random_inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail

pytestmark = pytest.mark.usefixtures("implementation")

LATENT, TOKENS = 40, 5


def group_inputs(groups, tp, seed=0):
    """Stacked inputs of several independent groups: [groups, tp, M, .]."""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, groups, tp, TOKENS, LATENT),
        normal(rng, groups, tp, TOKENS, 8 * tp),
        normal(rng, LATENT),
    )


def check_groups(latent, shard, routed, shared, gamma):
    """latent [groups * M, L] and shard [groups * M, H] against the oracle, group by group."""
    latent = np.asarray(latent).reshape(len(routed), -1, latent.shape[-1])
    shard = np.asarray(shard).reshape(len(shared), -1, shard.shape[-1])
    for group in range(len(routed)):
        expected = oracle.latent(routed[group], gamma)
        assert oracle.ulps(latent[group], expected).max() <= 1
        total = oracle.shards(shared[group]).swapaxes(0, 1).reshape(shard[group].shape)
        assert oracle.ulps(shard[group], total).max() == 0


def tail(group):
    """fused on arrays with leading dimensions of size one, which the in_specs have split."""

    def call(routed, shared, gamma):
        routed, shared = (x.reshape(x.shape[-2:]) for x in (routed, shared))
        return latent_tail.fused(routed, shared, gamma, axis_name=group)

    return call


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["ascending", "reversed", "shuffled"])
def test_ranks_follow_the_order_of_the_mesh(order):
    devices = jax.devices()
    if order == "reversed":
        devices = devices[::-1]
    elif order == "shuffled":
        devices = [devices[i] for i in np.random.default_rng(0).permutation(8)]
    inputs = random_inputs(0, 8, TOKENS, LATENT, 64)
    latents, shards = fused(inputs, mesh=make_mesh((8,), devices=devices))
    assert oracle.ulps(latents[0], oracle.latent(inputs.rows, inputs.gamma)).max() <= 1
    np.testing.assert_array_equal(
        shards.view(np.uint16), oracle.shards(inputs.shared).view(np.uint16)
    )


def test_one_jit_serves_two_device_orders():
    inputs = random_inputs(1, 8, TOKENS, LATENT, 64)
    with_abstract_mesh = jax.jit(
        jax.shard_map(
            functools.partial(latent_tail.fused, axis_name="tp"),
            in_specs=(P("tp"), P("tp"), P()),
            out_specs=(P(), P(None, "tp")),
        )
    )
    expected = oracle.shards(inputs.shared)
    for devices in (jax.devices(), jax.devices()[::-1]):
        with jax.set_mesh(make_mesh((8,), devices=devices)):
            _, shard = with_abstract_mesh(
                inputs.routed, flat(inputs.shared), jnp.asarray(inputs.gamma)
            )
        shards = np.asarray(shard).reshape(TOKENS, 8, -1).swapaxes(0, 1)
        np.testing.assert_array_equal(shards.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
def test_groups_over_one_axis_of_two_are_independent(names, axis_type):
    shape = {"dp": 2, "tp": 4}
    mesh = make_mesh([shape[n] for n in names], names, axis_type=axis_type)
    routed, shared, gamma = group_inputs(2, 4)
    spec = P("dp", "tp")
    mapped = jax.shard_map(
        tail("tp"),
        mesh=mesh,
        in_specs=(spec, spec, P()),
        out_specs=(P("dp"), P("dp", "tp")),
    )
    latent, shard = jax.jit(mapped)(
        jax.device_put(routed, NamedSharding(mesh, spec)),
        jax.device_put(shared, NamedSharding(mesh, spec)),
        jax.device_put(gamma, NamedSharding(mesh, P())),
    )
    check_groups(latent, shard, routed, shared, gamma)


@pytest.mark.parametrize("group", [("a", "b"), ("b", "a")])
def test_a_group_over_both_axes_counts_ranks_major_first(group):
    mesh = make_mesh((2, 4), ("a", "b"))
    routed, shared, gamma = group_inputs(1, 8)
    mapped = jax.shard_map(
        tail(group),
        mesh=mesh,
        in_specs=(P(group), P(group), P()),
        out_specs=(P(), P(None, group)),
    )
    latent, shard = jax.jit(mapped)(routed[0], shared[0], gamma)
    check_groups(latent, shard, routed, shared, gamma)


@pytest.mark.smoke
@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit])
def test_axes_that_stay_automatic(other):
    """shard_map over tp alone: tokens stay split over dp by XLA or by explicit types."""
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(other, AxisType.Auto))
    rng = np.random.default_rng(0)
    routed, shared = normal(rng, 4, 6, LATENT), normal(rng, 4, 6, 32)
    gamma = normal(rng, LATENT)

    def call(routed, shared, gamma):
        return latent_tail.fused(routed[0], shared[0], gamma, axis_name="tp")

    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=(P(), P(None, "tp")),
        axis_names={"tp"},
    )
    sharding = NamedSharding(mesh, P("tp", "dp"))
    with jax.set_mesh(mesh):
        latent, shard = jax.jit(mapped)(
            jax.device_put(routed, sharding),
            jax.device_put(shared, sharding),
            jax.device_put(gamma, NamedSharding(mesh, P())),
        )
    check_groups(latent, shard, routed[None], shared[None], gamma)


@pytest.mark.parametrize(("tp", "check_vma"), [(1, True), (1, False), (8, False)])
def test_groups_of_one_and_unchecked_types(tp, check_vma):
    routed, shared, gamma = group_inputs(1, tp)
    mapped = jax.shard_map(
        tail("tp"),
        mesh=make_mesh((tp,)),
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=(P(), P(None, "tp")),
        check_vma=check_vma,
    )
    latent, shard = jax.jit(mapped)(routed[0], shared[0], gamma)
    check_groups(latent, shard, routed, shared, gamma)


# Types.


def types_inside(function, *arrays, mesh=None, in_specs):
    """The varying axes of each output of a function as seen inside shard_map."""
    seen = []

    def call(*arrays):
        outputs = function(*arrays)
        seen.extend(jax.typeof(y).manual_axis_type.varying for y in outputs)
        return outputs

    mesh = mesh or make_mesh((8,))
    every = P(mesh.axis_names)
    jax.eval_shape(
        jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=every, check_vma=True), *arrays
    )
    return seen


def test_latent_is_invariant_and_shard_varying_over_the_group():
    routed, shared, gamma = group_inputs(1, 8)
    seen = types_inside(tail("tp"), routed[0], shared[0], gamma, in_specs=(P("tp"), P("tp"), P()))
    assert seen == [frozenset(), {"tp"}]


def test_types_keep_the_axes_outside_the_group():
    mesh = make_mesh((2, 4), ("dp", "tp"))
    routed, shared, gamma = group_inputs(2, 4)
    in_specs = (P("dp", "tp"), P("dp", "tp"), P())
    seen = types_inside(tail("tp"), routed, shared, gamma, mesh=mesh, in_specs=in_specs)
    assert seen == [{"dp"}, {"dp", "tp"}]


def test_a_gamma_per_group_is_allowed():
    mesh = make_mesh((2, 4), ("dp", "tp"))
    routed, shared, gamma = group_inputs(1, 4)
    gammas = np.concatenate([gamma, -gamma])
    mapped = jax.shard_map(
        tail("tp"),
        mesh=mesh,
        in_specs=(P(None, "tp"), P(None, "tp"), P("dp")),
        out_specs=(P("dp"), P("dp", "tp")),
    )
    latent, shard = jax.jit(mapped)(routed, shared, gammas)
    for half, own in ((slice(0, TOKENS), gamma), (slice(TOKENS, None), -gamma)):
        check_groups(latent[half], shard[half], routed, shared, own)


def test_partials_that_do_not_vary_are_cast():
    """Replicated partials are summed tp times, as psum does."""
    _, shared, gamma = group_inputs(1, 8)
    rng = np.random.default_rng(0)
    replicated = normal(rng, TOKENS, LATENT)
    mapped = jax.shard_map(
        tail("tp"),
        mesh=make_mesh((8,)),
        in_specs=(P(), P("tp"), P()),
        out_specs=(P(), P(None, "tp")),
    )
    latent, _ = jax.jit(mapped)(replicated, shared[0], gamma)
    expected = oracle.latent(np.stack([replicated] * 8), gamma)
    assert oracle.ulps(np.asarray(latent), expected).max() <= 1


@pytest.mark.smoke
def test_a_shard_is_refused_as_replicated():
    routed, shared, gamma = group_inputs(1, 8)
    mapped = jax.shard_map(
        tail("tp"),
        mesh=make_mesh((8,)),
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=(P(), P()),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped)(routed[0], shared[0], gamma)


def test_inputs_are_not_gathered(implementation):
    """A sharded custom call once gathered its inputs unseen (jax issue 32098)."""
    _, shared, _ = group_inputs(1, 8)
    mesh = make_mesh((8,))
    mapped = jax.shard_map(
        lambda shared: latent_tail.reduce_scatter(shared[0], axis_name="tp"),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(None, "tp"),
    )
    placed = jax.device_put(shared[0], NamedSharding(mesh, P("tp")))
    hlo = jax.jit(mapped).lower(placed).compile().as_text()
    assert ("all-to-all" in hlo) == (implementation == "xla")
    assert ("jax_latent_tail_cpu" in hlo) == (implementation == "cpu")
    assert "all-gather" not in hlo


@pytest.mark.parametrize("implementation", ["xla"], indirect=True)
def test_programs_for_other_platforms_use_plain_collectives(implementation):
    """Lowering for a platform without a native back end works without its devices."""
    routed, shared, gamma = group_inputs(1, 8)
    mapped = jax.shard_map(
        tail("tp"),
        mesh=make_mesh((8,)),
        in_specs=(P("tp"), P("tp"), P()),
        out_specs=(P(), P(None, "tp")),
    )
    traced = jax.jit(mapped).trace(routed[0], shared[0], gamma)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "all_to_all" in text
    assert "custom_call" not in text.replace("custom_call @Sharding", "")
