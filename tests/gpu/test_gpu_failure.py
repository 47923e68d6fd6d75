"""Missing and disagreeing ranks: bounded, reported, sticky, and repaired by a collective reset."""

import time

import kernel_oracle as oracle
import kernel_traffic as traffic
import numpy as np
import pytest

from jax_latent_tail.kernels import abi, harness

TAIL, GATHER, UP = traffic.Player, traffic.GatherPlayer, traffic.UpPlayer
# Who plays, and the roles of its calls.
HALVES = pytest.mark.parametrize(
    ("op", "roles"),
    [
        (TAIL, abi.ROUTED_MASK),
        (TAIL, abi.SHARED_MASK),
        (GATHER, abi.SHARED_MASK),
        (UP, abi.SHARED_MASK),
    ],
    ids=["routed", "shared", "all_gather_add", "up_gather_add"],
)
NAMES = {TAIL: "tail", GATHER: "all_gather_add", UP: "up_gather_add"}
OPS = pytest.mark.parametrize("op", NAMES, ids=NAMES.values())
DEADLINE_S = 0.05


@pytest.fixture
def make_group(device, load):
    def make(tp, op=TAIL, deadline_s=DEADLINE_S):
        if op is GATHER:
            loaded, data = traffic.gather(device, tp), oracle.make_gather(1, "normal", tp, 8, 7168)
        elif op is UP:
            loaded, data = traffic.up(device, tp), oracle.make_up(1, "integers", 8, 3584, 7168)
        else:
            loaded, data = load(tp), oracle.make(1, "normal", tp, 8, 3584, 7168)
        ranks = harness.connected(device, loaded, max_tokens=8, deadline_s=deadline_s)
        return [op(rank, loaded, [data], 4) for rank in ranks]

    return make


def launch(player, step, output=0, **changes):
    arguments = player.call(step, output)
    for name, value in changes.items():
        setattr(arguments, name, value)
    player.rank.launch(player.loaded, arguments)


def all_nan(player, step, output=0):
    outputs = [out for out in player.results(step, output) if out is not None]
    return all((out == oracle.NAN).all() for out in outputs)


def works_after_reset(group):
    """All drained, all cleared: the next calls are right."""
    for player in group:
        player.rank.synchronize()
    for player in group:
        player.rank.clear()
    for tokens in (1, 8, 3):
        step = traffic.Step(0, 0, tokens, group[0].whole, None)
        for player in group:
            player.poison()
            player.launch(step, 0)
        for player in group:
            player.check(step, 0)
    for player in group:
        traffic.idle(player.rank)


@HALVES
def test_a_missing_rank_is_named(make_group, op, roles):
    group = make_group(4, op)
    step = traffic.Step(0, 0, 3, roles, None)
    started = time.monotonic()
    for player in group:
        if player.rank.rank != 2:
            player.launch(step, 0)
    for player in group:
        if player.rank.rank != 2:
            player.rank.synchronize()
    assert DEADLINE_S * 0.9 < time.monotonic() - started < DEADLINE_S * 20
    first = []
    for player in group:
        record = player.rank.record
        if player.rank.rank == 2:
            assert record.code == 0
            continue
        assert all_nan(player, step)
        assert record.code in (abi.DEADLINE, abi.TOLD)
        assert record.rank == player.rank.rank
        if record.code == abi.DEADLINE:
            first.append(record)
            assert record.ranks == 1 << 2
            assert record.role == (abi.TILES if op is UP else roles >> 1)
            assert record.token < (player.rank.slots if op is UP else 3)  # or tile
            assert record.tokens == 3
            assert record.generation == 0
            assert record.waited_ns >= DEADLINE_S * 1e9
            assert record.abi_version == abi.ABI_VERSION
            assert "from ranks [2]" in record.describe()
    assert first
    # The missing rank was told. Coming late, it publishes nothing and takes nothing.
    late = group[2]
    before = [player.rank.read_workspace() for player in group]
    launch(late, step)
    late.rank.synchronize()
    assert all_nan(late, step)
    assert late.rank.record.code == abi.TOLD
    assert late.rank.record.ranks & ~0b1011 == 0
    for player, words in zip(group, before, strict=False):
        np.testing.assert_array_equal(player.rank.read_workspace(), words)
    works_after_reset(group)


@OPS
def test_failure_is_sticky(make_group, op):
    """Ninety queued layers do not wait out ninety deadlines, nor take a late peer's words."""
    group = make_group(2, op)
    step = traffic.Step(0, 0, 2, op.whole, None)
    started = time.monotonic()
    for layer in range(90):
        launch(group[0], step, layer % 4)
    group[0].rank.synchronize()
    assert time.monotonic() - started < 10 * DEADLINE_S
    record = bytes(group[0].rank.record)
    for layer in range(90):
        launch(group[1], step, layer % 4)
    for player in group:
        player.rank.synchronize()
        assert all(all_nan(player, step, output) for output in range(4))
        assert (player.rank.read_generations() == 0).all()
    assert bytes(group[0].rank.record) == record, "the record is written once"
    works_after_reset(group)


