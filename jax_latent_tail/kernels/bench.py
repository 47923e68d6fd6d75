"""Latency of the kernels alone: graph replay, ranks that share one GPU, the floor beside it.

    python -m jax_latent_tail.kernels.bench                     # measure and print tables
    python -m jax_latent_tail.kernels.bench --op all_gather_add # of another kernel
    python -m jax_latent_tail.kernels.bench --compile DIR       # only compile what it needs; no GPU
    python -m jax_latent_tail.kernels.bench --cubins DIR        # use those

Columns, in microseconds per call:

  fused     one launch, both roles
  pdl       the same, launched with the attribute for programmatic stream serialisation: the next
            launch is set up while the last call ends (there is no early trigger in the kernel)
  floor     an empty kernel of the same grid
  separate  the two roles as two launches, one after the other
  routed, shared   one role alone
  unguarded the fused kernel without status, headers, deadline and poison (`unguarded.py`)

for all_gather_add

  add, copy one launch, with a residual and without
  pdl, floor, unguarded   as above, with a residual

and for up_gather_add, each call with a stripe that is not in a cache

  up        one launch, with a residual
  pdl, floor, unguarded   as above
  memory    reading all ranks' stripes at the rate that the memory of an H200 is sold with

A graph of `CALLS` calls is replayed on every rank at once; a number is the least of `ROUNDS` rounds
of the slowest rank's time. The first column and `unguarded` take turns, so that their ratio means
something.
There is no NVLink in this: peers' memory is the same GPU's.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time

from jax_latent_tail.kernels import abi, geometry, store
from jax_latent_tail.kernels.variant import (
    ALL_GATHER_ADD,
    TAIL,
    UP_GATHER_ADD,
    UP_TOKENS,
    KernelVariant,
)

LATENT, HIDDEN = 3584, 7168
RANKS = (2, 4, 8)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_TOKENS = 128
CALLS = 100  # in one graph
REPLAYS = 5  # in one round
ROUNDS = 20
STRIPES = 32  # different ones of a rank: more than a cache holds
MEMORY_BYTES_PER_US = 4.8e6  # of an H200
COLUMNS = {
    TAIL: ("fused", "pdl", "floor", "separate", "routed", "shared", "unguarded"),
    ALL_GATHER_ADD: ("add", "copy", "pdl", "floor", "unguarded"),
    UP_GATHER_ADD: ("up", "pdl", "floor", "unguarded"),
}
# What takes turns with the unguarded twin, and is measured in each geometry.
_MAIN = {op: columns[0] for op, columns in COLUMNS.items()}

_UNGUARDED = "unguarded-"


def variants(arch: str = "sm_90") -> list[KernelVariant]:
    """What `measure` loads, besides the unguarded twins."""
    kinds = ((TAIL, 0), (TAIL, 16), (ALL_GATHER_ADD, 0), (UP_GATHER_ADD, 0))
    return [_variant(op, arch, tp, top_k) for op, top_k in kinds for tp in RANKS]


def _variant(op: str, arch: str, tp: int, top_k: int) -> KernelVariant:
    if op == ALL_GATHER_ADD:
        return KernelVariant.all_gather_add(arch, tp, HIDDEN)
    if op == UP_GATHER_ADD:
        return KernelVariant.up_gather_add(arch, tp, LATENT, HIDDEN)
    return KernelVariant(arch, tp, LATENT, HIDDEN, top_k)


def compile_all(folder: pathlib.Path, arch: str, jobs: int) -> None:
    """Compile everything into `folder`: the product's variants and the unguarded twins."""
    from jax_latent_tail.kernels import export, unguarded

    export.export(folder, variants(arch), jobs)
    for variant in variants(arch):
        if variant.top_k == 0:
            compiled = export.compile_variant(variant, unguarded.KERNELS[variant.op])
            name = _UNGUARDED + variant.key
            store.write_atomically(folder / f"{name}.cubin", compiled.cubin)
            store.write_atomically(folder / f"{name}.json", json.dumps(compiled.entry).encode())


