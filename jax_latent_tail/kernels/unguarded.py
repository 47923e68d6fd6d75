"""The kernels without what guards them, to measure what the guards cost. Never part of a release.

Same publish, wait and arithmetic; no status, header, deadline, poison or report.
"""

import cutlass.cute as cute
from cutlass import Int64, Uint32

from jax_latent_tail.kernels import collective, projection, ptx
from jax_latent_tail.kernels.abi import Control
from jax_latent_tail.kernels.variant import ALL_GATHER_ADD, TAIL, UP_GATHER_ADD


class _Unguarded:
    """See `Protocol`; only the steps of failure and disagreement are overridden, by nothing."""

    @cute.jit
    def enter(self, call, role, token):
        generation = ptx.load_shared_word(self.generation_address(call, role, token))
        workspace = ptx.load_shared_long(call.control + Control.workspace.offset)
        return Int64(0), workspace, generation

    @cute.jit
    def put_header(self, call, here, words, k, generation):
        pass  # a zero vector travels in its place

    def any_disagreement(self, call, headers, generation):
        return Uint32(0)

    @cute.jit
    def lose_patience(self, call, started):
        return Uint32(0), started

    @cute.jit
    def poisoned_if(self, value, failed):
        return value

    @cute.jit
    def find_poison(self, total, sums, failed):
        return failed

    @cute.jit
    def report(self, call, role, token, failed):
        pass

    @cute.jit
    def leave(self, call, role, failed):
        pass


class _Tail(_Unguarded, collective.Tail):
    pass


class _AllGatherAdd(_Unguarded, collective.AllGatherAdd):
    pass


class _UpGatherAdd(_Unguarded, projection.UpGatherAdd):
    pass


KERNELS = {TAIL: _Tail, ALL_GATHER_ADD: _AllGatherAdd, UP_GATHER_ADD: _UpGatherAdd}
