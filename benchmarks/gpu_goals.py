"""The goals of a first run on a GPU, and the table that holds a run against them."""

import json
import re

# Heads of a row of the table.
MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"


def speed(results, name):
    """Tokens/s of a part; None where it did not run."""
    return results.get(name, {}).get("tokens_per_s")


def over(results, ours, theirs):
    """Our tokens/s over the other side's, at one batch."""
    a, b = results.get(ours, {}), results.get(theirs, {})
    if not a.get("tokens_per_s") or not b.get("tokens_per_s"):
        return None
    return a["tokens_per_s"] / b["tokens_per_s"]


def memory(results, ours, theirs):
    """Our memory of the device over the other side's."""
    # A part that failed held less than it needs.
    a, b = [results[name].get("device_mib") if speed(results, name) else None for name in (ours, theirs)]
    return a / b if a and b else None


def figure(results, *words):
    """The value of a line of `device_check speed` that has all these words."""
    lines = results.get("speed: engraft", {}).get("speeds", [])
    return next((line["value"] for line in lines if all(word in line["what"] for word in words)), None)


def attention(results):
    """Our attention over PyTorch's FLASH backend, forward and backward together."""
    own, peer = figure(results, "attention both", "F16"), results.get("speed: PyTorch", {}).get("figures", {})
    flash = peer.get("attention both, F16")
    return own / flash[0] if own and flash else None


def goals():
    """(what, at least or at most, bound, unit, function of the results) of every goal."""
    rows = []
    sizes = {"small": (2.0, 1.3, None), "medium": (1.5, 1.2, 0.5), "large": (1.5, 1.2, 0.5), "xl": (1.5, 1.2, 0.5)}
    for method in ["lora", "prefix"]:
        for size, (eager, compiled, share) in sizes.items():
            name = f"{size} {method} f16"
            ours = f"{name}: engraft"
            rows.append((f"{name}: over PEFT eager", ">=", eager, "x", lambda r, o=ours, n=name: over(r, o, f"{n}: PEFT")))
            rows.append((f"{name}: over PEFT compiled", ">=", compiled, "x",
                         lambda r, o=ours, n=name: over(r, o, f"{n}: PEFT compiled")))
            if size == "small":
                rows.append((f"{name}: memory over PEFT's", "<=", 0.5, "x",
                             lambda r, o=ours, n=name: memory(r, o, f"{n}: PEFT")))
            if share:
                rows.append((f"{name}: share of the products' speed", ">=", share, "",
                             lambda r, o=ours: r.get(o, {}).get("utilisation")))
    rows.append(("update of 10,000,000 trainables", "<=", 0.2, "ms",
                 lambda r: figure(r, "update of 10000000 trainables, adamw")))
    rows.append(("attention (32, 16, 1024, 64) over PyTorch's FLASH", ">=", 0.7, "x", attention))
    medium = "24 layers of 1024, rank 16, recorded"
    rows.append(("medium, rank 16, one sample", ">=", 1500, "tokens/s", lambda r: figure(r, "one sample", medium)))
    rows.append(("medium, rank 16, one sample over Transformers", ">=", 5, "x",
                 lambda r: over(r, "medium decoding: engraft", "medium decoding: PEFT")))
    rows.append(("medium, rank 16, 32 samples", ">=", 16000, "tokens/s", lambda r: figure(r, "32 samples", medium)))
    return rows


def verdicts(results):
    """Every goal with what was reached."""
    found = []
    for what, sign, bound, unit, value_of in goals():
        value = value_of(results)
        holds = value is not None and (value >= bound if sign == ">=" else value <= bound)
        verdict = UNKNOWN if value is None else MET if holds else MISSED
        found.append({"goal": what, "wanted": f"{sign} {bound:g} {unit}".strip(), "reached": value, "verdict": verdict})
    return found


def flops(config, seq):
    """FLOP a token of a training step: 4 a weight of blocks and head, forward and back through frozen weights, and 7
    products of attention a pair of tokens."""
    width, layers = config["n_embd"], config["n_layer"]
    weights = layers * 12 * width * width + config["vocab_size"] * width
    return 4 * weights + 7 * layers * width * (seq + 1)


