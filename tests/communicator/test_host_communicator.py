"""Making the communicator of CPU devices: all processes alike, and nothing left behind."""

import os
import threading

import pytest
from world import FakeDevice, Service

from jax_latent_tail.communicator import host_memory
from jax_latent_tail.communicator.host import HostCommunicator
from jax_latent_tail.communicator.rendezvous import Refusal, Rendezvous, ServiceStore
from jax_latent_tail.errors import ArgumentValueError, DisagreementError, UnavailableError
from jax_latent_tail.spec import TailSpec

TABLE = ((0, 1), (2, 3))
ACROSS = {0: 0, 1: 3, 2: 0, 3: 3}  # the process of each device
WITHIN = {0: 0, 1: 0, 2: 3, 3: 3}


def spec(**changes):
    sizes = {"tp": 2, "latent_dim": 16, "hidden_dim": 32, "top_k": None, "max_tokens": 4}
    return TailSpec(**(sizes | {"eps": 1e-6, "fp32_internal": False} | changes))


class Library:
    """The calls that a communicator makes, and what is open."""

    def __init__(self, refuses=None):
        self.opened = []
        self.handles = set()
        self._refuses = refuses

    def cpu_segment_bytes(self, table, spec, processes):
        return 0 if processes[0] == processes[1] else 1 << 16

    def open_cpu(self, table, spec, processes, process, deadline_s, segment_fd):
        if self._refuses:
            raise UnavailableError(self._refuses)
        inode = os.fstat(segment_fd).st_ino if segment_fd >= 0 else None
        self.opened.append((tuple(processes), process, deadline_s, inode))
        self.handles.add(len(self.opened))
        return len(self.opened)

    def cpu_failure(self, handle):
        return f"failure of {handle}" if handle in self.handles else None

    def close_cpu(self, handle):
        self.handles.remove(handle)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_is_left(folder):
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not folder.exists() or not list(folder.iterdir())


def establish(holders=ACROSS, libraries=None, specs=None, environs=None, hosts=None):
    """Each process's communicator or error, by process."""
    devices = {id_: FakeDevice(id_, process, 0) for id_, process in holders.items()}
    processes = sorted(set(holders.values()))
    libraries = libraries or {process: Library() for process in processes}
    service = Service()
    results = {}

    def run(process):
        rendezvous = Rendezvous(processes, process, "key", 20, ServiceStore(service))
        try:
            with rendezvous.session():
                results[process] = HostCommunicator.establish(
                    TABLE,
                    (specs or {}).get(process, spec()),
                    devices,
                    rendezvous,
                    libraries[process],
                    (environs or {}).get(process, {}),
                    (hosts or {}).get(process, "host"),
                )
        except Exception as error:
            results[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_processes_share_one_segment_without_a_name():
    libraries = {0: Library(), 3: Library()}
    made = establish(libraries=libraries, environs=dict.fromkeys((0, 3), DEADLINE))
    ((first, number, deadline_s, inode),) = libraries[0].opened
    assert (first, number, deadline_s) == ((0, 1, 0, 1), 0, 7.5)
    assert libraries[3].opened == [((0, 1, 0, 1), 1, 7.5, inode)]
    assert made[0].failure() == "failure of 1"
    for process, communicator in made.items():
        communicator.close(1.0)
        communicator.close(1.0)
        assert not libraries[process].handles
        assert communicator.failure() is None


DEADLINE = {"JAX_LATENT_TAIL_DEADLINE": "7.5"}


def test_groups_within_processes_need_no_segment():
    libraries = {0: Library(), 3: Library()}
    establish(WITHIN, libraries)
    assert [library.opened[0][3] for library in libraries.values()] == [None, None]


@pytest.mark.parametrize("process", [0, 3])
def test_a_process_without_library_or_that_cannot_map_refuses_for_all(process):
    for refusing in (UnavailableError("no library"), Library(refuses="cannot map")):
        libraries = {0: Library(), 3: Library()} | {process: refusing}
        results = establish(libraries=libraries)
        assert all(isinstance(result, Refusal) for result in results.values())
        assert str(results[0]) == str(results[3])
        assert "no library" in str(results[0]) or "cannot map" in str(results[0])
        assert f"process {process}" in str(results[0])
        assert not any(x.handles for x in libraries.values() if isinstance(x, Library))


def test_without_the_folder_all_refuse(folder):
    folder.rmdir()
    results = establish()
    assert all("creating shared memory" in str(result) for result in results.values())


def test_without_room_all_refuse(monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    results = establish()
    assert all("cannot reserve 65536 bytes" in str(result) for result in results.values())


def test_a_file_of_another_mode_is_not_opened(monkeypatch):
    create = host_memory.SharedFile.create

    def readable_by_all(size):
        file = create(size)
        os.fchmod(file.fd, 0o644)
        return file

    monkeypatch.setattr(host_memory.SharedFile, "create", readable_by_all)
    results = establish()
    assert all("mode 644" in str(result) for result in results.values())


def test_the_segment_is_private_and_its_name_is_not_guessable(folder):
    files = [host_memory.SharedFile.create(4096) for _ in range(2)]
    assert {os.fstat(file.fd).st_mode & 0o777 for file in files} == {0o600}
    assert len({file.name for file in files}) == 2
    assert all(len(file.name) > 32 for file in files)
    for file in files:
        file.close()


def test_different_hosts_refuse():
    results = establish(hosts={3: "elsewhere"})
    assert all("has host elsewhere" in str(result) for result in results.values())


def test_different_users_refuse(monkeypatch):
    users = {}
    monkeypatch.setattr(
        os, "geteuid", lambda: users.setdefault(threading.get_ident(), 1000 + len(users))
    )
    results = establish()
    assert all("has user 100" in str(result) for result in results.values())


def test_different_calls_or_deadlines_are_shown():
    results = establish(specs={3: spec(eps=1e-5)})
    assert all(isinstance(result, DisagreementError) for result in results.values())
    assert all("eps" in str(result) for result in results.values())
    results = establish(environs={3: DEADLINE})
    assert all("deadline_s" in str(result) for result in results.values())


def test_a_bad_environment_is_the_same_error_in_all():
    environ = {"JAX_LATENT_TAIL_DEADLINE": "soon"}
    results = establish(environs={0: environ, 3: environ})
    assert all(isinstance(result, ArgumentValueError) for result in results.values())
