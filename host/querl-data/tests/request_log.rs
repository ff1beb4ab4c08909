//! Query tables made of request logs.
#![allow(clippy::unwrap_used)]

use querl_core::records::QueryRow;
use querl_data::{LogTableReport, LogTableSettings, Rows, day_file_name, open_queries, table_from_log};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A log folder, to be filled line by line.
struct Log(tempfile::TempDir);

impl Log {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn add(&self, day: &str, lines: &[Value]) -> &Self {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        self.add_text(day, &text)
    }

    fn add_text(&self, day: &str, text: &str) -> &Self {
        let path = self.path(&day_file_name(day));
        let before = std::fs::read_to_string(&path).unwrap_or_default();
        std::fs::write(path, before + text).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, tenant: Option<&str>, days: [Option<&str>; 2]) -> Result<(LogTableReport, Vec<Value>), String> {
        let out = self.path("table.jsonl");
        let settings = LogTableSettings { folder: self.0.path(), out: &out, tenant, since: days[0], until: days[1] };
        let report = table_from_log(&settings).map_err(|error| error.to_string())?;
        let table = std::fs::read_to_string(&out).unwrap();
        Ok((report, table.lines().map(|line| serde_json::from_str(line).unwrap()).collect()))
    }

    fn table(&self) -> (LogTableReport, Vec<Value>) {
        self.read(None, [None, None]).unwrap()
    }

    /// The number of groups that a run finds in the table.
    fn n_groups(&self) -> usize {
        let config = json!({"input": self.path("table.jsonl"), "group_column": "group"});
        open_queries(&serde_json::from_value(config).unwrap()).unwrap().findings().n_groups
    }
}

/// A rewrite; the id is also its second of the day.
fn rewrite(id: u32, query: &str) -> Value {
    let time = format!("2026-11-24T{:02}:{:02}:{:02}.000Z", id / 3600, id / 60 % 60, id % 60);
    json!({
        "kind": "rewrite", "time": time, "id": id.to_string(), "tenant": "shop", "version": "v1", "query": query,
        "user_profile": "", "history": "", "rewrite": "r", "fallback": null, "cached": false, "latency_ms": 1.0, "user": null,
        "redacted": null,
    })
}

fn with(mut line: Value, fields: Value) -> Value {
    line.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    line
}

fn feedback(id: u32, fields: Value) -> Value {
    with(
        json!({"kind": "feedback", "time": "2026-11-25T00:00:00.000Z", "id": id.to_string(), "tenant": "shop"}),
        fields,
    )
}

fn column(rows: &[Value], name: &str) -> Vec<Value> {
    rows.iter().map(|row| row[name].clone()).collect()
}

#[test]
fn equal_queries_in_one_context_are_one_row_with_their_counts() {
    let log = Log::new();
    log.add(
        "2026-11-24",
        &[
            rewrite(1, "鱼油怎么吃"),
            with(rewrite(2, " 鱼油怎么吃 "), json!({"fallback": "timeout", "rewrite": " 鱼油怎么吃 "})),
            with(rewrite(3, "鱼油怎么吃"), json!({"history": "在看鱼油"})),
            with(rewrite(4, ""), json!({"query": null, "user_profile": null, "redacted": "personal_data"})),
            rewrite(5, "[{\"role\": \"user\", \"content\": \"a\"}]"),
        ],
    );
    log.add("2026-11-25", &[rewrite(6, "鱼油怎么吃")]);
    let (report, rows) = log.table();
    assert_eq!(column(&rows, "original_query"), ["鱼油怎么吃", "鱼油怎么吃"]);
    assert_eq!(column(&rows, "history_summary"), ["", "在看鱼油"]);
    assert_eq!(
        (column(&rows, "requests"), column(&rows, "fallbacks")),
        (vec![json!(3), json!(1)], vec![json!(1), json!(0)])
    );
    assert_eq!((report.n_rewrites, report.n_repeated, report.n_fallbacks, report.n_rows), (6, 2, 1, 2));
    let left_out = [("with chat messages as query or history", 1), ("without texts", 1)];
    assert_eq!(report.left_out, BTreeMap::from(left_out));
    assert_eq!(report.days, ["2026-11-24", "2026-11-25"]);
}

