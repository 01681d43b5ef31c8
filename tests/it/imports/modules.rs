//! The modules of the workspace, read from files: which file each one is, what it defines, what it imports.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Attribute, Item, Meta, Token, UseTree, Visibility, punctuated::Punctuated};

use super::visit::attributes;

/// Path from the root of the tree, with forward slashes, to text.
pub type Files = BTreeMap<String, String>;

/// Crates that other crates can import: name and the file that is their root.
pub const CRATES: [(&str, &str); 3] = [
    ("engraft", "src/lib.rs"),
    ("engraft_adapters", "adapters/src/lib.rs"),
    ("engraft_util", "util/src/lib.rs"),
];

/// Folder whose files are programs, each a crate.
const PROGRAMS: &str = "src/bin/";

pub enum Kind {
    /// A type or trait; the names are an enum's variants.
    Type(Vec<String>),
    /// A function, constant or static; nothing can follow it in a path.
    Value,
    Macro,
}

pub struct Definition {
    pub name: String,
    pub kind: Kind,
}

/// One name of a `use`, or one glob.
pub struct Import {
    /// Begins with `::` if written so.
    pub path: Vec<String>,
    /// The name that it defines here; `None` for a glob.
    pub name: Option<String>,
    /// Other modules may see it.
    pub is_public: bool,
    pub line: usize,
}

/// A module, or the body of a block that has items of its own.
pub struct Module {
    /// Name of the crate first; a program's is its file.
    pub path: Vec<String>,
    pub file: String,
    pub parent: Option<usize>,
    /// The body of a block: names that it lacks are looked up in `parent`.
    pub is_block: bool,
    pub children: Vec<(String, usize)>,
    pub definitions: Vec<Definition>,
    pub imports: Vec<Import>,
    /// A macro call among the items may define names that are not seen here.
    pub expands: bool,
}

impl Module {
    pub fn new(path: Vec<String>, file: &str, parent: Option<usize>, is_block: bool) -> Self {
        Self {
            path,
            file: file.to_owned(),
            parent,
            is_block,
            children: Vec::new(),
            definitions: Vec::new(),
            imports: Vec::new(),
            expands: false,
        }
    }

    /// The room of the house: a top-level module of `engraft`, a part of `cli`, or a crate.
    pub fn room(&self) -> String {
        let names: Vec<&str> = self.path.iter().map(String::as_str).collect();
        match names.as_slice() {
            ["engraft"] => "lib".into(),
            ["engraft", "cli", part, ..] => format!("cli/{part}"),
            ["engraft", room, ..] => (*room).into(),
            [program, ..] if program.starts_with(PROGRAMS) => "bin".into(),
            [name, ..] => (*name).into(),
            [] => String::new(),
        }
    }

    /// Adds what `item` defines or imports.
    pub fn record(&mut self, item: &Item) {
        let mut define = |name: String, kind| self.definitions.push(Definition { name, kind });
        let of_type = || Kind::Type(Vec::new());
        match item {
            Item::Struct(it) => define(it.ident.to_string(), of_type()),
            Item::Union(it) => define(it.ident.to_string(), of_type()),
            Item::Trait(it) => define(it.ident.to_string(), of_type()),
            Item::TraitAlias(it) => define(it.ident.to_string(), of_type()),
            Item::Type(it) => define(it.ident.to_string(), of_type()),
            Item::Enum(it) => {
                let variants = it.variants.iter().map(|variant| variant.ident.to_string()).collect();
                define(it.ident.to_string(), Kind::Type(variants));
            }
            Item::Fn(it) => define(it.sig.ident.to_string(), Kind::Value),
            Item::Const(it) => define(it.ident.to_string(), Kind::Value),
            Item::Static(it) => define(it.ident.to_string(), Kind::Value),
            Item::ForeignMod(it) => {
                for item in &it.items {
                    match item {
                        syn::ForeignItem::Fn(it) => define(it.sig.ident.to_string(), Kind::Value),
                        syn::ForeignItem::Static(it) => define(it.ident.to_string(), Kind::Value),
                        _ => {}
                    }
                }
            }
            Item::Macro(it) => match &it.ident {
                Some(name) => define(name.to_string(), Kind::Macro),
                None => self.expands = true,
            },
            Item::Use(it) => self.imports.extend(imports(it)),
            Item::ExternCrate(it) => {
                let name = it.rename.as_ref().map_or(&it.ident, |(_, name)| name).to_string();
                let path = match it.ident.to_string().as_str() {
                    "self" => vec!["crate".into()],
                    other => vec!["::".into(), other.into()],
                };
                let line = it.ident.span().start().line;
                self.imports.push(Import { path, name: Some(name), is_public: is_public(&it.vis), line });
            }
            _ => {}
        }
    }
}

