// Settings, log and host functions of the host, and the contract's form of rejections and scores. Runs in components only; `querl plugin
// build` makes the module that uses it: the bindings `querl:plugin/...` exist in a component alone.

import { log as logOfHost } from "querl:plugin/log@0.2.0";
import { get } from "querl:plugin/settings@0.2.0";
import { sendLogTo } from "../log.js";
import { Settings } from "../settings.js";
import { CallFailure, Candidate, Episode, Message } from "../types.js";

sendLogTo((level, message) => logOfHost(level, message));

/** The settings that the host holds. */
export function settings() {
  return Settings.fromSource(get);
}

/** What `call` returns, or the rejection that it throws; any other exception ends the instance with its text as the fault's. */
export function attempt(call) {
  try {
    return call();
  } catch (error) {
    return rejection(error);
  }
}

/** A rejection as the contract's; any other exception is rethrown. */
export function rejection(error) {
  if (!isRejection(error)) throw error;
  return { code: error.code, detail: error.detail };
}

export function isRejection(error) {
  return error?.name === "Rejection";
}

/** The name of a case, `rate_limited` for `rate-limited`; the text of `other`. */
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

/** A score as the contract's, checked here: JSON would turn what is no number into null. Adding 0 makes -0 a 0, which JSON has alone. */
export function score(value) {
  if (typeof value?.total !== "number") {
    throw new TypeError(`the result is ${JSON.stringify(value)}; expected { total: NUMBER, components: { NAME: NUMBER } }`);
  }
  const components = [];
  for (const name in value.components) components.push({ name, value: number(name, value.components[name]) });
  return { total: number("total", value.total), components };
}

function number(name, value) {
  // As `Number.isFinite`, without a call.
  if (typeof value !== "number" || value - value !== 0) throw new TypeError(`\`${name}\` is ${String(value)}; expected a finite number`);
  return value + 0;
}
