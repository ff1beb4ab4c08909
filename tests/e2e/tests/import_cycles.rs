//! Imports inside a crate have a direction: no strongly connected component has more than three files.
//!
//! Nodes are the files of a crate under `host/`. An edge is a private `use` item or a path in code; it leads to the file that defines the
//! item, through re-exports. A `pub use` alone is no edge, and code under `cfg(test)` does not count.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

/// Largest permitted component: a parent and two children that share its types.
const LARGEST: usize = 3;

#[test]
fn no_import_cycle_has_more_than_three_files() {
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host");
    let mut crates: Vec<PathBuf> = fs::read_dir(host).unwrap().map(|entry| entry.unwrap().path()).collect();
    crates.sort();
    let mut failures = Vec::new();
    for path in crates {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        for root in ["src/lib.rs", "src/main.rs"].map(|root| path.join(root)).iter().filter(|root| root.exists()) {
            let graph = Crate::read(root).graph(&path);
            for component in components(&graph.edges).into_iter().filter(|component| component.len() > LARGEST) {
                failures.push(graph.describe(&name, &component));
            }
        }
    }
    assert!(failures.is_empty(), "import cycles:\n{}", failures.join("\n"));
}

/// For each file, the files from which it imports.
type Edges = BTreeMap<String, BTreeSet<String>>;

struct Graph {
    edges: Edges,
    /// The items behind an edge, for the error message.
    items: BTreeMap<(String, String), BTreeSet<String>>,
}

impl Graph {
    fn describe(&self, name: &str, component: &BTreeSet<String>) -> String {
        let files: Vec<&str> = component.iter().map(String::as_str).collect();
        let (from, to, left) = worst_edge(&self.edges, component);
        let items: Vec<&str> = self.items[&(from.clone(), to.clone())].iter().map(String::as_str).collect();
        format!(
            "{name}: {} files import each other: {}\n  worst edge: {from} -> {to} (for {}); without it the largest cycle has {left} files",
            files.len(),
            files.join(", "),
            items.join(", "),
        )
    }
}

/// The edge whose removal gives the smallest largest component, and the size of that component.
fn worst_edge(edges: &Edges, component: &BTreeSet<String>) -> (String, String, usize) {
    let inside: Edges =
        component.iter().map(|file| (file.clone(), edges[file].intersection(component).cloned().collect())).collect();
    let mut best: Option<(String, String, usize)> = None;
    for (from, targets) in &inside {
        for to in targets {
            let mut without = inside.clone();
            without.get_mut(from).unwrap().remove(to);
            let left = components(&without).iter().map(BTreeSet::len).max().unwrap_or(0);
            if best.as_ref().is_none_or(|(_, _, size)| left < *size) {
                best = Some((from.clone(), to.clone(), left));
            }
        }
    }
    best.unwrap()
}

/// Strongly connected components. Source: Tarjan, Depth-First Search and Linear Graph Algorithms, 1972.
fn components(edges: &Edges) -> Vec<BTreeSet<String>> {
    #[derive(Default)]
    struct State<'a> {
        index: BTreeMap<&'a str, usize>,
        low: BTreeMap<&'a str, usize>,
        stack: Vec<&'a str>,
        found: Vec<BTreeSet<String>>,
    }
    fn visit<'a>(node: &'a str, edges: &'a Edges, state: &mut State<'a>) {
        let index = state.index.len();
        state.index.insert(node, index);
        state.low.insert(node, index);
        state.stack.push(node);
        for target in edges.get(node).into_iter().flatten() {
            let seen = match state.index.get(target.as_str()) {
                None => {
                    visit(target, edges, state);
                    state.low[target.as_str()]
                }
                Some(&index) if state.stack.contains(&target.as_str()) => index,
                Some(_) => continue,
            };
            let low = state.low[node].min(seen);
            state.low.insert(node, low);
        }
        if state.low[node] == index {
            let start = state.stack.iter().position(|other| *other == node).unwrap();
            state.found.push(state.stack.drain(start..).map(str::to_owned).collect());
        }
    }
    let mut state = State::default();
    for node in edges.keys() {
        if !state.index.contains_key(node.as_str()) {
            visit(node, edges, &mut state);
        }
    }
    state.found
}

