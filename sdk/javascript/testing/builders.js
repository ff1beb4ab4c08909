// Builders for the inputs of plugins.

import { HostCallError, sendCallsTo } from "../host.js";
import { units } from "../text.js";
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

export function failed(message = "no response within 30 s", kind = "timeout") {
  return new CallFailure(kind, message);
}

export function candidate(rewrite, scores, { judged, style, nTokens, finishReason } = {}) {
  return new Candidate({
    rewrite,
    retrieval: Array.isArray(scores) ? hits(...scores) : scores,
    judgement: typeof judged === "number" ? { score: judged, reason: "" } : judged,
    style: style && distribution(style),
    nTokens,
    finishReason,
  });
}

export function episode(query = "", policy = "", baseline = undefined, more = {}) {
  const { userProfile, historySummary, sampleIndex = 0, ...fields } = more;
  const side = (value) => (typeof value === "string" ? candidate(value || undefined) : value);
  const context = { userProfile, historySummary };
  const id = `test/${sampleIndex}`;
  return new Episode({ id, groupId: "test", sampleIndex, query, context, policy: side(policy), baseline: side(baseline), ...fields });
}

/** The episode with only the inputs that a plugin's class declares, as the host passes it. */
export function declared(episode, { requires = [], uses = [] }) {
  const inputs = [...requires, ...uses];
  const part = (name, value) => (inputs.includes(name) ? value : undefined);
  const side = (of) => {
    const { rewrite, nTokens, finishReason } = of;
    const [retrieval, judgement, style] = ["retrieval", "judgement", "style"].map((name) => part(name, of[name]));
    return new Candidate({ rewrite, retrieval, judgement, style, nTokens, finishReason });
  };
  const { id, groupId, sampleIndex, step, split, query, context, goldIds, baseline } = episode;
  return new Episode({
    ...{ id, groupId, sampleIndex, step, split, query, context, goldIds },
    columns: part("columns", episode.columns),
    prompt: part("prompt", episode.prompt),
    response: part("response", episode.response),
    policy: side(episode.policy),
    baseline: part("baseline", baseline && side(baseline)),
  });
}

/** Calls `run` with replacements for host functions, and returns its result. */
export function withHostFunctions(standIns, run) {
  const { countTokens, splitTokens, words, embed, askJudge, classify } = {
    countTokens: (text) => units(text).length,
    splitTokens: units,
    words: units,
    embed: (texts) => texts.map(characterVector),
    ...standIns,
  };
  const functions = { count: countTokens, split: splitTokens, segment: words, embed, ask: askJudge, classify };
  const receiver = (name, method, argument) => {
    if (!functions[method]) throw new HostCallError(name);
    return functions[method](argument);
  };
  return withCallsTo(receiver, run);
}

/** Calls `run` with `receiver` as the receiver of host function calls, and returns its result. */
export function withCallsTo(receiver, run) {
  const before = sendCallsTo(receiver);
  try {
    return run();
  } finally {
    sendCallsTo(before);
  }
}

/** An L2-normalised vector of size 64: counts of code points modulo 64. An empty text gives the first unit vector. */
function characterVector(text) {
  const counts = Array(64).fill(0);
  for (const character of text || "\0") counts[character.codePointAt(0) % 64] += 1;
  const length = Math.hypot(...counts);
  return counts.map((count) => count / length);
}

export function sample(query, rewrite, scores = [0.9], columns = {}) {
  return {
    id: "test",
    originalQuery: query,
    rewrittenQuery: rewrite,
    context: { userProfile: undefined, historySummary: undefined },
    hits: hits(...scores),
    columns,
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
      if (!probabilities) throw new HostCallError("style-model", failure);
      return distribution(probabilities);
    },
  };
}

function distribution(probabilities) {
  return Object.entries(probabilities).map(([label, probability]) => ({ label, probability }));
}
