"""Tokenises the same records by engraft, by the tokenizer crate's `encode_batch_fast` and by `datasets.map`.

    pip install -r benchmarks/requirements.txt datasets==5.2.0
    cargo build --release --bins --examples
    python benchmarks/tokenize_speed.py TOKENIZER_DIR DATA.jsonl [--rounds 3]

DATA has an object with a `text` a line. All sides run alternately with as many threads or processes as there are
cores. engraft's time is that of reading: parsing, tokenising, and rows of 256 tokens written to a file.
`encode_batch_fast` has the texts in memory before its clock starts; of `datasets` the map alone is timed.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import common


def seconds_of(command, pattern):
    """The seconds that a program prints, and its whole line."""
    text = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    return float(re.search(pattern, text)[1]), text.splitlines()[0]


def map_once(tokenizer, data):
    """Seconds of one `datasets.map`, in a process of its own: the caches of a tokenizer outlive a map."""
    code = pathlib.Path(__file__)
    return seconds_of([sys.executable, code, tokenizer, data, "--map"], r"map in ([\d.]+) s")


def run_map(a):
    """The side of datasets."""
    import datasets
    from transformers import AutoTokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the work instead
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer)
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=str(a.data), split="train", cache_dir=cache)
        started = time.perf_counter()
        rows.map(lambda batch: tokenizer(batch["text"]), batched=True, num_proc=os.cpu_count(),
                 remove_columns=rows.column_names, load_from_cache_file=False)
        print(f"map in {time.perf_counter() - started:.2f} s")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tokenizer", type=pathlib.Path)
    p.add_argument("data", type=pathlib.Path)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--map", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.map:
        run_map(a)
        return
    examples = common.RELEASE / "examples"
    ratios = {"encode_batch_fast": [], "datasets.map": []}
    for number in range(a.rounds):
        with tempfile.TemporaryDirectory() as spool:
            ours, line = seconds_of([examples / "load", a.tokenizer, a.data, 256, spool], r"in ([\d.]+) s")
        batch, said = seconds_of([examples / "encode_batch", a.tokenizer, a.data], r"in ([\d.]+) s")
        mapped, _ = map_once(a.tokenizer, a.data)
        if number == 0:
            print(f"engraft: {line}\nencode_batch_fast: {said}")
        print(f"engraft {ours:.2f} s, encode_batch_fast {batch:.2f} s, datasets.map {mapped:.2f} s", flush=True)
        ratios["encode_batch_fast"].append(batch / ours)
        ratios["datasets.map"].append(mapped / ours)
    for name, found in ratios.items():
        print(f"speed of engraft over {name}: median {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
