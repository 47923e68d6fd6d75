"""One rank with scripted peers, for compute-sanitizer, which lets only one kernel run at a time.

The host plays the peers: it puts their words and headers where they would arrive, then launches the
one rank, whose own words go to stand-ins for the peers' workspaces. No pytest: run.sh starts it as
compute-sanitizer --tool T python kernel_sanitize.py.
"""

import kernel_oracle as oracle
import numpy as np

from jax_latent_tail.kernels import abi, harness, store
from jax_latent_tail.kernels.variant import UP_TILE, UP_TOKENS, KernelVariant, arch_for

MAX_TOKENS = 4


def slots(rank):
    """The workspace as [buffer, token or tile, byte]."""
    return rank.read_workspace().view(np.uint8).reshape(abi.BUFFERS, rank.slots, -1)


def without_sentinel(words):
    words = np.ascontiguousarray(words).view(np.uint32)
    return np.where(words == abi.SENTINEL, 0, words).astype(np.uint32).view(np.uint8)


def run(device, tp, rank, latent, hidden, top_k, fp32_internal, token_ctas):
    variant = KernelVariant(
        arch_for(*device.capability), tp, latent, hidden, top_k if top_k in (0, 8, 16) else -1,
        fp32_internal,
    )  # fmt: skip
    loaded = harness.Loaded(store.find(variant))
    ranks = harness.connected(device, loaded, max_tokens=MAX_TOKENS)
    me = ranks[rank]
    data = oracle.make(3, "spread", tp, MAX_TOKENS, latent, hidden, top_k, fp32_internal)
    contributions = data.rows
    if top_k:
        contributions = np.stack(
            [
                oracle.finalize(*of)
                for of in zip(data.rows, data.weights, data.indices, strict=False)
            ]
        )
    layout = abi.Slot(tp, latent, hidden)
    width = variant.shard
    inputs = {
        "rows": data.rows[rank],
        "shared": data.shared[rank],
        "gamma": data.gamma,
        "weights": data.weights[rank] if top_k else None,
        "indices": data.indices[rank] if top_k else None,
    }
    buffers = {
        name: harness.Buffer.of(array) for name, array in inputs.items() if array is not None
    }
    outputs = [harness.Buffer(2 * MAX_TOKENS * width_) for width_ in (latent, width)]
    for call_number in range(3):
        words = slots(me)
        assert (words.reshape(-1).view(np.uint32) == abi.SENTINEL).all()
        arguments = harness.Call(
            tokens=MAX_TOKENS,
            latent=outputs[0].address,
            shard=outputs[1].address,
            top_k=top_k,
            permuted_rows=data.rows.shape[1] if top_k else 0,
            token_ctas=token_ctas,
            kernel=call_number % len(loaded.geometries),
            call_hash=77,
            **{name: buffer.address for name, buffer in buffers.items()},
        )
        header = np.array([77, MAX_TOKENS, call_number, 0], np.uint32).view(np.uint8)
        for token in range(MAX_TOKENS):
            slot = words[call_number & 1, token]
            for peer in range(tp):
                if peer == rank:
                    continue
                row = without_sentinel(contributions[peer, token])
                mine = data.shared[peer, token, rank * width : (rank + 1) * width]
                routed = slot[peer * layout.routed_pitch :]
                routed[: latent * 2], routed[latent * 2 :][:16] = row, header
                shared = slot[layout.shared_offset + peer * layout.shared_pitch :]
                shared[: width * 2], shared[width * 2 :][:16] = without_sentinel(mine), header
        harness.write_workspace(me, words)
        me.launch(loaded, arguments)
        got = [
            buffer.read(np.uint16, (MAX_TOKENS, columns))
            for buffer, columns in zip(outputs, (latent, width), strict=False)
        ]
        assert me.record.describe() == "", me.record.describe()
        assert oracle.ulps(got[0], data.latent) <= 1
        np.testing.assert_array_equal(got[1], data.shard[rank])
    print(
        f"{variant.key}: rank {rank} of {tp}, {len(loaded.geometries)} geometries: right",
        flush=True,
    )


def run_gather(device, tp, rank, hidden, token_ctas):
    variant = KernelVariant.all_gather_add(arch_for(*device.capability), tp, hidden)
    loaded = harness.Loaded(store.find(variant))
    ranks = harness.connected(device, loaded, max_tokens=MAX_TOKENS)  # whose memory it stores to
    me = ranks[rank]
    data = oracle.make_gather(3, "patterns", tp, MAX_TOKENS, hidden)
    x, residual = harness.Buffer.of(data.x[rank]), harness.Buffer.of(data.residual)
    output = harness.Buffer(2 * MAX_TOKENS * hidden)
    pitch, row_bytes = abi.Slot(tp, 0, hidden).shared_pitch, variant.shard * 2
    for call_number in range(4):
        words = slots(me)
        assert (words.reshape(-1).view(np.uint32) == abi.SENTINEL).all()
        header = np.array([77, MAX_TOKENS, call_number, 0], np.uint32).view(np.uint8)
        for token, peer in np.ndindex(MAX_TOKENS, tp):
            if peer == rank:
                continue
            row = data.x[peer, token].view(np.uint32)
            row = np.where(row == abi.ESCAPED, np.uint32(abi.OTHER_NAN), row)
            row = np.where(row == abi.SENTINEL, np.uint32(abi.ESCAPED), row).view(np.uint8)
            slot = words[call_number & 1, token, peer * pitch :]
            slot[:row_bytes], slot[row_bytes:][:16] = row, header
        harness.write_workspace(me, words)
        with_residual = call_number > 1
        me.launch(
            loaded,
            harness.Call(
                tokens=MAX_TOKENS,
                shared=x.address,
                rows=residual.address if with_residual else 0,
                shard=output.address,
                roles=abi.SHARED_MASK,
                token_ctas=token_ctas,
                kernel=call_number % len(loaded.geometries),
                call_hash=77,
            ),
        )
        got = output.read(np.uint16, (MAX_TOKENS, hidden))
        assert me.record.describe() == "", me.record.describe()
        np.testing.assert_array_equal(got, data.added if with_residual else data.copied)
    print(
        f"{variant.key}: rank {rank} of {tp}, {len(loaded.geometries)} geometries: right",
        flush=True,
    )