def utilisation(results, bases, a):
    """Shares of the measured speed of products that trainings reach."""
    lines = results.get("speed: engraft", {}).get("speeds", [])
    ceilings = {line["what"].rsplit(", ", 1)[1].lower(): 1e12 * line["value"]
                for line in lines if line["what"].startswith("frozen product")}
    for name, result in results.items():
        if a.device == "cpu" or ": engraft" not in name or "losses" not in result:
            continue
        size, _, kind = name.split(": ")[0].split(",")[0].split(" ")
        file = bases / size / "config.json"
        if ceilings.get(kind) and file.exists():
            config = json.loads(file.read_text(encoding="utf-8"))
            result["utilisation"] = round(result["tokens_per_s"] * flops(config, a.seq) / ceilings[kind], 3)


def figures(results):
    """Prints what was measured."""
    for line in results.get("speed: engraft", {}).get("speeds", []):
        print(f"{line['what']:72} {line['value']:10.3f} {line['unit']}")
    for what, (value, unit) in results.get("speed: PyTorch", {}).get("figures", {}).items():
        print(f"{'PyTorch: ' + what:72} {value:10.3f} {unit}")
    for name, result in results.items():
        for kernel, found in list(result.get("kernels", {}).items())[:20] if isinstance(result, dict) else []:
            print(f"{name}: {kernel[:50]:50} {found['launches']:6} launches {found['ms']:10.3f} ms")
        for kernel, found in list(result.get("limits", {}).items())[:25] if isinstance(result, dict) else []:
            print(f"{name}: {kernel[:40]:40} {', '.join(f'{key} {value:g}' for key, value in found.items())}")
    print(f"\n{'':40} {'tokens/s':>10} {'MiB':>8}   engraft over it: speed, memory")
    for name, result in results.items():
        if not isinstance(result, dict) or "tokens_per_s" not in result:
            continue
        ours = f"{name.split(': ')[0]}: engraft"
        ratio, share = over(results, ours, name), memory(results, ours, name)
        used = f"  {result['utilisation']:.0%} of the products' speed" if "utilisation" in result else ""
        rows = f"  {result['batch']} rows" if "batch" in result else ""
        print(f"{name:40} {result['tokens_per_s']:10.0f} {result.get('device_mib') or '':>8}   "
              f"{f'{ratio:.2f} x' if ratio else '':8} {f'{share:.2f} x' if share else '':8}{used}{rows}")


def against(results):
    """Prints measured kernels of a step beside the predicted ones. Kernels that are not ours are cuBLASLt's."""
    named = results.get("device", {}).get("name", "")
    for name, result in results.items():
        size = name.removesuffix(" kernels")
        found = results.get(f"{size} predicted", {}).get("prediction")
        if size == name or not found or "kernels" not in result:
            continue
        gpus = [gpu["gpu"] for gpu in found["step"]["gpus"]]
        at = next((at for at, gpu in enumerate(gpus) if gpu in named), len(gpus) - 1)
        predicted, measured = {}, {}
        for op in found["step"]["ops"]:
            count, ms = predicted.get(op["kernel"].split(" ")[0], (0, 0.0))
            predicted[op["kernel"].split(" ")[0]] = (count + op["launches"], ms + op["us"][at] / 1e3)
        for kernel, times in result["kernels"].items():
            own = re.sub(r"_(f16|bf16|f32)$", "", kernel)
            own = own if own in predicted else "product"
            count, ms = measured.get(own, (0, 0.0))
            # Two steps were timed.
            measured[own] = (count + times["launches"] / 2, ms + times["ms"] / 2)
        print(f"\n{size + ', one step':32} {'launches':>8} {'predicted':>9}   {'ms':>8} {'predicted on ' + gpus[at]:>18}")
        for kernel, (count, ms) in sorted(predicted.items(), key=lambda item: -item[1][1]):
            seen, took = measured.get(kernel, (0, 0.0))
            print(f"{kernel:32} {seen:8g} {count:9} {took:10.3f} {ms:18.3f}")
        print(f"{'all':32} {'':8} {'':9} {sum(ms for _, ms in measured.values()):10.3f} "
              f"{sum(ms for _, ms in predicted.values()):18.3f}")


def table(results):
    """Prints all figures, what failed or was left out, and last the goals."""
    figures(results)
    against(results)
    for name, result in results.items():
        if isinstance(result, dict) and ("left_out" in result or "failed" in result):
            print(f"{name}: {result.get('failed') or 'left out, ' + result['left_out']}")
    print(f"\n{'goal':56} {'wanted':>16} {'reached':>10}  verdict")
    for row in results["goals"]:
        reached = "" if row["reached"] is None else f"{row['reached']:.3g}" if row["reached"] < 1000 else f"{row['reached']:.0f}"
        print(f"{row['goal']:56} {row['wanted']:>16} {reached:>10}  {row['verdict']}")
