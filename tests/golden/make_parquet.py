"""Writes parquet/: small Parquet files as PyArrow makes them, each beside its records as JSON lines.

    pip install pyarrow==26.0.1
    python tests/golden/make_parquet.py
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = pathlib.Path(__file__).parent / "parquet"

PAIRS = [{"id": i, "prompt": f"say {i} \"times\"\n", "completion": word}
         for i, word in enumerate(["hell", "the é", "", " two\twords", "hello", "last"])]
TURNS = [{"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "hello " * (i + 1)}]}
         for i in range(3)]

# Name: (records, compression, further options of the writer).
FILES = {
    "pairs_plain": (PAIRS, "none", {"use_dictionary": False}),
    "pairs_snappy": (PAIRS, "snappy", {}),
    "pairs_gzip": (PAIRS, "gzip", {}),
    "pairs_zstd": (PAIRS, "zstd", {"data_page_version": "2.0"}),
    "pairs_lz4": (PAIRS, "lz4", {}),
    "turns_snappy": (TURNS, "snappy", {}),
}


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, (records, compression, options) in FILES.items():
        table = pa.Table.from_pylist(records)
        pq.write_table(table, FOLDER / f"{name}.parquet", compression=compression, row_group_size=4, **options)
    for name, records in ("pairs", PAIRS), ("turns", TURNS):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