/// Names and globs of a `use`, one by one.
pub fn imports(item: &syn::ItemUse) -> Vec<Import> {
    let start = item.leading_colon.as_ref().map(|_| "::".to_owned());
    let mut found = Vec::new();
    flatten(&item.tree, is_public(&item.vis), &mut start.into_iter().collect(), &mut found);
    found
}

fn is_public(visibility: &Visibility) -> bool {
    !matches!(visibility, Visibility::Inherited)
}

fn flatten(tree: &UseTree, is_public: bool, path: &mut Vec<String>, found: &mut Vec<Import>) {
    let depth = path.len();
    let mut leaf = |path: &[String], ident: &syn::Ident, name: &syn::Ident| {
        let mut path = path.to_vec();
        // `{self}` is the module itself.
        if ident != "self" || path.is_empty() {
            path.push(ident.to_string());
        }
        let name = if name == "self" { path.last().cloned() } else { Some(name.to_string()) };
        found.push(Import { path, name, is_public, line: ident.span().start().line });
    };
    match tree {
        UseTree::Path(it) => {
            path.push(it.ident.to_string());
            flatten(&it.tree, is_public, path, found);
        }
        UseTree::Name(it) => leaf(path, &it.ident, &it.ident),
        UseTree::Rename(it) => leaf(path, &it.ident, &it.rename),
        UseTree::Glob(it) => {
            let line = it.star_token.spans[0].start().line;
            found.push(Import { path: path.clone(), name: None, is_public, line });
        }
        UseTree::Group(it) => it.items.iter().for_each(|tree| flatten(tree, is_public, path, found)),
    }
    path.truncate(depth);
}

/// Whether an item with these attributes is compiled in tests only.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let never = || attribute.parse_args::<Meta>().is_ok_and(|meta| holds(&meta) == Some(false));
        attribute.path().is_ident("test") || attribute.path().is_ident("cfg") && never()
    })
}

/// A `cfg` predicate in a build without tests; `None` where that depends on features or the target.
fn holds(predicate: &Meta) -> Option<bool> {
    let parts = |list: &syn::MetaList| {
        let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
        parts.unwrap_or_default().iter().map(holds).collect::<Vec<_>>()
    };
    let join = |parts: Vec<Option<bool>>, decides: bool| {
        let undecided = parts.iter().any(Option::is_none);
        if parts.contains(&Some(decides)) { Some(decides) } else { (!undecided).then_some(!decides) }
    };
    match predicate {
        Meta::Path(path) if path.is_ident("test") => Some(false),
        Meta::List(list) if list.path.is_ident("not") => parts(list).first().copied()?.map(|held| !held),
        Meta::List(list) if list.path.is_ident("all") => join(parts(list), false),
        Meta::List(list) if list.path.is_ident("any") => join(parts(list), true),
        _ => None,
    }
}

/// Folders in which a file's modules are searched.
#[derive(Clone)]
struct Folders {
    /// The file's folder.
    own: String,
    /// The folder that `mod x;` refers to.
    nested: String,
    /// Inside `mod x { .. }`, where `#[path]` counts from `nested`.
    inline: bool,
}

impl Folders {
    /// For a file that is `mod.rs`, a crate's root, or named by `#[path]`: its modules are in the same folder.
    fn beside(file: &str) -> Self {
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        Self { own: folder.clone(), nested: folder, inline: false }
    }

    /// For another file: its modules are in a folder of its name.
    fn below(file: &str) -> Self {
        Self { nested: file.trim_end_matches(".rs").to_owned(), ..Self::beside(file) }
    }
}

/// `folder/path`, with `.` and `..` resolved.
fn join(folder: &str, path: &str) -> String {
    let mut parts = Vec::new();
    for part in folder.split('/').chain(path.split('/')).filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." => parts.truncate(parts.len().saturating_sub(1)),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// All modules of a tree, less those of tests.
#[derive(Default)]
pub struct Modules {
    pub all: Vec<Module>,
    /// Name of a crate and its root.
    pub roots: BTreeMap<String, usize>,
    /// Files that only tests compile.
    pub test_files: BTreeSet<String>,
    /// Code that this reader understands less than the compiler does, as `file:line: text`.
    pub faults: Vec<String>,
}

/// Attributes of the file and items of a module; an inline module is left in its parent without its items.
#[derive(Default)]
pub struct Body {
    pub attributes: Vec<Attribute>,
    pub items: Vec<Item>,
}

impl Modules {
    /// The modules, and the body of each.
    pub fn read(files: &Files) -> (Self, Vec<Body>) {
        let mut reader = Reader { files, modules: Self::default(), bodies: Vec::new() };
        let libraries = CRATES.into_iter().filter(|(_, file)| files.contains_key(*file));
        let libraries = libraries.map(|(name, file)| (name.to_owned(), file.to_owned()));
        let programs = files.keys().filter(|file| is_program(file)).map(|file| (file.clone(), file.clone()));
        for (name, file) in libraries.chain(programs) {
            let folders = Folders::beside(&file);
            reader.add_file(Next { file, path: vec![name], parent: None, folders, tests: false });
        }
        let Reader { mut modules, bodies, .. } = reader;
        let known: BTreeSet<&String> = modules.all.iter().map(|module| &module.file).collect();
        let unknown = files.keys().filter(|file| file.ends_with(".rs") && !known.contains(file));
        let failed = |file: &str| modules.faults.iter().any(|fault| fault.starts_with(&format!("{file}:")));
        let unread = unknown.filter(|file| !modules.test_files.contains(*file) && !failed(file));
        let unread: Vec<_> = unread.map(|file| format!("{file}:1: no module is this file")).collect();
        modules.faults.extend(unread);
        (modules, bodies)
    }
}

struct Reader<'a> {
    files: &'a Files,
    modules: Modules,
    bodies: Vec<Body>,
}

