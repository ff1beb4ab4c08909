// Data types shared by the kinds of plugins. Unknown values are `undefined`. Documentation is in index.d.ts.

const CODE = /^[a-z0-9_]{1,64}$/;

export class CallFailure {
  constructor(kind, message = "") {
    this.kind = kind;
    this.message = message;
  }
}

export class Rejection extends Error {
  constructor(code, detail = "") {
    if (!CODE.test(code)) {
      throw new RangeError(`rejection code is \`${code}\`; expected 1 to 64 of a to z, 0 to 9 and _`);
    }
    super(detail ? `${code}: ${detail}` : code);
    this.name = "Rejection";
    this.code = code;
    this.detail = detail;
  }
}

/** A value in a message; texts are quoted. */
export function shown(value) {
  if (Array.isArray(value)) return `[${value.map(shown).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(value);
  return typeof value === "bigint" ? `${value}n` : String(value);
}

/** The message about a total or component that is not a finite number. */
export function notFinite(name, value) {
  const type = { string: ", a text", bigint: ", a BigInt" }[typeof value] ?? "";
  return `\`${name}\` is ${shown(value)}${type}; expected a finite number`;
}

/** The message about components that are an array. */
export function notNamed(components) {
  return `\`components\` is ${shown(components)}; expected an object with a number for each name`;
}

/** Base class of Candidate and Episode. A record decoded from JSON keeps the JSON object and converts each property when it is read. */
class Record {
  /** Creates the record from a JSON object in the encoding of json-rewards.wit. */
  static fromJson(json) {
    const record = Object.create(this.lazy);
    record.json = json;
    return record;
  }

  /** A prototype with `getters` that read `this.json`. They cache the objects that they create. */
  static lazyPrototype(getters) {
    const properties = Object.entries(getters).map(([name, read]) => [name, { get: read, enumerable: true }]);
    return Object.create(this.prototype, Object.fromEntries(properties));
  }
}

export class Candidate extends Record {
  constructor({ rewrite, retrieval, judgement, style, nTokens, finishReason } = {}) {
    super();
    this.rewrite = rewrite;
    this.retrieval = retrieval;
    this.judgement = judgement;
    this.style = style;
    this.nTokens = nTokens;
    this.finishReason = finishReason;
  }

  get isTruncated() {
    return this.finishReason === "length";
  }

  hits(side) {
    const { retrieval } = this;
    if (retrieval instanceof CallFailure) throw new Rejection(`${side}_retrieval_failed`, retrieval.message);
    if (retrieval === undefined) {
      const detail = "the rewrite was not looked up: the run has no retrieval, or the plugin does not declare `retrieval`";
      throw new Rejection(`${side}_retrieval_missing`, detail);
    }
    return retrieval;
  }

  judged(side) {
    const { judgement } = this;
    if (judgement instanceof CallFailure) throw new Rejection(`${side}_judgement_failed`, judgement.message);
    return judgement;
  }
}

export class Episode extends Record {
  constructor({
    id = "",
    groupId = "",
    sampleIndex = 0,
    step,
    split,
    query = "",
    context = {},
    goldIds,
    columns = {},
    prompt,
    response,
    policy,
    baseline,
  } = {}) {
    super();
    this.id = id;
    this.groupId = groupId;
    this.sampleIndex = sampleIndex;
    this.step = step;
    this.split = split;
    this.query = query;
    this.context = { userProfile: undefined, historySummary: undefined, ...context };
    this.goldIds = goldIds;
    this.columns = columns;
    this.prompt = prompt;
    this.response = response;
    this.policy = policy ?? new Candidate();
    this.baseline = baseline;
  }

  baselineOrReject() {
    if (this.baseline === undefined) {
      throw new Rejection("baseline_missing", "the episode has no teacher's rewrite, or the plugin does not declare `baseline`");
    }
    return this.baseline;
  }
}

export class Message {
  constructor(role, content) {
    this.role = role;
    this.content = content;
  }

  static system(content) {
    return new Message("system", content);
  }

  static user(content) {
    return new Message("user", content);
  }

  static assistant(content) {
    return new Message("assistant", content);
  }
}

export function contextFromJson(json = {}) {
  return { userProfile: json.user_profile, historySummary: json.history_summary };
}

/** Written as a loop: in a component, `map` with a call per hit takes longer than the conversion itself. */
export function hitsFromJson(json) {
  const hits = [];
  for (let index = 0; index < json.length; index += 1) {
    const hit = json[index];
    hits[index] = {
      id: hit.id,
      text: hit.text,
      rerankerScore: hit.reranker_score,
      retrievalScore: hit.retrieval_score,
      rank: hit.rank,
    };
  }
  return hits;
}

const messageFromJson = ({ role, content }) => new Message(role, content);

/** Decodes a result, stored in the key `result`, or a failure, stored in the key `failed`. */
function either(json, result, read) {
  if (json === undefined) return undefined;
  return json.failed ? new CallFailure(json.failed.kind, json.failed.message) : read(json[result]);
}

Candidate.lazy = Candidate.lazyPrototype({
  rewrite() {
    return this.json.rewrite;
  },
  retrieval() {
    return (this.hitsOrFailure ??= either(this.json.retrieval, "hits", hitsFromJson));
  },
  judgement() {
    return (this.scoreOrFailure ??= either(this.json.judgement, "scored", (scored) => scored));
  },
  style() {
    return this.json.style;
  },
  nTokens() {
    return this.json.n_tokens;
  },
  finishReason() {
    return this.json.finish_reason;
  },
});

Episode.lazy = Episode.lazyPrototype({
  id() {
    return this.json.id;
  },
  groupId() {
    return this.json.group_id;
  },
  sampleIndex() {
    return this.json.sample_index;
  },
  step() {
    return this.json.step;
  },
  split() {
    return this.json.split;
  },
  query() {
    return this.json.query;
  },
  context() {
    return (this.contextRead ??= contextFromJson(this.json.context));
  },
  goldIds() {
    return this.json.gold_ids;
  },
  columns() {
    return (this.json.columns ??= {});
  },
  prompt() {
    return (this.messages ??= this.json.prompt?.map(messageFromJson));
  },
  response() {
    return this.json.response;
  },
  policy() {
    return (this.policyRead ??= Candidate.fromJson(this.json.policy));
  },
  baseline() {
    return (this.baselineRead ??= this.json.baseline && Candidate.fromJson(this.json.baseline));
  },
});
