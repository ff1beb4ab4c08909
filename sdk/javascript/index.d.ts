/** Who asks, and what was said before. What is unknown is `undefined`, here and everywhere. */
export interface Context {
  /** 用户画像. */
  userProfile: string | undefined;
  /** 历史摘要; `undefined` at the start of a conversation. */
  historySummary: string | undefined;
}

/** One retrieved passage. */
export interface Hit {
  /** Id of the passage. */
  id: string | undefined;
  text: string;
  /** How well the passage answers the original query in its context, 0 to 1. */
  rerankerScore: number;
  /** First-stage score on the scale of the index. */
  retrievalScore: number | undefined;
  /** 1 for the best hit, then 2, 3 and so on. */
  rank: number;
}

/** A text that is one of `T` today; a later host may send others. */
type OneOf<T extends string> = T | (string & {});

/** The kinds of failure of an external call. */
export type FailureKind = OneOf<
  | "timeout"
  | "unreachable"
  | "unauthorized"
  | "rejected"
  | "rate_limited"
  | "server_error"
  | "invalid_response"
  | "not_recorded"
>;

/** Why an external call gave no result. Never to be read as a low value. */
export class CallFailure {
  constructor(kind: FailureKind, message?: string);
  kind: FailureKind;
  /** One sentence for a person. Its wording may change: do not parse it. */
  message: string;
}

/** A judge's score of one rewrite. */
export interface JudgeScore {
  /** 综合得分, 0 to 5. */
  score: number;
  /** Why, in words; may be empty. */
  reason: string;
}

/** One class of a style distribution; the probabilities sum to 1. */
export interface StyleProbability {
  label: string;
  probability: number;
}

/** A rewrite with what is known of it: the policy's, or the teacher's. */
export class Candidate {
  constructor(fields?: Partial<Pick<Candidate, "rewrite" | "retrieval" | "judgement" | "style" | "nTokens" | "finishReason">>);
  /** The parsed rewrite, never blank; `undefined` where the response contains none. */
  readonly rewrite: string | undefined;
  /**
   * Hits, best first, perhaps none, or why there is no result. `undefined` where the rewrite was not looked up: the plugin does not
   * declare `retrieval`, or the run has none. Without a rewrite there are no hits.
   */
  readonly retrieval: Hit[] | CallFailure | undefined;
  /** The judge's score, or why there is none; `undefined` where the rewrite was not judged: not declared (`judgement`), or not sampled. */
  readonly judgement: JudgeScore | CallFailure | undefined;
  /** Style distribution; `undefined` where the plugin does not declare `style`, or there is no rewrite. */
  readonly style: StyleProbability[] | undefined;
  /** Tokens generated, end of sequence included. */
  readonly nTokens: number | undefined;
  /** Why generation ended: `length` is the token limit. */
  readonly finishReason: OneOf<"stop" | "length"> | undefined;
  /** True where the token limit ended the response. */
  readonly isTruncated: boolean;
  /**
   * The hits.
   * @throws {Rejection} `SIDE_retrieval_failed` for a failed call, `SIDE_retrieval_missing` without one.
   */
  hits(side: string): Hit[];
  /**
   * The judge's score; `undefined` where the rewrite was not judged.
   * @throws {Rejection} `SIDE_judgement_failed` for a failed call.
   */
  judged(side: string): JudgeScore | undefined;
}

/** A cell of the query's row. */
export type ColumnValue = string | number | boolean | (string | number | boolean)[];

/** The other columns of the query's row, by name. */
export type Columns = Record<string, ColumnValue>;

