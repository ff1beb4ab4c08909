"""Expected values for the statistics of `querl plugin replay`: quantiles by numpy, correlations by scipy."""

import json
from pathlib import Path

import numpy as np
import scipy
from scipy import stats

GOLDEN = Path(__file__).resolve().parent / "golden" / "replay.json"

CORRELATION = {
    "no ties": ([0.11, -0.42, 0.73, 0.05, -0.9, 0.31], [0.2, -0.1, 0.5, -0.3, -0.8, 0.61]),
    "ties on both sides": (
        [0.0, 0.0, 0.0, 0.5, 0.5, -0.3, -0.3, 0.25, 1.0, 0.0],
        [0.0, 0.1, 0.0, 0.5, 0.4, -0.3, 0.0, 0.25, 0.9, 0.0],
    ),
    "tied in pairs alone": ([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], [2.0, 2.0, 1.0, 1.0, 3.0, 3.0]),
    "reversed": ([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]),
    "identical": ([0.4, -0.2, 0.4, 0.9], [0.4, -0.2, 0.4, 0.9]),
    "outlier": ([0.1, 0.2, 0.3, 0.4, 100.0], [0.5, 0.4, 0.6, 0.3, -80.0]),
    "two items": ([0.1, 0.2], [0.7, 0.3]),
    "constant after": ([0.1, 0.2, 0.3], [0.5, 0.5, 0.5]),
    "one item": ([0.1], [0.2]),
}

DISTRIBUTION = [
    [0.3],
    [0.1, 0.9],
    [-0.3, 0.0, 0.0, 0.05, 0.25, 0.25, 0.4, 0.8, 1.0, -1.0, 0.33],
    [1e6, -2.5e6, 3.25, 17.0],
]


def number(value):
    return None if np.isnan(value) else float(value)


def correlations(before, after):
    if len(before) < 2:
        return dict.fromkeys(["pearson", "spearman", "kendall_tau_b"])
    with np.errstate(all="ignore"):
        return {
            "pearson": number(stats.pearsonr(before, after).statistic),
            "spearman": number(stats.spearmanr(before, after).statistic),
            "kendall_tau_b": number(stats.kendalltau(before, after).statistic),
        }


def distribution(values):
    quantiles = {f"p{percent}": float(np.quantile(values, percent / 100)) for percent in (5, 25, 50, 75, 95)}
    sd = number(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "sd": sd, "min": min(values), **quantiles, "max": max(values)}


def main():
    cases = [
        {"name": name, "before": before, "after": after, **correlations(before, after)}
        for name, (before, after) in CORRELATION.items()
    ]
    spreads = [{"values": values, "expected": distribution(values)} for values in DISTRIBUTION]
    lines = lambda items: ",\n".join("  " + json.dumps(item, allow_nan=False) for item in items)
    versions = json.dumps({"numpy": np.__version__, "scipy": scipy.__version__})
    text = f'{{\n "versions": {versions},\n "correlation": [\n{lines(cases)}\n ],\n "distribution": [\n{lines(spreads)}\n ]\n}}\n'
    GOLDEN.write_text(text, encoding="utf-8")


main()
