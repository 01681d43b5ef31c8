//! The paths that code names: in `use`, in expressions, types and patterns, in attributes, inside macros.

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Expr, ForeignItem, ImplItem, Item, Meta, Stmt, TraitItem,
    visit::{self, Visit},
};

use super::{
    modules::{Body, Kind, Module, Modules, imports, is_for_tests},
    resolve::{Found, Target, resolve},
    tokens::{Named, Written},
};

/// A path in a file, and what it means.
pub struct Mention {
    /// The module that holds it.
    pub from: usize,
    pub line: usize,
    pub path: Vec<String>,
    /// All that is inside the path is imported.
    pub is_glob: bool,
    pub found: Vec<Found>,
}

impl Mention {
    /// The path as it is written.
    pub fn text(&self) -> String {
        self.path.join("::").replacen("::::", "::", 1)
    }
}

/// Paths and features that all modules of a tree mention.
#[derive(Default)]
pub struct Mentions {
    pub paths: Vec<Mention>,
    /// Module and line of each `feature = ".."`, and the feature.
    pub features: Vec<(usize, usize, String)>,
}

impl Mentions {
    pub fn read(modules: &mut Modules, bodies: &[Body]) -> Self {
        let mut reader = Reader { modules, scope: 0, own_type: Vec::new(), mentions: Self::default() };
        for (module, body) in bodies.iter().enumerate() {
            reader.scope = module;
            body.attributes.iter().for_each(|attribute| reader.visit_attribute(attribute));
            body.items.iter().for_each(|item| reader.visit_item(item));
        }
        reader.mentions
    }
}

struct Reader<'a> {
    modules: &'a mut Modules,
    scope: usize,
    /// The type of `Self` in an `impl`.
    own_type: Vec<String>,
    mentions: Mentions,
}

/// The names of a path, after `::` if it begins so.
fn names(path: &syn::Path) -> Vec<String> {
    let start = path.leading_colon.as_ref().map(|_| "::".to_owned());
    start.into_iter().chain(path.segments.iter().map(|segment| segment.ident.to_string())).collect()
}

