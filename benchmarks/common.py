"""Helpers of the memory benchmarks: bases, rows, runs of engraft, the smallest plan."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from limited import parse_size

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# The folder of cargo's builds.
RELEASE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
VOCAB = 50257
MIB = 2**20


def add_options(parser):
    """The options of every memory benchmark."""
    parser.add_argument("--program", type=pathlib.Path, default=RELEASE / "engraft")
    parser.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases", metavar="FOLDER",
                        help="folder of the bases (FOLDER/small ..); missing ones are made there")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE too")


def base(bases, size):
    """The folder of a random base of that size, made by gpt2.py if it is not there."""
    folder = bases / size
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, HERE / "gpt2.py", size, folder], check=True, stdout=sys.stderr)
    return folder


def write_rows(path, count, seq, seed=0, vocab=VOCAB):
    """`count` rows of `seq` random tokens as JSONL."""
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            ids = [draw.randrange(vocab) for _ in range(seq)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    return path


def job(base, rows, batch, seq, steps):
    """Options of engraft for `steps` steps over unpacked rows at a constant rate."""
    return ["--base", base, "--data", rows, "--batch", batch, "--seq-len", seq, "--steps", steps, "--no-pack",
            "--no-shuffle", "--lr", "2e-4", "--schedule", "constant"]


def words(command):
    """A command for subprocess."""
    return [str(part) for part in command]


def smallest(program, options):
    """(bytes, text such as 123MiB) of the smallest --memory that `engraft plan` accepts for a job."""
    command = words([program, "plan", *options, "--memory", "1MiB"])
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"--memory (\d[\d.]*[KMGT]?i?B) would fit", done.stdout + done.stderr)
    if done.returncode != 2 or not found:
        sys.exit(f"{' '.join(command)}\nnamed no smallest plan (exit code {done.returncode}):\n{done.stderr}")
    return parse_size(found[1]), found[1]


def train_command(program, options, output):
    """A training run that saves only at the end; its events come as JSON lines."""
    return words([program, "train", *options, "--output", output, "--json", "--save-every", "0"])


def measured_run(command):
    """Runs a command in a separate process: (exit code, stdout, stderr, peak resident bytes)."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(words(command), stdout=subprocess.PIPE, stderr=errors, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        return process.returncode, output, errors.read(), usage.ru_maxrss * 1024


def events(output):
    """Events of a run by kind; `step` is a list of all steps, every other kind its last event."""
    found = {"step": []}
    for event in (json.loads(line) for line in output.splitlines() if line.startswith("{")):
        if event.get("event") == "step":
            found["step"].append(event)
        else:
            found[event.get("event")] = event
    return found


def last_line(text):
    """The last non-blank line of a text; empty where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def save(path, results):
    """Writes results as JSON where a path was given."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
