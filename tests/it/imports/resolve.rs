//! Resolves paths: follows names, globs and re-exports to the module that defines the item.

use std::iter;

use super::modules::{Kind, Modules};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Module(usize),
    /// An item of a module, and what follows it in the path: a variant, an associated function.
    Item {
        module: usize,
        names: Vec<String>,
    },
    /// An item of another crate.
    External(Vec<String>),
    /// A name that the module seems to lack.
    Missing {
        module: usize,
        name: String,
    },
}

/// A meaning of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub target: Target,
    /// Modules whose `use` led there.
    pub through: Vec<usize>,
}

impl Found {
    fn direct(target: Target) -> Self {
        Self { target, through: Vec::new() }
    }

    fn is_ours(&self) -> bool {
        matches!(self.target, Target::Module(_) | Target::Item { .. })
    }
}

/// All meanings of `path`, which stands in the module `scope`: a name can be a module and a function at once.
pub fn resolve(modules: &Modules, scope: usize, path: &[String]) -> Vec<Found> {
    let mut found = Resolver { modules, busy: Vec::new() }.path(scope, path);
    if found.iter().any(|found| !matches!(found.target, Target::Missing { .. })) {
        found.retain(|found| !matches!(found.target, Target::Missing { .. }));
    }
    let own = &modules.all[scope].file;
    for found in &mut found {
        found.through.retain(|&module| modules.all[module].file != *own);
    }
    let mut unique: Vec<Found> = Vec::new();
    for found in found {
        if !unique.contains(&found) {
            unique.push(found);
        }
    }
    unique
}

struct Resolver<'a> {
    modules: &'a Modules,
    /// Imports being followed for a name: module, number of the import, name.
    busy: Vec<(usize, usize, String)>,
}

