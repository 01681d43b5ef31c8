"""TensorBoard's own reader and writer beside engraft's event files (pip install tensorboard).

    python benchmarks/read_tensorboard.py check RUN      what TensorBoard reads of a run, compared with its metrics.jsonl
    python benchmarks/read_tensorboard.py record FILE    the small file that tests compare engraft's bytes with
"""

import json
import math
import struct
import sys
from pathlib import Path


def record(path):
    """Writes events at fixed times with TensorBoard's writer and its own protobuf classes."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text import metadata as text
    from tensorboard.summary.writer.record_writer import RecordWriter

    time = 1763881920.25
    scalars = [("train/loss", 2.5), ("train/learning_rate", 0.001), ("train/grad_norm", 0.0)]
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
    tensor = TensorProto(dtype=DT_STRING, string_val=["    Once upon a time\n    ünïcode".encode()])
    tensor.tensor_shape.dim.add(size=1)
    sample = Summary.Value(tag="sample", tensor=tensor)
    sample.metadata.plugin_data.plugin_name = text.PLUGIN_NAME
    events = [
        Event(wall_time=time, file_version="brain.Event:2"),
        Event(wall_time=time, step=3, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=time, step=3, summary=Summary(value=values)),
        Event(wall_time=time, step=300, summary=Summary(value=[sample])),
    ]
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def same(a, b):
    """Whether two numbers are one as 32-bit floats."""
    return struct.pack("f", a) == struct.pack("f", b) or math.isnan(a) and math.isnan(b)


def check(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    wanted = {
        "train/loss": ("step", "loss"),
        "train/learning_rate": ("step", "lr"),
        "train/grad_norm": ("step", "grad_norm"),
        "train/tokens_per_second": ("step", "tokens_per_s"),
        "train/epoch": ("step", "epoch"),
        "memory/resident_bytes": ("step", "memory_bytes"),
        "eval/loss": ("eval", "loss"),
        "eval/perplexity": ("eval", "perplexity"),
    }
    faults = 0
    for tag, (event, key) in wanted.items():
        expected = [(line["step"], line[key]) for line in lines if line["event"] == event]
        known = tag in accumulator.Tags()["scalars"]
        found = [(point.step, point.value) for point in accumulator.Scalars(tag)] if known else []
        equal = len(found) == len(expected) and all(
            a[0] == b[0] and (same(a[1], b[1]) or abs(a[1] - b[1]) <= 1e-6 * abs(b[1])) for a, b in zip(found, expected)
        )
        faults += not equal
        print(f"{tag}: {len(found)} of {len(expected)} points, {'equal' if equal else 'DIFFERENT'}")
    print("texts:", sum(len(accumulator.Tensors(tag)) for tag in accumulator.Tags()["tensors"]))
    return faults


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("check", "record"):
        sys.exit(__doc__)
    sys.exit(check(sys.argv[2]) if sys.argv[1] == "check" else record(sys.argv[2]))
