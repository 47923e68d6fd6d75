"""Checks of the arguments that calls and `prepare` have in common."""

from typing import Any

import numpy as np

from jax_latent_tail.errors import ArgumentTypeError, ArgumentValueError
from jax_latent_tail.spec import IMPLEMENTATIONS, AxisName

_FP32_NORMAL_MIN, _FP32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_axis_names(axis_name: Any, allowed: str) -> AxisName:
    """`axis_name` as a tuple of different names."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError("axis_name", repr(axis_name), allowed)
    if len(set(names)) < len(names):
        raise ArgumentValueError("axis_name", repr(axis_name), "each name once")
    return names


def check_options(eps: Any, fp32_internal: Any, max_tokens: Any, implementation: Any) -> None:
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.integer | np.floating):
        raise ArgumentTypeError("eps", f"a {type(eps).__name__}", "a real Python or NumPy number")
    if not _FP32_NORMAL_MIN <= eps <= _FP32_MAX:
        raise ArgumentValueError(
            "eps", eps, f"a number that is normal in fp32: {_FP32_NORMAL_MIN} to {_FP32_MAX}"
        )
    if not isinstance(fp32_internal, bool | np.bool_):
        raise ArgumentTypeError("fp32_internal", repr(fp32_internal), "True or False")
    check_count("max_tokens", max_tokens)
    check_implementation(implementation)


def check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(name, repr(value), "an integer")
    if value < 1:
        raise ArgumentValueError(name, value, "an integer >= 1")
    return int(value)


def check_implementation(implementation: Any) -> None:
    if not isinstance(implementation, str | None):
        raise ArgumentTypeError(
            "implementation", f"a {type(implementation).__name__}", f"one of {IMPLEMENTATIONS}"
        )
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentValueError(
            "implementation", repr(implementation), f"one of {IMPLEMENTATIONS}"
        )
