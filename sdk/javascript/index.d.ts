/** User profile and conversation history. In all types an unknown value is `undefined`. */
export interface Context {
  /** 用户画像, description of the user. */
  userProfile: string | undefined;
  /** 历史摘要, summary of the conversation so far; `undefined` at the start of a conversation. */
  historySummary: string | undefined;
}

/** One retrieved passage. */
export interface Hit {
  /** Id of the passage. */
  id: string | undefined;
  /** Text of the passage. */
  text: string;
  /** Relevance of the passage to the original query in its context, 0 to 1. */
  rerankerScore: number;
  /** First-stage retrieval score; its scale depends on the index. */
  retrievalScore: number | undefined;
  /** Rank of the hit, from 1 (best). */
  rank: number;
}

/** One of the strings `T`. A later host may send others. */
type OneOf<T extends string> = T | (string & {});

/** Kinds of failures of external calls. */
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

/** A failed external call (retrieval or judge). Do not treat it as a low score. */
export class CallFailure {
  constructor(kind: FailureKind, message?: string);
  kind: FailureKind;
  /** One sentence for people. Do not parse it: the wording may change. */
  message: string;
}

/** A judge's score of one rewrite. */
export interface JudgeScore {
  /** 综合得分, overall score, 0 to 5. */
  score: number;
  /** The judge's explanation; may be empty. */
  reason: string;
}

/** One class of a style distribution. The probabilities of all classes sum to 1. */
export interface StyleProbability {
  /** Name of the class, for example 售前. */
  label: string;
  /** 0 to 1. */
  probability: number;
}

/** A rewrite of the policy or the teacher, with its retrieval hits, judge score and style. */
export class Candidate {
  constructor(fields?: Partial<Pick<Candidate, "rewrite" | "retrieval" | "judgement" | "style" | "nTokens" | "finishReason">>);
  /** The parsed rewrite, never blank; `undefined` if the response contains none. */
  readonly rewrite: string | undefined;
  /**
   * Retrieved passages, best first (may be empty), or the failure of the call. `undefined` if the plugin does not declare `retrieval` or
   * the run has no retrieval. Empty if there is no rewrite.
   */
  readonly retrieval: Hit[] | CallFailure | undefined;
  /**
   * The judge's score, or the failure of the call. `undefined` if the plugin does not declare `judgement`, or if the episode was not in
   * the share that is judged.
   */
  readonly judgement: JudgeScore | CallFailure | undefined;
  /** Class probabilities of the style model; `undefined` if the plugin does not declare `style` or there is no rewrite. */
  readonly style: StyleProbability[] | undefined;
  /** Number of generated tokens, including the end-of-sequence token. */
  readonly nTokens: number | undefined;
  /** Why generation ended: `stop`, `length` (token limit), or another reason as named by the service. */
  readonly finishReason: OneOf<"stop" | "length"> | undefined;
  /** True if the token limit ended the response. */
  readonly isTruncated: boolean;
  /**
   * The hits.
   * @throws {Rejection} `SIDE_retrieval_failed` if retrieval failed, `SIDE_retrieval_missing` if it is `undefined`.
   */
  hits(side: string): Hit[];
  /**
   * The judge's score; `undefined` if not judged.
   * @throws {Rejection} `SIDE_judgement_failed` if the judge failed.
   */
  judged(side: string): JudgeScore | undefined;
}

/** A cell of the query table. */
export type ColumnValue = string | number | boolean | (string | number | boolean)[];

/** The other columns of the query table, by name. */
export type Columns = Record<string, ColumnValue>;