#[test]
fn gold_ids_are_clicked_passages_and_judgements_outweigh_clicks() {
    let log = Log::new();
    let queries: Vec<Value> = (1..=10).map(|id| rewrite(id, if id <= 5 { "鱼油" } else { "钙片的剂量" })).collect();
    log.add("2026-11-24", &queries);
    log.add(
        "2026-11-25",
        &[
            feedback(1, json!({"clicked": ["p1", "p2"]})),
            feedback(2, json!({"clicked": ["p2"], "useful": false})),
            feedback(3, json!({"clicked": ["p1"], "passage": "p3", "score": 0.5})),
            feedback(4, json!({"passage": "p3", "useful": false})),
            feedback(5, json!({"passage": "p3", "score": 0.2})),
            // The last judgement of a request counts, and a later click does not undo it.
            feedback(5, json!({"passage": "p3", "score": 0.9})),
            feedback(5, json!({"clicked": ["p3"]})),
            feedback(6, json!({"passage": "p5", "useful": true, "score": 0.1})),
            feedback(7, json!({"passage": "p6"})),
            feedback(8, json!({"clicked": ["with space", "p7"], "useful": true})),
            feedback(9, json!({"useful": true})),
            feedback(99, json!({"clicked": ["p1"]})),
            with(feedback(1, json!({"clicked": ["p9"]})), json!({"tenant": "rival"})),
        ],
    );
    let (report, rows) = log.table();
    assert_eq!(column(&rows, "gold_ids"), [json!(["p1", "p3"]), json!(["p5", "p6", "p7"])]);
    assert_eq!((report.n_feedback, report.n_with_gold, report.n_contradicting), (12, 2, 2));
    let left_out = [
        ("for requests that are not in the log", 1),
        ("passages whose id a table of gold ids cannot hold", 1),
        ("without a passage", 1),
    ];
    assert_eq!(report.feedback_left_out, BTreeMap::from(left_out));
}

#[test]
fn near_duplicates_shared_gold_ids_and_reformulations_are_one_group() {
    let log = Log::new();
    let of_user = |id, query, user: &str| with(rewrite(id, query), json!({"user": user}));
    log.add(
        "2026-11-24",
        &[
            rewrite(1, "深海鱼油软胶囊一天吃几粒比较好"),
            rewrite(2, "深海鱼油软胶囊一天吃几粒比较好呢"),
            rewrite(3, "维生素Ｃ泡腾片"),
            rewrite(4, "维生素C 泡腾片!"),
            rewrite(5, "孕妇能不能吃钙"),
            rewrite(6, "备孕补什么"),
            of_user(100, "睡不着", "ada"),
            of_user(150, "褪黑素", "bob"),
            of_user(200, "失眠吃什么好", "ada"),
            // Another topic, after a pause.
            of_user(2000, "蛋白粉", "ada"),
        ],
    );
    log.add("2026-11-25", &[feedback(5, json!({"clicked": ["p5"]})), feedback(6, json!({"clicked": ["p5"]}))]);
    let (report, rows) = log.table();
    let groups = column(&rows, "group");
    for (one, other) in [(0, 1), (2, 3), (4, 5), (6, 8)] {
        assert_eq!(groups[one], groups[other], "{rows:#?}");
    }
    assert_eq!((report.n_groups, report.n_largest_group, report.n_unjoined), (6, 2, 0));

    // A run reads the table, and finds its groups.
    let config = json!({"input": log.path("table.jsonl"), "group_column": "group"});
    let table = open_queries(&serde_json::from_value(config).unwrap()).unwrap();
    assert_eq!((table.findings().n_usable, table.findings().n_groups, table.findings().repeated.n), (10, 6, 0));
    let read: Vec<QueryRow> = table.read().unwrap().map(Result::unwrap).collect();
    assert_eq!(
        (read[4].gold_ids.as_slice(), read[4].original_query.as_str()),
        (&["p5".to_owned()][..], "孕妇能不能吃钙")
    );
}

/// Regression: they had the same name, the normalised query, and were one group of a run.
#[test]
fn one_query_after_different_histories_is_in_different_groups() {
    let log = Log::new();
    let after = |id, query, history: &str| with(rewrite(id, query), json!({"history": history}));
    log.add(
        "2026-11-24",
        &[
            after(1, "怎么吃", "在看深海鱼油软胶囊"),
            after(2, "怎么吃", "维生素泡腾片多少钱"),
            after(3, "怎么吃?", "维生素泡腾片多少钱"),
            rewrite(4, "怎么吃"),
            rewrite(5, "P1"),
            rewrite(6, "孕妇钙片"),
            feedback(6, json!({"clicked": ["p1"]})),
        ],
    );
    let (report, rows) = log.table();
    let groups = column(&rows, "group");
    assert_eq!((&groups[0], &groups[1]), (&json!("怎么吃"), &groups[2]), "{groups:?}");
    assert_eq!((report.n_groups, log.n_groups()), (5, 5), "{groups:?}");
}

