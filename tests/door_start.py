"""A start of several processes: process 0's door and the lines of the others, over real sockets, with threads as processes."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from ejdist.cluster import door as door_module
from ejdist.cluster import line as line_module
from ejdist.cluster.door import Door, listening
from ejdist.cluster.line import knock
from ejdist.cluster.presence import Presence, Who


def soon(monkeypatch):
    """Signs of life every 50 ms, and silence after 0.5 s."""
    for module in (door_module, line_module):
        monkeypatch.setattr(module, "EVERY", 0.05)
        monkeypatch.setattr(module, "SILENT", 0.5)
    monkeypatch.setattr(door_module, "HELLO", 0.3)
    monkeypatch.setattr(line_module, "_AGAIN", 0.05)
    monkeypatch.setattr(line_module, "_ANSWER", 0.5)
    monkeypatch.setattr(line_module, "_TAKEN", 0.5)


def who(index, count=3, **other):
    facts = {"command": "launch.train", "run": "/runs/a", "start": "", "hostname": f"n{index}", "pid": 10 + index}
    return Who(index, count, **(facts | other))


class Start:
    """A start: process 0's door, and the lines of the others."""

    def __init__(self, count=3, me=None):
        self.said, self.left, self.presence = [], [], [Presence() for _ in range(count)]
        self.server = listening("", 0)
        self.port = self.server.getsockname()[1]
        self.address, self.count, self.lines = f"localhost:{self.port}", count, {}
        self.door = Door(me or who(0, count), self.server, self.presence[0], lambda line: self.said.append((0, line)))
        self.presence[0].side = self.door

    def knock(self, index, seconds=5.0, **other):
        line = knock(self.address, who(index, **({"count": self.count} | other)), seconds)
        self.presence[index].side, self.lines[index] = line, line
        line.keep(self.presence[index], lambda said: self.said.append((index, said)), lambda g: self.left.append(g))
        return line

    def complete(self):
        """All come, and are let in."""
        with ThreadPoolExecutor(self.count) as pool:
            come = [pool.submit(self.knock, i) for i in range(1, self.count)]
            hosts = self.door.wait(5)
            self.door.admit(7777)
            assert [c.result().port for c in come] == [7777] * (self.count - 1)
        return hosts

    def hears(self, index, word, seconds=5.0):
        """Waits until a process has been told something."""
        end = time.monotonic() + seconds
        while not any(i == index and word in line for i, line in self.said):
            assert time.monotonic() < end, (index, word, self.said)
            time.sleep(0.01)

    def close(self):
        for line in self.lines.values():
            line.close()
        self.door.close()


@contextlib.contextmanager
def starts():
    """Yields what makes a `Start`; closes them all."""
    made = []

    def make(*args, **options):
        made.append(Start(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
