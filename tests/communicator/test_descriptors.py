"""Descriptors through sockets, with strangers about."""

import os
import socket
import stat
import threading
import time

import pytest

from jax_latent_tail.communicator import descriptors
from jax_latent_tail.communicator.descriptors import Exchange, PassingError, send


@pytest.fixture
def pipes():
    """Descriptors whose other ends tell what they are."""
    made = []

    def make(count, mark=b"x"):
        ends = []
        for index in range(count):
            reader, writer = os.pipe()
            os.write(writer, mark + bytes([index]))
            made.extend((reader, writer))
            ends.append(reader)
        return ends

    yield make
    descriptors.close_all(made)


@pytest.fixture
def unchanged(sockets):
    """Nothing left open after the test."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(sockets) == []


def contents(received):
    return {
        sender: [os.read(descriptor, 2) for descriptor in handles]
        for sender, handles in received.items()
    }


def close(received):
    for handles in received.values():
        descriptors.close_all(handles)


def test_descriptors_arrive_with_their_sender(unchanged, pipes):
    exchange = Exchange({1: 2, 7: 3})
    send(7, exchange.address, pipes(3, b"s"))
    send(1, exchange.address, pipes(2, b"o"))
    received = exchange.receive(5)
    assert contents(received) == {1: [b"o\0", b"o\1"], 7: [b"s\0", b"s\1", b"s\2"]}
    assert not any(os.get_inheritable(fd) for handles in received.values() for fd in handles)
    close(received)
    exchange.close()
    exchange.close()


def test_the_folder_is_private_and_goes_with_the_exchange(unchanged):
    exchange = Exchange({1: 1})
    folder = os.path.dirname(exchange.path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    other = Exchange({1: 1})
    assert other.path != exchange.path
    assert other.address["token"] != exchange.address["token"]
    exchange.close()
    other.close()
    assert not os.path.exists(folder)


def stranger_says(path, data, fds=()):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        if data is not None:
            socket.send_fds(connection, [data], list(fds)) if fds else connection.sendall(data)


@pytest.mark.parametrize(
    "what", ["wrong token", "nothing", "short", "wrong process", "wrong number", "twice"]
)
def test_a_stranger_is_not_listened_to(what, unchanged, pipes):
    exchange = Exchange({1: 1})
    address = exchange.address
    bad = pipes(1, b"b")
    if what == "wrong token":
        send(1, {**address, "token": "00" * 32}, bad)
    elif what == "nothing":
        stranger_says(exchange.path, None)
    elif what == "short":
        stranger_says(exchange.path, b"hello", bad)
    elif what == "wrong process":
        send(2, address, bad)
    elif what == "wrong number":
        send(1, address, pipes(3, b"b"))
    send(1, address, pipes(1, b"g"))
    if what == "twice":
        send(1, address, bad)
    received = exchange.receive(5)
    assert contents(received) == {1: [b"g\0"]}
    close(received)
    exchange.close()


def test_who_hands_over_twice_is_heard_once(unchanged, pipes):
    exchange = Exchange({1: 1, 2: 1})
    for sender, mark in ((1, b"f"), (1, b"s"), (2, b"o")):
        send(sender, exchange.address, pipes(1, mark))
    received = exchange.receive(5)
    assert contents(received) == {1: [b"f\0"], 2: [b"o\0"]}
    close(received)
    exchange.close()


def test_one_that_connects_and_stays_silent_stops_nobody(unchanged, pipes):
    exchange = Exchange({1: 1})
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(exchange.path)
    send(1, exchange.address, pipes(1))
    start = time.monotonic()
    close(exchange.receive(5))
    assert time.monotonic() - start < 1
    silent.close()
    exchange.close()


def test_another_user_gets_and_gives_nothing(unchanged, pipes):
    users = iter([os.geteuid() + 1, os.geteuid()])
    exchange = Exchange({1: 1}, read_user=lambda connection: next(users))
    send(1, exchange.address, pipes(1, b"b"))
    send(1, exchange.address, pipes(1, b"g"))
    received = exchange.receive(5)
    assert contents(received) == {1: [b"g\0"]}
    close(received)
    with pytest.raises(PassingError, match="another user"):
        send(1, exchange.address, pipes(1), read_user=lambda connection: os.geteuid() + 1)
    exchange.close()


def test_the_kernel_says_who_is_there():
    a, b = socket.socketpair(socket.AF_UNIX)
    with a, b:
        assert descriptors.peer_user(a) == os.geteuid()


def test_one_that_does_not_come_is_named_in_time(unchanged, pipes):
    exchange = Exchange({1: 1, 2: 1})
    send(1, exchange.address, pipes(1))
    start = time.monotonic()
    with pytest.raises(PassingError, match=r"process \[2\]"):
        exchange.receive(0.3)
    assert time.monotonic() - start < 2
    exchange.close()


def test_a_late_one_is_waited_for(unchanged, pipes):
    exchange = Exchange({1: 1})
    handles = pipes(1)
    timer = threading.Timer(0.3, send, (1, exchange.address, handles))
    timer.start()
    close(exchange.receive(5))
    timer.join()
    exchange.close()


def test_a_folder_with_a_long_name_is_a_reason(unchanged, sockets, monkeypatch):
    folder = os.path.join(sockets, "f" * 100)
    os.mkdir(folder)
    monkeypatch.setattr(descriptors.tempfile, "tempdir", folder)
    with pytest.raises(PassingError, match="TMPDIR"):
        Exchange({1: 1})
    os.rmdir(folder)


def test_a_socket_that_is_not_there_is_a_reason(unchanged, pipes):
    with pytest.raises(PassingError, match="cannot connect to /nowhere/socket: No such file"):
        send(1, {"path": "/nowhere/socket", "token": "00" * 32}, pipes(1))
