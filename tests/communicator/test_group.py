"""Tables of devices from meshes, and who holds them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from world import FakeDevice

from jax_latent_tail.communicator import cuda_memory, group
from jax_latent_tail.communicator.settings import Settings, rendezvous_timeout
from jax_latent_tail.errors import ArgumentValueError


def mesh(shape, names, order=None):
    devices = np.array(jax.devices())[order if order is not None else slice(None)]
    count = int(np.prod(shape))
    return Mesh(devices[:count].reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize(
    ("shape", "names", "axis_name", "expected"),
    [
        ((8,), ("tp",), ("tp",), [list(range(8))]),
        ((2, 4), ("dp", "tp"), ("tp",), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((2, 4), ("dp", "tp"), ("dp",), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ((4, 2), ("tp", "dp"), ("tp",), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ((2, 4), ("a", "b"), ("a", "b"), [list(range(8))]),
        ((2, 4), ("a", "b"), ("b", "a"), [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ((2, 2, 2), ("a", "b", "c"), ("c", "a"), [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ((2, 2, 2), ("a", "b", "c"), ("b",), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ((2, 1), ("a", "b"), ("b",), [[0], [1]]),
    ],
)
def test_groups_of_a_mesh(shape, names, axis_name, expected):
    table = group.device_table(mesh(shape, names), axis_name)
    assert table == tuple(map(tuple, expected))
    assert all(type(device) is int for ids in table for device in ids)
    hash(table)


@pytest.mark.parametrize("seed", range(4))
def test_a_table_is_what_axis_index_says(seed):
    """XLA's own rank in the group, on permuted devices and axes in any order."""
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(seed)
    names = ("a", "b", "c")
    grid = mesh((2, 2, 2), names, rng.permutation(8))
    axis_name = tuple(rng.permutation(names)[: 1 + seed % 3])
    ranks = jax.jit(
        jax.shard_map(
            lambda: lax.axis_index(axis_name)[None, None, None],
            mesh=grid,
            in_specs=(),
            out_specs=P(*names),
            check_vma=False,
        )
    )()
    table = group.device_table(grid, axis_name)
    for shard in ranks.addressable_shards:
        (place,) = [ids.index(shard.device.id) for ids in table if shard.device.id in ids]
        assert place == int(jnp.ravel(shard.data)[0])


def test_members_know_their_process_and_only_local_ordinals():
    devices = {
        10: FakeDevice(10, 0, 1),
        11: FakeDevice(11, 0, 0),
        20: FakeDevice(20, 3, 0),
        21: FakeDevice(21, 3, 1),
    }
    everyone = group.members(((20, 10), (11, 21)), devices, me=3)
    assert [(m.device_id, m.group, m.rank, m.process, m.ordinal) for m in everyone] == [
        (20, 0, 0, 3, 0),
        (10, 0, 1, 0, None),
        (11, 1, 0, 0, None),
        (21, 1, 1, 3, 1),
    ]
    assert group.participants(everyone) == (0, 3)
    assert group.describe_process(everyone, 0) == "process 0 (devices 10, 11)"
    assert str(everyone[1]) == "rank 1 of group 0 (device 10)"


def test_kinds_of_memory_depend_on_who_shares_it():
    devices = {index: FakeDevice(index, index, 0) for index in range(4)}
    names = {}
    for key, table in {"across": ((0, 2), (1, 3)), "within": ((0, 1), (2, 3))}.items():
        everyone = group.members(table, devices, 0)
        hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
        names[key] = [kind.name for kind in cuda_memory.candidates(everyone, hosts)]
        one = [kind.name for kind in cuda_memory.candidates(everyone, dict.fromkeys(hosts, "a"))]
        assert one == ["posix_fd", "ipc"]
    assert names == {"across": ["fabric"], "within": ["posix_fd", "ipc"]}


def test_settings_and_their_defaults():
    assert Settings.read({}) == Settings(deadline_s=60.0, pdl=True, multicast=False)
    assert rendezvous_timeout({}) == 300.0
    given = {
        "JAX_LATENT_TAIL_DEADLINE": "0.5",
        "JAX_LATENT_TAIL_PDL": "0",
        "JAX_LATENT_TAIL_MULTICAST": "1",
        "JAX_LATENT_TAIL_RENDEZVOUS_TIMEOUT": "7",
    }
    assert Settings.read(given) == Settings(deadline_s=0.5, pdl=False, multicast=True)
    assert rendezvous_timeout(given) == 7.0
    assert not Settings.read({**given, "NCCL_NVLS_ENABLE": "0"}).multicast
    assert Settings.read({**given, "NCCL_NVLS_ENABLE": "1"}).multicast


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_LATENT_TAIL_DEADLINE", "0"),
        ("JAX_LATENT_TAIL_DEADLINE", "-3"),
        ("JAX_LATENT_TAIL_DEADLINE", "nan"),
        ("JAX_LATENT_TAIL_DEADLINE", "1e300"),
        ("JAX_LATENT_TAIL_PDL", "yes"),
        ("JAX_LATENT_TAIL_MULTICAST", "2"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(variable, value):
    with pytest.raises(ArgumentValueError, match=variable) as caught:
        Settings.read({variable: value})
    assert repr(value) in str(caught.value)
