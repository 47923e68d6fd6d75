"""Ranks as streams of one process: values, waves, delays, finalize, single roles, graphs, PDL, and
the same of all_gather_add and up_gather_add."""

import time

import kernel_oracle as oracle
import kernel_traffic as traffic
import numpy as np
import pytest

from jax_latent_tail.kernels import abi, geometry, harness
from jax_latent_tail.kernels.variant import UP_TOKENS

MAX_TOKENS = 128
BATCH = 8  # calls in flight before their outputs are looked at


def players(device, loaded, sets, top_k=0, ring=BATCH, **options):
    ranks = harness.connected(device, loaded, max_tokens=MAX_TOKENS, **options)
    return [traffic.Player(rank, loaded, sets, ring, top_k) for rank in ranks]


def play(group, steps, order=None):
    """Run all steps in batches, checking each; rank order of the launches may change by step."""
    rng = np.random.default_rng(0)
    for start in range(0, len(steps), BATCH):
        batch = steps[start : start + BATCH]
        for player in group:
            player.poison()
        for output, step in enumerate(batch):
            for player in rng.permutation(group) if order is None else order:
                player.launch(step, output)
        for output, step in enumerate(batch):
            latents = [player.check(step, output) for player in group]
            for latent in latents[1:]:
                if latent is not None:
                    np.testing.assert_array_equal(latent, latents[0])
    for player in group:
        traffic.idle(player.rank)


def play_with_a_late_rank(group, steps):
    """Each step is launched by one rank in turn after all others, every other time much later."""
    for turn, step in enumerate(steps):
        late = turn % len(group)
        for player in group:
            if player.rank.rank != late:
                player.launch(step, 0)
        if turn % 2:
            time.sleep(0.001)
        group[late].launch(step, 0)
        if turn % 10 == 9:
            for player in group:
                player.check(step, 0)
    for player in group:
        traffic.idle(player.rank)


def replay_with_new_inputs(group, steps, turns=143):
    """The steps as one graph a rank, so many times, now and then on other inputs."""

    def enqueue(player):
        for output, step in enumerate(steps):
            player.launch(step, output)

    graphs = [player.rank.capture(lambda player=player: enqueue(player)) for player in group]
    sets = len(group[0].sets)
    for turn in range(turns):
        looked_at = turn % 20 == 0 or turn > turns - 6
        if looked_at:
            for player in group:
                player.poison()
                player.replace(0, turn % sets)
        for graph in graphs:
            graph.launch()
        for player in group if looked_at else ():
            for output, step in enumerate(steps):
                player.check(step, output, turn % sets)
    for player in group:
        traffic.idle(player.rank)


