#!/usr/bin/env python3
"""Summarizes the results of run.sh: report.py FOLDER writes FOLDER/RESULTS.md and FOLDER/results.json and prints the table.

Exits with 1 if a part failed or reached its time limit, or if no part ran. Missing and failed parts are named. Ratios are querl's rate divided by the
reference's, or the reference's time divided by querl's, so that larger is better.
"""

import json
import sys
from pathlib import Path

SHAPES = ["tiny", "0.5b", "7b", "32b"]


def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def median(spread):
    return spread["median"] if isinstance(spread, dict) else spread


def number(value, digits=3):
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def gib(value):
    return "" if value is None else f"{value / 2**30:.1f}"


def ratio(ours, theirs):
    return f"{ours / theirs:.2f}" if ours and theirs else ""


def of_parts(parts):
    lines = ["| part | ended with | seconds |", "|---|---|---|"]
    for part in parts:
        code = part["code"]
        ended = {None: "not begun", 0: "done", 124: "its time", 137: "its time"}.get(code, f"code {code}")
        ended += f": {part['why']}" if part["why"] else ""
        lines.append(f"| {part['name']} | {ended} | {part['seconds']} |")
    return lines


def merged(folder, shape):
    """Merges the results of `measure` for a shape."""
    whole = {"left_out": [], "rollouts": []}
    for path in sorted(folder.glob(f"measure-{shape}-*.json")):
        found = read(path)
        if found is None:
            continue
        whole["left_out"] += found.pop("left_out")
        whole["rollouts"] += found.pop("rollouts")
        whole.update({key: value for key, value in found.items() if value is not None})
    return whole if "parameters" in whole else None


def of_ceilings(results):
    lines = ["| shape | by | products TFLOP/s | copies GB/s |", "|---|---|---|---|"]
    for shape, (ours, theirs) in results.items():
        for name, found in [("querl", ours), ("torch", theirs)]:
            top = (found or {}).get("ceilings")
            if top:
                lines.append(f"| {shape} | {name} | {median(top['matrix']) / 1e12:.3g} | {median(top['copy']) / 1e9:.4g} |")
    return lines


def of_work(results):
    lines = ["| shape | what | ours | theirs | ratio | of the ceiling | our GiB | plan | their GiB | theirs by |", "|" + "---|" * 10]

    def line(*cells):
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")

    for shape, (ours, theirs) in results.items():
        ours, theirs = ours or {}, theirs or {}
        sft, their_sft = ours.get("sft"), theirs.get("sft")
        if sft or their_sft:
            a, b = (median(found["tokens_per_s"]) if found else None for found in (sft, their_sft))
            memory = (sft or {}).get("memory", {})
            by = f"micro-batch {their_sft['micro_batch']}{', checkpointing' if their_sft['checkpointing'] else ''}" if their_sft else ""
            share = f"{100 * sft['share_of_matrix_rate']:.1f}% of products" if sft else ""
            line(shape, "LoRA SFT, tokens/s", number(a), number(b), ratio(a, b), share, gib(memory.get("peak_bytes")),
                 gib(memory.get("planned_bytes")), gib((their_sft or {}).get("peak_bytes")), by)
            if sft:
                line(shape, "LoRA SFT, computed tokens/s", number(median(sft["computed_tokens_per_s"])), number(b),
                     ratio(median(sft["computed_tokens_per_s"]), b), "", "", "", "", "what rows begin with counted once for us")
        generated = {found["sequences"]: found for found in theirs.get("generate", [])}
        for rolled in ours.get("rollouts", []):
            their = generated.get(rolled["sequences"], {})
            a, b = median(rolled["tokens_per_s"]), median(their.get("tokens_per_s"))
            line(shape, f"rollout of {rolled['sequences']}, tokens/s", number(a), number(b), ratio(a, b), "", "", "", gib(their.get("peak_bytes")), "generate")
            a, b = median(rolled["decode_tokens_per_s"]), their.get("decode_tokens_per_s")
            share = rolled["share_of_bandwidth"]
            share = f"{100 * share:.1f}% of copies" if share else ""
            line(shape, f"decoding {rolled['sequences']}, tokens/s", number(a), number(b), ratio(a, b), share, gib(rolled["cache_bytes"]), "", "", "")
        ppo, their_ppo = ours.get("ppo"), theirs.get("ppo")
        if ppo or their_ppo:
            a, b = (median(found["iteration_s"]) if found else None for found in (ppo, their_ppo))
            memory = (ppo or {}).get("memory", {})
            line(shape, "PPO iteration, s", number(a), number(b), ratio(b, a), "", gib(memory.get("peak_bytes")), gib(memory.get("planned_bytes")),
                 gib((their_ppo or {}).get("peak_bytes")), (their_ppo or {}).get("by", ""))
    return lines


