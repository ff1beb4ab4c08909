"""Expected values for the metrics of a classifier: scores, log loss, Brier score, TF-IDF and logistic regression by scikit-learn; Wilson's
interval, the permutation test and the optimal temperature with querl's prior by scipy."""

import json
from pathlib import Path

import numpy as np
import scipy
import sklearn
from scipy import optimize, special, stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, log_loss, precision_recall_fscore_support

GOLDEN = Path(__file__).resolve().parent / "golden" / "classification.json"

# Class 3 occurs only as a prediction, class 4 not at all.
LABELS = [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 1, 2, 2]
PREDICTED = [0, 0, 1, 0, 2, 1, 1, 3, 0, 2, 2, 1, 0, 1, 2, 2]
PROPORTIONS = [(0, 5), (5, 6), (6, 6), (26, 26), (13, 26), (350, 420), (1, 420)]
# Correctness of the classifier and of the majority class, per example.
PAIRS = {
    "better": ([1, 1, 1, 0, 1, 1, 1, 1, 0, 1], [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]),
    "equal": ([1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0]),
    "worse": ([0, 0, 0, 1, 0], [1, 1, 1, 1, 0]),
}
TEXTS = [
    ("现在下单立减三十，要不要给您留一件？", 0),
    ("新客第二件半价，今天晚上截止。", 0),
    ("这款卖得最好，买两盒送 Cup 一只。", 0),
    ("会员价八折，我给您备注好。", 0),
    ("抱歉，今天就给您补发新的一件。", 1),
    ("退款  已经提交，三个工作日到账。", 1),
    ("请拍照发来，运费由我们承担。", 1),
    ("已约师傅明天上门，免费更换。", 1),
    ("请不要这样做，会伤到自己。", 2),
    ("这是违法的，我不能教您。", 2),
    ("马上离开，开窗通风，再拨打120。", 2),
    ("别吃，先把药收好，去急诊。", 2),
]
HELD_OUT = ["今天下单送您一只 cup。", "运费我们承担，退款马上到账。", "不要自己吃药，去急诊。", "ｘｙｚ"]


def scores():
    precision, recall, f1, support = precision_recall_fscore_support(LABELS, PREDICTED, labels=range(5), zero_division=0)
    return {
        "labels": LABELS,
        "predicted": PREDICTED,
        "accuracy": accuracy_score(LABELS, PREDICTED),
        "f1_macro": f1_score(LABELS, PREDICTED, average="macro", zero_division=0),
        "f1_weighted": f1_score(LABELS, PREDICTED, average="weighted", zero_division=0),
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "support": support.tolist(),
    }


def brier(labels, probabilities):
    """As scikit-learn's `brier_score_loss(scale_by_half=False)`, which older releases lack for more than two classes."""
    return float(np.mean(np.sum((probabilities - np.eye(probabilities.shape[1])[labels]) ** 2, axis=1)))


def probabilities():
    random = np.random.default_rng(7)
    labels = random.integers(0, 4, 40)
    logits = random.normal(0, 2, (40, 4))
    logits[np.arange(40), labels] += 1.0
    found = special.softmax(logits, axis=1)

    def loss(log_temperature):
        return log_loss(labels, special.softmax(logits / np.exp(log_temperature), axis=1), labels=range(4))

    def penalised(log_temperature):
        """Prior: the logarithm of the temperature is normally distributed with mean 0 and standard deviation 0.7."""
        return loss(log_temperature) + (log_temperature / 0.7) ** 2 / (2 * len(labels))

    best = optimize.minimize_scalar(penalised, bounds=(np.log(0.05), np.log(20)), method="bounded", options={"xatol": 1e-12}).x
    return {
        "labels": labels.tolist(),
        "logits": logits.tolist(),
        "log_loss": log_loss(labels, found, labels=range(4)),
        "log_loss_certain": log_loss([0, 1], [[1.0, 0.0], [1.0, 0.0]], labels=[0, 1]),
        "brier": brier(labels, found),
        "temperature": float(np.exp(best)),
        "log_loss_calibrated": loss(best),
    }


def permutations():
    def difference(a, b):
        return np.sum(a) - np.sum(b)

    found = []
    for name, pair in PAIRS.items():
        test = stats.permutation_test(pair, difference, permutation_type="samples", alternative="greater", n_resamples=np.inf)
        found.append({"name": name, "classifier": pair[0], "majority": pair[1], "p_value": test.pvalue})
    return found


def baseline(n_classes):
    texts, labels = zip(*[(text, label) for text, label in TEXTS if label < n_classes])
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 2))
    rows = vectorizer.fit_transform(texts)
    model = LogisticRegression(C=10.0, tol=1e-10, max_iter=10000).fit(rows, labels)
    held_out = vectorizer.transform(HELD_OUT)
    return {
        "texts": texts,
        "labels": labels,
        "held_out": HELD_OUT,
        "n_features": len(vectorizer.vocabulary_),
        "rows": [sorted(held_out[index].data.tolist()) for index in range(len(HELD_OUT))],
        "probabilities": model.predict_proba(held_out).tolist(),
    }


def main():
    wilson = [(k, n, *stats.binomtest(k, n).proportion_ci(method="wilson")) for k, n in PROPORTIONS]
    golden = {
        "versions": {"scikit-learn": sklearn.__version__, "scipy": scipy.__version__},
        "scores": scores(),
        "wilson": [[k, n, float(low), float(high)] for k, n, low, high in wilson],
        "probabilities": probabilities(),
        "permutations": permutations(),
        "baseline": baseline(3),
        "baseline_of_two": baseline(2),
    }
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
