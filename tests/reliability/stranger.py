"""What a process that is no member of a job gets: `stranger.py USER ACTION ...`.

USER is a number, which this process becomes first, or "me". Prints one line.
"""

import os
import socket
import sys


def read(path):
    """Opens a file for reading, or lists a folder."""
    if os.path.isdir(path):
        return os.listdir(path)
    with open(path, "rb") as file:
        return file.read(1)


def write(path):
    with open(path, "r+b") as file:
        file.write(b"\0")
    return "written"


def connect(path, message):
    """Connects to a socket, says something and hands over a descriptor; what comes back."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        handle = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(connection, [bytes.fromhex(message)], [handle])
        data, descriptors, _, _ = socket.recv_fds(connection, 100, 10)
        return [data, descriptors]


if __name__ == "__main__":
    user, action, *arguments = sys.argv[1:]
    if user != "me":
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    try:
        print("got", globals()[action](*arguments))
    except OSError as error:
        print("refused", type(error).__name__)