/** One response of the policy to one query. Inputs that the plugin does not declare are `undefined` (`columns`: empty). */
export class Episode {
  constructor(fields?: Partial<Omit<Episode, "context" | "baselineOrReject">> & { context?: Partial<Context> });
  /** Unique in a run. */
  readonly id: string;
  /** Equal for all samples of one query in one rollout batch. */
  readonly groupId: string;
  /** Index of the response in its group, from 0. */
  readonly sampleIndex: number;
  /** Training step of the rollout, from 0; `undefined` outside of training. */
  readonly step: number | undefined;
  /** The split that the query belongs to. */
  readonly split: OneOf<"train" | "validation" | "test"> | undefined;
  /** The user's query. */
  readonly query: string;
  readonly context: Context;
  /** Ids of the gold passages: those known to answer the query. */
  readonly goldIds: string[] | undefined;
  /** The other columns of the query table, in the table's order. Needs the input `columns`. */
  readonly columns: Columns;
  /** The prompt of the policy, as messages. Needs the input `prompt`. */
  readonly prompt: Message[] | undefined;
  /** The unparsed text that the policy generated; may be empty. Needs the input `response`. */
  readonly response: string | undefined;
  /** The policy's rewrite, parsed from `response`. */
  readonly policy: Candidate;
  /** The teacher's rewrite of the same query. Needs the input `baseline`. */
  readonly baseline: Candidate | undefined;
  /**
   * The teacher's rewrite.
   * @throws {Rejection} `baseline_missing` if the episode has none.
   */
  baselineOrReject(): Candidate;
}

/** A row of the query table whose rewrite and retrieval both succeeded. */
export interface Sample {
  /** Id of the row, unique in the batch. */
  id: string;
  /** The user's query. */
  originalQuery: string;
  /** The teacher's rewrite. */
  rewrittenQuery: string;
  context: Context;
  /** Retrieved passages for the rewrite, best first; empty if nothing was found. */
  hits: Hit[];
  /** The other columns of the row. Empty unless the filter declares `columns`. */
  columns: Columns;
}

