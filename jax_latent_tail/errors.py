"""What the package raises: every refusal names the argument, its value and what is allowed."""

from typing import Any


class LatentTailError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(LatentTailError):
    """An argument that cannot be served.

    Attributes:
      argument: name of the argument as the user wrote it.
      value: the value, or a description of it where the value is an array.
      allowed: what would have been accepted.
    """

    def __init__(self, argument: str, value: Any, allowed: str):
        super().__init__(f"{argument} is {value}; allowed: {allowed}")
        self.argument = argument
        self.value = value
        self.allowed = allowed


class ArgumentValueError(ArgumentError, ValueError):
    """The argument has the right type, but a value, shape or axis that is not allowed."""


class ArgumentTypeError(ArgumentError, TypeError):
    """The argument has a type or dtype that is not allowed."""


class UnavailableError(LatentTailError, RuntimeError):
    """The implementation that was insisted on cannot run here; the message says why."""


class RendezvousError(LatentTailError, RuntimeError):
    """The processes of a device table did not meet; the message names those that did not come.

    Nothing is decided: the same call may be tried again by all of them.
    """


class DisagreementError(LatentTailError, RuntimeError):
    """The processes of a device table want different things; the message shows each side.

    Raised in every one of them, with the same text.
    """


class CommunicatorError(LatentTailError, RuntimeError):
    """A native call failed, and with it its communicator; the message names ranks and call."""
