// Reads episodes, samples and dialogues from the JSON that querl writes.

import { readFileSync } from "node:fs";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";
import { contextFromJson, Episode, hitsFromJson, Message } from "../types.js";

const FORMATS = [2, 3];

/** The keys of a JSON object. `end` throws an error for keys that were not read. */
export class Fields {
  constructor(value, place) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new TypeError(`\`${place}\` is ${JSON.stringify(value)}; expected an object`);
    }
    this.left = { ...value };
    this.taken = [];
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
    this.taken.push(key);
    const value = this.left[key];
    delete this.left[key];
    return value ?? fallback;
  }

  /** The subset of these keys that have a value. */
  known(...keys) {
    const values = keys.map((key) => [key, this.optional(key)]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }

  end() {
    const known = this.taken.join("`, `");
    for (const key of Object.keys(this.left)) {
      throw new TypeError(`unknown key \`${key}\` in \`${this.place}\`, expected one of \`${known}\``);
    }
  }
}

/** Reads an object with `read`, which must read all of its keys. */
export function whole(value, place, read) {
  const fields = new Fields(value, place);
  const result = read(fields);
  fields.end();
  return result;
}

/** Location (`FILE:LINE`) and value of each line that is not blank. */
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
  return readRecorded(path).map(({ episode }) => episode);
}

/** Reads the episodes of a file, each with its recorded calls of host functions. */
export function readRecorded(path) {
  return lines(path).map(([place, value]) => {
    const newest = FORMATS.at(-1);
    if (!FORMATS.includes(value?.format)) throw new TypeError(`${place}: expected "format": ${newest}`);
    try {
      return { episode: episode(value.episode, `line-${place.split(":").at(-1)}`, value.format), calls: value.calls ?? [] };
    } catch (error) {
      throw new TypeError(`${place}: ${error.message}`);
    }
  });
}

/** Reads a recorded episode. Fills in missing ids, ranks and texts. In format 2 a missing `retrieval` means that nothing was found. */
export function episode(value, defaultId = "", format = FORMATS.at(-1)) {
  const json = whole(value, "episode", (fields) => {
    const id = fields.optional("id", defaultId);
    const [, group, index] = /^(.+)\/(\d+)$/.exec(id) ?? [undefined, id, 0];
    const baseline = fields.optional("baseline");
    return {
      id,
      group_id: fields.optional("group_id", group),
      sample_index: fields.optional("sample_index", Number(index)),
      ...fields.known("step", "split", "gold_ids", "columns", "prompt", "response"),
      query: fields.take("query"),
      context: context(fields.optional("context", {})),
      policy: candidate(fields.take("policy"), "policy", format),
      ...(baseline && { baseline: candidate(baseline, "baseline", format) }),
    };
  });
  return Episode.fromJson(json);
}

export function sample(value, id = "") {
  return whole(value, "samples", (fields) => ({
    id: fields.optional("id", id),
    originalQuery: fields.take("original_query"),
    rewrittenQuery: fields.take("rewritten_query"),
    context: contextFromJson(context(fields.optional("context", {}))),
    hits: hitsFromJson(hits(fields.optional("hits", []))),
    columns: fields.optional("columns", {}),
  }));
}

export function promptInput(value) {
  return whole(value, "input", (fields) => ({
    query: fields.take("query"),
    context: contextFromJson(context(fields.optional("context", {}))),
    rewrite: fields.optional("rewrite"),
  }));
}

/** A recorded call of a host function. */
export function hostCall(value) {
  return whole(value, "calls", (fields) => {
    fields.optional("plugin");
    return { request: fields.take("request"), response: fields.take("response") };
  });
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

/** Reads a context. Format 2 has empty strings for unknown values. */
function context(value) {
  const known = whole(value, "context", (fields) => fields.known("user_profile", "history_summary"));
  return Object.fromEntries(Object.entries(known).filter(([, text]) => text !== ""));
}

function candidate(value, place, format) {
  return whole(value, place, (fields) => {
    const read = fields.known("rewrite", "n_tokens", "style", "finish_reason");
    if (!read.rewrite?.trim()) delete read.rewrite;
    if (!read.n_tokens) delete read.n_tokens;
    const retrieval = fields.optional("retrieval", format === 2 ? { hits: [] } : undefined);
    if (retrieval) read.retrieval = either(retrieval, "hits", hits);
    const judgement = fields.optional("judgement", "not_sampled");
    if (judgement !== "not_sampled") read.judgement = either(judgement, "scored", (scored) => ({ reason: "", ...scored }));
    const truncated = fields.optional("truncated");
    if (truncated || (truncated === false && read.n_tokens)) read.finish_reason ??= truncated ? "length" : "stop";
    return read;
  });
}

/** Reads a result, stored in the key `result`, or a failure, stored in the key `failed`. */
function either(value, result, read) {
  return whole(value, result, (fields) => {
    if (!fields.has("failed")) return { [result]: read(fields.take(result)) };
    return { failed: { message: "", ...fields.take("failed") } };
  });
}

function hits(values) {
  return values.map((value, index) => whole(value, "hits", (fields) => ({
    id: fields.optional("id", "") || undefined,
    text: fields.optional("text", ""),
    reranker_score: fields.take("reranker_score"),
    retrieval_score: fields.optional("retrieval_score"),
    rank: fields.optional("rank", 0) || index + 1,
  })));
}