/// A module: its file and the names in its scope.
#[derive(Default)]
struct Module {
    file: PathBuf,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    /// Names that `use` adds to the scope, each with its path.
    bindings: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    /// Paths of private `use` items and of code.
    paths: BTreeSet<Vec<String>>,
}

enum Target {
    Module(usize),
    Item(usize),
}

struct Crate {
    modules: Vec<Module>,
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut this = Self { modules: vec![Module { file: root.to_owned(), ..Module::default() }] };
        this.file(0, root, &root.with_file_name(""));
        this
    }

    /// Reads the items of a file. `folder` contains its child modules.
    fn file(&mut self, module: usize, path: &Path, folder: &Path) {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if !file.attrs.iter().any(is_test) {
            self.items(module, file.items, folder);
        }
    }

    fn items(&mut self, module: usize, items: Vec<Item>, folder: &Path) {
        for item in items {
            match item {
                Item::Mod(item) if item.attrs.iter().any(is_test) => {}
                Item::Mod(item) => {
                    let name = item.ident.to_string();
                    let child = self.modules.len();
                    let file = match &item.content {
                        Some(_) => self.modules[module].file.clone(),
                        None => module_file(&item.attrs, folder, &name),
                    };
                    let parent = Some(module);
                    self.modules.push(Module { file: file.clone(), parent, ..Module::default() });
                    self.modules[module].children.insert(name.clone(), child);
                    match item.content {
                        Some((_, items)) => self.items(child, items, &folder.join(&name)),
                        None => self.file(child, &file, &folder.join(&name)),
                    }
                }
                Item::Use(item) => {
                    let mut leaves = Vec::new();
                    flatten(&item.tree, &mut Vec::new(), &mut leaves);
                    let module = &mut self.modules[module];
                    for (name, path) in leaves {
                        if matches!(item.vis, Visibility::Inherited) {
                            module.paths.insert(path.clone());
                        }
                        match name {
                            Some(name) => drop(module.bindings.insert(name, path)),
                            None => module.globs.push(path),
                        }
                    }
                }
                item => {
                    let module = &mut self.modules[module];
                    if let Some(name) = item_name(&item) {
                        module.items.insert(name);
                    }
                    Paths(&mut module.paths).visit_item(&item);
                }
            }
        }
    }

    /// The item that a path refers to in a module; `None` for paths into other crates and for names generated by macros.
    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        if depth > 20 {
            return None;
        }
        let mut at = match first.as_str() {
            "crate" => 0,
            "self" => from,
            "super" => self.modules[from].parent?,
            _ => {
                rest = path;
                from
            }
        };
        while let Some((name, after)) = rest.split_first() {
            let module = &self.modules[at];
            if name == "super" {
                at = module.parent?;
            } else if let Some(child) = module.children.get(name) {
                at = *child;
            } else if module.items.contains(name) {
                return Some(Target::Item(at));
            } else {
                let through = module
                    .bindings
                    .get(name)
                    .filter(|path| *path != rest)
                    .and_then(|path| self.resolve(at, path, depth + 1));
                let globbed = || {
                    module.globs.iter().find_map(|path| match self.resolve(at, path, depth + 1)? {
                        Target::Module(other) if other != at => {
                            self.resolve(other, &["self".to_owned(), name.clone()], depth + 1)
                        }
                        _ => None,
                    })
                };
                match through.or_else(globbed) {
                    Some(Target::Module(other)) => at = other,
                    Some(item) => return Some(item),
                    // A name of another crate, or one generated by a macro.
                    None if at == from && rest.len() == path.len() => return None,
                    None => return (!module.bindings.contains_key(name)).then_some(Target::Item(at)),
                }
            }
            rest = after;
        }
        Some(Target::Module(at))
    }

    fn graph(&self, root: &Path) -> Graph {
        let name =
            |module: usize| self.modules[module].file.strip_prefix(root.join("src")).unwrap().display().to_string();
        let mut edges: Edges = (0..self.modules.len()).map(|module| (name(module), BTreeSet::new())).collect();
        let mut items = BTreeMap::<_, BTreeSet<String>>::new();
        for (from, module) in self.modules.iter().enumerate() {
            for path in &module.paths {
                let Some(Target::Item(to)) = self.resolve(from, path, 0) else { continue };
                let (from, to) = (name(from), name(to));
                if from != to {
                    edges.get_mut(&from).unwrap().insert(to.clone());
                    items.entry((from, to)).or_default().insert(path.last().unwrap().clone());
                }
            }
        }
        Graph { edges, items }
    }
}