def test_record_is_readable_while_a_kernel_runs(make_group):
    group = make_group(2, deadline_s=0.2)
    step = traffic.Step(0, 0, 1, abi.BOTH_MASK, None)
    launch(group[0], step)
    deadline = time.monotonic() + 5
    while not group[0].rank.record.code:  # no synchronisation
        assert time.monotonic() < deadline
    assert group[0].rank.record.ranks == 0b10
    works_after_reset(group)


@HALVES
@pytest.mark.parametrize("what", ["tokens", "call hash", "generation"])
def test_disagreement_is_caught(make_group, op, roles, what):
    group = make_group(2, op, deadline_s=2.0)
    steps = [traffic.Step(0, 0, 3, roles, None)] * 2
    changes = [{}, {}]
    if what == "tokens":
        steps = [steps[0], traffic.Step(0, 0, 2, roles, None)]
    elif what == "call hash":
        # Another eps; a residual on one rank only.
        changes = [{}, {"eps": 1e-5} if op is TAIL else {"rows": 0}]
    else:
        two = np.full_like(group[1].rank.read_generations(), 2)  # the same buffer, two calls on
        harness.write_generations(group[1].rank, two)
    started = time.monotonic()
    for player, step, change in zip(group, steps, changes, strict=False):
        launch(player, step, **change)
    for player, step in zip(group, steps, strict=False):
        player.rank.synchronize()
        assert all_nan(player, step)
    assert time.monotonic() - started < 1.0, "found out by the header, not by the deadline"
    records = [player.rank.record for player in group]
    found = [record for record in records if record.code == abi.MISMATCH]
    assert found
    assert all(record.code in (abi.MISMATCH, abi.TOLD) for record in records)
    for record in found:
        assert record.ranks == 1 << (1 - record.rank)
        assert abi.HEADER_FIELDS[record.field] == what
        assert record.got != record.expected
        if what == "tokens":
            assert (record.got, record.expected) == (3 - (1 - record.rank), 3 - record.rank)
        assert "made a different call" in record.describe()
    works_after_reset(group)


@OPS
def test_closed_touches_nothing(make_group, op):
    group = make_group(2, op)
    step = traffic.Step(0, 0, 2, op.whole, None)
    for player in group:
        player.rank.write_control("closed", 1)
        player.rank.write_control("workspace", 0xDEAD0000)
        for name in ("peer_workspace", "peer_broken"):
            player.rank.write_control(name, 0)
        player.rank.write_control("record", 0xDEAD0000)
        player.poison()
        launch(player, step)
    for player in group:
        player.rank.synchronize()
        assert all_nan(player, step)
        assert player.rank.record.code == 0
        assert (player.rank.read_workspace() == abi.SENTINEL).all()
    works_after_reset(group)


@OPS
def test_broken_by_the_host(make_group, op):
    """What a host marks broken behaves like a rank that a peer told."""
    group = make_group(2, op)
    step = traffic.Step(0, 0, 2, op.whole, None)
    group[0].rank.write_control("broken", abi.TOLD | 1 << 8)
    launch(group[0], step)
    group[0].rank.synchronize()
    assert all_nan(group[0], step)
    assert group[0].rank.record.code == abi.TOLD
    assert group[0].rank.record.ranks == 0b10
    assert (group[1].rank.read_workspace() == abi.SENTINEL).all()
    works_after_reset(group)


def test_nan_in_the_rows_is_not_a_failure(make_group):
    group = make_group(2)
    data = group[0].sets[0]
    rows = data.rows[0].copy()
    rows[0, 5] = 0x7FC0
    group[0].inputs[0]["rows"].write(rows)
    step = traffic.Step(0, 0, 2, abi.BOTH_MASK, None)
    for _ in range(3):
        for player in group:
            player.launch(step, 0)
    for player in group:
        latent, _ = player.results(step, 0)
        assert (latent[0] == oracle.NAN).all()
        assert oracle.ulps(latent[1], data.latent[1]) <= 1
        assert (player.rank.read_generations()[0, :, :2] == 3).all()
        traffic.idle(player.rank)


@OPS
def test_a_late_rank_within_the_deadline_is_waited_for(make_group, op):
    group = make_group(2, op, deadline_s=2.0)
    step = traffic.Step(0, 0, 2, op.whole, None)
    group[0].launch(step, 0)
    time.sleep(0.3)
    group[1].launch(step, 0)
    for player in group:
        player.check(step, 0)
        traffic.idle(player.rank)


@pytest.mark.parametrize(
    ("op", "token_ctas"),
    [(GATHER, 2), (UP, None), (UP, 2)],
    ids=["all_gather_add", "up_gather_add", "up_gather_add, many tiles a cluster"],
)
def test_a_gather_without_one_rank_s_columns_is_nan_everywhere(make_group, op, token_ctas):
    """The columns of the ranks that came are stored before the verdict: none of them may stay."""
    group = make_group(8, op)
    step = traffic.Step(0, 0, 5, abi.SHARED_MASK, token_ctas)
    for player in group:
        player.poison()
        if player.rank.rank != 5:
            player.launch(step, 0)
    for player in group:
        player.rank.synchronize()
        if player.rank.rank != 5:
            assert all_nan(player, step)
            assert (player.rank.read_generations() == 0).all()
    works_after_reset(group)