/** One response of the policy to one query. Parts that the plugin does not declare are `undefined`, or no columns. */
export class Episode {
  constructor(fields?: Partial<Omit<Episode, "context" | "baselineOrReject">> & { context?: Partial<Context> });
  /** Unique in a run. */
  readonly id: string;
  /** The same for all samples of one query in one batch of rollouts. */
  readonly groupId: string;
  /** Index of the response among the samples of its group, from 0. */
  readonly sampleIndex: number;
  /** Training step of the rollout, from 0; `undefined` outside of training. */
  readonly step: number | undefined;
  /** The split of the query's row. */
  readonly split: OneOf<"train" | "validation" | "test"> | undefined;
  /** What the user typed. */
  readonly query: string;
  readonly context: Context;
  /** Ids of passages known to answer the query. */
  readonly goldIds: string[] | undefined;
  /** Needs the input `columns`. */
  readonly columns: Columns;
  /** The messages that the policy answered. Needs the input `prompt`. */
  readonly prompt: Message[] | undefined;
  /** The raw text that the policy generated, before it is parsed; may be empty. Needs the input `response`. */
  readonly response: string | undefined;
  /** The policy's rewrite, parsed from `response`. */
  readonly policy: Candidate;
  /** The teacher's rewrite of the same query. Needs the input `baseline`. */
  readonly baseline: Candidate | undefined;
  /**
   * The teacher's rewrite.
   * @throws {Rejection} `baseline_missing` where the episode has none.
   */
  baselineOrReject(): Candidate;
}

/** A row whose rewrite and retrieval both succeeded. */
export interface Sample {
  /** Id of the row, unique in the batch. */
  id: string;
  /** What the user typed. */
  originalQuery: string;
  /** The teacher's rewrite. */
  rewrittenQuery: string;
  context: Context;
  /** Hits of the rewrite, best first; empty where nothing was found. */
  hits: Hit[];
  /** Where the filter declares `columns`. */
  columns: Columns;
}

/** The score of one episode, or of one dialogue's style. */
export interface Score {
  /** Finite, and within the range that the plugin declares; 0 to 1 for a style. */
  total: number;
  /** Named parts, finite; at most 64; they need not sum to the total. Names: 1 to 64 of `a` to `z`, `0` to `9`, `_`. */
  components?: Record<string, number>;
}

/** The speaker of a chat message. */
export type Role = "system" | "user" | "assistant";

/** A chat message. */
export class Message {
  constructor(role: Role, content: string);
  role: Role;
  content: string;
  static system(content: string): Message;
  static user(content: string): Message;
  static assistant(content: string): Message;
}

/** The purpose of a prompt. The SDK rejects a task that is not here (`unknown_task`). */
export type PromptTask =
  /** The teacher's prompt: long, with the tenant's rules. */
  | "teacher_rewrite"
  /** The policy's prompt: short; the model learns the rules in training. */
  | "policy_rewrite"
  /** The judge's prompt. The response to it goes to `parseJudgement`. */
  | "judge";

/** What goes into a prompt. */
export interface PromptInput {
  /** What the user typed. */
  query: string;
  context: Context;
  /** The rewrite to judge; `undefined` in the rewrite tasks. */
  rewrite: string | undefined;
}

/** A dialogue whose last turn, the assistant's, is to be scored. */
export interface Dialogue {
  /** Unique in a run. */
  id: string;
  turns: Message[];
}

/** The style model of the run. In a test, any stand-in with this method. */
export interface StyleModel {
  /**
   * The distribution over the model's classes, one entry per class, in the model's order.
   * @throws {HostCallError} There is no model, or no response.
   */
  classify(turns: Message[]): StyleProbability[];
}

/**
 * Host functions. plugin.toml declares what a plugin calls (`host_functions = ["tokens"]`). Results are recorded with the episode. Outside
 * of a component, `withHostFunctions` of the test kit says what they return.
 * Each throws a {@link HostCallError} where there is no result.
 */
export const host: StyleModel & {
  /** Number of tokens by the policy's tokenizer, without special tokens. Needs `tokens`. */
  countTokens(text: string): number;
  /** The tokens as texts, in order. Needs `tokens`. */
  splitTokens(text: string): string[];
  /** The words in order, without blanks and punctuation: jieba with the run's user dictionary. Needs `words`. */
  words(text: string): string[];
  /** One vector of length 1 per text, at most 64 texts: a dot product is the cosine similarity. Needs `similarity`. */
  embed(texts: string[]): number[][];
  /** The response of the configured judge, through cache and budget. Needs `judge`. */
  askJudge(messages: Message[]): string;
};