def _unguarded(variant: KernelVariant, folder: pathlib.Path | None) -> store.Cubin | None:
    if folder is None or not (folder / f"{_UNGUARDED}{variant.key}.json").exists():
        return None
    name = _UNGUARDED + variant.key
    entry = json.loads((folder / f"{name}.json").read_text())
    return store.load(variant, entry, folder / f"{name}.cubin")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured: a column, at M tokens, K experts, in one of the geometries."""

    column: str
    tokens: int
    top_k: int = 0
    kernel: int | None = None
    op: str = TAIL

    @property
    def takes_turns(self) -> bool:
        return self.kernel is None and self.column in (_MAIN[self.op], "unguarded")


def cases(tokens, top_k: int, all_geometries: bool, op: str = TAIL) -> list[Case]:
    """In the order of measuring; what takes turns next to each other."""
    columns = sorted(COLUMNS[op], key=lambda column: column not in (_MAIN[op], "unguarded"))
    wanted = [
        Case(c, m, top_k, op=op)
        for m in tokens
        for c in columns
        if not (top_k and c == "unguarded")
    ]
    if all_geometries:
        wanted += [Case(_MAIN[op], m, top_k, index, op) for m in tokens for index in (0, 1)]
    return wanted


class Bench:
    """One process's ranks, with inputs and graphs.

    Args:
      tp: ranks of the group.
      mine: those of this process.
      wanted: what will be measured, of one op; all kernels are loaded before any rank can wait.
      connect: called with the list of `harness.Rank`, maps the peers.
      meet: returns when all processes have called it.
    """

    def __init__(self, tp, mine, folder, wanted, max_tokens, connect, meet):
        import numpy as np

        from jax_latent_tail.kernels import harness
        from jax_latent_tail.kernels.variant import arch_for

        self.harness, self.meet, self.tp, self.op = harness, meet, tp, wanted[0].op
        self.device = harness.Device()
        arch = arch_for(*self.device.capability)
        self.loaded = {}
        for top_k in {0, *(case.top_k for case in wanted)}:
            variant = _variant(self.op, arch, tp, top_k)
            self.loaded[top_k, True] = harness.Loaded(store.find(variant))
            bare = _unguarded(variant, folder)
            self.loaded[top_k, False] = harness.Loaded(bare) if bare else None
        self.ranks = [
            harness.Rank(self.device, self.loaded[0, True], rank, max_tokens, deadline_s=10.0)
            for rank in mine
        ]
        connect(self.ranks)
        rng = np.random.default_rng(0)

        def random(*shape):  # bf16 of about unit size
            return harness.Buffer.of(
                (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            )

        self.stripe_bytes = LATENT * HIDDEN // tp * 2
        self.buffers = []
        for _ in self.ranks:
            if self.op == UP_GATHER_ADD:
                self.buffers.append(
                    {
                        "latent": random(max_tokens, LATENT),
                        "shared": random(max_tokens, HIDDEN // tp),
                        "rows": random(max_tokens, HIDDEN),
                        "weights": random(LATENT, HIDDEN // tp).repeated(STRIPES),
                        "shard": harness.Buffer(2 * max_tokens * HIDDEN),
                    }
                )
                continue
            self.buffers.append(
                {
                    "gamma": random(LATENT),
                    "shared": random(max_tokens, HIDDEN),
                    "weights": random(max_tokens, 16),
                    "indices": harness.Buffer.of(
                        rng.integers(0, max_tokens * 16, (max_tokens, 16), dtype=np.int32)
                    ),
                    "rows": random(max_tokens * 16, LATENT),
                    "latent": harness.Buffer(2 * max_tokens * LATENT),
                    "shard": harness.Buffer(2 * max_tokens * HIDDEN),
                }
            )

    def _enqueue(self, index: int, case: Case, turn: int) -> None:
        loaded = self.loaded[case.top_k, case.column != "unguarded"]
        rank = self.ranks[index]
        call = self.harness.Call(
            tokens=case.tokens,
            top_k=case.top_k,
            permuted_rows=rank.max_tokens * 16,
            kernel=case.kernel,
            pdl=case.column == "pdl",
            **{name: buffer.address for name, buffer in self.buffers[index].items()},
        )
        if case.column == "copy":
            call.rows = 0
        if self.op == UP_GATHER_ADD:
            call.weights += turn % STRIPES * self.stripe_bytes
        one = {"routed": [abi.ROUTED_MASK], "shared": [abi.SHARED_MASK]}
        one["separate"] = [abi.ROUTED_MASK, abi.SHARED_MASK]
        whole = [abi.BOTH_MASK if self.op == TAIL else abi.SHARED_MASK]
        for roles in one.get(case.column, whole):
            launch = rank.launch_empty if case.column == "floor" else rank.launch
            launch(loaded, dataclasses.replace(call, roles=roles))

    def _graphs(self, case: Case):
        def many(index):
            for turn in range(CALLS):
                self._enqueue(index, case, turn)

        return [
            rank.capture(lambda index=index: many(index)) for index, rank in enumerate(self.ranks)
        ]

    def _round(self, graphs) -> float:
        timers = [self.harness.Timer(rank.stream) for rank in self.ranks]
        self.meet()
        for graph in graphs:  # brings the ranks together
            graph.launch()
        for timer in timers:
            timer.start()
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.launch()
        for timer in timers:
            timer.stop()
        return max(timer.microseconds() for timer in timers) / (REPLAYS * CALLS)

    def measure(self, wanted: list[Case]) -> list[tuple[Case, list[float]]]:
        """(case, its rounds) for each; cases of the same M, one after the other, take turns."""
        results: list[tuple[Case, list[float]]] = []
        while wanted:
            turn, wanted = wanted[:1], wanted[1:]
            if wanted and turn[0].takes_turns and wanted[0].takes_turns:
                turn, wanted = [turn[0], wanted[0]], wanted[1:]
            turn = [c for c in turn if c.column != "unguarded" or self.loaded[c.top_k, False]]
            graphs = [self._graphs(case) for case in turn]
            rounds: list[list[float]] = [[] for _ in turn]
            for _ in range(ROUNDS):
                for position, of_case in enumerate(graphs):
                    rounds[position].append(self._round(of_case))
            results += zip(turn, rounds, strict=False)
        failed = [rank.record.describe() for rank in self.ranks if rank.record.code]
        if failed:
            raise RuntimeError(failed[0])
        self.meet()
        return results


def _worker(peers, folder, wanted, max_tokens):
    from jax_latent_tail.kernels import harness

    def connect(ranks):
        harness.map_peers(ranks[0], peers.exchange(harness.share(ranks[0])))
        peers.meet()

    bench = Bench(peers.count, [peers.rank], folder, wanted, max_tokens, connect, peers.meet)
    results = bench.measure(wanted)
    harness.unmap_peers(bench.ranks[0])
    peers.meet()
    return results


def measure_streams(tp: int, folder, wanted, max_tokens):
    """Ranks as streams of this process: [(case, rounds)]."""

    def connect(ranks):
        for rank in ranks:
            rank.connect([peer.memory.address for peer in ranks])

    bench = Bench(tp, range(tp), folder, wanted, max_tokens, connect, lambda: None)
    return bench.measure(wanted)


def measure_mps(tp: int, folder, wanted, max_tokens):
    """Ranks as processes under MPS: [(case, rounds)], of each round the slowest rank."""
    from jax_latent_tail.kernels import processes

    with processes.mps() as environment:
        by_rank = processes.run(
            tp, _worker, folder, wanted, max_tokens, environment=environment, timeout_s=300
        )
    return [
        (case, [max(rank[i][1][turn] for rank in by_rank) for turn in range(len(rounds))])
        for i, (case, rounds) in enumerate(by_rank[0])
    ]


def table(results: list[tuple[Case, list[float]]]) -> str:
    """Markdown: a row per M, the least of the rounds."""
    columns = COLUMNS[results[0][0].op]
    least = {(case.column, case.tokens): min(rounds) for case, rounds in results}
    tokens = sorted({case.tokens for case, _ in results})
    present = [c for c in columns if any((c, m) in least for m in tokens)]
    lines = ["| M | " + " | ".join(present) + " |", "|---" * (len(present) + 1) + "|"]
    for m in tokens:
        cells = (f"{least[c, m]:.2f}" if (c, m) in least else "" for c in present)
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _guards(results) -> str:
    """What the failure machinery costs, by medians of rounds that took turns."""
    rounds = {(case.column, case.tokens): r for case, r in results}
    main = _MAIN[results[0][0].op]
    parts = []
    for (column, m), guarded in sorted(rounds.items(), key=lambda item: item[0][1]):
        if column == main and ("unguarded", m) in rounds:
            bare = rounds["unguarded", m]
            parts.append(
                f"M={m}: {100 * (statistics.median(guarded) / statistics.median(bare) - 1):+.1f} %"
                f" (least {100 * (min(guarded) / min(bare) - 1):+.1f} %)"
            )
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_latent_tail.kernels.bench", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--compile", type=pathlib.Path, metavar="DIR", help="compile only, into DIR"
    )
    parser.add_argument("--arch", default="sm_90", help="with --compile")
    parser.add_argument("--cubins", type=pathlib.Path, metavar="DIR")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="M")
    parser.add_argument("--mode", choices=("streams", "mps"), nargs="+", default=("streams", "mps"))
    parser.add_argument("--op", choices=tuple(COLUMNS), nargs="+", default=(TAIL,))
    parser.add_argument("--top-k", type=int, choices=(0, 16), nargs="+", default=(0,), metavar="K")
    parser.add_argument("--geometries", action="store_true", help="also each geometry at each M")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all rounds")
    options = parser.parse_args(argv)
    if options.compile:
        compile_all(options.compile, options.arch, options.jobs)
        return
    if options.cubins:
        os.environ[store.FOLDER_VARIABLE] = str(options.cubins)
    record = []
    kinds = [(TAIL, top_k) for top_k in options.top_k] if TAIL in options.op else []
    kinds += [(op, 0) for op in (ALL_GATHER_ADD, UP_GATHER_ADD) if op in options.op]
    for tp in options.ranks:
        for op, top_k in kinds:
            most = UP_TOKENS if op == UP_GATHER_ADD else MAX_TOKENS
            tokens = [m for m in options.tokens if m <= most]
            wanted = cases(tokens, top_k, options.geometries and op != UP_GATHER_ADD, op)
            for mode in options.mode:
                started = time.monotonic()
                run = measure_streams if mode == "streams" else measure_mps
                results = run(tp, options.cubins, wanted, most)
                what = f"K = {top_k}" if op == TAIL else op
                print(f"\nN = {tp}, {mode}, {what} ({time.monotonic() - started:.0f} s)\n")
                print(table([r for r in results if r[0].kernel is None]))
                if guards := _guards([r for r in results if r[0].kernel is None]):
                    print(f"\nguards: {guards}")
                if op == UP_GATHER_ADD:
                    print(f"\nmemory: {2 * LATENT * HIDDEN / MEMORY_BYTES_PER_US:.2f}")
                latent = LATENT if op == TAIL else 0
                for index, shape in enumerate(geometry.entries(tp, latent, HIDDEN, op)):
                    those = [r for r in results if r[0].kernel == index]
                    if those:
                        print(f"\nC{shape.cluster}xT{shape.threads}:")
                        print(table(those))
                print(flush=True)
                record += [
                    {"ranks": tp, "mode": mode, **dataclasses.asdict(case), "rounds": rounds}
                    for case, rounds in results
                ]
    if options.json:
        options.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