def of_times(results):
    """Querl's times by kernel, and the phases of an iteration."""
    lines = []
    for shape, (ours, theirs) in results.items():
        for name in ["sft", "ppo"]:
            kernels = ((ours or {}).get(name) or {}).get("kernels") or []
            if kernels:
                total = sum(kernel["seconds"] for kernel in kernels)
                top = ", ".join(f"{kernel['name']} {100 * kernel['seconds'] / total:.0f}%" for kernel in kernels[:10])
                lines.append(f"- {shape}, {name}: {total:.3f} s on the GPU: {top}")
        parts, their_parts = (((found or {}).get("ppo") or {}).get("parts_s") or {} for found in (ours, theirs))
        for part in parts:
            if part in their_parts:
                a, b = median(parts[part]), median(their_parts[part])
                lines.append(f"- {shape}, ppo {part}: {number(a)} s, theirs {number(b)} s")
    return lines


def of_kernels(found):
    lines = ["| call | kernel | us | floor us | time / floor |", "|---|---|---|---|---|"]
    for kernel in found["kernels"]:
        if kernel["error"]:
            lines.append(f"| {kernel['case']} | FAILED: {kernel['error']} | | | |")
            continue
        floor = "" if kernel["floor_s"] is None else f"{kernel['floor_s'] * 1e6:.2f}"
        relative = "" if kernel["ratio"] is None else f"{kernel['ratio']:.2f}"
        lines.append(f"| {kernel['case']} | {kernel['kernel']} | {kernel['seconds'] * 1e6:.2f} | {floor} | {relative} |")
    return lines


def main():
    folder = Path(sys.argv[1])
    lines_of_parts = (folder / "parts.jsonl").read_text().splitlines() if (folder / "parts.jsonl").exists() else []
    parts = [json.loads(line) for line in lines_of_parts]
    results = {shape: (merged(folder, shape), read(folder / f"compare-{shape}.json")) for shape in SHAPES}
    results = {shape: both for shape, both in results.items() if any(both)}
    kernels = read(folder / "kernels.json")
    doctor = (folder / "doctor.log").read_text().splitlines() if (folder / "doctor.log").exists() else []
    device = next((found["device"] for both in results.values() for found in both if found), "no device")
    lines = [f"# {device}", ""]
    if "Simulated" in device:
        lines += ["A simulated GPU: this shows only that it works.", ""]
    lines += ["```", *[line for line in doctor if " driver " in line or " cuda:" in line or " library " in line or " cuda " in line], "```", ""]
    lines += ["## Parts", "", *of_parts(parts), "", "## Ceilings", "", *of_ceilings(results), "", "## Work", "", *of_work(results), ""]
    left_out = [f"- {shape}, {who}: {sentence}" for shape, both in results.items() for who, found in zip(["querl", "transformers"], both)
                for sentence in (found or {}).get("left_out", [])]
    lines += [*(["Left out:", "", *left_out, ""] if left_out else []), *of_times(results), ""]
    if kernels:
        lines += ["## Kernels", "", f"{kernels['shape']}, {kernels['rows']} rows, {kernels['sequences']} sequences", "", *of_kernels(kernels), ""]
    text = "\n".join(lines)
    (folder / "RESULTS.md").write_text(text)
    both = {shape: {"querl": ours, "transformers": theirs} for shape, (ours, theirs) in results.items()}
    (folder / "results.json").write_text(json.dumps({"device": device, "parts": parts, "shapes": both, "kernels": kernels}, indent=1))
    print(text)
    failed = [part["name"] for part in parts if part["code"] not in (0, None)]
    ran = [part for part in parts if part["code"] is not None]
    if failed or not ran:
        sys.exit(f"failed, or cut off: {', '.join(failed)}" if failed else "no part ran")


main()
