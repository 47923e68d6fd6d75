"""Jobs of real processes that a test commands, stops, continues and kills."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jax_latent_tail import launch
from jax_latent_tail.communicator import host_memory

MEMBER = Path(__file__).with_name("member.py")

START_S = 60.0
ANSWER_S = 30.0


# Long enough for a busy machine to answer within, and short enough to be waited out.
DEADLINE_S = 2.0

# From the end of the deadline to the answer: a tick of the watchdog, and a busy machine.
SLACK_S = 4.0


def shared_files():
    """Names of segments; those of other jobs are there as long as these meet."""
    return {name for name in os.listdir(host_memory.FOLDER) if "latent_tail" in name}


def assert_no_more_files_than(before):
    gone_by = time.monotonic() + 10
    while not shared_files() <= before:
        assert time.monotonic() < gone_by, shared_files() - before
        time.sleep(0.05)


class Outcome:
    """What a command returned or raised.

    Attributes:
      value: what it returned; None if it raised.
      error: name of the class that it raised, or None.
      message: of the error.
      seconds: it took.
    """

    def __init__(self, seconds, value=None, error=None, message=""):
        self.seconds, self.value, self.error, self.message = seconds, value, error, message

    def __repr__(self):
        what = f"{self.error}: {self.message}" if self.error else repr(self.value)
        return f"<{what} after {self.seconds:.2f} s>"


class Member:
    """One process of a job."""

    def __init__(self, index, environment, log):
        self.index = index
        self.log = log
        self._unread = b""
        self._unanswered = 1  # it says when it is ready
        reading, writing = os.pipe()
        self._answers = reading
        try:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, str(MEMBER), str(writing)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writing],
                )
        finally:
            os.close(writing)

    @property
    def pid(self):
        return self.process.pid

    def tell(self, command, /, **options):
        """Starts a command."""
        self._unanswered += 1
        self.process.stdin.write(json.dumps([command, options]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s=ANSWER_S):
        """The outcome of the oldest command that has not been answered."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._answers], [], [], left)[0]
            data = os.read(self._answers, 1 << 16) if ready else b""
            if not data:
                how = "ended" if ready else f"did not answer within {timeout_s:g} s"
                raise AssertionError(f"process {self.index} {how}:\n{self.text()[-4000:]}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        self._unanswered -= 1
        return Outcome(**json.loads(line))

    def ask(self, command, /, **options):
        self.tell(command, **options)
        return self.answer()

    def is_idle(self):
        """Whether it lives and has answered everything."""
        return self.process.poll() is None and not self._unanswered

    def text(self):
        """What it has written."""
        return self.log.read_text(errors="replace")

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        if self._answers is None:
            return
        self.kill()
        self.process.stdin.close()
        os.close(self._answers)
        self._answers = None


class Job:
    """Processes that have met through jax.distributed, of one device each: a CPU, if `environment`
    says nothing else.

    Args:
      folder: for logs.
      num_processes: of them; the first hosts the coordinator.
      environment: added to this process's, for all of them.
      environments: added for single ones, by index.
    """

    def __init__(
        self,
        folder: Path,
        num_processes: int,
        environment: Mapping[str, str],
        environments: Mapping[int, Mapping[str, str]] | None = None,
    ):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            coordinator = f"localhost:{probe.getsockname()[1]}"
        self.members: list[Member] = []
        try:
            for index in range(num_processes):
                member_environment = {
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": "1",
                    launch._DEVICES: "1",
                    launch._COORDINATOR: coordinator,
                    launch._NUM_PROCESSES: str(num_processes),
                    launch._PROCESS_ID: str(index),
                    **environment,
                    **(environments or {}).get(index, {}),
                }
                log = folder / f"process{index}.log"
                self.members.append(Member(index, member_environment, log))
            for member in self.members:
                member.answer(START_S)
        except BaseException:
            self.end()
            raise

    def __getitem__(self, index) -> Member:
        return self.members[index]

    def is_idle(self):
        return all(member.is_idle() for member in self.members)

    def others(self, index):
        return [member for member in self.members if member.index != index]

    def tell(self, command, /, *, members=None, **options):
        for member in self.members if members is None else members:
            member.tell(command, **options)

    def answers(self, members=None, timeout_s=ANSWER_S):
        return [m.answer(timeout_s) for m in (self.members if members is None else members)]

    def ask(self, command, /, *, members=None, timeout_s=ANSWER_S, **options):
        """The outcomes of one command in several processes, all at once."""
        self.tell(command, members=members, **options)
        return self.answers(members, timeout_s)

    def end(self):
        for member in self.members:
            member.end()


def recovers(job, *programs):
    """A reset by all makes all of it right again."""
    assert not any(outcome.error for outcome in job.ask("reset"))
    for program in ("program", *programs):
        outcomes = job.ask("run", name=program, first=100, count=5)
        assert all(outcome.value == "right" for outcome in outcomes), outcomes
    assert not any(outcome.error for outcome in job.ask("check"))
