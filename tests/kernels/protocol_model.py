"""An executable model of the kernel's protocol, small enough to explore exhaustively.

The protocol, as one thread of the kernel follows it (`tail_thread` below says it in code):

    wait for the preceding kernel of the stream (griddepcontrol.wait), before anything else
    for each token of my cluster:
        read my rank's status word; if it is set: publish nothing, wait for nothing
        read the generation word of (role, token); it picks the buffer, `generation % 2`
        publish my words of the row, and the header beside it, into every peer's buffer
        poll each word of my vectors until no word is the sentinel; after reading a vector,
            write the sentinel back (re-arm); compare the header with my own
        on a deadline or a mismatch: set my status and every peer's; leave the token alone
        exchange the partial row sums and the verdict over one cluster barrier
        write the row, or NaN if any thread of the cluster failed
        the first thread advances the generation word, unless the token failed

Memory, as modelled. Every store to global memory, local or remote, goes into `net` and lands
later, word by word, in any order between words and in issue order per (source rank, word). Only
these force it to land: the end of a kernel (the rank's stores to its own memory; not those to its
peers) and a host-side drain (all of them). A rank's load of a word waits for the rank's own earlier
stores to it. Cluster shared memory is ordered by the cluster barrier (arrive.release,
wait.acquire), which counts exited threads as arrived. A deadline may expire whenever a poll fails,
at once or never: that covers every delay of every peer, so safety does not rest on time.

Values are symbols, (source, call, token, dest, vector, word), and a sum is the tuple of its terms
in rank order: a lost, doubled, stale or torn word shows as a wrong tuple, and two ranks that both
write the expected tuple are bit-identical. A gathered row is its words, not sums of them.

An output is modelled as the last store to it: the kernel of the gather stores a row before the
cluster's verdict, and NaN over it after, which nobody can tell apart, since outputs are read when
the kernel has ended.

Not modelled: arithmetic, time (except in `patient_run`), the number of SMs and which CTAs are
resident, the address aliases of multicast, 31-bit collisions and wrap-around, dying processes,
several streams over one workspace, kernels of others that skip griddepcontrol.wait.

How it is explored. A thread is a generator that yields one operation on shared words and is sent
the answer. What it does next is a function of the answers so far; `Scripts` remembers that function
as a tree, so a thread's state is one tree node, and a whole state can be hashed and resumed.
Two reductions keep the graph small. Operations that commute with everything another thread can do
(issuing a store, arriving, a barrier wait that is open) are taken at once: `Machine.settle`. And a
store lands only when it matters: as part of a load of its word, at a forced landing, or when a
second store to the same word is under way: nobody can tell in between. No move can be undone and
polling does not loop, so the graph has no cycles: if no state is stuck, every execution ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque, namedtuple
from functools import cache, partial
from itertools import product
from typing import NamedTuple

SENTINEL = "sentinel"  # the armed word, 0x80000000; also what a (-0, -0) pair looks like
ZERO = "zero"
ESCAPED = "escaped"  # the pair of NaNs as which a copied (+0, -0) travels
DEADLINE, TOLD, MISMATCH = "deadline", "told", "mismatch"  # why a thread gives up a token
RESET = "reset"  # the collective reset, an item of a rank's program
BUFFERS = 2


@dataclasses.dataclass(frozen=True)
class Faults:
    """Each switch removes one obligation of the protocol."""

    # the words
    no_rearm: bool = False  # the consumer does not write the sentinel back
    rearm_before_read: bool = False  # ... or writes it before it has read
    one_buffer: bool = False
    sentinel_in_payload: bool = False  # a (-0, -0) word is published as it is
    first_word_only: bool = False  # the poll tests one word of the vector, not each
    # the cluster
    no_barrier: bool = False  # the generation advances before the cluster barrier
    no_acquire: bool = False  # ... or between arrive and wait: a store hoisted over the wait
    one_exchange_slot: bool = False  # the row-sum slots do not alternate between tokens
    output_before_verdict: bool = False  # a shared row is written before the cluster's verdict
    early_exit: bool = False  # a thread that finds the status set leaves without exchanging
    nan_is_failure: bool = False  # the verdict is read off a NaN row sum, not off a flag
    # the kernel boundary (PDL)
    generation_before_wait: bool = False
    gamma_before_wait: bool = False
    status_before_wait: bool = False
    no_grid_wait: bool = False
    stores_outlive_kernel: bool = False  # not ours to break: what a kernel's end must guarantee
    # failure
    not_sticky: bool = False  # nobody reads the status word
    no_entry_check: bool = False  # the status word is read while polling only
    status_once_per_kernel: bool = False  # ... or also on entry to the kernel, not to each token
    peers_not_told: bool = False  # a failure sets the own status word only
    aborted_advances: bool = False
    aborted_rearms: bool = False
    no_header: bool = False
    # reset
    reset_alone: bool = False  # without meeting the peers
    reset_undrained: bool = False  # the first meeting without draining
    refill_undrained: bool = False  # the second meeting without draining
    reset_keeps_generation: bool = False


class Call(NamedTuple):
    m: int
    op: str = "op"  # what the header's hash covers: op, dims, rounding, options
    # "routed": the same row to all, summed; "shared": a slice for each, summed; "gather": the same
    # row to all, copied, ranks and vectors divided among the threads
    roles: tuple = ("routed",)


@dataclasses.dataclass(frozen=True)
class Case:
    """What the ranks run, and on what geometry."""

    programs: tuple  # per rank: a tuple of Call and RESET
    threads: int = 1  # per cluster
    vectors: int = 1  # of payload per row and destination; the header is one more vector
    width: int = 1  # words per vector that can land apart
    token_ctas: int = 2  # clusters per role; cluster c owns tokens c, c + token_ctas, ...
    deadlines: tuple = ()  # epochs (counted in resets) in which a deadline may expire
    minus_zero: bool = False  # vector 0 of every row is (-0, -0)
    nan: bool = False  # every row holds a NaN: its row sum is NaN, rightly

    @property
    def ranks(self):
        return range(len(self.programs))

    @property
    def calls(self):
        return [item for program in self.programs for item in program if item != RESET]

    def identity(self, rank, item):
        """(epoch, place in the epoch): equal on all ranks for calls that belong together."""
        before = self.programs[rank][:item]
        epoch = before.count(RESET)
        return epoch, before[::-1].index(RESET) if epoch else item

    def agreed(self, identity):
        """Whether every rank makes this call, with equal arguments."""
        found = {}
        for rank in self.ranks:
            for item, call in enumerate(self.programs[rank]):
                if call != RESET and self.identity(rank, item) == identity:
                    found[rank] = call
        return len(found) == len(self.programs) and len(set(found.values())) == 1

    def disputed(self, epoch):
        """Whether the ranks differ in any call of the epoch."""
        items = ((rank, i) for rank in self.ranks for i in range(len(self.programs[rank])))
        called = {self.identity(*at) for at in items if self.programs[at[0]][at[1]] != RESET}
        return any(not self.agreed(identity) for identity in called if identity[0] == epoch)

    def payload(self, source, identity, role, token, dest, v):
        """The words of one vector of a row."""
        if self.minus_zero and v == 0:
            return (SENTINEL,) * self.width
        dest = dest if role == "shared" else "all"
        return tuple((source, identity, token, dest, v, i) for i in range(self.width))

    def sums(self, rank, identity, role, token, t):
        """What thread t must hold of the summed row: per word, the terms in rank order."""
        if role == "gather":
            return tuple(
                word
                for source, v in self.pairs(range(self.vectors), t)
                for word in self.payload(source, identity, role, token, rank, v)
            )
        words = []
        for v in range(t, self.vectors, self.threads):
            terms = [self.payload(r, identity, role, token, rank, v) for r in self.ranks]
            words += zip(*(map(clean, term) for term in terms), strict=True)
        return tuple(words)

    def pairs(self, vectors, t):
        """The (rank, vector) that thread t of a gather deals with, in publishing and in taking."""
        return [(r, v) for v in vectors for r in self.ranks][t :: self.threads]


def clean(word):
    """The publisher's integer compare: the one word that equals the sentinel becomes +0."""
    return ZERO if word == SENTINEL else word


