"""Trains every method on the embedded task at about as many values, and counts the answers that are right.

    cargo build --release --example mentions && cargo build --release
    python benchmarks/methods.py
    python benchmarks/methods.py --methods lora prompt_tuning --seeds 1 --json methods.json
    python benchmarks/methods.py --methods lora --base-dtype f16 q8 nf4

The methods are those that the program names. Where a method has an option of its size, the value that comes nearest to
--values is taken; the other options are those with which `engraft train` trains it on the embedded data. An answer is
right if it mentions every attribute of its prompt (examples/mentions.rs). The loss is that of the held-out data
after training. With --base-dtype each method is trained, evaluated and asked on a base of each type. Prints a Markdown
table.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from common import RELEASE, events, measured_run, save, words

# The option that sets how many values a method trains, as far as one does.
SIZES = {"lora": "rank", "dora": "rank", "prefix": "prefix-len", "prompt_tuning": "prompt-len"}


def fail(text):
    sys.exit(f"methods.py: {text}")


def methods(program):
    """The names of all methods, from the program's answer to one that there is not."""
    done = subprocess.run(words([program, "train", "--method", "?"]), capture_output=True, text=True)
    found = re.search(r"give (.+), or several of them", done.stderr)
    if done.returncode != 2 or not found:
        fail(f"{program} names no methods: {done.stderr}")
    return re.split(r", | or ", found[1])


def train(program, output, options):
    """Trains on the embedded data; returns the event of the start, the seconds of all steps and the last held-out loss."""
    command = [program, "train", "--output", output, "--save-every", "0", "--json", *options]
    code, out, errors, _ = measured_run(command)
    found = events(out)
    if code or "done" not in found:
        fail(f"{' '.join(words(command))} ended with {code}: {errors}")
    return found["start"], found["step"][-1]["elapsed"], found.get("eval", {}).get("loss")


def sized(program, method, values):
    """Options for about `values` trained values. How many one unit of the size gives is seen in two runs of a step."""
    option = SIZES.get(method)
    if option is None:
        return []
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for units in (1, 2):
            start, *_ = train(program, pathlib.Path(folder) / str(units),
                             ["--method", method, f"--{option}", units, "--steps", "1"])
            counts.append(start["trainables"])
    return [f"--{option}", max(1, 1 + round((values - counts[0]) / (counts[1] - counts[0])))]


def answers(mentions, adapter, dtype):
    """How many answers are right with the adapter on a base of that type, and of how many."""
    kept = [] if dtype == "f16" else [f"--{dtype}"]
    done = subprocess.run(words([mentions, *kept, adapter]), capture_output=True, text=True)
    found = re.findall(r"(\d+) of (\d+) mention every attribute", done.stdout)
    if done.returncode or len(found) != 2:
        fail(f"{mentions} {adapter} ended with {done.returncode}: {done.stderr}")
    return tuple(int(number) for number in found[1])  # the first is the base alone


def measured(arguments, method, dtype):
    """One row of the table, as a dictionary."""
    options = ["--method", method, *sized(arguments.program, method, arguments.values)]
    if dtype != "f16":
        options += ["--base-dtype", dtype]
    right, seconds, losses = [], [], []
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "run"
            start, took, loss = train(arguments.program, output, [*options, "--seed", seed])
            count, of = answers(arguments.mentions, output / "adapter", dtype)
        right.append(count)
        seconds.append(took)
        losses.append(loss)
        print(f"{method}, {dtype}, seed {seed}: {count} of {of}, loss {loss}, in {took:.1f} s", file=sys.stderr)
    return {"method": method, "options": " ".join(words(options)), "values": start["trainables"], "right": right,
            "of": of, "seconds": seconds, "losses": losses}


def line(row):
    right = row["right"]
    spread = f" ({min(right)} to {max(right)})" if len(right) > 1 else ""
    return (f"| {row['method']} | `{row['options']}` | {row['values']:,} | {statistics.mean(right):.1f} of {row['of']}"
            f"{spread} | {statistics.mean(row['losses']):.4f} | {statistics.mean(row['seconds']):.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=RELEASE / "engraft")
    parser.add_argument("--mentions", type=pathlib.Path, default=RELEASE / "examples" / "mentions")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="instead of all that the program has")
    parser.add_argument("--values", type=int, default=24576, help="trained values (those of a LoRA of rank 8)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base-dtype", nargs="+", default=["f16"], metavar="TYPE", help="f16, q8 or nf4")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE too")
    arguments = parser.parse_args()
    found = arguments.methods or methods(arguments.program)
    rows = [measured(arguments, method, dtype) for method in found for dtype in arguments.base_dtype]
    print("| method | options | trained values | answers right | held-out loss | seconds |\n|---|---|---|---|---|---|")
    for row in rows:
        print(line(row))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
