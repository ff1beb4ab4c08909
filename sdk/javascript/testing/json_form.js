// Episodes, samples and dialogues as querl writes them in JSON.

import { readFileSync } from "node:fs";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";
import { CallFailure, Candidate, Episode, Message } from "../types.js";

const FORMAT = 2;

/** The keys of a JSON object. Those that nobody takes are refused at the end. */
export class Fields {
  constructor(value, place) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new TypeError(`\`${place}\` is ${JSON.stringify(value)}; expected an object`);
    }
    this.left = { ...value };
    this.place = place;
  }

  has(key) {
    return key in this.left;
  }

  take(key) {
    if (!(key in this.left)) throw new TypeError(`\`${key}\` is missing in \`${this.place}\``);
    return this.optional(key);
  }

  optional(key, fallback) {
    const value = this.left[key];
    delete this.left[key];
    return value ?? fallback;
  }

  end() {
    for (const key of Object.keys(this.left)) throw new TypeError(`unknown key \`${key}\` in \`${this.place}\``);
  }
}

/** Reads an object: `fields` are for `read` to take, all of them. */
function whole(value, place, read) {
  const fields = new Fields(value, place);
  const result = read(fields);
  fields.end();
  return result;
}

/** Place and value of each line of a file that is not blank. */
export function lines(path) {
  const file = path instanceof URL ? fileURLToPath(path) : path;
  const numbered = readFileSync(file, "utf8").split("\n").map((line, index) => [`${basename(file)}:${index + 1}`, line]);
  return numbered.filter(([, line]) => line.trim()).map(([place, line]) => {
    try {
      return [place, JSON.parse(line)];
    } catch (error) {
      throw new TypeError(`${place}: not JSON: ${error.message}`);
    }
  });
}

export function readEpisodes(path) {
  return lines(path).map(([place, value]) => {
    if (value?.format !== FORMAT) throw new TypeError(`${place}: expected "format": ${FORMAT}`);
    return episode(value.episode);
  });
}

export function episode(value, id = "") {
  return whole(value, "episode", (fields) => new Episode({
    id: fields.optional("id", id),
    query: fields.take("query"),
    context: context(fields.optional("context", {})),
    goldIds: fields.optional("gold_ids", []),
    policy: candidate(fields.take("policy"), "policy"),
    baseline: candidate(fields.take("baseline"), "baseline"),
  }));
}

export function sample(value, id = "") {
  return whole(value, "samples", (fields) => ({
    id: fields.optional("id", id),
    originalQuery: fields.take("original_query"),
    rewrittenQuery: fields.take("rewritten_query"),
    context: context(fields.optional("context", {})),
    hits: hitsOf(fields.optional("hits", [])),
  }));
}

export function promptInput(value) {
  return whole(value, "input", (fields) => ({
    query: fields.take("query"),
    context: context(fields.optional("context", {})),
    rewrite: fields.optional("rewrite"),
  }));
}

export function dialogue(value, id = "") {
  return whole(value, "dialogue", (fields) => ({
    id: fields.optional("id", id),
    turns: fields.take("turns").map(message),
  }));
}

export function message({ role, content }) {
  return new Message(role, content);
}

function context(value) {
  return whole(value, "context", (fields) => ({
    userProfile: fields.optional("user_profile", ""),
    historySummary: fields.optional("history_summary", ""),
  }));
}

function candidate(value, place) {
  return whole(value, place, (fields) => new Candidate({
    rewrite: fields.take("rewrite"),
    retrieval: either(fields.optional("retrieval", { hits: [] }), "hits", hitsOf),
    judgement: judgement(fields.optional("judgement", "not_sampled")),
    style: fields.optional("style"),
    nTokens: fields.optional("n_tokens", 0),
    truncated: fields.optional("truncated", false),
  }));
}

function judgement(value) {
  if (value === "not_sampled") return undefined;
  return either(value, "scored", ({ score, reason = "" }) => ({ score, reason }));
}

/** An answer under its name, or a failure under `failed`. */
function either(value, answered, read) {
  return whole(value, answered, (fields) => {
    if (!fields.has("failed")) return read(fields.take(answered));
    const { kind, message = "" } = fields.take("failed");
    return new CallFailure(kind, message);
  });
}

function hitsOf(values) {
  return values.map((value, index) => whole(value, "hits", (fields) => ({
    id: fields.optional("id", ""),
    text: fields.optional("text", ""),
    rerankerScore: fields.take("reranker_score"),
    retrievalScore: fields.optional("retrieval_score"),
    rank: fields.optional("rank", 0) || index + 1,
  })));
}
