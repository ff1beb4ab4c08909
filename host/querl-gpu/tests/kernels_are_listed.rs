//! Every kernel is in the table of minimum work, with which kernels are measured.
#![allow(clippy::unwrap_used)]

use fancy_regex::Regex;
use std::collections::BTreeSet;
use std::path::Path;

/// Names of the kernels without macro suffixes: `attend_##D` is `attend`.
fn kernels() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let declared = Regex::new(
        r"__global__(?:\s+void)?(?:\s+__launch_bounds__\([^)]*\))?(?:\s+void)?[\s\\]+(\w+?)_?(?:##[\w#]*)?\(",
    )
    .unwrap();
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let found: Vec<String> = declared.captures_iter(&text).map(|found| found.unwrap()[1].to_owned()).collect();
        assert_eq!(
            found.len(),
            text.matches("extern \"C\" __global__").count(),
            "a declaration that is written otherwise"
        );
        names.extend(found);
    }
    names
}

#[test]
fn every_kernel_has_a_floor() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cuda.md")).unwrap();
    let floors = page.split_once("### Floors").unwrap().1;
    let (kernels, stem) = (kernels(), |name: &str| name.trim_end_matches("_bf16").trim_end_matches("_f32").to_owned());
    let is_listed = |name: &String| [name.clone(), stem(name)].iter().any(|name| floors.contains(&format!("`{name}`")));
    let missing: Vec<&String> = kernels.iter().filter(|name| !is_listed(name)).collect();
    assert!(kernels.len() > 40 && missing.is_empty(), "{} kernels, without a floor: {missing:?}", kernels.len());
}