def escape(word):
    """The same where words are copied, and must not lose a sign."""
    return ESCAPED if word == SENTINEL else word


def unescape(word):
    return SENTINEL if word == ESCAPED else word


# ---- operations: what a thread yields, one shared word at a time

Load = namedtuple("Load", "word")
Poll = namedtuple(
    "Poll", "word status"
)  # until no sentinel: the value, DEADLINE, or TOLD by status
Store = namedtuple("Store", "word value")
Share = namedtuple("Share", "word value")  # a store to the cluster's shared memory
Gather = namedtuple("Gather", "words")  # loads of all the cluster's shared words
Arrive = namedtuple("Arrive", "barrier member")
Wait = namedtuple("Wait", "barrier members phase")
GridWait = namedtuple("GridWait", "")  # griddepcontrol.wait: the program's preceding item is over
Drain = namedtuple("Drain", "")  # the host synchronises: each store that the rank issued has landed
Output = namedtuple("Output", "token value")  # value: (sums, gamma), or None for NaN


def slot(owner, buffer, role, token, source, vector, i):
    return "slot", owner, buffer, role, token, source, vector, i


def default(word):
    return SENTINEL if word[0] == "slot" else 0


# ---- the kernel


def tail_thread(case, faults, rank, item, role, cluster, t):
    """One thread of the cluster that owns `role` of tokens cluster, cluster + token_ctas, ..."""
    call, identity = case.programs[rank][item], case.identity(rank, item)
    status, barrier = ("status", rank), ("barrier", rank, item, role, cluster)
    header = case.vectors  # one more vector, after the payload
    vectors = range(header if faults.no_header else header + 1)
    mine = vectors[t :: case.threads]  # the vectors that I poll
    if role == "routed":  # the own row stays in registers
        sources = [r for r in case.ranks if r != rank]
        published = [(dest, v) for dest in sources for v in mine]
        taken = [(v, sources) for v in mine]
    elif role == "shared":  # the slices are scattered over all threads, the own one too
        sources = list(case.ranks)
        published = [(dest, v) for dest in sources for v in vectors][t :: case.threads]
        taken = [(v, sources) for v in mine]
    else:  # the own columns stay in registers
        published = [(r, v) for r, v in case.pairs(vectors, t) if r != rank]
        taken = [(v, [r] if r != rank else []) for r, v in case.pairs(vectors, t)]
    encode = escape if role == "gather" else clean

    # -- nothing of a call comes before the wait (the faults read a word too early)
    early = {}
    for name, *index in (("status",), ("gamma",), ("generation", role, cluster)):
        if getattr(faults, f"{name}_before_wait"):
            early[name] = yield Load((name, rank, *index))
    if not faults.no_grid_wait:
        yield GridWait()

    def read(name, *index):
        return early.pop(name) if name in early else (yield Load((name, rank, *index)))

    broken, looks = False, not (faults.not_sticky or faults.no_entry_check)
    for wave, token in enumerate(range(cluster, call.m, case.token_ctas)):
        # -- entry
        if looks and (wave == 0 or not faults.status_once_per_kernel):
            broken = yield from read("status")
        if broken and faults.early_exit:
            return
        generation = yield from read("generation", role, token)
        buffer = 0 if faults.one_buffer else generation % BUFFERS
        header_words = (((call.op, call.m), generation), *[ZERO] * (case.width - 1))
        row = partial(case.payload, rank, identity, role, token)

        # -- publish
        if not broken:
            for dest, v in published:
                for i, word in enumerate(header_words if v == header else row(dest, v)):
                    word = word if faults.sentinel_in_payload else encode(word)
                    yield Store(slot(dest, buffer, role, token, rank, v, i), word)

        # -- take: poll every word of a vector, from every source, then re-arm them
        cause, sums = TOLD if broken else None, ()
        for v, sources in taken:
            own = header_words if v == header else map(encode, row(rank, v))
            got = {(rank, i): word for i, word in enumerate(own)}
            slots = [slot(rank, buffer, role, token, s, v, i)
                     for s in sources for i in range(case.width)]  # fmt: skip
            if faults.rearm_before_read:
                yield from rearm(slots)
            for word in slots:
                s, i = word[5], word[7]
                if cause is None and faults.first_word_only and i > 0:
                    got[s, i] = yield Load(word)
                elif cause is None:
                    got[s, i] = yield Poll(word, None if faults.not_sticky else status)
                    cause = got[s, i] if got[s, i] in (DEADLINE, TOLD) else None
            differs = any(word != header_words[i] for (_, i), word in got.items())
            if cause is None and v == header and differs:
                cause = MISMATCH
            if faults.aborted_rearms if cause else not faults.no_rearm:
                yield from rearm(slots)
            if cause is None and v != header and role == "gather":
                sums += tuple(unescape(got[(sources or [rank])[0], i]) for i in range(case.width))
            elif cause is None and v != header:
                sums += tuple(tuple(got[r, i] for r in case.ranks) for i in range(case.width))

        # -- a failure is everybody's, and stays
        if cause in (DEADLINE, MISMATCH):
            for r in [rank] if faults.peers_not_told else case.ranks:
                yield Store(("status", r), 1)

        # -- exchange the partial row sums and the verdict over one cluster barrier
        gamma = yield from read("gamma")
        advance = Store(("generation", rank, role, token), generation + 1)
        parity = 0 if faults.one_exchange_slot else wave % 2
        exchange = [("exchange", rank, item, role, cluster, parity, u) for u in range(case.threads)]
        if faults.no_barrier and t == 0 and cause is None:
            yield advance
        yield Share(exchange[t], (cause is None, sums))
        yield Arrive(barrier, t)
        if faults.no_acquire and t == 0 and cause is None:
            yield advance
        yield Wait(barrier, range(case.threads), wave + 1)
        parts = yield Gather(tuple(exchange))
        good = all(part == 0 or part[0] for part in parts)  # 0: nobody wrote there
        if faults.nan_is_failure and case.nan:
            good = False

        # -- the row, and the generation
        if role == "routed":
            sums = tuple(part and part[1] for part in parts)  # the norm needs the whole row
        elif faults.output_before_verdict:
            good = cause is None
        yield Output(token, (sums, gamma) if good else None)
        advanced = faults.no_barrier or faults.no_acquire
        if t == 0 and not advanced and (good or faults.aborted_advances):
            yield advance