def rows_of_tile(columns, tile):
    """What a slot's row holds of [M, S], with zeros where there is neither token nor column."""
    row = np.zeros((UP_TOKENS, UP_TILE), np.uint16)
    part = columns[:, tile * UP_TILE : (tile + 1) * UP_TILE]
    row[: part.shape[0], : part.shape[1]] = part
    there = np.zeros(row.shape, bool)
    there[: part.shape[0], : part.shape[1]] = True
    return row, there


def run_up(device, tp, rank, latent, hidden, token_ctas):
    variant = KernelVariant.up_gather_add(arch_for(*device.capability), tp, latent, hidden)
    loaded = harness.Loaded(store.find(variant))
    ranks = harness.connected(device, loaded, max_tokens=UP_TOKENS)  # whose memory it stores to
    me = ranks[rank]
    data = oracle.make_up(3, "zeros", UP_TOKENS, latent, hidden)
    width, layout = variant.shard, variant.slot
    mine = slice(rank * width, (rank + 1) * width)
    inputs = {
        "latent": data.latent,
        "weights": data.weights[:, mine],
        "shared": data.x[:, mine],
        "rows": data.residual,
    }
    buffers = {name: harness.Buffer.of(array) for name, array in inputs.items()}
    output = harness.Buffer(2 * UP_TOKENS * hidden)
    travelling = data.copied[0].view(np.uint32)
    travelling = np.where(travelling == abi.SENTINEL, np.uint32(abi.ESCAPED), travelling)
    travelling = travelling.view(np.uint16)
    for call_number, tokens in enumerate((3, UP_TOKENS, 9, 1)):
        columns = travelling[:tokens].reshape(tokens, tp, width)
        words = slots(me)
        assert (words.reshape(-1).view(np.uint32) == abi.SENTINEL).all()
        header = np.array([77, tokens, call_number, 0], np.uint32).view(np.uint8)
        for tile, peer in np.ndindex(me.slots, tp):
            if peer == rank:
                continue
            slot = words[call_number & 1, tile, peer * layout.shared_pitch :]
            row, there = rows_of_tile(columns[:, peer], tile)
            into = slot[: row.nbytes].view(np.uint16).reshape(row.shape)
            into[there] = row[there]
            slot[layout.shared_header :][:16] = header
        harness.write_workspace(me, words)
        with_residual = call_number != 2
        addresses = {name: buffer.address for name, buffer in buffers.items()}
        if not with_residual:
            addresses["rows"] = 0
        me.launch(
            loaded,
            harness.Call(
                tokens=tokens,
                shard=output.address,
                roles=abi.SHARED_MASK,
                token_ctas=token_ctas,
                call_hash=77,
                **addresses,
            ),
        )
        got = output.read(np.uint16, (tokens, hidden))
        assert me.record.describe() == "", me.record.describe()
        want = data.added[0] if with_residual else data.copied[0]
        np.testing.assert_array_equal(got, want[:tokens])
        # Each peer has the own columns where it looks for them.
        for peer in ranks:
            if peer is me:
                continue
            buffer = slots(peer)[call_number & 1]
            for tile in range(me.slots):
                slot = buffer[tile, rank * layout.shared_pitch :]
                row, there = rows_of_tile(columns[:, rank], tile)
                found = slot[: row.nbytes].view(np.uint16).reshape(row.shape)
                np.testing.assert_array_equal(found[there], row[there])
                np.testing.assert_array_equal(slot[layout.shared_header :][:16], header)
    print(
        f"{variant.key}: rank {rank} of {tp}, {len(loaded.geometries)} geometries: right",
        flush=True,
    )


if __name__ == "__main__":
    here = harness.Device()
    run(here, 2, 1, 3584, 7168, 0, False, None)
    run(here, 4, 0, 3584, 7168, 8, True, 2)
    run(here, 8, 7, 3584, 7168, 16, False, 1)
    run(here, 8, 3, 3584, 7168, 5, False, None)
    run(here, 3, 1, 8, 24, 0, False, None)
    run_gather(here, 2, 1, 7168, None)
    run_gather(here, 8, 5, 7168, 1)
    run_gather(here, 3, 0, 24, 2)
    run_up(here, 3, 1, 520, 600, None)
    run_up(here, 3, 2, 520, 600, 1)
    run_up(here, 8, 5, 3584, 7168, 2)
