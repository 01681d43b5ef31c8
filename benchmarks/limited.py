"""Runs a command under a hard limit of memory that includes its page cache; prints one JSON line at the end.

    python benchmarks/limited.py --limit 300MiB [--evict PATH]... -- COMMAND ARGUMENT...

The limit is a new memory cgroup (version 1 or 2, no swap), which needs root; if none can be made
it is RLIMIT_AS, which counts address space, mapped files included, and `note` says so. The page cache of a
file is charged to the process that reads it first: --evict drops a file, or the files of a folder, from the cache
before the command starts. `killed` tells whether the kernel ended a process for lack of memory.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path("/sys/fs/cgroup")


def parse_size(text):
    """Bytes of a size such as 300MiB, 2GiB or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])iB|B?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is no size; write 300MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * 1024 ** (" KMGT".index(match[2]) if match[2] else 0))


def evict(paths):
    """Drops files, or the files of folders, from the page cache."""
    for path in map(pathlib.Path, paths):
        for file in (path.iterdir() if path.is_dir() else [path]):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())  # dirty pages stay where they are
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Group:
    """A memory cgroup with a limit; removed by `remove`. OSError where none can be made."""

    def __init__(self, limit):
        self.version = 1 if (ROOT / "memory").is_dir() else 2
        self.folder = (ROOT / "memory" if self.version == 1 else ROOT) / f"limited-{os.getpid()}"
        self.folder.mkdir()
        try:
            if self.version == 1:
                self.write("memory.limit_in_bytes", limit)
                with contextlib.suppress(OSError):  # absent without swap accounting
                    self.write("memory.memsw.limit_in_bytes", limit)
            else:
                self.write("memory.max", limit)
                with contextlib.suppress(OSError):
                    self.write("memory.swap.max", 0)
        except OSError:
            self.folder.rmdir()
            raise

    def write(self, name, value):
        """Sets a file of the group; it exists already, so it is not created."""
        with open(self.folder / name, "r+", encoding="ascii") as file:
            file.write(str(value))

    def read(self, name, key=None):
        """The number in a file of the group, or the one after `key`; None where there is none."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (self.folder / name).read_text().splitlines()
            return int(lines[0] if key is None else next(x.split()[1] for x in lines if x.split()[0] == key))

    def results(self):
        """Peak in bytes, times the limit was met, processes ended by the kernel."""
        if self.version == 1:
            # Newer kernels leave both at 0.
            met = [self.read(name) or 0 for name in ("memory.failcnt", "memory.memsw.failcnt")]
            return (self.read("memory.max_usage_in_bytes"), sum(met),
                    self.read("memory.oom_control", "oom_kill"))
        return (self.read("memory.peak"), self.read("memory.events", "max"),
                self.read("memory.events", "oom_kill"))

    def remove(self):
        """Ends the processes left in the group and removes it."""
        for _ in range(50):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                return self.folder.rmdir()
            time.sleep(0.1)
        print(f"limited.py: {self.folder} could not be removed; remove it by rmdir", file=sys.stderr)


def run(command, limit, evicted=(), **options):
    """Runs `command` with at most `limit` bytes; a dict of results. `options` go to subprocess.Popen."""
    evict(evicted)
    try:
        group, note = Group(limit), None
    except OSError as error:
        group, note = None, f"RLIMIT_AS instead of a cgroup ({error})"

    def enter():  # in the child, before it becomes the command
        if group:
            group.write("cgroup.procs", os.getpid())
        else:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    try:
        start = time.perf_counter()
        process = subprocess.Popen([str(part) for part in command], preexec_fn=enter, **options)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        peak, met, kills = group.results() if group else (None, None, None)
        return {"rc": process.returncode, "killed": bool(kills), "limit": limit, "max_usage_bytes": peak,
                "failcnt": met, "maxrss_bytes": usage.ru_maxrss * 1024,
                "seconds": round(time.perf_counter() - start, 3)} | ({"note": note} if note else {})
    finally:
        if group:
            group.remove()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--limit", type=parse_size, required=True, metavar="SIZE", help="300MiB, 2GiB or bytes")
    p.add_argument("--evict", action="append", default=[], metavar="PATH")
    p.add_argument("command", nargs="+", help="after --")
    a = p.parse_args()
    result = run(a.command, a.limit, a.evict)
    print(json.dumps(result))
    sys.exit(0 if result["rc"] == 0 else 1)


if __name__ == "__main__":
    main()
