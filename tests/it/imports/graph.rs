//! The graph of imports: arrows between files and between rooms, and the files that can be reached along them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{
    modules::{Files, Module, Modules},
    resolve::Target,
    visit::{Mention, Mentions},
};

pub struct Graph {
    pub modules: Modules,
    pub mentions: Mentions,
}

/// A path of one module that means something in another.
pub struct Arrow<'a> {
    pub from: &'a Module,
    pub to: &'a Module,
    pub line: usize,
    /// The path as it is written.
    pub path: String,
    /// `to` only hands on, by a re-export, what the path means and another room defines.
    pub through: bool,
}

impl Arrow<'_> {
    /// `file:line: room -> room: path (file that defines it)`.
    pub fn text(&self) -> String {
        let (from, to) = (self.from.room(), self.to.room());
        let does = if self.through { "re-exported by" } else { "in" };
        format!("{}:{}: {from} -> {to}: {} ({does} {})", self.from.file, self.line, self.path, self.to.file)
    }
}

/// Pairs of importing and imported node, each with one arrow as an example.
pub type Steps = BTreeMap<String, BTreeMap<String, String>>;

impl Graph {
    pub fn read(files: &Files) -> Self {
        let (mut modules, bodies) = Modules::read(files);
        let mentions = Mentions::read(&mut modules, &bodies);
        Self { modules, mentions }
    }

    pub fn module(&self, index: usize) -> &Module {
        &self.modules.all[index]
    }

    /// Meanings of a mention: all names from the crate down, and the module if it is ours.
    pub fn meanings<'a>(
        &'a self,
        mention: &'a Mention,
    ) -> impl Iterator<Item = (Vec<String>, Option<&'a Module>)> {
        mention.found.iter().map(|found| {
            let (module, rest) = match &found.target {
                Target::External(names) => (None, names.clone()),
                Target::Module(module) => (Some(*module), Vec::new()),
                Target::Item { module, names } => (Some(*module), names.clone()),
                Target::Missing { module, name } => (Some(*module), vec![name.clone()]),
            };
            let module = module.map(|module| self.module(module));
            let start = module.map_or(&[][..], |module| &module.path);
            let glob = mention.is_glob.then(|| "*".to_owned());
            (start.iter().cloned().chain(rest).chain(glob).collect(), module)
        })
    }

    /// All arrows between different files, in the order of the files.
    pub fn arrows(&self) -> Vec<Arrow<'_>> {
        let mut arrows = Vec::new();
        for mention in &self.mentions.paths {
            let from = self.module(mention.from);
            let path = mention.text();
            let mut add = |to: &usize, through| {
                let to = self.module(*to);
                if to.file != from.file {
                    arrows.push(Arrow { from, to, line: mention.line, path: path.clone(), through });
                }
            };
            for found in &mention.found {
                let to = match &found.target {
                    Target::Module(to) | Target::Item { module: to, .. } => Some(to),
                    Target::Missing { module: to, .. } => Some(to),
                    Target::External(_) => None,
                };
                to.into_iter().for_each(|to| add(to, false));
                let room = to.map(|to| self.module(*to).room());
                let others = found.through.iter().filter(|other| Some(self.module(**other).room()) != room);
                others.for_each(|other| add(other, true));
            }
        }
        arrows.sort_by(|a, b| (&a.from.file, a.line).cmp(&(&b.from.file, b.line)));
        arrows
    }

    /// The first arrow from each node to each other one, where `node` names the node of a module, if any.
    pub fn steps(&self, node: impl Fn(&Module) -> Option<String>, through: bool) -> Steps {
        let mut steps = Steps::new();
        for arrow in self.arrows().iter().filter(|arrow| through || !arrow.through) {
            if let (Some(from), Some(to)) = (node(arrow.from), node(arrow.to))
                && from != to
            {
                steps.entry(from).or_default().entry(to).or_insert_with(|| arrow.text());
            }
        }
        steps
    }
}

/// For each node that a start reaches and for which `is_end` holds: the arrows on the shortest way.
pub fn ways(steps: &Steps, starts: &BTreeSet<String>, is_end: impl Fn(&str) -> bool) -> Vec<Vec<String>> {
    let mut came: BTreeMap<&str, Option<&str>> = starts.iter().map(|start| (&start[..], None)).collect();
    let mut queue: VecDeque<&str> = starts.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    while let Some(node) = queue.pop_front() {
        if is_end(node) {
            let mut way = Vec::new();
            let mut at = node;
            while let Some(Some(before)) = came.get(at) {
                way.push(steps[*before][at].clone());
                at = before;
            }
            way.reverse();
            found.push(way);
            continue;
        }
        for next in steps.get(node).into_iter().flat_map(BTreeMap::keys) {
            if !came.contains_key(&next[..]) {
                came.insert(next, Some(node));
                queue.push_back(next);
            }
        }
    }
    found
}

/// The cycles of a graph: the arrows of a shortest one for each group of nodes that reach one another.
pub fn cycles(steps: &Steps) -> Vec<Vec<String>> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut found = Vec::new();
    for (start, first) in steps {
        if seen.contains(&start[..]) {
            continue;
        }
        let back = first.keys().filter_map(|next| {
            let way = ways(steps, &BTreeSet::from([next.clone()]), |node| node == start).pop()?;
            Some([vec![first[next].clone()], way].concat())
        });
        let Some(cycle) = back.min_by_key(Vec::len) else { continue };
        found.push(cycle);
        let reaches = |from: &str, to: &str| {
            let starts = BTreeSet::from([from.to_owned()]);
            !ways(steps, &starts, |node| node == to).is_empty()
        };
        seen.extend(
            steps.keys().map(String::as_str).filter(|other| reaches(start, other) && reaches(other, start)),
        );
    }
    found
}