/// A module about to be read.
struct Next {
    file: String,
    path: Vec<String>,
    parent: Option<usize>,
    folders: Folders,
    tests: bool,
}

impl Reader<'_> {
    fn add_file(&mut self, next: Next) {
        let parsed = match syn::parse_file(&self.files[&next.file]) {
            Ok(parsed) => parsed,
            Err(error) => {
                self.modules.faults.push(format!("{}:{}: {error}", next.file, error.span().start().line));
                return;
            }
        };
        let next = Next { tests: next.tests || is_for_tests(&parsed.attrs), ..next };
        if next.tests {
            self.modules.test_files.insert(next.file.clone());
        }
        self.add(next, Body { attributes: parsed.attrs, items: parsed.items });
    }

    fn add(&mut self, this: Next, mut body: Body) {
        let all = &mut self.modules.all;
        let index = all.len();
        if !this.tests {
            all.push(Module::new(this.path.clone(), &this.file, this.parent, false));
            self.bodies.push(Body::default());
            match this.parent {
                Some(parent) => all[parent].children.push((this.path[this.path.len() - 1].clone(), index)),
                None => drop(self.modules.roots.insert(this.path[0].clone(), index)),
            }
        }
        for item in &mut body.items {
            let tests = this.tests || is_for_tests(attributes(item));
            if let Item::Mod(module) = item {
                self.add_child(&this, index, module, tests);
            } else if !tests {
                self.modules.all[index].record(item);
                self.export(&this.path, item);
            }
        }
        if !this.tests {
            self.bodies[index] = body;
        }
    }

    fn add_child(&mut self, this: &Next, parent: usize, module: &mut syn::ItemMod, tests: bool) {
        let name = module.ident.to_string();
        let path = [&this.path[..], std::slice::from_ref(&name)].concat();
        let next = |file, folders| Next { file, path, parent: Some(parent), folders, tests };
        let Folders { own, nested, inline } = &this.folders;
        let named =
            path_attribute(&module.attrs).map(|named| join(if *inline { nested } else { own }, &named));
        if let Some((_, items)) = &mut module.content {
            let nested = named.unwrap_or_else(|| join(nested, &name));
            let folders = Folders { own: own.clone(), nested, inline: true };
            let body = Body { items: std::mem::take(items), ..Body::default() };
            self.add(next(this.file.clone(), folders), body);
            return;
        }
        let candidates = match named {
            Some(named) => vec![(Folders::beside(&named), named)],
            None => {
                let flat = join(nested, &format!("{name}.rs"));
                let folder = join(nested, &format!("{name}/mod.rs"));
                vec![(Folders::below(&flat), flat), (Folders::beside(&folder), folder)]
            }
        };
        match candidates.into_iter().find(|(_, file)| self.files.contains_key(file)) {
            Some((folders, file)) => self.add_file(next(file, folders)),
            None => {
                let line = module.ident.span().start().line;
                self.modules.faults.push(format!("{}:{line}: mod {name} has no file", this.file));
            }
        }
    }

    /// A macro with `#[macro_export]` is also found at the root of its crate.
    fn export(&mut self, path: &[String], item: &Item) {
        let Item::Macro(syn::ItemMacro { attrs, ident: Some(name), .. }) = item else { return };
        if path.len() == 1 || !attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
            return;
        }
        let name = name.to_string();
        let full = ["crate".to_owned()].into_iter().chain(path[1..].iter().cloned()).chain([name.clone()]);
        let import = Import { path: full.collect(), name: Some(name), is_public: true, line: 1 };
        let root = self.modules.roots[&path[0]];
        self.modules.all[root].imports.push(import);
    }
}

fn is_program(file: &str) -> bool {
    let name = file.strip_prefix(PROGRAMS).unwrap_or_default();
    name.ends_with("/main.rs") || name.ends_with(".rs") && !name.contains('/')
}

/// The string of `#[path = ".."]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}
