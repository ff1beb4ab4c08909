// The values that several kinds of plugin share.

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

export class Candidate {
  constructor({ rewrite = "", retrieval = [], judgement, style, nTokens = 0, truncated = false } = {}) {
    this.rewrite = rewrite;
    this.retrieval = retrieval;
    this.judgement = judgement;
    this.style = style;
    this.nTokens = nTokens;
    this.truncated = truncated;
  }

  hits(side) {
    if (this.retrieval instanceof CallFailure) {
      throw new Rejection(`${side}_retrieval_failed`, this.retrieval.message);
    }
    return this.retrieval;
  }

  judged(side) {
    if (this.judgement instanceof CallFailure) {
      throw new Rejection(`${side}_judgement_failed`, this.judgement.message);
    }
    return this.judgement;
  }
}

export class Episode {
  constructor({ id = "", query = "", context, goldIds = [], policy, baseline } = {}) {
    this.id = id;
    this.query = query;
    this.context = context ?? { userProfile: "", historySummary: "" };
    this.goldIds = goldIds;
    this.policy = policy ?? new Candidate();
    this.baseline = baseline ?? new Candidate();
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
