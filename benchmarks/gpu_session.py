"""Parts of a check on a GPU: each a process of its own with a time limit, whose output is kept and whose failure ends no other."""

import contextlib
import gzip
import json
import os
import pathlib
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time

from common import HERE, RELEASE, ROOT, words


class Places:
    """Where programs, golden files, bases and results are: in a folder that scripts/gpu-kit.sh made, or in the sources."""

    def __init__(self, programs=None, bases=None, output=None):
        kit = HERE / "programs"
        self.is_kit = kit.is_dir()
        work = HERE if self.is_kit else ROOT / "target"
        if not os.access(work if work.exists() else ROOT, os.W_OK):
            work = pathlib.Path(tempfile.gettempdir()) / f"engraft-gpu-{os.getuid()}"
        self.work = work
        self.programs = (programs or (kit if self.is_kit else RELEASE)).resolve()
        self.golden = HERE / "golden" if self.is_kit else ROOT / "tests" / "golden"
        self.bases = (bases or work / "bases").resolve()
        self.output = (output or work / ("results" if self.is_kit else "gpu")).resolve()
        self.root = HERE if self.is_kit else ROOT

    def program(self, name):
        """A program's path; None where it is missing. One that is packed is unpacked first."""
        found = next((path for path in [self.programs / name, self.programs / "examples" / name] if path.exists()), None)
        packed = self.programs / f"{name}.gz"
        if found or not packed.exists():
            return found
        copy = self.work / "unpacked" / name
        if not copy.exists() or copy.stat().st_mtime < packed.stat().st_mtime:
            copy.parent.mkdir(parents=True, exist_ok=True)
            beside = copy.with_suffix(".new")
            with gzip.open(packed) as source, open(beside, "wb") as target:
                shutil.copyfileobj(source, target)
            beside.chmod(0o755)
            beside.replace(copy)
        return copy


def packages():
    """Folders that hold packages of this Python."""
    folders = [*sys.path, *site.getsitepackages(), site.getusersitepackages()]
    return list(dict.fromkeys(pathlib.Path(folder) for folder in folders if folder))


def python_libraries():
    """Folders of CUDA's libraries among these packages: nvidia/cu13/lib, nvidia/cudnn/lib and others."""
    found = [folder for root in packages() for folder in sorted((root / "nvidia").glob("*/lib"))]
    return list(dict.fromkeys(str(folder) for folder in found))


def installed(name, *patterns):
    """A program in PATH, among this Python's packages or where one of the patterns says; None where there is none."""
    inside = [path for root in packages() for path in root.glob(f"nvidia/*/*/{name}")]
    elsewhere = [path for pattern in patterns for path in sorted(pathlib.Path("/").glob(pattern), reverse=True)]
    return shutil.which(name) or next((str(path) for path in [*inside, *elsewhere] if os.access(path, os.X_OK)), None)