impl Reader<'_> {
    /// Keeps a path. A single name is kept if it is an item: as a module it would be a variable of that name.
    fn mention(&mut self, path: Vec<String>, line: usize, is_use: bool, is_glob: bool) {
        let mut found = resolve(self.modules, self.scope, &path);
        if path.len() == 1 && !is_use {
            let is_guess = |path: &Vec<String>| path.len() > 1;
            found.retain(|found| match &found.target {
                Target::Item { .. } => true,
                Target::External(path) => is_guess(path),
                Target::Module(_) | Target::Missing { .. } => false,
            });
        }
        if found.is_empty() {
            return;
        }
        let mention = Mention { from: self.scope, line, path, is_glob, found };
        if let [Found { target: Target::Missing { module, name }, .. }, ..] = &mention.found[..] {
            let (file, lacks) = (&self.modules.all[self.scope].file, &self.modules.all[*module].file);
            let fault = format!("{file}:{line}: {} is not found: {lacks} has no {name}", mention.text());
            self.modules.faults.push(fault);
        }
        self.mentions.paths.push(mention);
    }

    /// A macro that no path leads to: it is in scope because it was defined further up.
    fn mention_macro(&mut self, name: &syn::Ident) {
        let all = &self.modules.all;
        let of_crate = |at: &usize| all[*at].path[0] == all[self.scope].path[0];
        let defines = |at: &usize| {
            all[*at].definitions.iter().any(|item| name == &item.name && matches!(item.kind, Kind::Macro))
        };
        let mut homes = (0..all.len()).filter(of_crate).filter(defines);
        if let (Some(module), None) = (homes.next(), homes.next()) {
            let path = vec![name.to_string()];
            let found =
                vec![Found { target: Target::Item { module, names: path.clone() }, through: Vec::new() }];
            let line = name.span().start().line;
            self.mentions.paths.push(Mention { from: self.scope, line, path, is_glob: false, found });
        }
    }

    fn tokens(&mut self, stream: &TokenStream) {
        let named = Named::read(stream);
        for Written { path, line, is_use } in named.paths {
            self.mention(path, line, is_use, false);
        }
        let features = named.features.into_iter();
        self.mentions.features.extend(features.map(|(line, feature)| (self.scope, line, feature)));
    }

    fn fault(&mut self, at: &syn::Ident, says: &str) {
        let (file, line) = (&self.modules.all[self.scope].file, at.span().start().line);
        self.modules.faults.push(format!("{file}:{line}: {says}"));
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            Item::Use(it) => {
                it.attrs.iter().for_each(|attribute| self.visit_attribute(attribute));
                for import in imports(it) {
                    self.mention(import.path, import.line, true, import.name.is_none());
                }
            }
            Item::Mod(syn::ItemMod { content: Some((_, items)), ident, .. }) if !items.is_empty() => {
                self.fault(ident, &format!("mod {ident} is inside a function"));
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let outer = self.scope;
        let items = block.stmts.iter().filter_map(|stmt| match stmt {
            Stmt::Item(item) if !is_for_tests(attributes(item)) => Some(item),
            _ => None,
        });
        let items: Vec<&Item> = items.collect();
        if !items.is_empty() {
            let Module { path, file, .. } = &self.modules.all[outer];
            let mut scope = Module::new(path.clone(), file, Some(outer), true);
            items.into_iter().for_each(|item| scope.record(item));
            self.scope = self.modules.all.len();
            self.modules.all.push(scope);
        }
        visit::visit_block(self, block);
        self.scope = outer;
    }

    fn visit_item_impl(&mut self, it: &'ast syn::ItemImpl) {
        let own = match &*it.self_ty {
            syn::Type::Path(own) if own.qself.is_none() => names(&own.path),
            _ => Vec::new(),
        };
        let outer = std::mem::replace(&mut self.own_type, own);
        visit::visit_item_impl(self, it);
        self.own_type = outer;
    }

    /// After `<T>` a path is read as if it began with a crate, which is none of ours.
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut names = names(path);
        if names[0] == "Self" && !self.own_type.is_empty() {
            names.splice(..1, self.own_type.iter().cloned());
        }
        let line = path.segments.first().map_or(0, |segment| segment.ident.span().start().line);
        self.mention(names, line, false, false);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, it: &'ast syn::Macro) {
        if let Some(name) = it.path.get_ident().filter(|name| *name == "include") {
            self.fault(name, "include! takes in code that is no module");
        }
        let known = self.mentions.paths.len();
        self.visit_path(&it.path);
        if let (Some(name), true) = (it.path.get_ident(), known == self.mentions.paths.len()) {
            self.mention_macro(name);
        }
        self.tokens(&it.tokens);
    }

    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        self.tokens(tokens);
    }

    /// Paths as tokens (`derive`) and as strings (`#[serde(with = "..")]`).
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let Meta::List(list) = &attribute.meta else { return };
        self.tokens(&list.tokens);
        for token in list.tokens.clone() {
            if let TokenTree::Literal(text) = token
                && let Ok(text) = syn::parse_str::<syn::LitStr>(&text.to_string())
                && let Ok(path) = text.parse::<syn::Path>()
                && path.segments.len() > 1
            {
                self.mention(names(&path), list.path.segments[0].ident.span().start().line, false, false);
            }
        }
    }

    /// `pub(in a::path)` imports nothing.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_expr(&mut self, it: &'ast Expr) {
        if !is_for_tests(of_expr(it)) {
            visit::visit_expr(self, it);
        }
    }

    fn visit_stmt(&mut self, it: &'ast Stmt) {
        let attributes = match it {
            Stmt::Local(it) => &it.attrs[..],
            Stmt::Macro(it) => &it.attrs,
            Stmt::Item(_) | Stmt::Expr(..) => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_stmt(self, it);
        }
    }

    fn visit_impl_item(&mut self, it: &'ast ImplItem) {
        if !is_for_tests(of_impl(it)) {
            visit::visit_impl_item(self, it);
        }
    }

    fn visit_trait_item(&mut self, it: &'ast TraitItem) {
        if !is_for_tests(of_trait(it)) {
            visit::visit_trait_item(self, it);
        }
    }

    fn visit_foreign_item(&mut self, it: &'ast ForeignItem) {
        if !is_for_tests(of_foreign(it)) {
            visit::visit_foreign_item(self, it);
        }
    }

    fn visit_arm(&mut self, it: &'ast syn::Arm) {
        if !is_for_tests(&it.attrs) {
            visit::visit_arm(self, it);
        }
    }

    fn visit_field(&mut self, it: &'ast syn::Field) {
        if !is_for_tests(&it.attrs) {
            visit::visit_field(self, it);
        }
    }

    fn visit_field_value(&mut self, it: &'ast syn::FieldValue) {
        if !is_for_tests(&it.attrs) {
            visit::visit_field_value(self, it);
        }
    }

    fn visit_variant(&mut self, it: &'ast syn::Variant) {
        if !is_for_tests(&it.attrs) {
            visit::visit_variant(self, it);
        }
    }
}

macro_rules! attributes_of {
    ($of:vis fn $name:ident($kind:ident): $($variant:ident)*) => {
        $of fn $name(node: &$kind) -> &[Attribute] {
            match node {
                $($kind::$variant(it) => &it.attrs,)*
                _ => &[],
            }
        }
    };
}

attributes_of!(pub fn attributes(Item): Const Enum ExternCrate Fn ForeignMod Impl Macro Mod Static Struct
    Trait TraitAlias Type Union Use);
attributes_of!(fn of_impl(ImplItem): Const Fn Type Macro);
attributes_of!(fn of_trait(TraitItem): Const Fn Type Macro);
attributes_of!(fn of_foreign(ForeignItem): Fn Static Type Macro);
attributes_of!(fn of_expr(Expr): Array Assign Async Await Binary Block Break Call Cast Closure Const Continue
    Field ForLoop If Index Infer Let Lit Loop Macro Match MethodCall Paren Path Range RawAddr Reference Repeat
    Return Struct Try TryBlock Tuple Unary Unsafe While Yield);