/** Thrown where a plugin gives no result for one item. The item is dropped and counted; it is not a result of 0. */
export class Rejection extends Error {
  /**
   * @param code For counting: 1 to 64 of `a` to `z`, `0` to `9`, `_`; stable over versions.
   * @param detail One sentence for a person; may be empty.
   */
  constructor(code: string, detail?: string);
  code: string;
  detail: string;
}

/** A host function gave no result. Where nobody catches it, the episode is rejected: `judge_failed`, `judge_not_configured`. */
export class HostCallError extends Rejection {
  constructor(functions: string, failure?: CallFailure);
  /** `undefined` where the run has no such service or model. */
  failure: CallFailure | undefined;
}

/** Thrown for a setting that cannot be used: `problem` says what was expected and what came. */
export class SettingError extends Error {
  constructor(key: string, problem: string);
  key: string;
  problem: string;
}

/** Both ends count as inside. */
export interface Bounds {
  minimum?: number;
  maximum?: number;
}

/**
 * The user's settings for this plugin, each a text. In a component they come from the host; in a test they are given:
 * `new Settings({ max_chars: 10 })`. Every reader but `get` throws a {@link SettingError} for an unusable value, and without a fallback
 * where the user set nothing.
 */
export class Settings {
  constructor(values?: Record<string, unknown>);
  /** The text under `key`; `undefined` where the user set nothing. */
  get(key: string): string | undefined;
  /** The text under `key`, or `fallback`. */
  text(key: string, fallback?: string): string;
  /** One of `choices` under `key`, or `fallback`. */
  choice<T extends string>(key: string, fallback: T | undefined, choices: readonly T[]): T;
  /** The number under `key`, or `fallback`. */
  number(key: string, fallback?: number, bounds?: Bounds): number;
  /** The whole number under `key`, or `fallback`. */
  integer(key: string, fallback?: number, bounds?: Bounds): number;
  /** The truth value under `key`, or `fallback`. */
  flag(key: string, fallback?: boolean): boolean;
  /** The list of texts under `key`, or `fallback`. */
  texts(key: string, fallback?: readonly string[]): string[];
}

/**
 * Scores what the policy generated. One object is made for each call and scores the episodes of a batch one by one: a score depends on
 * its episode, the settings and the results of host functions only. The constructor reads every setting.
 */
export interface Reward {
  /** The lowest and the highest total under these settings. */
  range(): [number, number];
  /**
   * Scores one episode.
   * @throws {Rejection} It cannot be scored. That is not a score of 0.
   */
  score(episode: Episode): Score;
}

/** Scores all samples of one query together, for rewards of diversity or rank. A score does not depend on the order of the episodes. */
export interface GroupReward {
  /** The lowest and the highest total under these settings. */
  range(): [number, number];
  /**
   * One score per episode, in their order; a rejection drops its episode alone.
   * @throws {Rejection} The whole group cannot be scored.
   */
  scoreGroup(episodes: Episode[]): (Score | Rejection)[];
}

/** Keeps samples in the training data or drops them. One object is made for each batch, which is one whole split. */
export interface Filter {
  /**
   * Returns nothing to keep the sample. What it remembers of the samples before it in the batch may count.
   * @throws {Rejection} The sample is dropped, for this reason.
   */
  check(sample: Sample): void;
}

/** A tenant's prompts, and the parsing of responses to them. */
export interface Prompt {
  /** The conversation for one task: the last message is the user's, a system message is only at the start. */
  messages(task: PromptTask, input: PromptInput): Message[];
  /**
   * The rewrite in a model's response, never blank.
   * @throws {Rejection} There is none.
   */
  parseRewrite(text: string): string;
  /**
   * The judgement in a judge's response.
   * @throws {Rejection} There is none, or its score is not within 0 to 5: never a guess.
   */
  parseJudgement(text: string): JudgeScore;
}

