"""Random calls of one rank, the same plan on every rank, checked against the oracle.

Used by ranks as streams (all in one process) and by ranks as processes (one each).
"""

import dataclasses
import functools

import kernel_oracle as oracle
import numpy as np
import pytest

from jax_latent_tail.kernels import abi

pytest.importorskip("cuda.bindings.driver", reason="GPU tests need cuda-bindings")
from jax_latent_tail.kernels import harness, store
from jax_latent_tail.kernels.variant import KernelVariant, arch_for


@dataclasses.dataclass(frozen=True)
class Step:
    """One call: a window of one data set."""

    data: int
    first: int
    tokens: int
    roles: int
    token_ctas: int | None
    residual: bool = True  # of a gather


def plan(
    seed: int, calls: int, sets: int, max_tokens: int, waves=(None,), roles=None, residuals=(True,)
) -> list[Step]:
    """Calls of 1..max_tokens tokens; small ones as often as large ones."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(calls):
        tokens = int(np.exp2(rng.uniform(0, np.log2(max_tokens + 0.99))))
        first = int(rng.integers(0, max_tokens - tokens + 1))
        role = int(rng.choice(roles or (abi.BOTH_MASK,)))
        ctas = waves[rng.integers(len(waves))]
        data, residual = int(rng.integers(sets)), bool(rng.choice(residuals))
        steps.append(Step(data, first, tokens, role, ctas and min(ctas, tokens), residual))
    return steps


class Player:
    """One rank with the inputs of its data sets on the device and a ring of outputs."""

    whole = abi.BOTH_MASK  # the roles of a call that does everything

    def __init__(self, rank: harness.Rank, loaded: harness.Loaded, sets, ring: int, top_k: int = 0):
        self.rank, self.loaded, self.sets, self.top_k = rank, loaded, sets, top_k
        self.inputs = [
            {name: harness.Buffer.of(array) for name, array in self.arrays(data).items()}
            for data in sets
        ]
        self.widths = self.output_widths()
        self.outputs = [
            tuple(harness.Buffer(2 * rank.max_tokens * width) for width in self.widths)
            for _ in range(ring)
        ]

    def arrays(self, data) -> dict[str, np.ndarray]:
        """This rank's inputs, by their names in a call."""
        me = self.rank.rank
        arrays = {"gamma": data.gamma, "rows": data.rows[me], "shared": data.shared[me]}
        if self.top_k:
            arrays |= {"weights": data.weights[me], "indices": data.indices[me]}
        return arrays

    def output_widths(self) -> tuple[int, int]:
        """Columns of what the routed role writes and of what the shared role writes."""
        return self.loaded.variant.latent, self.loaded.variant.shard

    def call(self, step: Step, output: int) -> harness.Call:
        data, variant = self.inputs[step.data], self.loaded.variant
        address = {name: buffer.address for name, buffer in data.items()}
        if self.top_k:
            address["weights"] += 2 * step.first * self.top_k
            address["indices"] += 4 * step.first * self.top_k
        else:
            address["rows"] += 2 * step.first * variant.latent
        address["shared"] += 2 * step.first * variant.hidden
        return harness.Call(
            tokens=step.tokens,
            latent=self.outputs[output][0].address,
            shard=self.outputs[output][1].address,
            permuted_rows=self.sets[step.data].rows.shape[1] if self.top_k else 0,
            top_k=self.top_k,
            roles=step.roles,
            token_ctas=step.token_ctas and min(step.token_ctas, self.resident(step)),
            **address,
        )

    def resident(self, step: Step) -> int:
        """The most token CTAs with which all ranks' clusters fit on the device."""
        roles = 2 if step.roles == abi.BOTH_MASK else 1
        return min(
            self.rank.token_ctas(self.loaded, step.tokens, roles, index)
            for index in range(len(self.loaded.geometries))
        )

    def replace(self, data: int, other: int) -> None:
        """Put the inputs of set `other` where calls of set `data` look for theirs."""
        for name, array in self.arrays(self.sets[other]).items():
            self.inputs[data][name].write(array)

    def poison(self) -> None:
        """Fill the outputs with a NaN that no kernel writes."""
        for pair in self.outputs:
            for buffer in pair:
                buffer.fill(0xFFFFFFFF)

    def launch(self, step: Step, output: int) -> None:
        self.rank.launch(self.loaded, self.call(step, output))

    def results(self, step: Step, output: int):
        """(latent [M, L] or None, shard [M, S] or None)"""
        return tuple(
            self.outputs[output][role].read(np.uint16, (step.tokens, self.widths[role]))
            if step.roles >> role & 1
            else None
            for role in (abi.ROUTED, abi.SHARED)
        )

    def check(self, step: Step, output: int, inputs: int | None = None) -> np.ndarray | None:
        """Compare with the oracle; returns the latent output, for comparison between ranks.

        `inputs` is the set whose inputs were there, if not the step's.
        """
        data = self.sets[step.data if inputs is None else inputs]
        window = slice(step.first, step.first + step.tokens)
        latent, shard = self.results(step, output)
        if shard is not None:
            np.testing.assert_array_equal(shard, data.shard[self.rank.rank, window])
        if latent is not None:
            distance = oracle.ulps(latent, data.latent[window])
            assert distance <= 1, f"latent is {distance} ulp off at {step}"
        return latent


