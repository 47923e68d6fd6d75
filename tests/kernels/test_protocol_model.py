"""The kernel's protocol keeps its promises, and each of its rules is needed.

The properties, checked on every row that is written in every execution of `protocol_model`:
a row that is not NaN is the sum of the words of its own call, from all ranks, each once (nothing
lost, doubled, stale or torn; so all ranks hold the same bits); calls that differ between ranks are
never summed; nothing fails unless calls differ or a deadline may have expired; every execution ends
(where a case lets no deadline expire: without one).
"""

import random
from itertools import permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from protocol_model import DEADLINE, RESET, Call, Case, Faults, Machine, Violation, explore

BOTH = ("routed", "shared")
GATHER = ("gather",)
ANY_TIME = {"deadlines": (0,)}  # in epoch 0, which ends at the first reset


def same(*items, ranks=2, roles=("routed",), **geometry):
    """Every rank runs the same calls, given by their M."""
    program = tuple(item if item == RESET else Call(item, roles=roles) for item in items)
    return Case(programs=(program,) * ranks, **geometry)


def unequal(*programs, **geometry):
    return Case(programs=programs, **geometry)


# ---- each rule is needed. Per fault: a case that finds it, what is seen, and the nearest schedule.

STUCK, FAILED, WRONG, UNEQUAL = "stuck", "failed without a cause", "wrong", "summed unequal calls"
RESET_CASE = same(1, RESET, 1, 1, **ANY_TIME)
ONE_SHARED = unequal((Call(1, "f", ("shared",)),), (Call(1, "g", ("shared",)),), threads=2)

NEEDED = {
    # Rank 0, two calls on, meets rank 1's row of the first call. Only when its own poll of the
    # header runs late does the header (already new) hide the stale payload.
    "no_rearm": (same(1, 1, 1, **ANY_TIME), WRONG),
    # Rank 0 publishes before rank 1 has begun; rank 1 wipes it and waits for it.
    "rearm_before_read": (same(1), STUCK),
    # Rank 0 is one call ahead and publishes over the row that rank 1 has yet to read.
    "one_buffer": (same(1, 1, 1, **ANY_TIME), WRONG),
    # Every schedule: the (-0, -0) word looks as if it had not come.
    "sentinel_in_payload": (same(1, minus_zero=True), STUCK),
    # The vector's first word lands, the second is under way.
    "first_word_only": (same(1, width=2, **ANY_TIME), WRONG),
    # Thread 0 is through before thread 1 of its cluster has read the generation: thread 1 uses the
    # other buffer, and waits there. The same for a store hoisted over the barrier's wait (this is
    # what a missing acquire let the compiler do).
    "no_barrier": (same(1, 1, threads=2), STUCK),
    "no_acquire": (same(1, 1, threads=2), STUCK),
    # Thread 1 writes its part of the second token before thread 0 has gathered the first.
    "one_exchange_slot": (same(2, threads=2, vectors=2, token_ctas=1), WRONG),
    # Thread 0 has its payload and writes it; thread 1 then finds that the headers differ.
    "output_before_verdict": (ONE_SHARED, UNEQUAL),
    # Rank 1's status is set between the entries of two threads of one cluster: thread 0 leaves,
    # the other one's barrier opens all the same, and it norms the row without thread 0's part.
    "early_exit": (same(1, threads=2, vectors=2, **ANY_TIME), WRONG),
    # A NaN in the data leaves the generation behind: the same buffer twice, see one_buffer.
    "nan_is_failure": (same(1, 1, 1, nan=True), STUCK),
    # Rank 0's second call begins beside its first, picks the same buffer and publishes over the
    # first row, which rank 1 has yet to read.
    "generation_before_wait": (same(1, 1, 1), WRONG),
    # The kernel in between has not written gamma yet.
    "gamma_before_wait": (same(1, 1), WRONG),
    # Rank 1's first call ends by a deadline; its second has read the clear status already, finds
    # the generation where the first left it, and takes rank 0's row of the first call.
    "status_before_wait": (same(1, 1, **ANY_TIME), WRONG),
    "no_grid_wait": (same(1, 1), WRONG),
    # Rank 0's re-arming lands after rank 1's row of two calls later.
    "stores_outlive_kernel": (same(1, 1, 1), STUCK),
    # Rank 0 gives up its first call, rank 1 is late: rank 0's second call meets rank 1's first row,
    # and overwrites its own that rank 1 has yet to read. The headers agree: same M, op, generation.
    "not_sticky": (same(1, 1, **ANY_TIME), WRONG),
    "no_entry_check": (same(1, 1, **ANY_TIME), WRONG),
    # Every schedule.
    "no_header": (unequal((Call(2), Call(1)), (Call(1), Call(2))), UNEQUAL),
    # Rank 0 gives up, refills alone, calls again over the row that late rank 1 has yet to read; or
    # rank 1's own failure sets rank 0's status after rank 0 has cleared it.
    "reset_alone": (same(1, RESET, 1, 1, deadlines=(0, 1)), WRONG),
    # A store of the time before, data or status, lands on the refilled buffer.
    "reset_undrained": (same(1, RESET, 1, 1, deadlines=(0, 1)), WRONG),
    # The faster rank's first row after the reset lands before the slower rank's refill.
    "refill_undrained": (RESET_CASE, STUCK),
    # Rank 0 gave the call up, rank 1 completed it: their buffers differ from then on.
    "reset_keeps_generation": (RESET_CASE, STUCK),
}