#[test]
fn rows_that_share_one_gold_passage_are_one_group_up_to_a_limit() {
    let log = Log::new();
    let query = |n: u32| char::from_u32(0x4e00 + 7 * n).unwrap().to_string().repeat(3);
    let lines = (0..30).flat_map(|n| {
        let shared = if n < 28 { "p" } else { "r" };
        let clicked = [shared.to_owned(), format!("q{n}")];
        [rewrite(n, &query(n)), feedback(n, json!({"clicked": clicked}))]
    });
    log.add("2026-11-24", &lines.collect::<Vec<_>>());
    let (report, rows) = log.table();
    let groups = column(&rows, "group");
    assert_eq!((&groups[0], &groups[20], &groups[28]), (&groups[19], &groups[27], &groups[29]));
    let found = (report.n_groups, report.n_largest_group, report.n_unjoined_gold, report.n_unjoined);
    assert_eq!((found, log.n_groups()), ((3, 20, 1, 0), 3), "{groups:?}");
}

/// Without a limit one everyday query between the others would join all users' queries.
#[test]
fn everyday_queries_do_not_join_everything() {
    let log = Log::new();
    let words: Vec<String> =
        (0..400_u32).map(|n| char::from_u32(0x4e00 + 7 * n).unwrap().to_string().repeat(3)).collect();
    let lines = words.iter().zip(0..).flat_map(|(word, n)| {
        let line = |id: u32, query: &str| with(rewrite(id, query), json!({"user": format!("u{n}")}));
        [line(2 * n, "在吗"), line(2 * n + 1, word)]
    });
    log.add("2026-11-24", &lines.collect::<Vec<_>>());
    let (report, _) = log.table();
    assert_eq!((report.n_rows, report.n_largest_group, report.n_groups, report.n_unjoined), (401, 20, 382, 381));
}

#[test]
fn days_and_tenants_are_chosen_and_feedback_of_later_days_counts() {
    let log = Log::new();
    log.add("2026-11-23", &[rewrite(1, "a")])
        .add("2026-11-24", &[rewrite(2, "b"), with(rewrite(3, "c"), json!({"tenant": "rival"}))]);
    log.add(
        "2026-11-26",
        &[rewrite(4, "d"), feedback(2, json!({"clicked": ["p1"]})), feedback(4, json!({"clicked": ["p1"]}))],
    );
    let (report, rows) = log.read(Some("shop"), [Some("2026-11-24"), Some("2026-11-25")]).unwrap();
    assert_eq!((column(&rows, "original_query"), column(&rows, "gold_ids")), (vec![json!("b")], vec![json!(["p1"])]));
    assert_eq!((report.n_others, report.n_rewrites), (3, 1));
    assert_eq!(report.feedback_left_out, BTreeMap::from([("for requests of other days", 1)]));

    let refused = |tenant, days| log.read(tenant, days).unwrap_err();
    let several = refused(None, [None, None]);
    let expected = "the log has requests of several tenants: `rival`, `shop`; name one with --tenant";
    assert!(several.ends_with(expected), "{several}");
    let unknown = refused(Some("shopp"), [None, None]);
    let expected = "the log has no request of tenant `shopp`; it has those of `rival`, `shop`";
    assert!(unknown.ends_with(expected), "{unknown}");
    let none = refused(Some("rival"), [Some("2026-11-25"), None]);
    let expected = "no request of tenant `rival` can be used; name other days, or collect more requests";
    assert!(none.ends_with(expected), "{none}");
}