def rearm(words):
    for word in words:
        yield Store(word, SENTINEL)


def reset_thread(case, faults, rank, item):
    """The host's collective reset: drain, meet, refill, drain, meet."""
    meeting = "meeting", case.identity(rank, item)[0]
    roles = sorted({role for call in case.calls for role in call.roles})
    yield GridWait()
    if not faults.reset_undrained:
        yield Drain()
    if not faults.reset_alone:
        yield Arrive(meeting, rank)
        yield Wait(meeting, case.ranks, 1)
    for role, token in product(roles, range(max(call.m for call in case.calls))):
        if not faults.reset_keeps_generation:
            yield Store(("generation", rank, role, token), 0)
        of = range(BUFFERS), [role], [token], case.ranks, range(case.vectors + 1), range(case.width)
        yield from rearm(slot(rank, *index) for index in product(*of))
    yield Store(("status", rank), 0)
    if not faults.refill_undrained:
        yield Drain()
    if not faults.reset_alone:
        yield Arrive(meeting, rank)
        yield Wait(meeting, case.ranks, 2)


# ---- the machine


class Violation(Exception):
    """A property does not hold. `trace` is the schedule that shows it."""

    trace: tuple = ()


class Scripts:
    """What a thread does next, as a function of the answers it has been given: a tree of ops."""

    def __init__(self, start):
        self.start, self.children = start, {}
        self.ops, self.paths, self.running = [], [], {}

    def root(self, thread):
        if (None, thread) not in self.children:
            self._add((None, thread), self.start(thread), None, (thread, ()))
        return self.children[None, thread]

    def after(self, node, answer):
        if (node, answer) not in self.children:
            thread, answers = self.paths[node]
            generator = self.running.pop(node, None)
            if generator is None:  # it went another way: replay it
                generator = self.start(thread)
                for past in (None, *answers):
                    generator.send(past)
            self._add((node, answer), generator, answer, (thread, (*answers, answer)))
        return self.children[node, answer]

    def _add(self, edge, generator, answer, path):
        self.children[edge] = node = len(self.ops)
        self.paths.append(path)
        try:
            self.ops.append(generator.send(answer))
            self.running[node] = generator
        except StopIteration:
            self.ops.append(None)


