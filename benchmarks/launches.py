"""Records what a device is given in a training step and for a token, and holds it against the table of src/plan/launches.rs.

    cuda-shim/driver/build.sh target/shim
    cargo build --release --features cuda --bins
    python benchmarks/launches.py [--size medium | --base FOLDER] [--batch 8] [--seq 1024] [--rank 8] [--targets c_attn]
        [--base-dtype f16]

Runs the programs on the driver of cuda-shim/driver, which does no work and records every launch and product (SHIM_SKIP,
SHIM_RECORD), so that steps of the real sizes take seconds. Every kernel's name and the sizes of every product are compared in
order with those of `engraft plan --json`; the first difference is shown, and the exit code is then 1. Prints launches by
layer, the predicted times and the goals by count. A token is one of greedy decoding.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from common import RELEASE, ROOT, base, job, words, write_rows


def record(command, shim, more=None):
    """The lines that a command's process leaves."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "record"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(shim), "SHIM_SKIP": "1", "SHIM_RECORD": str(file),
                       "SHIM_MEMORY": str(140 << 30), **(more or {})}
        done = subprocess.run(words(command), capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"{' '.join(words(command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return file.read_text(encoding="utf-8").splitlines()


def launches(lines):
    """Kernels without their types, and products with rows, columns and terms, as the table names them."""
    found = []
    for line in lines:
        word, *rest = line.split()
        if word == "launch":
            found.append(re.sub(r"_(f16|bf16|f32)$", "", rest[0]))
        elif word == "product":
            # The library is column-major: its m are our columns.
            found.append(f"product {rest[1]} x {rest[0]} x {rest[2]}")
    return found


def step_of(found):
    """The last whole training step of a run: between two norms of the gradient, with the updates that follow the first put
    behind the second."""
    ends = [at for at, kernel in enumerate(found) if kernel == "square_sum_finish"]
    between = found[ends[-2] + 1:ends[-1] + 1]
    updates = next(at for at, kernel in enumerate(between) if not kernel.startswith("adamw"))
    return between[updates:] + between[:updates]


def token_of(found):
    """The last token of a run, which ends with the choice among its logits."""
    ends = [at for at, kernel in enumerate(found) if kernel == "argmax"]
    return found[ends[-2] + 1:ends[-1] + 1]


def endless(source, folder):
    """The base `source` with another end-of-text than token 0, which is what a device chooses that computes nothing."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = config["vocab_size"] - 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def planned(a, source):
    """The table of a run, from `engraft plan`: launches in order, and times."""
    rows = write_rows(a.work / "plan.jsonl", a.batch, a.seq, vocab=a.vocab)
    command = [a.programs / "engraft", "plan", *options_of(a, source, rows, 1), "--memory", "130GiB", "--json"]
    done = subprocess.run(words(command), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words(command))}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["device_time"]


def options_of(a, source, rows, steps):
    """Options of a training, also for a plan."""
    return [*job(source, rows, a.batch, a.seq, steps), "--method", "lora", "--rank", a.rank, "--alpha", 2 * a.rank, "--targets",
            a.targets, "--base-dtype", a.base_dtype, "--device", "cuda", "--precision", "f16", "--recompute", "none",
            "--micro-batch", a.batch, "--optimizer", "adamw"]


def compare(what, found, table):
    """Whether the launches are those of the table; tells the first difference."""
    wanted = table["order"]
    for at, (ours, theirs) in enumerate(zip(found, wanted)):
        if ours != theirs:
            print(f"{what}: launch {at} is {ours}, the table has {theirs}; before it: {', '.join(found[max(0, at - 4):at])}")
            return False
    if len(found) != len(wanted):
        more = (found if len(found) > len(wanted) else wanted)[min(len(found), len(wanted))]
        print(f"{what}: {len(found)} launches, the table has {len(wanted)}; the first more is {more}")
        return False
    forward, backward = table["launches_of_a_layer"]
    print(f"{what}: {len(found)} launches as in the table; of a layer {forward} forward, {backward} backward")
    for gpu in table["gpus"]:
        # Of a token memory is the bound, and its adapters run inside the kernels of the base.
        more = f", {gpu['share_of_ceiling']:.1%} of the ceiling, adapters {gpu['adapters']:.1%}" if backward else ""
        print(f"{what}: {gpu['gpu']}: {gpu['us']:.0f} us, {gpu['tokens_per_s']:.0f} tokens/s{more}")
    return True


# By count, on an H100's estimated shares: the share of 700 TFLOP/s that a step reaches, for a LoRA r 8 on c_attn, 8 x 1024.
SHARES = {"small": 0.50, "medium": 0.55, "xl": 0.65}


def goals(a, table):
    """What the kernels have to reach by count, with what they do, for the runs that have goals."""
    step, token = table["step"], table["token"]
    h100 = next(gpu for gpu in step["gpus"] if gpu["gpu"] == "H100")
    rows = []
    if a.base or (a.batch, a.seq, a.base_dtype) != (8, 1024, "f16"):
        return
    if (a.targets, a.rank) == ("c_attn", 8):
        forward, backward = step["launches_of_a_layer"]
        rows += [("launches of a layer forward", forward, "<=", 12), ("launches of a layer backward", backward, "<=", 12),
                 ("share of a step that the LoRA takes", h100["adapters"], "<", 0.03)]
        if a.size in SHARES:
            rows.append(("share of 700 TFLOP/s", h100["share_of_ceiling"], ">=", SHARES[a.size]))
    elif (a.size, a.targets, a.rank) == ("medium", "all-linear", 16):
        rows.append(("launches of a token", token["launches"], "<=", 125))
    for what, found, sign, bound in rows:
        holds = {"<=": found <= bound, "<": found < bound, ">=": found >= bound}[sign]
        print(f"{a.size}: {what}: {found:.3g} {sign} {bound}: {'met' if holds else 'missed'}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="medium")
    p.add_argument("--base", type=pathlib.Path, metavar="FOLDER", help="a base there is, instead of a size")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--rank", type=int, default=8)
    p.add_argument("--targets", default="c_attn")
    p.add_argument("--base-dtype", choices=["f16", "q8", "nf4"], default="f16")
    p.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases")
    p.add_argument("--programs", type=pathlib.Path, default=RELEASE)
    p.add_argument("--shim", type=pathlib.Path, default=ROOT / "target" / "shim")
    p.add_argument("--save", type=pathlib.Path, metavar="FILE", help="write what was recorded to FILE")
    a = p.parse_args()
    a.shim, a.programs = a.shim.resolve(), a.programs.resolve()

    source = a.base.resolve() if a.base else base(a.bases, a.size)
    a.vocab = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        a.work = pathlib.Path(name)
        table = planned(a, source)
        rows = write_rows(a.work / "rows.jsonl", 3 * a.batch, a.seq, vocab=a.vocab)
        command = [a.programs / "engraft", "train", *options_of(a, source, rows, 3), "--json", "--save-every", 0]
        step = step_of(launches(record([*command, "--output", a.work / "run"], a.shim)))
        command = [a.programs / "engraft-infer", "generate", "--base", endless(source, a.work / source.name),
                   "--adapter", a.work / "run" / "adapter", "--base-dtype", a.base_dtype, "--device", "cuda", "--json",
                   "--input-ids", "5,6",
                   "--max-new-tokens", 4, "--temperature", 0]
        token = token_of(launches(record(command, a.shim, {"SHIM_NO_RECORDING": "1"})))
    if a.save:
        counts = {what: dict(collections.Counter(found)) for what, found in [("step", step), ("token", token)]}
        a.save.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    alike = [compare(f"{source.name} {what}", found, table[what]) for what, found in [("step", step), ("token", token)]]
    goals(a, table)
    sys.exit(0 if all(alike) else 1)


if __name__ == "__main__":
    main()