impl Resolver<'_> {
    fn path(&mut self, scope: usize, path: &[String]) -> Vec<Found> {
        let modules = self.modules;
        let all = &modules.all;
        let mut module = scope;
        while all[module].is_block {
            module = all[module].parent.unwrap_or(module);
        }
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        match first.as_str() {
            "crate" | "$crate" => match modules.roots.get(&all[module].path[0]) {
                Some(&root) => self.descend(scope, root, rest),
                None => Vec::new(),
            },
            "self" | "super" => {
                let mut rest = if first == "self" { rest } else { path };
                while let [first, others @ ..] = rest
                    && first == "super"
                    && let Some(parent) = all[module].parent
                {
                    (module, rest) = (parent, others);
                }
                self.descend(scope, module, rest)
            }
            "Self" => Vec::new(),
            "::" => self.of_crates(scope, rest),
            name => {
                let starts = self.visible(scope, name);
                starts.into_iter().flat_map(|start| self.extend(scope, start, rest)).collect()
            }
        }
    }

    /// A path that begins with the name of a crate.
    fn of_crates(&mut self, viewer: usize, path: &[String]) -> Vec<Found> {
        match path.split_first() {
            Some((name, rest)) => match self.modules.roots.get(name) {
                Some(&root) => self.descend(viewer, root, rest),
                None => vec![Found::direct(Target::External(path.to_vec()))],
            },
            None => Vec::new(),
        }
    }

    /// Meaning of `name` at the start of a path: an item of the blocks around it or of the module, or a crate.
    fn visible(&mut self, scope: usize, name: &str) -> Vec<Found> {
        let modules = self.modules;
        let all = &modules.all;
        let (mut at, mut guesses) = (scope, Vec::new());
        loop {
            let found = self.names(scope, at, name);
            // From a glob of another crate anything could come; our own crates go first.
            if found.iter().any(Found::is_ours) || !found.is_empty() && !modules.roots.contains_key(name) {
                return [found, guesses].concat();
            }
            guesses.extend(found);
            match all[at].parent {
                Some(parent) if all[at].is_block => at = parent,
                _ => return [self.of_crates(scope, &[name.to_owned()]), guesses].concat(),
            }
        }
    }

    fn descend(&mut self, viewer: usize, module: usize, rest: &[String]) -> Vec<Found> {
        let Some((name, rest)) = rest.split_first() else {
            return vec![Found::direct(Target::Module(module))];
        };
        let found = self.names(viewer, module, name);
        if found.is_empty() {
            let name = name.clone();
            let names = [std::slice::from_ref(&name), rest].concat();
            return vec![Found::direct(match self.modules.all[module].expands {
                true => Target::Item { module, names },
                false => Target::Missing { module, name },
            })];
        }
        found.into_iter().flat_map(|found| self.extend(viewer, found, rest)).collect()
    }

    fn extend(&mut self, viewer: usize, start: Found, rest: &[String]) -> Vec<Found> {
        if rest.is_empty() {
            return vec![start];
        }
        let longer = |names: Vec<String>| [&names[..], rest].concat();
        let found = match start.target {
            Target::Module(module) => self.descend(viewer, module, rest),
            Target::External(names) => vec![Found::direct(Target::External(longer(names)))],
            Target::Item { module, names } if self.is_type(module, &names[0]) => {
                vec![Found::direct(Target::Item { module, names: longer(names) })]
            }
            Target::Item { .. } => Vec::new(),
            missing @ Target::Missing { .. } => vec![Found::direct(missing)],
        };
        let through =
            |found: Found| Found { through: [&start.through[..], &found.through].concat(), ..found };
        found.into_iter().map(through).collect()
    }

    fn is_type(&self, module: usize, name: &str) -> bool {
        let mut named =
            self.modules.all[module].definitions.iter().filter(|item| item.name == name).peekable();
        named.peek().is_none() || named.any(|item| matches!(item.kind, Kind::Type(_)))
    }

    /// Meaning of `name` in a module, as far as `viewer` may see it: private imports only from inside.
    fn names(&mut self, viewer: usize, module: usize, name: &str) -> Vec<Found> {
        let modules = self.modules;
        let this = &modules.all[module];
        let parent = |&at: &usize| modules.all[at].parent;
        let is_inside = iter::successors(Some(viewer), parent).any(|around| around == module);
        let children = this.children.iter().filter(|(child, _)| child == name);
        let mut found: Vec<Found> =
            children.map(|&(_, child)| Found::direct(Target::Module(child))).collect();
        if this.definitions.iter().any(|item| item.name == name) {
            found.push(Found::direct(Target::Item { module, names: vec![name.to_owned()] }));
        }
        for (number, import) in this.imports.iter().enumerate() {
            if import.name.as_deref() == Some(name) && (is_inside || import.is_public) {
                found.extend(self.follow(module, number, name, false));
            }
        }
        if !found.is_empty() {
            return found;
        }
        for (number, import) in this.imports.iter().enumerate() {
            if import.name.is_none() && (is_inside || import.is_public) {
                found.extend(self.follow(module, number, name, true));
            }
        }
        if found.iter().any(Found::is_ours) {
            found.retain(Found::is_ours);
        }
        found
    }

    /// Meaning of `name` by one import of `module`.
    fn follow(&mut self, module: usize, number: usize, name: &str, is_glob: bool) -> Vec<Found> {
        let key = (module, number, name.to_owned());
        if self.busy.contains(&key) {
            return Vec::new();
        }
        self.busy.push(key);
        let modules = self.modules;
        let mut found = self.path(module, &modules.all[module].imports[number].path);
        if is_glob {
            found = found.into_iter().flat_map(|found| self.inside(module, found, name)).collect();
        }
        self.busy.pop();
        found.iter_mut().for_each(|found| found.through.insert(0, module));
        found
    }

    /// Meaning of `name` by a glob over `of`.
    fn inside(&mut self, viewer: usize, of: Found, name: &str) -> Vec<Found> {
        let found = match of.target {
            Target::Module(module) => self.names(viewer, module, name),
            Target::Item { module, mut names } => {
                let has = |kind: &Kind| matches!(kind, Kind::Type(all) if all.iter().any(|one| one == name));
                let mut items = self.modules.all[module].definitions.iter();
                if names.len() > 1 || !items.any(|item| item.name == names[0] && has(&item.kind)) {
                    return Vec::new();
                }
                names.push(name.to_owned());
                vec![Found::direct(Target::Item { module, names })]
            }
            Target::External(names) => {
                let names = [&names[..], &[name.to_owned()]].concat();
                vec![Found::direct(Target::External(names))]
            }
            Target::Missing { .. } => Vec::new(),
        };
        let through = |found: Found| Found { through: [&of.through[..], &found.through].concat(), ..found };
        found.into_iter().map(through).collect()
    }
}
