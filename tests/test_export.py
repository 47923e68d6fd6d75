"""Programs that outlive the process that traced them: jax.export and the persistent cache."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import flat, make_mesh, random_inputs
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail

IN_SPECS = (P("tp"), P("tp"), P())


def tail(mesh, **options):
    return jax.jit(
        jax.shard_map(
            functools.partial(latent_tail.fused, axis_name="tp", **options),
            mesh=mesh,
            in_specs=IN_SPECS,
            out_specs=(P(), P(None, "tp")),
        )
    )


def arguments(mesh, inputs):
    arrays = (inputs.routed, flat(inputs.shared), jnp.asarray(inputs.gamma))
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, IN_SPECS, strict=True)
    ]


@pytest.mark.parametrize("num_tokens", [4, 40])
def test_an_exported_program_is_right_on_a_permuted_device_order(num_tokens):
    inputs = random_inputs(0, 8, num_tokens, 40, 64)
    mesh = make_mesh((8,))
    serialized = export.export(tail(mesh))(*arguments(mesh, inputs)).serialize()

    permutation = np.random.default_rng(1).permutation(8)
    permuted = make_mesh((8,), devices=[jax.devices()[i] for i in permutation])
    latent, shard = export.deserialize(serialized).call(*arguments(permuted, inputs))

    assert oracle.ulps(np.asarray(latent), oracle.latent(inputs.rows, inputs.gamma)).max() <= 1
    shards = np.asarray(shard).reshape(num_tokens, 8, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(
        shards.view(np.uint16), oracle.shards(inputs.shared).view(np.uint16)
    )


def test_an_exported_program_takes_unfinalized_rows():
    inputs = random_inputs(3, 4, 6, 40, 32, top_k=2)
    mesh = make_mesh((4,))
    sharding = NamedSharding(mesh, P("tp"))
    call = (
        jax.tree.map(lambda x: jax.device_put(x, sharding), inputs.routed),
        *arguments(mesh, inputs)[1:],
    )
    serialized = export.export(tail(mesh))(*call).serialize()
    results = export.deserialize(serialized).call(*call)
    for actual, expected in zip(results, tail(mesh)(*call), strict=True):
        np.testing.assert_array_equal(
            np.asarray(actual).view(np.uint16), np.asarray(expected).view(np.uint16)
        )


def test_a_program_exported_with_its_gradient():
    inputs = random_inputs(1, 4, 6, 40, 32)
    mesh = make_mesh((4,))
    exported = export.export(tail(mesh))(
        *arguments(mesh, inputs),
    )
    serialized = exported.serialize(vjp_order=1)

    def loss(function, *arrays):
        latent, shard = function(*arrays)
        return (latent.astype(jnp.float32) ** 2).sum() + shard.astype(jnp.float32).sum()

    restored = export.deserialize(serialized)
    gradients = [
        jax.grad(functools.partial(loss, function), (0, 1, 2))(*arguments(mesh, inputs))
        for function in (restored.call, tail(mesh))
    ]
    for actual, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=2**-6
        )


PROGRAM = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import jax
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    import numpy as np
    import test_export
    from harness import make_mesh, random_inputs
    order = [int(i) for i in sys.argv[3].split(",")]
    mesh = make_mesh((4,), devices=[jax.devices()[i] for i in order])
    inputs = random_inputs(2, 4, 6, 40, 32)
    arguments = test_export.arguments(mesh, inputs)
    hits.clear()
    latent, shard = test_export.tail(mesh)(*arguments)
    print(sum("cache_hits" in hit for hit in hits), sum("cache_misses" in hit for hit in hits))
    print(np.asarray(latent).tobytes().hex(), np.asarray(shard).tobytes().hex())
"""


def test_a_second_process_finds_the_program_in_the_persistent_cache(tmp_path, request):
    def start(order):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
        result = subprocess.run(
            [*command, str(request.path.parent), str(tmp_path), order],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        counts, values = result.stdout.splitlines()
        return tuple(map(int, counts.split())), values

    (hits, misses), values = start("0,1,2,3")
    assert (hits, misses) == (0, 1)
    (hits, misses), again = start("0,1,2,3")
    assert (hits, misses) == (1, 0)
    assert again == values
    _, permuted = start("2,0,3,1")
    assert permuted == values
