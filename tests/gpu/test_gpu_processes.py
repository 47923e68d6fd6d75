"""Ranks as processes under MPS, and by time slices, each checking its own outputs."""

import hashlib
import time

import kernel_oracle as oracle
import kernel_traffic as traffic
import numpy as np
import pytest

from jax_latent_tail.kernels import abi, harness, processes, store
from jax_latent_tail.kernels.variant import UP_TOKENS, KernelVariant, arch_for

MAX_TOKENS = 128
KINDS = ("normal", "spread", "special")
BATCH = 8


def worker(peers, top_k, fp32_internal, calls):
    """Random calls of one rank; returns a hash of all its latent outputs."""
    device = harness.Device()
    tp = peers.count
    variant = KernelVariant(arch_for(*device.capability), tp, 3584, 7168, top_k, fp32_internal)
    loaded = harness.Loaded(store.find(variant))
    sets = [
        oracle.make(seed, kind, tp, MAX_TOKENS, 3584, 7168, top_k, fp32_internal)
        for seed, kind in enumerate(KINDS)
    ]
    steps = traffic.plan(tp, calls, len(sets), MAX_TOKENS, (None, 1, 8, 32))
    return play(peers, device, loaded, traffic.Player, sets, steps, top_k)


def play(peers, device, loaded, player_class, sets, steps, *options):
    """Make the calls in batches, checking each; returns a hash of what all ranks must agree on."""
    rank = harness.Rank(device, loaded, peers.rank, max_tokens=MAX_TOKENS, deadline_s=20.0)
    harness.map_peers(rank, peers.exchange(harness.share(rank)))
    peers.meet()  # all buffers are armed before anyone may call
    player = player_class(rank, loaded, sets, BATCH, *options)
    digest = hashlib.sha256()
    rng = np.random.default_rng(peers.rank)
    peers.meet()
    for start in range(0, len(steps), BATCH):
        batch = steps[start : start + BATCH]
        player.poison()
        for output, step in enumerate(batch):
            if rng.random() < 0.02:
                time.sleep(0.001)
            player.launch(step, output)
        for output, step in enumerate(batch):
            digest.update(player.check(step, output).tobytes())
    rank.synchronize()
    peers.meet()
    traffic.idle(rank)
    peers.meet()
    harness.unmap_peers(rank)
    peers.meet()
    return digest.hexdigest()


def gather_worker(peers, calls):
    """The same for all_gather_add."""
    device = harness.Device()
    loaded = traffic.gather(device, peers.count)
    kinds = (*KINDS, "patterns")
    sets = [
        oracle.make_gather(seed, kind, peers.count, MAX_TOKENS, 7168)
        for seed, kind in enumerate(kinds)
    ]
    steps = traffic.plan(
        peers.count, calls, len(kinds), MAX_TOKENS, (None, 1, 8, 32), (abi.SHARED_MASK,),
        (True, False),
    )  # fmt: skip
    return play(peers, device, loaded, traffic.GatherPlayer, sets, steps)


def up_worker(peers, calls):
    """The same for up_gather_add."""
    device = harness.Device()
    loaded = traffic.up(device, peers.count)
    sets = [oracle.make_up(0, "integers", UP_TOKENS, 3584, 7168)]
    steps = traffic.plan(
        peers.count, calls, 1, UP_TOKENS, (None, 1, 2), (abi.SHARED_MASK,), (True, False)
    )
    return play(peers, device, loaded, traffic.UpPlayer, sets, steps)


@pytest.fixture(scope="module")
def daemon():
    with processes.mps() as environment:
        yield environment


@pytest.mark.parametrize(
    ("tp", "top_k", "fp32_internal", "calls"),
    [(2, 0, False, 1000), (4, 0, False, 1000), (8, 0, False, 1000), (4, 8, True, 200)],
)
def test_random_calls(daemon, tp, top_k, fp32_internal, calls):
    hashes = processes.run(tp, worker, top_k, fp32_internal, calls, environment=daemon)
    assert len(set(hashes)) == 1, "ranks differ in their latent output"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_random_gathers(daemon, tp):
    hashes = processes.run(tp, gather_worker, 1000, environment=daemon)
    assert len(set(hashes)) == 1, "ranks differ in their output"


@pytest.mark.parametrize("tp", [2, 8])
def test_random_up_gathers(daemon, tp):
    hashes = processes.run(tp, up_worker, 200, environment=daemon)
    assert len(set(hashes)) == 1, "ranks differ in their output"


def dying(peers):
    """Rank 1 never calls; rank 0 finds out, in another process."""
    device = harness.Device()
    variant = KernelVariant(arch_for(*device.capability), peers.count, 3584, 7168)
    loaded = harness.Loaded(store.find(variant))
    sets = [oracle.make(0, "normal", peers.count, 4, 3584, 7168)]
    rank = harness.Rank(device, loaded, peers.rank, max_tokens=4, deadline_s=0.1)
    harness.map_peers(rank, peers.exchange(harness.share(rank)))
    peers.meet()
    player = traffic.Player(rank, loaded, sets, 1)
    step = traffic.Step(0, 0, 4, abi.BOTH_MASK, None)
    if peers.rank == 0:
        player.launch(step, 0)
        rank.synchronize()
    peers.meet()
    if peers.rank == 1:  # told by the peer through its mapping
        player.launch(step, 0)
        rank.synchronize()
    outputs = player.results(step, 0)
    described = rank.record.describe()
    peers.meet()
    rank.clear()
    peers.meet()
    player.launch(step, 0)
    player.check(step, 0)
    peers.meet()
    harness.unmap_peers(rank)
    peers.meet()
    return all((out == oracle.NAN).all() for out in outputs), described


def test_a_missing_process(daemon):
    (nan0, record0), (nan1, record1) = processes.run(2, dying, environment=daemon)
    assert nan0
    assert nan1
    assert "from ranks [1]" in record0
    assert "ranks [0] failed and told this one" in record1