/// Collects the paths of an item's code.
struct Paths<'a>(&'a mut BTreeSet<Vec<String>>);

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.0.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut leaves = Vec::new();
        flatten(&item.tree, &mut Vec::new(), &mut leaves);
        self.0.extend(leaves.into_iter().map(|(_, path)| path));
    }

    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}
}

/// The names that a `use` tree adds to the scope, each with its path; a glob has no name.
fn flatten(tree: &UseTree, prefix: &mut Vec<String>, leaves: &mut Vec<(Option<String>, Vec<String>)>) {
    let joined = |name: &str| match name {
        "self" if !prefix.is_empty() => prefix.clone(),
        name => prefix.iter().cloned().chain([name.to_owned()]).collect(),
    };
    match tree {
        UseTree::Path(tree) => {
            prefix.push(tree.ident.to_string());
            flatten(&tree.tree, prefix, leaves);
            prefix.pop();
        }
        UseTree::Name(tree) => {
            let path: Vec<String> = joined(&tree.ident.to_string());
            leaves.push((path.last().cloned(), path));
        }
        UseTree::Rename(tree) => leaves.push((Some(tree.rename.to_string()), joined(&tree.ident.to_string()))),
        UseTree::Glob(_) => leaves.push((None, prefix.clone())),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, prefix, leaves)),
    }
}

fn item_name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

fn is_test(attribute: &Attribute) -> bool {
    let is_cfg = attribute.path().is_ident("cfg");
    is_cfg
        && attribute
            .meta
            .require_list()
            .is_ok_and(|list| ["test", "all (test"].iter().any(|start| list.tokens.to_string().starts_with(start)))
}

fn module_file(attributes: &[Attribute], folder: &Path, name: &str) -> PathBuf {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("path")) {
        if let syn::Meta::NameValue(syn::MetaNameValue { value: syn::Expr::Lit(literal), .. }) = &attribute.meta
            && let syn::Lit::Str(text) = &literal.lit
        {
            return folder.join(text.value());
        }
    }
    let flat = folder.join(format!("{name}.rs"));
    if flat.exists() { flat } else { folder.join(name).join("mod.rs") }
}

#[test]
fn components_and_the_worst_edge_of_a_small_graph() {
    let edges = |list: &[(&str, &str)]| {
        let mut edges = Edges::new();
        for (from, to) in list {
            edges.entry((*from).to_owned()).or_default().insert((*to).to_owned());
            edges.entry((*to).to_owned()).or_default();
        }
        edges
    };
    // a -> b -> c -> d -> a, and c -> b: without d -> a, only b and c import each other.
    let graph = edges(&[("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("c", "b"), ("d", "e")]);
    let found: Vec<BTreeSet<String>> = components(&graph).into_iter().filter(|files| files.len() > 1).collect();
    assert_eq!(found, [["a", "b", "c", "d"].map(str::to_owned).into()]);
    let (from, to, left) = worst_edge(&graph, &found[0]);
    assert_eq!((from.as_str(), to.as_str(), left), ("b", "c", 1));
}