class State(NamedTuple):
    mem: dict  # word -> value, where it is not the default
    net: dict  # (word, source rank) -> values under way, oldest first
    at: dict  # thread -> node of its script, for the current item of each rank and the next
    current: tuple  # rank -> item of its program; GridWait holds threads of later ones

    def copy(self):
        return State(self.mem.copy(), self.net.copy(), self.at.copy(), self.current)

    def key(self):
        return frozenset(self.mem.items()), frozenset(self.net.items()), frozenset(self.at.items())

    def load(self, word):
        return self.mem.get(word, default(word))

    def put(self, word, value):
        self.mem[word] = value
        if value == default(word):
            del self.mem[word]

    def land(self, word, source, everything=False):
        *values, last = self.net.pop((word, source))
        if values and not everything:
            self.net[word, source] = (*values[1:], last)
            last = values[0]
        self.put(word, last)


class Machine:
    """The moves of a case. A thread is (rank, item, role, cluster, t); a resetting host (rank,
    item). A move is ("step", thread, source of a store that lands just before, or None),
    ("give up", thread, DEADLINE or TOLD), ("land", word, source) or ("finish", rank, None)."""

    def __init__(self, case, faults=None, reduced=True):
        self.case, self.faults, self.reduced = case, faults or Faults(), reduced
        self.scripts = Scripts(self._start)
        self.right, self.may_fail = cache(self._right), cache(self._may_fail)
        self.may_expire = cache(self._may_expire)
        self.one_wave = max(call.m for call in case.calls) <= case.token_ctas

    def _start(self, thread):
        program = reset_thread if len(thread) == 2 else tail_thread
        return program(self.case, self.faults, *thread)

    def _launch(self, state, rank, item):
        if item >= len(self.case.programs[rank]):
            return
        call, threads = self.case.programs[rank][item], [(rank, item)]
        if call != RESET:
            clusters = range(min(call.m, self.case.token_ctas))
            threads = product([rank], [item], call.roles, clusters, range(self.case.threads))
        for thread in threads:
            state.at[thread] = self.scripts.root(thread)

    def first(self):
        state = State({}, {}, {}, (0,) * len(self.case.programs))
        for rank, item in product(self.case.ranks, (0, 1)):
            self._launch(state, rank, item)
        return self.settle(state)

    def settle(self, state):
        """Take every operation that commutes with all that other threads can do."""
        busy = self.reduced
        while busy:
            busy = False
            for thread in list(state.at):
                while self._commutes(state, thread, op := self.scripts.ops[state.at[thread]]):
                    self._perform(state, thread, op)
                    busy = True
        return state

    def _commutes(self, state, thread, op):
        kind, rank, single = type(op), thread[0], self.case.threads == 1
        if kind in (Wait, GridWait):
            return self._open(state, thread, op)
        if kind in (Share, Gather):
            return single or self.one_wave
        if kind is Load and thread[1] == state.current[rank]:  # words that nobody else changes now
            name = op.word[0]
            return name == "gamma" or (
                state.load(op.word) != 0  # a status word that is set stays set
                if name == "status"
                else name == "generation" and single and (op.word, rank) not in state.net
            )
        return kind in (Store, Arrive, Output)

    def _open(self, state, thread, op):
        if type(op) is GridWait:
            return thread[1] == state.current[thread[0]]
        return all(state.load((op.barrier, member)) >= op.phase for member in op.members)

    def _perform(self, state, thread, op):
        answer, kind = None, type(op)
        if kind is Store:
            sent = op.word, thread[0]
            state.net[sent] = (*state.net.get(sent, ()), op.value)
        elif kind is Share:
            state.put(op.word, op.value)
        elif kind is Arrive:
            state.put((op.barrier, op.member), state.load((op.barrier, op.member)) + 1)
        elif kind is Gather:
            answer = tuple(state.load(word) for word in op.words)
        elif kind in (Load, Poll):
            answer = state.load(op.word)
        elif kind is Drain:
            self._land_all(state, thread[0])
        elif kind is Output:
            self._check(thread, op)
        self._advance(state, thread, answer)

    def _land_all(self, state, rank, own_memory_only=False):
        for word, source in list(state.net):
            if source == rank and (word[1] == rank or not own_memory_only):
                state.land(word, source, everything=True)

    def _advance(self, state, thread, answer):
        state.at[thread] = node = self.scripts.after(state.at[thread], answer)
        if self.scripts.ops[node] is None and len(thread) > 2:  # exited threads count as arrived
            state.put((("barrier", *thread[:4]), thread[4]), 1 << 20)

    def _check(self, thread, output):
        """The properties of a written row."""
        token, value = output
        if value is None:
            if not self.case.nan and not self.may_fail(*thread[:2]):
                raise Violation(f"failed without a cause: {thread}, token {token}")
        elif (right := self.right(*thread, token)) is None:
            raise Violation(f"summed unequal calls: {thread}, token {token} is {value}")
        elif value != right:
            raise Violation(f"wrong: {thread}, token {token} is {value}, not {right}")

    def _right(self, rank, item, role, cluster, t, token):
        case, identity = self.case, self.case.identity(rank, item)
        if not case.agreed(identity):
            return None
        sums = [case.sums(rank, identity, role, token, u) for u in range(case.threads)]
        return tuple(sums) if role == "routed" else sums[t], item

    def _may_expire(self, rank, item):
        return self.case.identity(rank, item)[0] in self.case.deadlines

    def _may_fail(self, rank, item):
        disputed = self.case.disputed(self.case.identity(rank, item)[0])
        return disputed or self.may_expire(rank, item)

    def moves(self, state):
        moves, left = [], dict.fromkeys(self.case.ranks, 0)  # threads still running
        for thread, node in state.at.items():
            rank, op = thread[0], self.scripts.ops[node]
            left[rank] += thread[1] == state.current[rank] and op is not None
            if type(op) in (Load, Poll):
                moves += self._reads(state, thread, op)
            elif op is not None and not (
                type(op) in (Wait, GridWait) and not self._open(state, thread, op)
            ):
                moves.append(("step", thread, None))
        for rank in self.case.ranks:
            if not left[rank] and state.current[rank] < len(self.case.programs[rank]):
                moves.append(("finish", rank, None))
        stores = Counter()
        for (word, _), values in state.net.items():
            stores[word] += len(values)
        for word, source in state.net:
            if not self.reduced or (stores[word] > 1 and word[0] != "status"):
                moves.append(("land", word, source))
        return moves

    def _reads(self, state, thread, op):
        rank, poll = thread[0], type(op) is Poll
        on_way = [r for r in self.case.ranks if (op.word, r) in state.net]
        if rank in on_way:  # a rank sees its own stores
            on_way = [rank]
        elif not poll or state.load(op.word) != SENTINEL:
            yield "step", thread, None
        for r in on_way:
            if not poll or state.net[op.word, r][0] != SENTINEL:
                yield "step", thread, r
            else:
                yield "land", op.word, r
        if poll and state.load(op.word) == SENTINEL:
            told = any(1 in state.net.get((op.status, r), ()) for r in self.case.ranks)
            if op.status and (told or state.load(op.status)):
                yield "give up", thread, TOLD
            if self.may_expire(*thread[:2]):
                yield "give up", thread, DEADLINE

    def apply(self, state, move):
        state = state.copy()
        kind, who, detail = move
        if kind == "land":
            state.land(who, detail)
        elif kind == "finish":
            state = self._finish(state, who)
        elif kind == "give up":
            status = self.scripts.ops[state.at[who]].status
            for r in self.case.ranks if detail == TOLD else ():
                if (status, r) in state.net:
                    state.land(status, r)
            self._advance(state, who, detail)
        else:
            op = self.scripts.ops[state.at[who]]
            if detail is not None:
                state.land(op.word, detail)
            self._perform(state, who, op)
        return self.settle(state)

    def _finish(self, state, rank):
        """The kernel boundary: the rank's stores to its own memory have landed."""
        item = state.current[rank]
        if not self.faults.stores_outlive_kernel:
            self._land_all(state, rank, own_memory_only=True)
        for thread in [thread for thread in state.at if thread[:2] == (rank, item)]:
            del state.at[thread]
        for word in list(state.mem):  # the clusters' barriers and shared memory
            name, *index = word[0] if isinstance(word[0], tuple) else word
            if name in ("barrier", "exchange") and index[:2] == [rank, item]:
                del state.mem[word]
        state.put(("gamma", rank), item + 1)  # what a kernel in between leaves for the next call
        current = (c + (r == rank) for r, c in enumerate(state.current))
        state = state._replace(current=tuple(current))
        self._launch(state, rank, item + 2)
        return state


# ---- searches


def explore(case, faults=None, reduced=True, limit=1_000_000):
    """Visit every state, breadth first. Returns their number; raises the nearest Violation."""
    machine = Machine(case, faults, reduced)
    state = machine.first()
    came_from, queue = {state.key(): None}, deque([state])

    def fail(violation, key, *last):
        trace = list(last)
        while came_from[key]:
            key, move = came_from[key]
            trace.append(move)
        violation.trace = tuple(trace[::-1])
        raise violation

    while queue:
        state = queue.popleft()
        key, moves = state.key(), machine.moves(state)
        if not moves and state.at:
            fail(Violation("stuck: a wait that nothing ends"), key)
        for move in moves:
            try:
                after = machine.apply(state, move)
            except Violation as violation:
                fail(violation, key, move)
            if (new := after.key()) not in came_from:
                came_from[new] = key, move
                queue.append(after)
        assert len(came_from) <= limit, f"more than {limit} states"
    return len(came_from)