#[test]
fn damaged_lines_are_named_and_the_others_are_used() {
    let log = Log::new();
    log.add("2026-11-24", &[rewrite(1, "a")]);
    let long = format!("{{\"kind\": \"rewrite\", \"query\": \"{}\"}}\n", "x".repeat(9 << 20));
    log.add_text("2026-11-24", "\n{\"kind\": \"rewrite\"}\n[1]\nno json\n{\"kind\": \"other\"}\n");
    log.add_text("2026-11-24", &long).add("2026-11-24", &[rewrite(2, "b")]);
    let cut = rewrite(3, "c").to_string();
    log.add_text("2026-11-24", &cut[..cut.len() - 20]);
    std::fs::write(log.path("salt"), [0xff; 32]).unwrap();
    let (report, rows) = log.table();
    assert_eq!(column(&rows, "original_query"), ["a", "b"]);
    let damaged: Vec<(usize, &str)> = report.damaged.iter().map(|line| (line.line, line.problem.as_str())).collect();
    assert_eq!(damaged.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3, 4, 5, 6, 7, 9], "{damaged:#?}");
    assert_eq!(damaged[0].1, "is no line of a request log: `id` or `tenant` is missing");
    assert_eq!(damaged[4].1, "is longer than 8388608 bytes");
    assert_eq!(damaged[5].1, "is cut, as the last line of a server that was killed or still writes");
    assert_eq!((report.n_damaged, report.damaged[0].file.as_str()), (6, "requests-2026-11-24.jsonl"));
}

#[test]
fn what_is_no_log_is_an_error_with_the_folder() {
    let log = Log::new();
    let message = |settings: LogTableSettings<'_>| table_from_log(&settings).unwrap_err().to_string();
    let (empty, out, missing) = (log.0.path(), log.path("t.jsonl"), log.path("missing"));
    let settings = LogTableSettings { folder: empty, out: &out, tenant: None, since: None, until: None };
    assert!(message(settings).contains("no file of a request log"));
    assert!(message(LogTableSettings { folder: &missing, ..settings }).contains("there is no such folder"));
    log.add_text("2026-11-24", "{}\n");
    assert!(message(settings).ends_with("the log has no readable request; check the folder"));
    let xls = log.path("t.xls");
    assert!(
        message(LogTableSettings { out: &xls, ..settings }).contains("ends in .jsonl, .xlsx, .csv, .tsv or .parquet")
    );
    log.add("2026-11-24", &[with(rewrite(1, "a"), json!({"redacted": "x", "query": null}))]);
    assert!(message(settings).contains("can be used (left out: 1 without texts)"), "{}", message(settings));
    assert!(!out.exists());
}

#[test]
fn every_format_is_a_query_table_with_the_same_rows() {
    let log = Log::new();
    log.add(
        "2026-11-24",
        &[rewrite(1, "=1+1"), with(rewrite(2, "鱼油\n怎么吃"), json!({"history": "在看, \"鱼油\""}))],
    );
    log.add("2026-11-24", &[feedback(1, json!({"clicked": ["p1", "p2"]}))]);
    let read = |name: &str| {
        let out = log.path(name);
        let settings = LogTableSettings { folder: log.0.path(), out: &out, tenant: None, since: None, until: None };
        table_from_log(&settings).unwrap();
        let table =
            open_queries(&serde_json::from_value(json!({"input": out, "group_column": "group"})).unwrap()).unwrap();
        let rows = table.read().unwrap().map(Result::unwrap);
        rows.map(|row| QueryRow { row: 0, ..row }).collect::<Vec<_>>()
    };
    let expected = read("t.jsonl");
    assert_eq!((expected.len(), expected[0].gold_ids.len()), (2, 2));
    for name in ["t.csv", "t.tsv", "t.xlsx", "t.parquet"] {
        assert_eq!(read(name), expected, "{name}");
    }
}

#[test]
fn rows_that_a_workbook_would_change_are_left_out_of_one() {
    let log = Log::new();
    let queries = ["鱼油\r\n怎么吃".to_owned(), "a\u{1}b".to_owned(), "长".repeat(32_768), "长".repeat(32_767)];
    let lines: Vec<Value> = queries.iter().zip(1..).map(|(query, id)| rewrite(id, query)).collect();
    log.add("2026-11-24", &lines);
    let n_rows = |name: &str| {
        let out = log.path(name);
        let settings = LogTableSettings { folder: log.0.path(), out: &out, tenant: None, since: None, until: None };
        let report = table_from_log(&settings).unwrap();
        (report.n_rows, report.left_out)
    };
    let left_out = BTreeMap::from([("with a text that a cell of a workbook cannot hold", 2)]);
    assert_eq!((n_rows("t.jsonl"), n_rows("t.xlsx")), ((4, BTreeMap::new()), (2, left_out)));
}
