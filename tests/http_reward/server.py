"""A reward function over HTTP with the API of OpenRLHF's remote reward model, for the comparison with a plugin.

POST /reward {"query": [...], "prompts": [...], "labels": [...]} -> {"rewards": [...], "scores": [...], "extra_logs": {...}}.
Each label is one episode as JSON, in the form of episodes.jsonl. The function is that of plugins/reward-competition with its default
settings. A rejection is null, which OpenRLHF does not support.
"""

import json
import math

from fastapi import FastAPI
from pydantic import BaseModel

DRAW_TOLERANCE = 1e-9

app = FastAPI()


class RewardRequest(BaseModel):
    query: list[str]
    prompts: list[str]
    labels: list[str]


def quality(candidate: dict) -> float | None:
    """Quality of a retrieval: 0 if nothing was found, None if it failed."""
    retrieval = candidate.get("retrieval", {"hits": []})
    if "hits" not in retrieval:
        return None
    top3 = [hit["reranker_score"] for hit in retrieval["hits"][:3]]
    return 0.6 * top3[0] + 0.4 * sum(top3) / len(top3) if top3 else 0.0


def judged(candidate: dict) -> tuple[bool, float | None]:
    """Whether the judgement can be used, and its score if there is one."""
    judgement = candidate.get("judgement", "not_sampled")
    if judgement == "not_sampled":
        return True, None
    return ("scored" in judgement, judgement.get("scored", {}).get("score"))


def score(episode: dict) -> float | None:
    policy, baseline = quality(episode["policy"]), quality(episode["baseline"])
    (policy_ok, policy_judged), (baseline_ok, baseline_judged) = judged(episode["policy"]), judged(episode["baseline"])
    one_sided = (policy_judged is None) != (baseline_judged is None)
    if policy is None or baseline is None or not policy_ok or not baseline_ok or one_sided:
        return None
    difference = policy - baseline
    win = 0.5 if difference > DRAW_TOLERANCE else -0.3 if difference < -DRAW_TOLERANCE else 0.0
    found = 0.40 * math.tanh(3 * difference) + 0.25 * win
    if policy_judged is None:
        total = found / 0.65
    else:
        total = 0.35 * math.tanh(3 * (policy_judged - baseline_judged) / 5) + found
    return max(-1.0, min(1.0, total))


@app.post("/reward")
def reward(request: RewardRequest) -> dict:
    scores = [score(json.loads(label)) for label in request.labels]
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
