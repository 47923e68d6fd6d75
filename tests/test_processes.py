"""Real processes that meet through jax.distributed; each checks its own part of the results."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jax_latent_tail import launch

SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2)]


@pytest.fixture
def processes(request):
    """Starts this file's programs as one group of processes: `processes(name, N, devices)`."""

    def start(name, num_processes, devices_per_process):
        return launch.run(
            [str(Path(__file__)), name],
            num_processes,
            devices_per_process=devices_per_process,
            timeout_s=180,
            env={"JAX_PLATFORMS": "cpu"},
        )

    return start


@pytest.mark.parametrize(("num_processes", "devices"), SHAPES)
def test_fused_over_all_devices(processes, num_processes, devices):
    outputs = processes("over_all_devices", num_processes, devices)
    assert all(output.endswith("checked\n") for output in outputs)


@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("program", ["groups_within_processes", "groups_across_processes"])
def test_dp_and_tp_over_processes(processes, program, num_processes, devices):
    outputs = processes(program, num_processes, devices)
    assert all(output.endswith("checked\n") for output in outputs)


def test_a_scan_and_a_gradient_agree_with_one_process(processes):
    outputs = processes("scan_and_gradient", 2, 2)
    alone = decode(scan_and_gradient())
    for output in outputs:
        *values, routed_gradient, shared_gradient = decode(output.splitlines()[-1])
        for actual, expected in zip(values, alone[:2], strict=True):
            np.testing.assert_array_equal(actual, expected)
        # The backward pass sums over ranks with psum, whose order is XLA's.
        for actual, expected in zip((routed_gradient, shared_gradient), alone[2:], strict=True):
            assert np.abs(actual - expected).max() <= 2**-6 * np.abs(expected).max()


def test_an_error_while_tracing_is_raised_in_every_process(processes):
    outputs = processes("bad_argument", 2, 2)
    assert all("shared is 30 columns wide" in output for output in outputs)


# The programs. Inputs come from a seed, so every process knows all of them.


def placed(array, mesh, spec):
    import jax
    from jax.sharding import NamedSharding

    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def run_tail(mesh, spec, out_specs, routed, shared, gamma):
    """Runs fused over tp; returns this process's parts of the results as (index, data) pairs."""
    import jax
    from jax.sharding import PartitionSpec as P

    import jax_latent_tail as latent_tail

    def tail(routed, shared, gamma):
        routed, shared = (x.reshape(x.shape[-2:]) for x in (routed, shared))
        return latent_tail.fused(routed, shared, gamma, axis_name="tp")

    program = jax.jit(
        jax.shard_map(tail, mesh=mesh, in_specs=(spec, spec, P()), out_specs=out_specs)
    )
    results = program(
        placed(routed, mesh, spec), placed(shared, mesh, spec), placed(gamma, mesh, P())
    )
    return [[(part.index, part.data) for part in y.addressable_shards] for y in results]


def check(parts, latent, shared):
    import oracle

    latents, shards = parts
    assert latents
    for index, data in latents:
        assert oracle.ulps(np.asarray(data), latent[index]).max() <= 1
    for index, data in shards:
        assert oracle.ulps(np.asarray(data), shared[index]).max() == 0
    print("checked")


def over_all_devices():
    import jax
    import oracle
    from harness import make_mesh, random_inputs
    from jax.sharding import PartitionSpec as P

    tp = jax.device_count()
    # An order that is neither that of the ids nor grouped by process.
    devices = jax.devices()[::2] + jax.devices()[1::2][::-1]
    inputs = random_inputs(0, tp, 11, 40, 8 * tp)
    parts = run_tail(
        make_mesh((tp,), devices=devices),
        P("tp"),
        (P(), P(None, "tp")),
        inputs.rows,
        inputs.shared,
        inputs.gamma,
    )
    total = oracle.shards(inputs.shared).swapaxes(0, 1).reshape(11, -1)
    check(parts, oracle.latent(inputs.rows, inputs.gamma), total)


def two_groups(devices_of_groups):
    import jax
    import oracle
    from harness import normal
    from jax.sharding import AxisType, Mesh
    from jax.sharding import PartitionSpec as P

    tp = jax.device_count() // 2
    mesh = Mesh(
        devices_of_groups(np.array(jax.devices()), tp),
        ("dp", "tp"),
        axis_types=(AxisType.Auto,) * 2,
    )
    rng = np.random.default_rng(0)
    routed, shared = normal(rng, 2, tp, 9, 40), normal(rng, 2, tp, 9, 8 * tp)
    gamma = normal(rng, 40)
    parts = run_tail(mesh, P("dp", "tp"), (P("dp"), P("dp", "tp")), routed, shared, gamma)
    latent = np.concatenate([oracle.latent(group, gamma) for group in routed])
    total = [oracle.shards(group).swapaxes(0, 1).reshape(9, -1) for group in shared]
    check(parts, latent, np.concatenate(total))


def groups_within_processes():
    two_groups(lambda devices, tp: devices.reshape(2, tp))


def groups_across_processes():
    two_groups(lambda devices, tp: devices.reshape(tp, 2).T)


def scan_and_gradient():
    """Results that must not depend on how many processes hold the devices, encoded."""
    import jax
    import jax.numpy as jnp
    from harness import make_mesh, random_inputs
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P

    import jax_latent_tail as latent_tail

    mesh = make_mesh((4,))
    inputs = random_inputs(3, 4, 6, 40, 32)

    def layers(routed, shared, gamma):
        def layer(carry, _):
            routed, shared = carry
            latent, shard = latent_tail.fused(routed, shared, gamma, axis_name="tp")
            latent = lax.pcast(latent, ("tp",), to="varying")
            return (latent, shared.at[:, : shard.shape[1]].set(shard)), None

        return lax.scan(layer, (routed, shared), length=5)[0]

    mapped = jax.shard_map(
        layers, mesh=mesh, in_specs=(P("tp"), P("tp"), P()), out_specs=(P("tp"), P("tp"))
    )

    def loss(routed, shared, gamma):
        routed, shared = mapped(routed, shared, gamma)
        return (routed.astype(jnp.float32) ** 2).sum() + shared.astype(jnp.float32).sum()

    arrays = [
        placed(x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x, mesh, spec)
        for x, spec in zip(
            (inputs.rows, inputs.shared, inputs.gamma), (P("tp"), P("tp"), P()), strict=True
        )
    ]
    results = (*jax.jit(mapped)(*arrays), *jax.jit(jax.grad(loss, (0, 1)))(*arrays))
    if jax.process_count() > 1:
        results = [multihost_utils.process_allgather(y, tiled=True) for y in results]
    return " ".join(np.asarray(y, np.float32).tobytes().hex() for y in results)


def decode(line):
    return [np.frombuffer(bytes.fromhex(part), np.float32) for part in line.split()]


def bad_argument():
    import jax
    import jax.numpy as jnp
    from harness import make_mesh
    from jax.sharding import PartitionSpec as P

    import jax_latent_tail as latent_tail

    tp = jax.device_count()
    mapped = jax.shard_map(
        lambda shared: latent_tail.reduce_scatter(shared, axis_name="tp"),
        mesh=make_mesh((tp,)),
        in_specs=P(),
        out_specs=P(None, "tp"),
    )
    try:
        jax.eval_shape(mapped, jnp.ones((3, 30), jnp.bfloat16))
    except latent_tail.ArgumentValueError as error:
        print(error)


if __name__ == "__main__":
    launch.initialize()
    result = globals()[sys.argv[1]]()
    if result is not None:
        print(result)