@pytest.mark.parametrize("fault", NEEDED)
def test_each_rule_is_needed(fault):
    case, seen = NEEDED[fault]
    explore(case)  # with the rule, the same case is sound
    with pytest.raises(Violation, match=f"^{seen}") as found:
        explore(case, Faults(**{fault: True}))
    assert found.value.trace or seen == STUCK


# Rules that cost time, or nothing, when they are broken alone: no execution gets worse than NaN.
# An aborted token may be advanced or re-armed because nobody takes from it before the reset, which
# puts both right. That it is not serves the failure record, which is read off its words.
UNNEEDED = ["peers_not_told", "status_once_per_kernel", "aborted_advances", "aborted_rearms"]


@pytest.mark.parametrize("fault", UNNEEDED)
@pytest.mark.parametrize(
    "case",
    [
        same(1, 1, 1, **ANY_TIME),
        same(2, token_ctas=1, **ANY_TIME),
        same(1, RESET, 1, 1, **ANY_TIME),
        unequal((Call(2),), (Call(1),), **ANY_TIME),
    ],
    ids=["calls", "waves", "reset", "unequal"],
)
def test_safe_without(fault, case):
    explore(case, Faults(**{fault: True}))


def test_verdict_may_be_a_nan_if_every_token_advances():
    """What a kernel without a separate failure flag would have to do instead."""
    faults = Faults(nan_is_failure=True, aborted_advances=True)
    explore(same(1, 1, 1, nan=True), faults)
    explore(same(1, 1, RESET, 1, 1, nan=True, **ANY_TIME), faults)


def test_every_fault_is_listed():
    assert set(Faults.__dataclass_fields__) == {*NEEDED, *UNNEEDED}


# ---- the protocol is sound


@pytest.mark.parametrize("token_ctas", [1, 2])
def test_equal_calls_are_summed(token_ctas):
    for ms in product([1, 2], repeat=4):  # the shorter ones are their beginnings
        explore(same(*ms, token_ctas=token_ctas))


@pytest.mark.parametrize(
    "case",
    [
        same(1, 1, 1, threads=2),  # the second thread carries the header only
        same(1, 1, 1, threads=2, vectors=2),
        same(2, 1, threads=2, vectors=2, token_ctas=1),
        same(1, 1, 1, width=2),
        same(1, 1, 1, 1, roles=("shared",)),
        same(1, 1, threads=2, roles=("shared",)),
        same(1, 1, 1, roles=BOTH),
        same(2, 1, 2, token_ctas=1, roles=("shared",)),
        same(1, 1, ranks=3),
        same(1, 1, 1, minus_zero=True, roles=BOTH),
        same(1, 1, 1, 1, roles=GATHER),
        same(2, 1, 2, token_ctas=1, roles=GATHER),
        same(1, 1, threads=3, roles=GATHER),  # in each cluster a thread without a rank to wait for
        same(1, 1, threads=2, vectors=2, roles=GATHER),
        same(1, 1, 1, width=2, roles=GATHER),
        same(1, 1, ranks=3, roles=GATHER),
        same(1, 1, 1, minus_zero=True, roles=GATHER),
    ],
    ids=lambda case: None,
)
def test_equal_calls_on_other_geometry(case):
    explore(case)