class GatherPlayer(Player):
    """The same for all_gather_add."""

    whole = abi.SHARED_MASK

    def arrays(self, data) -> dict[str, np.ndarray]:
        return {"shared": data.x[self.rank.rank], "rows": data.residual}

    def output_widths(self) -> tuple[int, int]:
        return 0, self.loaded.variant.hidden

    def call(self, step: Step, output: int) -> harness.Call:
        data, variant = self.inputs[step.data], self.loaded.variant
        residual = data["rows"].address + 2 * step.first * variant.hidden
        return harness.Call(
            tokens=step.tokens,
            shared=data["shared"].address + 2 * step.first * variant.shard,
            rows=residual if step.residual else 0,
            shard=self.outputs[output][abi.SHARED].address,
            roles=abi.SHARED_MASK,
            token_ctas=step.token_ctas and min(step.token_ctas, self.resident(step)),
        )

    def check(self, step: Step, output: int, inputs: int | None = None) -> np.ndarray:
        data = self.sets[step.data if inputs is None else inputs]
        want = data.added if step.residual else data.copied
        _, got = self.results(step, output)
        np.testing.assert_array_equal(got, want[step.first : step.first + step.tokens])
        return got


class UpPlayer(GatherPlayer):
    """The same for up_gather_add."""

    def arrays(self, data) -> dict[str, np.ndarray]:
        width = self.loaded.variant.shard
        mine = slice(self.rank.rank * width, (self.rank.rank + 1) * width)
        return {
            "latent": data.latent,
            "weights": data.weights[:, mine],
            "shared": data.x[:, mine],
            "rows": data.residual,
        }

    def call(self, step: Step, output: int) -> harness.Call:
        data = self.inputs[step.data]
        call = super().call(step, output)
        call.latent = data["latent"].address + 2 * step.first * self.loaded.variant.latent
        call.weights = data["weights"].address
        return call

    def check(self, step: Step, output: int, inputs: int | None = None) -> np.ndarray:
        data = self.sets[step.data if inputs is None else inputs]
        least, most = data.added if step.residual else data.copied
        window = slice(step.first, step.first + step.tokens)
        _, got = self.results(step, output)
        right = oracle.between(got, least[window], most[window])
        if not right.all():
            at = tuple(int(i) for i in np.argwhere(~right)[0])
            raise AssertionError(
                f"{(~right).sum()} words are wrong at {step}; the first, {at}, is {got[at]:#06x}, "
                f"not {least[window][at]:#06x}..{most[window][at]:#06x}"
            )
        return got


@functools.cache
def gather(
    device: harness.Device, tp: int, hidden: int = 7168, trigger: bool = False
) -> harness.Loaded:
    """The kernel of an all_gather_add, loaded once."""
    arch = arch_for(*device.capability)
    return harness.Loaded(
        store.find(KernelVariant.all_gather_add(arch, tp, hidden, trigger=trigger))
    )


@functools.cache
def up(device: harness.Device, tp: int, latent: int = 3584, hidden: int = 7168) -> harness.Loaded:
    """The kernels of an up_gather_add, loaded once."""
    arch = arch_for(*device.capability)
    return harness.Loaded(store.find(KernelVariant.up_gather_add(arch, tp, latent, hidden)))


def idle(rank: harness.Rank) -> None:
    """With nothing in flight the workspace holds nothing but the sentinel, own slots of rows for
    all too (they are never written), and nothing has failed."""
    assert rank.record.describe() == ""
    words = rank.read_workspace()
    assert (words == abi.SENTINEL).all(), f"{(words != abi.SENTINEL).sum()} words are not re-armed"
