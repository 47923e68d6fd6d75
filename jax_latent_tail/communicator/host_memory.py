"""POSIX shared memory that only this user's processes can find, and only while they are meeting."""

import os
import secrets
import stat
from pathlib import Path

from jax_latent_tail.errors import UnavailableError

FOLDER = Path("/dev/shm")


class SharedFile:
    """A file of shared memory, open in this process.

    Whoever created it unlinks it, once all have opened it or will not: it then goes with the last
    mapping. A mapping outlives the descriptor.

    Attributes:
      fd: the descriptor; closed by `close`.
      name: under which other processes open it, unguessable.
    """

    def __init__(self, fd: int, path: Path):
        self.fd = fd
        self.name = path.name
        self._path = path
        self._linked = False

    @classmethod
    def create(cls, size: int) -> "SharedFile":
        """A new file of so many zero bytes, all of them reserved.

        Raises:
          OSError: the folder is not there, or has not so much room.
        """
        path = FOLDER / f"jax_latent_tail_{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = cls(os.open(path, flags, 0o600), path)
        file._linked = True
        try:
            # Not ftruncate: where memory ran out later, a store to it would kill the process.
            os.posix_fallocate(file.fd, 0, size)
        except OSError as error:
            file.close()
            raise OSError(f"cannot reserve {size} bytes in {FOLDER}: {error}") from error
        return file

    @classmethod
    def open(cls, name: str) -> "SharedFile":
        """The file that another process of this user created.

        Raises:
          OSError: it is not there: the processes do not share the folder.
          UnavailableError: it is somebody else's.
        """
        path = FOLDER / Path(name).name
        file = cls(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path)
        status = os.fstat(file.fd)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode != 0o600:
            file.close()
            raise UnavailableError(
                f"{path} belongs to user {status.st_uid} with mode {mode:o}, not to user"
                f" {os.geteuid()} with mode 600"
            )
        return file

    def unlink(self) -> None:
        """Removes the name, if this process made it and it is still there."""
        if self._linked:
            self._linked = False
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the descriptor, and removes the name as `unlink` does; may be called again."""
        self.unlink()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