/** The score of an episode (rewards) or of a dialogue (style scorers). */
export interface Score {
  /** A finite number within the declared range; 0 to 1 for style scorers. */
  total: number;
  /**
   * Named parts of the score, for reports: at most 64 finite numbers, which need not sum to the total. Names have 1 to 64 characters of
   * `a` to `z`, `0` to `9`, `_`.
   */
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

/** The purpose of a prompt. The SDK rejects any other task with the code `unknown_task`. */
export type PromptTask =
  /** The teacher model's prompt: long, with the tenant's rules. */
  | "teacher_rewrite"
  /** The policy's prompt: short, because the policy learns the rules in training. */
  | "policy_rewrite"
  /** The judge model's prompt. Its response is parsed by `parseJudgement`. */
  | "judge";

/** The variables of a prompt. */
export interface PromptInput {
  /** The user's query. */
  query: string;
  context: Context;
  /** The rewrite to judge; `undefined` for the rewrite tasks. */
  rewrite: string | undefined;
}

/** A dialogue that ends with the assistant's turn to score. */
export interface Dialogue {
  /** Unique in a run. */
  id: string;
  /** All turns, oldest first. */
  turns: Message[];
}

/** The style model of the run. In a test, any object with this method. */
export interface StyleModel {
  /**
   * The class probabilities for the last question with its answer, in the model's order of classes.
   * @throws {HostCallError} The run has no style model, or the call failed.
   */
  classify(turns: Message[]): StyleProbability[];
}

/**
 * Host functions. A plugin may call the interfaces that plugin.toml declares (`host_functions = ["tokens"]`). Results are recorded with the
 * episode, so that a replay gives the same score. Outside of a component, `withHostFunctions` of the test kit replaces them. Each throws
 * a {@link HostCallError} on failure.
 */
export const host: StyleModel & {
  /** Number of tokens in the policy's tokenizer, without special tokens. Needs `tokens`. */
  countTokens(text: string): number;
  /** The tokens in the policy's tokenizer, as strings. Needs `tokens`. */
  splitTokens(text: string): string[];
  /** Word segmentation by jieba with the run's user dictionary, without whitespace and punctuation. Needs `words`. */
  words(text: string): string[];
  /** One L2-normalised embedding per text, so that a dot product is the cosine similarity. At most 64 texts. Needs `similarity`. */
  embed(texts: string[]): number[][];
  /** The response of the run's judge model. The response cache and the budget apply. Needs `judge`. */
  askJudge(messages: Message[]): string;
};

/** Thrown by a plugin that cannot compute a result for one item. querl drops and counts the item; that is not a score of 0. */
export class Rejection extends Error {
  /**
   * @param code Used for counting: 1 to 64 characters of `a` to `z`, `0` to `9`, `_`, the same in all versions of the plugin.
   * @param detail One sentence for people; may be empty.
   */
  constructor(code: string, detail?: string);
  code: string;
  detail: string;
}

/** A host function failed. If not caught, the episode is rejected with a code such as `judge_failed` or `judge_not_configured`. */
export class HostCallError extends Rejection {
  constructor(functions: string, failure?: CallFailure);
  /** The failed call; `undefined` if the run has no such service or model. */
  failure: CallFailure | undefined;
}

/** An invalid setting. `problem` says what was expected and what was given. */
export class SettingError extends Error {
  constructor(key: string, problem: string);
  key: string;
  problem: string;
}

/** Bounds of a number, inclusive. */
export interface Bounds {
  minimum?: number;
  maximum?: number;
}

/**
 * The user's settings of the plugin, stored as text. In a component they come from the host; in a test pass them:
 * `new Settings({ max_chars: 10 })`. Every reader but `get` throws a {@link SettingError} for an invalid value, and if the user set no value
 * and there is no fallback.
 */
export class Settings {
  constructor(values?: Record<string, unknown>);
  /** The text of `key`; `undefined` if the user set no value. */
  get(key: string): string | undefined;
  /** The text of `key`, or `fallback`. */
  text(key: string, fallback?: string): string;
  /** The value of `key`, one of `choices`, or `fallback`. */
  choice<T extends string>(key: string, fallback: T | undefined, choices: readonly T[]): T;
  /** The number of `key`, or `fallback`. */
  number(key: string, fallback?: number, bounds?: Bounds): number;
  /** The integer of `key`, or `fallback`. */
  integer(key: string, fallback?: number, bounds?: Bounds): number;
  /** The boolean of `key`, or `fallback`. */
  flag(key: string, fallback?: boolean): boolean;
  /** The list of strings of `key`, or `fallback`. */
  texts(key: string, fallback?: readonly string[]): string[];
}

/**
 * Scores responses of the policy, one episode at a time. One object is constructed per batch. A score may depend only on the episode, the
 * settings and the results of host functions. The constructor must read every setting unconditionally.
 */
export interface Reward {
  /** The lowest and the highest possible total with these settings. */
  range(): [number, number];
  /**
   * Scores one episode.
   * @throws {Rejection} The episode cannot be scored, for example because retrieval failed. That is not a score of 0.
   */
  score(episode: Episode): Score;
}

/** Scores all samples of one query together, for example by diversity or rank. Scores must not depend on the order of the episodes. */
export interface GroupReward {
  /** The lowest and the highest possible total with these settings. */
  range(): [number, number];
  /**
   * One score per episode, in the same order. A returned rejection drops one episode.
   * @throws {Rejection} The whole group cannot be scored.
   */
  scoreGroup(episodes: Episode[]): (Score | Rejection)[];
}

/**
 * Decides for each sample whether it stays in the training data. One object is constructed per batch: a complete split, or a part of it of
 * at most 8192 samples or 32 MiB of text if the split is larger.
 */
export interface Filter {
  /**
   * Returns nothing to keep the sample. The result may depend on earlier samples of the batch, for example to remove duplicates.
   * @throws {Rejection} The sample is dropped.
   */
  check(sample: Sample): void;
}

/** Builds a tenant's prompts and parses the responses. */
export interface Prompt {
  /**
   * The messages of the prompt for one task. The last message has the role user; only the first may be a system message.
   * @throws {Rejection} The plugin has no prompt for this task or input.
   */
  messages(task: PromptTask, input: PromptInput): Message[];
  /**
   * The rewrite in a model's response; not blank.
   * @throws {Rejection} The response contains no rewrite.
   */
  parseRewrite(text: string): string;
  /**
   * The score (0 to 5) and reason in a judge's response.
   * @throws {Rejection} The response contains no score, or one outside of 0 to 5. Never guess a score.
   */
  parseJudgement(text: string): JudgeScore;
}

/** Scores the style of the last turn of a dialogue. */
export interface StyleScorer {
  /**
   * Scores one dialogue, from 0 (worst) to 1 (best).
   * @throws {Rejection} The dialogue cannot be scored. That is not a score of 0.
   */
  score(dialogue: Dialogue, model: StyleModel): Score;
}

type From<T> = new (settings: Settings) => T;

/** An input of an episode that a plugin gets only if it declares it. */
export type Input = "response" | "prompt" | "columns" | "baseline" | "retrieval" | "judgement" | "style";

/** A class that declares its inputs. querl refuses a run that cannot provide an input of `requires`; those in `uses` are optional. */
type Declaring<T, I extends string> = From<T> & { requires?: readonly I[]; uses?: readonly I[] };

/** The classes of a plugin by kind. At most one of `reward` and `groupReward`. */
export interface Classes {
  prompt?: From<Prompt>;
  filter?: Declaring<Filter, "columns">;
  reward?: Declaring<Reward, Input>;
  groupReward?: Declaring<GroupReward, Input>;
  styleScorer?: From<StyleScorer>;
}

/** The default export of `plugin.js`. */
export interface Plugin {
  /** The classes by the kind's name in plugin.toml. */
  readonly kinds: Readonly<Record<string, From<unknown>>>;
}

/** Registers the plugin's classes: `export default plugin({ reward: Brevity })` in `plugin.js`. */
export function plugin(classes: Classes): Plugin;

/** A setting that a plugin reads. */
export interface SettingSpec {
  key: string;
  valueType: "text" | "number" | "integer" | "flag" | "texts";
  /** The default as text; `undefined` if the user must set a value. */
  default: string | undefined;
  minimum?: number;
  maximum?: number;
  choices?: string[];
}

/** The description of a plugin, derived from its classes: the settings that constructors read, and the declared inputs. */
export function describe(plugin: Plugin): {
  kinds: string[];
  settings: SettingSpec[];
  /** Range of totals with default settings; `undefined` if the plugin is not a reward or a setting has no default. */
  range: [number, number] | undefined;
  /** Declared inputs; true for those in `requires`, false for those in `uses`. */
  inputs: Partial<Record<Input, boolean>>;
};

/** Number of code points. `[...text].length` is equal, but takes thousands of instructions per character in a component. */
export function nChars(text: string): number;

/** Strips these characters from both ends of a text, without a regular expression, which is slow in a component. */
export function stripped(text: string, characters: string): string;

/** Debug log: to querl's log (`-v`) in a component, to stderr natively. It has no effect on results. */
export const log: Record<"debug" | "info" | "warn" | "error", (message: string) => void>;

/** Text functions for plugins. The SDKs for Rust and Python have the same functions with bit-identical results. */
export const text: {
  /** Converts full-width forms to ASCII and letters to lower case, and collapses whitespace: a subset of NFKC, in lower case. */
  normalise(text: string): string;
  /** The units of the normalised text: each run of ASCII letters and digits, and each other character. Drops whitespace and punctuation. */
  units(text: string): string[];
  /** Parses a text that is one number: `三百二十`, `一万零五`, `3.5万`, `百分之五` (0.05); `undefined` for any other text. */
  number(text: string): number | undefined;
  /** Finds all numbers in a text, in order: at each position the longest of at most 32 characters. */
  numbers(text: string): number[];
  /** Levenshtein distance in code points. */
  editDistance(a: string, b: string): number;
  /** ROUGE-L F1 over units, 0 to 1 (Lin, 2004). */
  rougeL(a: string, b: string): number;
  /** Jaccard similarity of the sets of n-grams over units; 0 if both are empty. */
  jaccard(a: string, b: string, n: number): number;
  /** Share of repeated n-grams over units, 0 to 1: 1 - distinct / all. */
  repetition(text: string, n: number): number;
  /** Soft overlong penalty, -1 to 0: 0 up to `maxLength - buffer`, then linear to -1 at `maxLength` (DAPO, equation 13). */
  softOverlong(length: number, maxLength: number, buffer: number): number;
  nChars(text: string): number;
  stripped(text: string, characters: string): string;
};
