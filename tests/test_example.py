"""examples/kimi_moe.py: its parts against NumPy, and the whole program in its modes."""

import argparse
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import make_mesh, normal
from jax.sharding import PartitionSpec as P

PATH = Path(__file__).parents[1] / "examples" / "kimi_moe.py"

module_spec = importlib.util.spec_from_file_location("kimi_moe", PATH)
kimi_moe = importlib.util.module_from_spec(module_spec)
sys.modules["kimi_moe"] = kimi_moe
module_spec.loader.exec_module(kimi_moe)

CONFIG = kimi_moe.Config(64, 32, 8, 3, 16, 32, layers=2, vocabulary=32, routed_scaling=2.5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def parameters(layers=1, config=CONFIG):
    return {
        name: kimi_moe.random_parameter(name, (layers, *shape))
        for name, shape in kimi_moe.layer_shapes(config).items()
    }


def test_the_bias_moves_the_choice_but_not_the_weights():
    rng = np.random.default_rng(0)
    h = normal(rng, 5, CONFIG.hidden)
    p = {"router": parameters()["router"][0], "bias": np.zeros(CONFIG.experts, np.float32)}
    p["bias"][6] = 10
    weights, chosen = map(np.asarray, kimi_moe.route(CONFIG, jnp.asarray(h), p))
    scores = sigmoid(h.astype(np.float64) @ p["router"].astype(np.float64))
    for token in range(5):
        best = np.argsort(-(scores[token] + p["bias"]))[: CONFIG.top_k]
        assert set(chosen[token]) == set(best)
        assert 6 in chosen[token]
        own = scores[token][chosen[token]]
        np.testing.assert_allclose(weights[token], own / own.sum() * 2.5, rtol=1e-5)


def test_situ_glu_is_bounded_and_matches_its_formula():
    gate, up = np.float32([[-50, -1, 0, 0.5, 50]]), np.float32([[3, -2, 5, 100, 1000]])
    expected = (4 * np.tanh(gate / 4) * sigmoid(gate)) * (25 * np.tanh(up / 25))
    np.testing.assert_allclose(kimi_moe.situ_glu(CONFIG, gate, up), expected, atol=1e-5)
    assert np.abs(expected).max() <= 100


@pytest.mark.parametrize("experts_by", ["expert", "width"])
def test_partial_rows_of_all_ranks_sum_to_the_experts(experts_by):
    config = dataclasses.replace(CONFIG, beta=1e6, linear_beta=1e6)  # gate * sigmoid(gate) * up
    p = {name: parameter[0] for name, parameter in parameters(config=config).items()}
    rng = np.random.default_rng(1)
    rows = normal(rng, 6, config.latent)
    weights = rng.random((6, 3)).astype(np.float32)
    chosen = np.stack([rng.permutation(config.experts)[:3] for _ in range(6)])

    names = ["expert_gate", "expert_up", "expert_down"]
    specs = kimi_moe.layer_specs(experts_by)

    def own(rows, weights, chosen, *matrices):
        p = dict(zip(names, matrices, strict=True))
        return kimi_moe.own_experts(config, rows, weights, chosen, p)

    permuted, own_weights, indices = jax.jit(
        jax.shard_map(
            own,
            mesh=make_mesh((4,)),
            in_specs=(P(), P(), P(), *(specs[name] for name in names)),
            out_specs=P("tp"),
        )
    )(rows, weights, chosen, *(p[name] for name in names))
    stacked = [np.asarray(x).reshape(4, -1, x.shape[-1]) for x in (permuted, own_weights, indices)]
    total = sum(
        oracle.contribution(*rank).astype(np.float64) for rank in zip(*stacked, strict=True)
    )

    expected = np.zeros((6, config.latent))
    for token in range(6):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up, down = (p[name][expert].astype(np.float64) for name in names)
            x = rows[token].astype(np.float64)
            hidden = x @ gate * sigmoid(x @ gate) * (x @ up)
            expected[token] += weight * (hidden @ down)
    assert np.linalg.norm(total - expected) <= 0.01 * np.linalg.norm(expected)


def arguments(**changes):
    defaults = {
        "config": CONFIG,
        "processes": 1,
        "devices": 4,
        "experts_by": "expert",
        "tokens": 5,
        "steps": 2,
        "tolerance": 0.02,
        "share_gpus": False,
    }
    return argparse.Namespace(**(defaults | changes))


@pytest.mark.parametrize("experts_by", ["expert", "width"])
def test_decoding_matches_the_dense_model(experts_by, capsys):
    assert kimi_moe.run(arguments(experts_by=experts_by)) == 0
    assert "PASSED" in capsys.readouterr().out


def test_an_error_above_the_tolerance_fails(capsys, monkeypatch):
    right = kimi_moe.dense_block
    monkeypatch.setattr(kimi_moe, "dense_block", lambda *operands: 1.05 * right(*operands))
    assert kimi_moe.run(arguments()) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [{0}, {0, 1}, {1}])
def test_nan_is_not_within_any_tolerance(steps, capsys, monkeypatch):
    right, calls = kimi_moe.dense_block, iter(range(100))

    def sometimes_nan(*operands):
        return right(*operands) * (np.nan if next(calls) % 2 in steps else 1)

    monkeypatch.setattr(kimi_moe, "dense_block", sometimes_nan)
    assert kimi_moe.run(arguments(tolerance=1e9)) == 1
    assert "FAILED" in capsys.readouterr().out


def start(*options):
    return subprocess.run(
        [sys.executable, str(PATH), *options], capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("options", [("--processes", "2", "--devices", "2"), ("--processes", "4")])
def test_several_processes(options):
    result = start(*options, "--steps", "2", "--layers", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASSED" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--devices", "3"), "3 ranks do not divide"),
        (("--tokens", "0"), "--tokens is 0; allowed: at least 1"),
        (("--experts", "2"), "allowed: at least the 4 chosen"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, says):
    result = start(*options)
    assert result.returncode == 2
    assert says in result.stderr
