// Short ways to what a plugin is given.

import { ClassifyError } from "../style.js";
import { CallFailure, Candidate, Episode, Message } from "../types.js";

export function hits(...scores) {
  return scores.map((score, index) => ({
    id: `kb-${index + 1}`,
    text: "",
    rerankerScore: score,
    retrievalScore: undefined,
    rank: index + 1,
  }));
}

export function failed(message = "no answer within 30 s", kind = "timeout") {
  return new CallFailure(kind, message);
}

export function candidate(rewrite = "", scores = [], { judged, style, truncated = false } = {}) {
  return new Candidate({
    rewrite,
    retrieval: scores instanceof CallFailure ? scores : hits(...scores),
    judgement: typeof judged === "number" ? { score: judged, reason: "" } : judged,
    style: style && distribution(style),
    truncated,
  });
}

export function episode(query = "", policy = "", baseline = "", { userProfile = "", historySummary = "", goldIds = [] } = {}) {
  const side = (value) => (typeof value === "string" ? candidate(value) : value);
  const context = { userProfile, historySummary };
  return new Episode({ id: "test", query, context, goldIds, policy: side(policy), baseline: side(baseline) });
}

export function sample(query, rewrite, scores = [0.9]) {
  return {
    id: "test",
    originalQuery: query,
    rewrittenQuery: rewrite,
    context: { userProfile: "", historySummary: "" },
    hits: hits(...scores),
  };
}

export function dialogue(...texts) {
  const speakers = [Message.user, Message.assistant];
  const first = texts.length % 2;
  return { id: "test", turns: texts.map((text, index) => speakers[(first + index) % 2](text)) };
}

export function styleModel(probabilities, failure) {
  return {
    classify() {
      if (!probabilities) throw new ClassifyError(failure);
      return distribution(probabilities);
    },
  };
}

function distribution(probabilities) {
  return Object.entries(probabilities).map(([label, probability]) => ({ label, probability }));
}