def sets_of(tp, variant, top_k=0, kinds=oracle.CLASSES):
    return [
        oracle.make(
            seed, kind, tp, MAX_TOKENS, variant.latent, variant.hidden, top_k, variant.fp32_internal
        )
        for seed, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("fp32_internal", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_random_calls(device, load, tp, fp32_internal):
    loaded = load(tp, fp32_internal=fp32_internal)
    group = players(device, loaded, sets_of(tp, loaded.variant))
    calls = 1000 if not fp32_internal else 200
    roles = (abi.BOTH_MASK,) * 4 + (abi.ROUTED_MASK, abi.SHARED_MASK)
    waves = (None, 1, 8, 32)
    play(group, traffic.plan(tp, calls, len(oracle.CLASSES), MAX_TOKENS, waves, roles))


@pytest.mark.parametrize(("tp", "top_k"), [(8, 16), (4, 8), (2, 16), (8, 5)])
def test_finalize(device, load, tp, top_k):
    loaded = load(tp, top_k=top_k if top_k in (8, 16) else -1)
    group = players(device, loaded, sets_of(tp, loaded.variant, top_k, ("normal", "spread")), top_k)
    play(group, traffic.plan(7, 160, 2, MAX_TOKENS))


@pytest.mark.parametrize("top_k", [8, 5])
def test_finalize_reads_no_row_that_is_not_there(device, load, top_k):
    """P = 0 with all indices negative, and an index >= P: NaN in that row alone, no access."""
    loaded = load(2, top_k=8 if top_k == 8 else -1)
    data = oracle.make(1, "normal", 2, 4, 3584, 7168, top_k)
    indices = np.full((2, 4, top_k), -1, np.int32)
    indices[1, 2, 3] = 1_000_000_000
    data.rows, data.indices = data.rows[:, :0], indices
    group = players(device, loaded, [data], top_k)
    step = traffic.Step(0, 0, 4, abi.BOTH_MASK, None)
    for player in group:
        player.launch(step, 0)
    for player in group:
        latent, shard = player.results(step, 0)
        np.testing.assert_array_equal(shard, data.shard[player.rank.rank])
        assert (latent[2] == oracle.NAN).all()
        signed_zeros = data.gamma & 0x8000  # 0 * gamma
        assert (latent[[0, 1, 3]] == signed_zeros).all()
        traffic.idle(player.rank)


@pytest.mark.parametrize(
    ("tp", "latent", "hidden"),
    [
        (1, 3584, 7168),
        (3, 8, 24),
        (3, 1536, 6144),
        (6, 2048, 5040),
        (5, 4104, 40),
        (2, 8192, 16384),
    ],
)
def test_other_sizes(device, load, tp, latent, hidden):
    loaded = load(tp, latent, hidden)
    group = players(device, loaded, sets_of(tp, loaded.variant, kinds=("normal", "spread")))
    play(group, traffic.plan(3, 64, 2, 33 if latent > 4104 else MAX_TOKENS, (None, 2)))


@pytest.mark.parametrize(("latent", "hidden"), [(3584, 0), (0, 7168)])
def test_one_half_alone(device, load, latent, hidden):
    loaded = load(4, latent, hidden)
    role = abi.ROUTED_MASK if latent else abi.SHARED_MASK
    group = players(device, loaded, sets_of(4, loaded.variant, kinds=("normal",)))
    play(group, traffic.plan(3, 32, 1, MAX_TOKENS, (None, 2), (role,)))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_late_rank_before_every_other_call(device, load, tp):
    """Ranks a call ahead of a slow one fill only the other buffer."""
    loaded = load(tp)
    group = players(device, loaded, sets_of(tp, loaded.variant, kinds=("normal",)), ring=1)
    play_with_a_late_rank(group, traffic.plan(11, 300, 1, 16))


def test_two_channels_at_once(device, load):
    """Calls of two channels on two streams share nothing but the control block."""
    loaded = load(2)
    data = sets_of(2, loaded.variant, kinds=("normal",))
    ranks = harness.connected(device, loaded, max_tokens=16, channels=2, ranks_on_device=4)
    group = [traffic.Player(rank, loaded, data, 2) for rank in ranks]
    streams = [(player.rank.stream, harness.new_stream()) for player in group]
    for turn in range(200):
        step = traffic.Step(0, turn % 64, 1 + turn % 16, abi.BOTH_MASK, None)
        for channel in (0, 1):
            for player, pair in zip(group, streams, strict=False):
                arguments = player.call(step, channel)
                arguments.channel = channel
                player.rank.stream = pair[channel]
                player.rank.launch(loaded, arguments)
        if turn % 20 == 19:
            for channel in (0, 1):
                for player in group:
                    player.check(step, channel)
    for player in group:
        traffic.idle(player.rank)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_graph_replay_with_new_inputs(device, load, tp):
    """A captured sequence of calls of several M, replayed on changing inputs."""
    loaded = load(tp)
    sets = sets_of(tp, loaded.variant, kinds=("normal", "spread", "minus zero"))
    group = players(device, loaded, sets)
    steps = [
        traffic.Step(0, 0, tokens, abi.BOTH_MASK, ctas)
        for tokens, ctas in [
            (1, None),
            (32, 5),
            (2, None),
            (17, 1),
            (8, None),
            (33, None),
            (1, None),
        ]
    ]
    replay_with_new_inputs(group, steps)


@pytest.mark.parametrize("trigger", [False, True])
def test_back_to_back_with_pdl(device, load, trigger):
    """Launched with the PDL attribute, each call feeding on the last one's output: a call that read
    or published before `griddepcontrol.wait` would see it unfinished."""
    tp, tokens, calls = 2, 1, 10_000
    loaded = load(tp, latent=3584, hidden=7168, trigger=trigger)
    group = players(device, loaded, sets_of(tp, loaded.variant, kinds=("normal",)), ring=2)
    step = traffic.Step(0, 0, tokens, abi.BOTH_MASK, None)

    def enqueue(player):
        for turn in range(100):
            arguments = player.call(step, turn % 2)
            if turn:
                arguments.rows = player.outputs[(turn + 1) % 2][0].address
            arguments.pdl = True
            player.rank.launch(loaded, arguments)

    graphs = [player.rank.capture(lambda player=player: enqueue(player)) for player in group]
    want = None
    for _ in range(calls // 100):
        for player in group:
            player.poison()
        for graph in graphs:
            graph.launch()
        got = [player.results(step, 1)[0] for player in group]
        want = got[0] if want is None else want
        assert not np.isnan(oracle.to_float(want)).any()
        for latent in got:
            np.testing.assert_array_equal(latent, want)
    for player in group:
        traffic.idle(player.rank)


def test_peers_played_by_the_host(device):
    """Words and headers are expected exactly where `abi.Slot` says, buffer by buffer."""
    import kernel_sanitize

    kernel_sanitize.run(device, 2, 1, 3584, 7168, 0, False, None)


def test_geometries_agree_with_themselves(device, load):
    """Each geometry, whatever the number of waves, gives one bit pattern over 540 calls."""
    tp = 4
    loaded = load(tp)
    group = players(device, loaded, sets_of(tp, loaded.variant, kinds=("spread",)))
    for kernel in range(len(loaded.geometries)):
        first = None
        for ctas in (1, 8, 15):
            for _ in range(30):
                for player in group:
                    player.poison()
                for output, tokens in enumerate((33, 65, 128)):
                    step = traffic.Step(0, 0, tokens, abi.BOTH_MASK, ctas)
                    for player in group:
                        arguments = player.call(step, output)
                        arguments.kernel = kernel
                        player.rank.launch(loaded, arguments)
                for output, tokens in enumerate((33, 65, 128)):
                    step = traffic.Step(0, 0, tokens, abi.BOTH_MASK, ctas)
                    got = [player.check(step, output) for player in group]
                    first = got[0] if first is None and tokens == 128 else first
                    for latent in got:
                        np.testing.assert_array_equal(latent, got[0])
                        if first is not None:
                            np.testing.assert_array_equal(latent, first[:tokens])
    for player in group:
        traffic.idle(player.rank)


def test_occupancy_holds_all_ranks(device, load):
    """What `token_ctas` admits for ranks that share this GPU fits at once."""
    for tp in (2, 4, 8):
        gathers = (traffic.gather(device, tp), traffic.up(device, tp))
        for loaded, roles in ((load(tp), 2), *((gather, 1) for gather in gathers)):
            for index in range(len(loaded.geometries)):
                fits = loaded.active_clusters(index)
                ctas = geometry.token_ctas(
                    10**6, roles=roles, active_clusters=fits, sm_count=device.sm_count,
                    ranks_on_device=tp, reserved_sms=0,
                )  # fmt: skip
                assert ctas >= 1
                assert roles * tp * ctas <= fits


# ---- all_gather_add

GATHER_KINDS = (*oracle.CLASSES, "patterns")


def gather_players(device, loaded, kinds=GATHER_KINDS, ring=BATCH, max_tokens=MAX_TOKENS):
    variant = loaded.variant
    sets = [
        oracle.make_gather(seed, kind, variant.tp, max_tokens, variant.hidden)
        for seed, kind in enumerate(kinds)
    ]
    ranks = harness.connected(device, loaded, max_tokens=max_tokens)
    return [traffic.GatherPlayer(rank, loaded, sets, ring) for rank in ranks]


def replay_to(want, group, step, enqueue, times):
    """What `enqueue` puts on each rank's stream, as graphs that end with `want` in output 1."""
    graphs = [player.rank.capture(lambda player=player: enqueue(player)) for player in group]
    for _ in range(times):
        for player in group:
            player.poison()
        for graph in graphs:
            graph.launch()
        for player in group:
            np.testing.assert_array_equal(player.results(step, 1)[1], want)
    for player in group:
        traffic.idle(player.rank)


def gather_step(tokens, data=0, first=0, token_ctas=None, residual=True):
    return traffic.Step(data, first, tokens, abi.SHARED_MASK, token_ctas, residual)


def gather_plan(seed, calls, sets, max_tokens, waves=(None,)):
    return traffic.plan(seed, calls, sets, max_tokens, waves, (abi.SHARED_MASK,), (True, False))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_random_gathers(device, tp):
    group = gather_players(device, traffic.gather(device, tp))
    play(group, gather_plan(tp, 1000, len(GATHER_KINDS), MAX_TOKENS, (None, 1, 8, 32)))


@pytest.mark.parametrize(
    ("tp", "hidden", "max_tokens"),
    [(1, 7168, 128), (3, 24, 128), (5, 40, 128), (6, 5040, 128), (2, 65536, 40)],
)
def test_gathers_of_other_sizes(device, tp, hidden, max_tokens):
    loaded = traffic.gather(device, tp, hidden)
    group = gather_players(device, loaded, ("spread", "patterns"), max_tokens=max_tokens)
    play(group, gather_plan(3, 96, 2, max_tokens, (None, 2)))


@pytest.mark.parametrize("residual", [True, False], ids=["add", "copy"])
def test_gather_keeps_every_sign(device, residual):
    """Zeros of both signs in every pair of columns, in the own columns and in those of peers: all
    ranks as the plain sum has them, although one pair is the word that must not travel."""
    loaded = traffic.gather(device, 4)
    zeros = np.array([0, 0x8000], np.uint16)
    pairs = np.stack(np.meshgrid(zeros, zeros, zeros, zeros), -1).reshape(16, 4)
    x = np.broadcast_to(np.tile(pairs[:, :2].ravel(), 56), (4, 2, 1792)).copy()
    addends = np.tile(np.tile(pairs[:, 2:].ravel(), 56), (2, 4))
    data = oracle.gather_data(x, addends)
    assert ((data.added == 0x8000) == ((data.copied == 0x8000) & (addends == 0x8000))).all()
    ranks = harness.connected(device, loaded, max_tokens=2)
    group = [traffic.GatherPlayer(rank, loaded, [data], BATCH) for rank in ranks]
    play(group, [gather_step(2, residual=residual)] * 8)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_late_rank_before_every_other_gather(device, tp):
    group = gather_players(device, traffic.gather(device, tp), ("normal", "spread"), ring=1)
    play_with_a_late_rank(group, gather_plan(11, 300, 2, 16))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_gather_graph_replay_with_new_inputs(device, tp):
    group = gather_players(device, traffic.gather(device, tp), ("normal", "spread", "patterns"))
    steps = [
        gather_step(tokens, token_ctas=ctas, residual=residual)
        for tokens, ctas, residual in [
            (1, None, True),
            (32, 5, False),
            (2, None, True),
            (17, 1, True),
            (8, None, False),
            (33, None, True),
            (128, 3, True),
        ]
    ]
    replay_with_new_inputs(group, steps)


@pytest.mark.parametrize("trigger", [False, True])
def test_gathers_back_to_back_with_pdl(device, trigger):
    """Launched with the PDL attribute, each call's residual the last one's output: a call that
    read it before `griddepcontrol.wait` would see it unfinished."""
    loaded = traffic.gather(device, 2, trigger=trigger)
    group = gather_players(device, loaded, ("normal",), ring=2)
    step, data = gather_step(1), group[0].sets[0]

    def enqueue(player):
        for turn in range(100):
            arguments = player.call(step, turn % 2)
            if turn:
                arguments.rows = player.outputs[(turn + 1) % 2][abi.SHARED].address
            arguments.pdl = True
            player.rank.launch(loaded, arguments)

    want = data.residual[:1]
    for _ in range(100):
        want = oracle.all_gather_add(data.x[:, :1], want)
    replay_to(want, group, step, enqueue, times=100)


def test_gather_with_peers_played_by_the_host(device):
    """Words and headers are expected exactly where `abi.Slot` says, buffer by buffer."""
    import kernel_sanitize

    kernel_sanitize.run_gather(device, 2, 1, 7168, None)
    kernel_sanitize.run_gather(device, 8, 5, 7168, 1)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_gather_geometries_agree(device, tp):
    loaded = traffic.gather(device, tp)
    group = gather_players(device, loaded, ("patterns",))
    for kernel in range(len(loaded.geometries)):
        fits = group[0].rank.token_ctas(loaded, MAX_TOKENS, 1, kernel)
        for ctas in (1, 8, 15):
            for _ in range(10):
                for player in group:
                    player.poison()
                steps = [gather_step(m, residual=m != 65) for m in (33, 65, 128)]
                for output, step in enumerate(steps):
                    for player in group:
                        arguments = player.call(step, output)
                        arguments.kernel, arguments.token_ctas = kernel, min(ctas, fits)
                        player.rank.launch(loaded, arguments)
                for output, step in enumerate(steps):
                    for player in group:
                        player.check(step, output)
    for player in group:
        traffic.idle(player.rank)


# ---- up_gather_add


def up_players(device, loaded, kinds=oracle.UP_CLASSES, ring=BATCH):
    sizes = loaded.variant.latent, loaded.variant.hidden
    seeds = [oracle.UP_CLASSES.index(kind) for kind in kinds]
    sets = [oracle.make_up(*which, UP_TOKENS, *sizes) for which in zip(seeds, kinds, strict=True)]
    ranks = harness.connected(device, loaded, max_tokens=UP_TOKENS)
    return [traffic.UpPlayer(rank, loaded, sets, ring) for rank in ranks]


def up_plan(seed, calls, sets, waves=(None, 1, 2), max_tokens=UP_TOKENS):
    return gather_plan(seed, calls, sets, max_tokens, waves)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_random_up_gathers(device, tp):
    """Any M after any other, one tile a cluster or all of them in one; ranks agree bit by bit."""
    group = up_players(device, traffic.up(device, tp))
    play(group, up_plan(tp, 240, len(oracle.UP_CLASSES)))


@pytest.mark.parametrize(("tp", "latent", "hidden"), [(3, 520, 600), (5, 8, 40), (6, 7168, 6144)])
def test_up_gathers_of_other_sizes(device, tp, latent, hidden):
    """The last tile in part, warps without a row, a stripe in two passes."""
    group = up_players(device, traffic.up(device, tp, latent, hidden), ("integers", "special"))
    play(group, up_plan(3, 64, 2))


@pytest.mark.parametrize("residual", [True, False], ids=["add", "copy"])
def test_up_gather_keeps_every_sign(device, residual):
    """Zeros of both signs in every pair of columns, one of them the word that must not travel."""
    group = up_players(device, traffic.up(device, 4), ("zeros",))
    data = group[0].sets[0]
    pairs, counts = np.unique(data.copied[0].view(np.uint32), return_counts=True)
    assert set(pairs.tolist()) == {0, 0x8000, 0x80000000, 0x80008000}
    assert counts.min() > 1000
    minus = (data.copied[0] == 0x8000) & (data.residual == 0x8000)
    assert ((data.added[0] == 0x8000) == minus).all()
    waves = (None, 1, 2, None, 1, None, 2, None)
    tokens = (32, 16, 8, 1, 9, 31, 17, 2)
    play(
        group,
        [
            gather_step(m, token_ctas=ctas, residual=residual)
            for m, ctas in zip(tokens, waves, strict=True)
        ],
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_a_late_rank_before_every_other_up_gather(device, tp):
    group = up_players(device, traffic.up(device, tp), ("integers", "zeros"), ring=1)
    play_with_a_late_rank(group, up_plan(11, 150, 2, (None, 2)))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_up_gather_graph_replay_with_new_inputs(device, tp):
    group = up_players(device, traffic.up(device, tp), ("integers", "zeros", "normal"))
    steps = [
        gather_step(tokens, token_ctas=ctas, residual=residual)
        for tokens, ctas, residual in [
            (1, None, True),
            (32, 2, False),
            (2, None, True),
            (17, 1, True),
            (8, None, False),
            (9, None, True),
            (32, None, True),
        ]
    ]
    replay_with_new_inputs(group, steps, turns=43)


def test_up_gathers_back_to_back_with_pdl(device):
    """Launched with the PDL attribute, each call's latent or residual the last one's output: a
    call that read it before `griddepcontrol.wait` would see it unfinished."""
    loaded = traffic.up(device, 2)
    group = up_players(device, loaded, ("normal",), ring=2)
    step = gather_step(1)

    def launch(player, turn, pdl):
        arguments = player.call(step, turn % 2)
        if turn:
            name = "latent" if turn % 2 else "rows"
            setattr(arguments, name, player.outputs[(turn + 1) % 2][abi.SHARED].address)
        arguments.pdl = pdl
        player.rank.launch(loaded, arguments)

    for turn in range(100):  # one by one
        for player in group:
            launch(player, turn, False)
        for player in group:
            player.rank.synchronize()
    want = group[0].results(step, 1)[1]
    assert np.isfinite(oracle.to_float(want)).all()

    def enqueue(player):
        for turn in range(100):
            launch(player, turn, True)

    replay_to(want, group, step, enqueue, times=20)


def test_up_gather_with_peers_played_by_the_host(device):
    """Words and headers are expected, and published, exactly where `abi.Slot` says."""
    import kernel_sanitize

    kernel_sanitize.run_up(device, 3, 1, 520, 600, 1)
    kernel_sanitize.run_up(device, 8, 5, 3584, 7168, None)


@pytest.mark.parametrize("tp", [2, 8])
def test_up_gather_geometries_agree(device, tp):
    """A token has the same bits whatever the geometry, the number of waves and M."""
    loaded = traffic.up(device, tp)
    group = up_players(device, loaded, ("normal",))
    want = None
    for kernel, shape in enumerate(loaded.geometries):
        fits = group[0].rank.token_ctas(loaded, UP_TOKENS, 1, kernel)
        for ctas in (1, 3, fits):
            for player in group:
                player.poison()
            steps = [gather_step(m) for m in (3, 8, 16, UP_TOKENS) if m <= shape.tokens]
            for output, step in enumerate(steps):
                for player in group:
                    arguments = player.call(step, output)
                    arguments.kernel, arguments.token_ctas = kernel, min(ctas, fits)
                    player.rank.launch(loaded, arguments)
            for output, step in enumerate(steps):
                for player in group:
                    got = player.check(step, output)
                    want = got if want is None else want
                    both = min(len(got), len(want))
                    np.testing.assert_array_equal(got[:both], want[:both])
                    want = max(got, want, key=len)
    for player in group:
        traffic.idle(player.rank)
