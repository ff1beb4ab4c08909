"""Weights of scikit-learn's logistic regression with an L1 penalty on binary features (solver saga, whose intercept is not penalised)."""

import json
import warnings

from common import GOLDEN
import numpy as np
from sklearn.linear_model import LogisticRegression

N_ROWS, N_FEATURES = 60, 25
VALUES_OF_C = [0.5, 3.0]

warnings.filterwarnings("ignore", category=FutureWarning)


def main():
    generator = np.random.default_rng(11)
    # Frequent and rare features, as words are.
    frequency = np.concatenate([np.full(5, 0.5), np.full(20, 0.08)])
    features = generator.random((N_ROWS, N_FEATURES)) < frequency
    logits = features @ generator.normal(0, 1.5, N_FEATURES) - 0.7
    labels = generator.random(N_ROWS) < 1 / (1 + np.exp(-logits))
    fits = []
    for c in VALUES_OF_C:
        model = LogisticRegression(C=c, penalty="l1", solver="saga", tol=1e-12, max_iter=1_000_000, random_state=0)
        model.fit(features.astype(float), labels)
        weights = [round(float(weight), 9) for weight in model.coef_[0]]
        fits.append({"c": c, "intercept": round(float(model.intercept_[0]), 9), "weights": weights})
    golden = {
        "n_rows": N_ROWS,
        "rows_of": [np.flatnonzero(column).tolist() for column in features.T],
        "labels": labels.tolist(),
        "fits": fits,
    }
    (GOLDEN / "logistic.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