/** Scores the style of the last turn of a dialogue. */
export interface StyleScorer {
  /**
   * Scores one dialogue, 0 (worst) to 1 (best).
   * @throws {Rejection} It cannot be scored. That is not a score of 0.
   */
  score(dialogue: Dialogue, model: StyleModel): Score;
}

type From<T> = new (settings: Settings) => T;

/** A part of an episode that a plugin must declare to get it. */
export type Input = "response" | "prompt" | "columns" | "baseline" | "retrieval" | "judgement" | "style";

/** A class whose static lists declare what it reads: a run that cannot provide a part of `requires` is refused. */
type Declaring<T, I extends string> = From<T> & { requires?: readonly I[]; uses?: readonly I[] };

/** The classes of a plugin, one for each kind that it has; not both `reward` and `groupReward`. */
export interface Classes {
  prompt?: From<Prompt>;
  filter?: Declaring<Filter, "columns">;
  reward?: Declaring<Reward, Input>;
  groupReward?: Declaring<GroupReward, Input>;
  styleScorer?: From<StyleScorer>;
}

/** What `plugin.js` exports by default. */
export interface Plugin {
  /** By the names that plugin.toml has for kinds. */
  readonly kinds: Readonly<Record<string, From<unknown>>>;
}

/** Says what the plugin is made of: `export default plugin({ reward: Brevity })` in `plugin.js`. */
export function plugin(classes: Classes): Plugin;

/** A key that a plugin reads. */
export interface SettingSpec {
  key: string;
  valueType: "text" | "number" | "integer" | "flag" | "texts";
  /** In the text form of settings; `undefined` where the user must set one. */
  default: string | undefined;
  minimum?: number;
  maximum?: number;
  choices?: string[];
}

/** What a plugin says of itself, derived from its classes: what constructors read, and what classes declare. */
export function describe(plugin: Plugin): {
  kinds: string[];
  settings: SettingSpec[];
  /** Under the default settings; `undefined` for other kinds than rewards and where a setting has no default. */
  range: [number, number] | undefined;
  /** Whether each declared input is required. */
  inputs: Partial<Record<Input, boolean>>;
};

/** Characters (code points) of a text. `[...text].length` gives the same and costs a component thousands of instructions a character. */
export function nChars(text: string): number;

/** The text without these characters at its two ends; as `nChars`, for long texts. */
export function stripped(text: string, characters: string): string;

/** Lines for a person who is looking for a mistake: in a component to the host's log, natively to stderr. No result depends on them. */
export const log: Record<"debug" | "info" | "warn" | "error", (message: string) => void>;

/** Functions on texts that many plugins need; the SDKs for Rust and Python have the same, with equal results. */
export const text: {
  /** The text in one spelling: full-width forms as ASCII, lower case, runs of blanks as one space. A light form of NFKC. */
  normalise(text: string): string;
  /** Units of a normalised text: a run of ASCII letters and digits, or one other character, without blanks and punctuation. */
  units(text: string): string[];
  /** The value of a text that is one number: `三百二十`, `一万零五`, `3.5万`, `百分之五` (0.05); `undefined` for any other text. */
  number(text: string): number | undefined;
  /** The values of the numbers in a text, in order. */
  numbers(text: string): number[];
  /** Levenshtein distance in code points. */
  editDistance(a: string, b: string): number;
  /** ROUGE-L of the units, 0 to 1 (Lin, 2004). */
  rougeL(a: string, b: string): number;
  /** Jaccard similarity of the sets of n-grams of units; 0 where both are empty. */
  jaccard(a: string, b: string, n: number): number;
  /** Share of the n-grams of units that occurred before in the text, 0 to 1. */
  repetition(text: string, n: number): number;
  /** Penalty of an overlong response, -1 to 0: falls over the last `buffer` units before `maxLength` (DAPO, equation 13). */
  softOverlong(length: number, maxLength: number, buffer: number): number;
  nChars(text: string): number;
  stripped(text: string, characters: string): string;
};