def test_calls_of_either_role_mix():
    fused, reduce, scatter = (
        Call(1, "f", BOTH),
        Call(1, "r", ("routed",)),
        Call(1, "s", ("shared",)),
    )
    for program in product([fused, reduce, scatter], repeat=2):
        explore(Case(programs=(program,) * 2))


@pytest.mark.parametrize("ms", [(1, 1, 1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("token_ctas", [1, 2])
def test_deadlines_at_any_time(ms, token_ctas):
    """Late ranks, spurious deadlines: what is not NaN stays right, in the failed call and later."""
    explore(same(*ms, token_ctas=token_ctas, **ANY_TIME))


def test_deadlines_within_a_cluster():
    explore(same(1, threads=2, vectors=2, **ANY_TIME))
    explore(same(1, width=2, **ANY_TIME))
    explore(same(1, 1, roles=("shared",), **ANY_TIME))


def test_a_gather_fails_like_the_tail():
    """Its threads wait for different ranks: what one of them misses makes NaN of the whole row."""
    explore(same(1, 1, 1, roles=GATHER, **ANY_TIME))
    explore(same(1, threads=2, roles=GATHER, **ANY_TIME))
    explore(same(1, RESET, 1, 2, token_ctas=1, roles=GATHER, **ANY_TIME))
    one, other = Call(1, "f", GATHER), Call(1, "g", GATHER)
    explore(unequal((one, one), (other, one), threads=2))
    explore(unequal((Call(2, roles=GATHER),), (Call(1, roles=GATHER),), **ANY_TIME))


@pytest.mark.parametrize(
    ("fault", "case", "seen"),
    [
        ("sentinel_in_payload", same(1, minus_zero=True, roles=GATHER), STUCK),
        ("no_barrier", same(1, 1, threads=2, roles=GATHER), STUCK),
        ("no_rearm", same(1, 1, 1, roles=GATHER, **ANY_TIME), WRONG),
        ("one_buffer", same(1, 1, 1, roles=GATHER, **ANY_TIME), WRONG),
        (
            "output_before_verdict",
            unequal((Call(1, "f", GATHER),), (Call(1, "g", GATHER),), threads=2),
            UNEQUAL,
        ),
    ],
)
def test_a_gather_needs_the_rules_too(fault, case, seen):
    explore(case)
    with pytest.raises(Violation, match=f"^{seen}"):
        explore(case, Faults(**{fault: True}))


@pytest.mark.parametrize("before", [(1,), (1, 1), (2,)])
def test_reset_after_any_failure_makes_calls_right(before):
    """No deadline expires after the reset: whatever fails then is a remnant."""
    explore(same(*before, RESET, 1, 2, 1, token_ctas=1, **ANY_TIME))


def unequal_ms(length, **geometry):
    for programs in product(product(map(Call, [1, 2]), repeat=length), repeat=2):
        if programs[0] != programs[1]:
            explore(unequal(*programs, **geometry))


def test_unequal_m_is_never_summed():
    """Without a deadline too: token 0 is in every call, its headers tell all ranks."""
    unequal_ms(2, token_ctas=1)
    unequal_ms(2, token_ctas=2)
    unequal_ms(1, **ANY_TIME)
    explore(unequal((Call(1),), (Call(1),), (Call(2),)))


DIFFERENT = {  # found by the headers, before any deadline
    "option": ((Call(1, "f"), Call(1)), (Call(1, "g"), Call(1))),
    "swapped": ((Call(1, "f"), Call(1, "g")), (Call(1, "g"), Call(1, "f"))),
    "left out": ((Call(1), Call(1, "g"), Call(1)), (Call(1, "g"), Call(1))),
}
MISSING = {  # only time can tell
    "fewer": ((Call(1), Call(1), Call(1)), (Call(1), Call(1))),
    "fewer, reset": ((Call(1), Call(1), RESET, Call(1)), (Call(1), RESET, Call(1))),
    "role missing": ((Call(1, "f", BOTH),), (Call(1, "r", ("routed",)),)),
    "roles swapped": tuple(permutations([Call(1, "r"), Call(1, "s", ("shared",))])),
}


@pytest.mark.parametrize("programs", (DIFFERENT | MISSING).values(), ids=DIFFERENT | MISSING)
def test_unequal_calls_are_never_summed(programs):
    explore(unequal(*programs, **ANY_TIME))


@pytest.mark.parametrize("programs", DIFFERENT.values(), ids=DIFFERENT)
def test_unequal_calls_end_without_a_deadline(programs):
    explore(unequal(*programs))


# ---- what a failure costs in time


def patient_run(case, faults=None, starts=None):
    """One execution in time: operations take none, a poll gives up one deadline after it begins
    to fail, rank r begins at starts[r] (in deadlines). The times at which a deadline expired."""
    machine, clock, expired, since = Machine(case, faults), 0.0, [], {}
    state, starts = machine.first(), starts or {}

    def begun(move):
        kind, who, _ = move
        return kind == "land" or starts.get(who if kind == "finish" else who[0], 0) <= clock

    while state.at:
        moves = [move for move in machine.moves(state) if begun(move)]
        ready = [move for move in moves if move[2] != DEADLINE]
        ends = [
            (since.setdefault((m[1], state.at[m[1]]), clock) + 1, m) for m in moves if not ready
        ]
        late = [(start, None) for start in starts.values() if start > clock and not ready]
        if ready:
            state = machine.apply(state, ready[0])
            continue
        clock, move = min(ends + late, key=lambda event: event[0])
        if move:
            expired.append(clock)
            state = machine.apply(state, move)
    return expired


def test_a_failure_costs_one_deadline():
    late = {"case": same(*[1] * 20, **ANY_TIME), "starts": {1: 1.5}}
    assert patient_run(**late) == [1.0]
    # Untold, the late rank finds out by itself, a deadline after it began.
    assert patient_run(**late, faults=Faults(peers_not_told=True)) == [1.0, 2.5]


def test_what_failures_cost_that_do_not_stick():
    """Rank 1 makes one call only; 20 more are queued on rank 0."""
    missing = unequal((Call(1),) * 21, (Call(1),), **ANY_TIME)
    assert patient_run(missing) == [1.0]
    each = patient_run(missing, Faults(not_sticky=True))
    assert each == [1.0 + i for i in range(20)]


def test_entry_may_look_once_per_kernel():
    """Five tokens in five waves: the polls of the later ones see the status at once."""
    missing = unequal((Call(5),), (), token_ctas=1, **ANY_TIME)
    assert patient_run(missing) == [1.0]
    assert patient_run(missing, Faults(status_once_per_kernel=True)) == [1.0]


# ---- the model is sound, and random schedules on larger cases


def test_reductions_hide_nothing_small():
    explore(same(1, 1), reduced=False)
    for fault in ("rearm_before_read", "no_grid_wait"):
        with pytest.raises(Violation):
            explore(same(1, 1), Faults(**{fault: True}), reduced=False)


@st.composite
def cases(draw):
    ranks = draw(st.integers(2, 3))
    roles = draw(st.sampled_from([("routed",), ("shared",), BOTH, GATHER]))
    epoch = st.lists(st.builds(Call, st.integers(1, 5), roles=st.just(roles)), max_size=4)
    first, second = draw(epoch), draw(st.just([]) | epoch.map(lambda calls: [RESET, *calls]))
    programs = [(*first, *second)] * ranks
    healthy = draw(st.booleans())
    if not healthy and draw(st.booleans()):  # one rank does something else before the reset
        odd = epoch.map(lambda calls: [call._replace(op="g") for call in calls]) | epoch
        programs[draw(st.integers(0, ranks - 1))] = (*draw(odd), *second)
    assume(any(isinstance(item, Call) for program in programs for item in program))
    return Case(
        programs=tuple(programs),
        threads=draw(st.integers(1, 3)),
        vectors=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 2)),
        token_ctas=draw(st.integers(1, 4)),
        deadlines=() if healthy else (0,),
        minus_zero=draw(st.booleans()),
    )


def walk(case, choose, faults=None):
    """One execution; `choose` picks among the moves."""
    machine = Machine(case, faults)
    state = machine.first()
    while moves := machine.moves(state):
        state = machine.apply(state, choose(moves))
    if state.at:
        raise Violation("stuck")


def scheduler(seed, speeds):
    """Ranks of different speed, deadlines that are rare."""
    rng = random.Random(seed)

    def weight(move):
        kind, who, detail = move
        rank = detail if kind == "land" else who if kind == "finish" else who[0]
        return speeds[rank] * (0.01 if detail == DEADLINE else 1)

    return lambda moves: rng.choices(moves, [weight(move) for move in moves])[0]


SCHEDULES = {
    "seed": st.integers(0, 2**32),
    "speeds": st.tuples(*[st.sampled_from([1, 9, 999])] * 3),
}


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(case=cases(), **SCHEDULES)
def test_random_schedules(case, seed, speeds):
    walk(case, scheduler(seed, speeds))


@pytest.mark.parametrize(
    "fault", ["no_rearm", "one_buffer", "generation_before_wait", "not_sticky"]
)
def test_random_schedules_find_faults(fault):
    case = same(*[1] * 6, **(ANY_TIME if fault == "not_sticky" else {}))

    def search():
        for seed, speeds in product(range(500), [(1, 9), (9, 1), (1, 1)]):
            walk(case, scheduler(seed, speeds), Faults(**{fault: True}))

    with pytest.raises(Violation):
        search()


# ---- deeper: minutes


@pytest.mark.long
@pytest.mark.parametrize("ms", list(product([1, 2], repeat=3)))
def test_deadlines_at_any_time_deep(ms):
    explore(same(*ms, **ANY_TIME))


@pytest.mark.long
def test_unequal_m_is_never_summed_deep():
    unequal_ms(2, token_ctas=2)
    unequal_ms(3, token_ctas=1)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        same(2, 1, 2, roles=BOTH),
        same(2, 1, 2, 1, 1, 2, token_ctas=2),
        same(1, 1, threads=2, vectors=2, **ANY_TIME),
        same(1, 1, threads=2, roles=("shared",), **ANY_TIME),
        same(1, 1, 1, 1, ranks=3),
        same(2, 1, 2, ranks=3, token_ctas=1),
        same(1, 1, ranks=3, **ANY_TIME),
        same(2, 1, RESET, 1, 2, **ANY_TIME),
        unequal((Call(2), Call(1)), (Call(2), Call(1)), (Call(1), Call(2)), token_ctas=1),
    ],
    ids=lambda case: None,
)
def test_deep(case):
    explore(case)


@pytest.mark.long
@pytest.mark.parametrize("fault", UNNEEDED)
def test_safe_without_deep(fault):
    if fault != "aborted_rearms":  # many words under way: too many states
        explore(same(1, 1, ranks=3, **ANY_TIME), Faults(**{fault: True}))
    explore(same(1, 1, 1, 1, **ANY_TIME), Faults(**{fault: True}))
    explore(unequal((Call(2), Call(1)), (Call(1), Call(2))), Faults(**{fault: True}))


@pytest.mark.long
def test_reductions_hide_nothing():
    explore(same(1, **ANY_TIME), reduced=False)
    explore(same(1, 1, 1), reduced=False)
    explore(same(1, 1, roles=("shared",)), reduced=False)
    for fault, (case, _) in NEEDED.items():
        if case.threads * case.vectors * case.width == 1 and not case.deadlines:
            with pytest.raises(Violation):
                explore(case, Faults(**{fault: True}), reduced=False)


@pytest.mark.long
@settings(max_examples=1000, derandomize=True, deadline=None, database=None)
@given(case=cases(), **SCHEDULES)
def test_many_random_schedules(case, seed, speeds):
    walk(case, scheduler(seed, speeds))
