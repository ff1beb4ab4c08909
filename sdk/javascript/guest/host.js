// Connects settings, log and host functions of the SDK to the host, and converts rejections and scores to the contract's types. Runs in
// components only, imported by a module that `querl plugin build` writes: the bindings `querl:plugin/...` exist only there.

import { log as logOfHost } from "querl:plugin/log@0.2.0";
import { get } from "querl:plugin/settings@0.2.0";
import { sendLogTo } from "../log.js";
import { Settings } from "../settings.js";
import { CallFailure, Candidate, Episode, Message, notFinite, notNamed, shown } from "../types.js";

sendLogTo((level, message) => logOfHost(level, message));

/** The plugin's settings, read from the host. */
export function settings() {
  return Settings.fromSource(get);
}

/** The result of `call`, or the rejection that it throws. Any other exception ends the instance; its text becomes the fault's message. */
export function attempt(call) {
  try {
    return call();
  } catch (error) {
    return rejection(error);
  }
}

/** Converts a rejection to the contract's type; rethrows any other exception. */
export function rejection(error) {
  if (!isRejection(error)) throw error;
  return { code: error.code, detail: error.detail };
}

export function isRejection(error) {
  return error?.name === "Rejection";
}

/** The name of a variant's case: `rate_limited` for `rate-limited`. For the case `other`, its text. */
export function caseName({ tag, val }) {
  return tag === "other" ? val : tag.replaceAll("-", "_");
}

export function callFailure({ kind, message }) {
  return new CallFailure(caseName(kind), message);
}

export function columns(values) {
  const plain = ({ tag, val }) => (tag === "items" ? val.map(plain) : val);
  return Object.fromEntries(values.map(({ name, value }) => [name, plain(value)]));
}

export function episode(value) {
  value.step &&= Number(value.step);
  value.step ??= undefined;
  value.split &&= caseName(value.split);
  value.columns = columns(value.columns);
  value.prompt &&= value.prompt.map(({ role, content }) => new Message(role, content));
  value.policy = candidate(value.policy);
  value.baseline &&= candidate(value.baseline);
  return new Episode(value);
}

function candidate(value) {
  const result = (of) => (of?.tag === "failed" ? callFailure(of.val) : of?.val);
  value.retrieval = result(value.retrieval);
  value.judgement = result(value.judgement);
  value.finishReason &&= caseName(value.finishReason);
  return new Candidate(value);
}

/** Checks a score and converts it to the contract's type. JSON would encode NaN as null. Adding 0 converts -0, which JSON lacks, to 0. */
export function score(value) {
  if (value === null || typeof value !== "object") {
    throw new TypeError(`the result is ${shown(value)}; expected { total: NUMBER, components: { NAME: NUMBER } }`);
  }
  const components = [];
  // Same as `Array.isArray`, without a function call.
  if (value.components?.constructor === Array) throw new TypeError(notNamed(value.components));
  for (const name in value.components) components.push({ name, value: number(name, value.components[name]) });
  return { total: number("total", value.total), components };
}

function number(name, value) {
  // Same as `Number.isFinite`, without a function call.
  if (typeof value !== "number" || value - value !== 0) throw new TypeError(notFinite(name, value));
  return value + 0;
}
