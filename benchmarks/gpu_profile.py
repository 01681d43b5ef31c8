"""The commands of ncu and compute-sanitizer for benchmarks/gpu.py, and what is read from their output.

ncu reads two things. Durations of every kernel of two steps or of four tokens: one metric, one pass, so that caches and
order are those of the run. And of two steps of a base of two layers of medium's width what limits each kernel: the shares
of the device's peaks that memory and multiprocessors reach, occupancy and registers (sections SpeedOfLight, Occupancy and
LaunchStats, whose names no version of ncu has changed). The clock is left alone (--clock-control none), so that times are
those of a run.

How to read it: a kernel above 70% of memory's peak is done, whatever its arithmetic; one above 60% of the
multiprocessors' too. One below 40% of both waits: for latency where occupancy is low (registers, shared memory or too few
blocks: fewer than the multiprocessors), else for dependent loads, barriers or bank conflicts, which `ncu --set full
--kernel-name NAME` tells apart. Then the sum of all kernels against the time of a step: the rest is gaps.

compute-sanitizer runs every op at odd shapes: memcheck (accesses out of bounds or misaligned), racecheck (shared memory),
synccheck (barriers that not all threads reach). A clean run ends with `ERROR SUMMARY: 0 errors`, racecheck with `RACECHECK
SUMMARY: 0 hazards displayed`.
"""

import csv
import json
import re

from gpu_session import Unreadable

SANITIZER_TOOLS = ["memcheck", "racecheck", "synccheck"]
DURATION = "gpu__time_duration.sum"
# Shown names of the metrics that are kept, as the sections print them.
LIMITS = {"Duration": "us", "DRAM Throughput": "memory_percent", "Memory Throughput": "memory_path_percent",
          "Compute (SM) Throughput": "sm_percent", "Achieved Occupancy": "occupancy_percent",
          "Registers Per Thread": "registers", "Grid Size": "blocks"}
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}


def sanitizer(program, tool):
    """The beginning of a command under compute-sanitizer."""
    return [program, "--tool", tool, "--error-exitcode", 9, "--print-limit", 20]


def sanitized(output):
    """The summary of compute-sanitizer; it must be there, since a tool that did not start found nothing either."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", output)
    if not found or any(count != "0" for count in found):
        raise Unreadable(f"compute-sanitizer found errors, or has no summary: {found}")
    return {"errors": 0}


def durations(ncu):
    """The beginning of a command whose kernels ncu times."""
    return [ncu, "--csv", "--clock-control", "none", "--metrics", DURATION]


def sections(ncu):
    """The beginning of a command whose kernels ncu reads in several passes: at most 160, two steps of two layers."""
    named = [word for section in ["SpeedOfLight", "Occupancy", "LaunchStats"] for word in ["--section", section]]
    return [ncu, "--csv", "--clock-control", "none", "--launch-count", 160, *named]


def rows_of(text):
    """The lines of ncu's CSV, which begins after what the program itself printed, as dictionaries."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise Unreadable("ncu printed no table")
    return list(csv.DictReader(line for line in lines[begin:] if line.startswith('"')))


def number(text):
    """A number as ncu prints it, with commas between thousands."""
    return float(text.replace(",", ""))


def plain(name):
    """A kernel's name without types and arguments."""
    return re.sub(r"^void ", "", name).split("(")[0].split("<")[0]


def times(text):
    """Launches and milliseconds of each kernel, the longest first."""
    sums = {}
    for row in rows_of(text):
        if row.get("Metric Name") == DURATION:
            count, before = sums.get(plain(row["Kernel Name"]), (0, 0.0))
            took = number(row["Metric Value"]) * MICROSECONDS[row["Metric Unit"]] / 1e3
            sums[plain(row["Kernel Name"])] = (count + 1, before + took)
    if not sums:
        raise Unreadable(f"ncu's table has no {DURATION}")
    largest = sorted(sums.items(), key=lambda item: -item[1][1])
    return {"kernels": {name: {"launches": count, "ms": round(ms, 4)} for name, (count, ms) in largest}}


def limits(text):
    """Of each kernel the mean of what limits it."""
    kernels = {}
    for row in rows_of(text):
        key = LIMITS.get(row.get("Metric Name"))
        # A metric that a device lacks has words for a value.
        if not key or not re.fullmatch(r"[\d,.]+", row["Metric Value"]):
            continue
        factor = MICROSECONDS[row["Metric Unit"]] if key == "us" else 1.0
        kernels.setdefault(plain(row["Kernel Name"]), {}).setdefault(key, []).append(factor * number(row["Metric Value"]))
    if not kernels:
        raise Unreadable("ncu's table has none of the metrics")
    means = {name: {key: round(sum(values) / len(values), 2) for key, values in found.items()}
             for name, found in kernels.items()}
    return {"limits": dict(sorted(means.items(), key=lambda item: -item[1].get("us", 0)))}


def predicted(text):
    """The predicted time of a step, as `engraft plan --json` tells it."""
    event = json.loads(text.splitlines()[-1])
    if "device_time" not in event:
        raise Unreadable("the plan has no predicted time of a device")
    return {"prediction": event["device_time"]}