class Device:
    """Memory, name and clock of the first device, from nvidia-smi; nothing without one."""

    def __init__(self):
        self.smi = shutil.which("nvidia-smi")

    def ask(self, field):
        """One field as text; empty where there is no answer."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(self.query(field), capture_output=True, text=True, timeout=20).stdout.strip()
        return ""

    def query(self, field, *more):
        """The command that asks for a field."""
        return [self.smi or "nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0", *more]

    @contextlib.contextmanager
    def peak(self, result):
        """Writes the most MiB that were used above what is used now to result["device_mib"]."""
        before = self.ask("memory.used") if self.smi else ""
        if not before.isdigit():
            yield
            return
        most = int(before)
        # One process that answers every 50 ms: starting one for each answer takes longer than that.
        watch = subprocess.Popen(self.query("memory.used", "--loop-ms=50"), stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.DEVNULL)

        def read():
            nonlocal most
            for line in watch.stdout:
                if line.strip().isdigit():
                    most = max(most, int(line))
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            watch.kill()
            watch.wait()
            thread.join(timeout=5)
            result["device_mib"] = most - int(before)


class Unreadable(Exception):
    """A part ended well, but its output has no result."""


class Session:
    """Runs parts one after another within a time limit, and keeps their results and their whole output."""

    def __init__(self, places, minutes, patience=1):
        self.places, self.patience, self.device, self.failures = places, patience, Device(), []
        places.output.mkdir(parents=True, exist_ok=True)
        self.file, self.log = places.output / "gpu.json", places.output / "gpu.log"
        try:
            self.results = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.results = {}
        self.end = time.monotonic() + 60 * minutes

    def left(self):
        """Seconds that are left."""
        return self.end - time.monotonic()

    def environment(self):
        """The environment of the parts: caches beside the results, no network, CUDA's libraries of this Python after those of
        LD_LIBRARY_PATH."""
        folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        own = {"LD_LIBRARY_PATH": ":".join([*folders, *python_libraries()]),
               "ENGRAFT_CACHE": str(self.places.work / "cache"), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_CACHE_DIR": str(self.places.work / "inductor")}
        return {**os.environ, **own, "HOME": os.environ.get("HOME") or str(self.places.work)}

    def run(self, name, command, needs, read=None, may_fail=False, limit=None, echo=False):
        """Runs a command if `needs` seconds are left, for `limit` seconds at most. `read` makes a result of its standard
        output; `echo` shows every line at once."""
        if self.left() < needs:
            self.keep(name, {"left_out": f"needs {needs} s, {max(self.left(), 0):.0f} were left"})
            return None
        own_limit = self.patience * (limit or max(120, 4 * needs))
        limit = min(self.left(), own_limit)
        result, start = {}, time.monotonic()
        with open(self.log, "a", encoding="utf-8", errors="replace") as log:
            log.write(f"\n=== {name}\n$ {' '.join(words(command))}\n")
            log.flush()
            try:
                with self.device.peak(result):
                    code, lines = self.process(words(command), limit, log, echo)
                if code is None and limit < own_limit:
                    result["left_out"] = f"ended after {limit:.0f} s, the last of --minutes"
                elif code is None:
                    result["failed"] = f"took longer than {limit:.0f} s"
                elif code != 0:
                    result["failed"] = f"exit code {code}"
                elif read:
                    result |= read("".join(lines))
            except (OSError, KeyError, IndexError, ValueError, TypeError, StopIteration, Unreadable) as cause:
                result["failed"] = f"{cause!r}"
                lines = []
        if "failed" in result:
            result["failed"] += ": " + " | ".join(self.reason())
            if not may_fail:
                self.failures.append(f"{name}: {result['failed']}")
        result["seconds"] = round(time.monotonic() - start, 3)
        self.keep(name, result)
        return result

    def process(self, command, limit, log, echo):
        """Runs a command in a group of its own, so that what it starts ends with it. Returns its exit code, None after the
        limit, and the lines of its standard output; both outputs go to the log line by line."""
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                 cwd=self.places.root, env=self.environment(), start_new_session=True)
        lines, guard = [], threading.Lock()

        def follow(stream, kept):
            for line in stream:
                with guard:
                    log.write(line)
                    log.flush()
                if kept is not None:
                    kept.append(line)
                    if echo:
                        print(f"  {line}", end="", flush=True)
        threads = [threading.Thread(target=follow, args=pair, daemon=True)
                   for pair in [(child.stdout, lines), (child.stderr, None)]]
        for thread in threads:
            thread.start()
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for thread in threads:
            thread.join(timeout=10)
        return code, lines

    def reason(self):
        """What the last part said that tells why it failed: at most three lines."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        said = [line for line in text[text.rfind("\n=== "):].splitlines()[3:] if line.strip()]
        wrong = [line for line in said if "BROKEN" in line or "FAILED" in line or line.lower().startswith("error")]
        return [" ".join(line.split())[:200] for line in (wrong or said)[-3:]]

    def keep(self, name, result):
        """Writes all results so far, and a line."""
        self.results[name] = result
        self.write()
        shown = {key: value for key, value in result.items() if not isinstance(value, (list, dict))}
        print(f"{name}: {shown}", flush=True)

    def write(self):
        """Writes all results, through another file: a call that is cut short leaves the results before it."""
        beside = self.file.with_suffix(".json.new")
        beside.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.file)
