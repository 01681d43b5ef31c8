//! Finds paths among the tokens of macros and attributes, which are not parsed.

use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};

/// A path found among tokens.
pub struct Written {
    pub path: Vec<String>,
    pub line: usize,
    /// It stands in the braces of a `use`.
    pub is_use: bool,
}

/// Paths and features that tokens name.
#[derive(Default)]
pub struct Named {
    pub paths: Vec<Written>,
    /// Line and feature of each `feature = ".."`.
    pub features: Vec<(usize, String)>,
}

impl Named {
    pub fn read(stream: &TokenStream) -> Self {
        let mut named = Self::default();
        named.add(stream, &[]);
        named
    }

    /// Adds what `stream` names; `prefix` is the path before the braces of a `use`.
    fn add(&mut self, stream: &TokenStream, prefix: &[String]) {
        let tokens = Tokens(stream.clone().into_iter().collect());
        let mut at = 0;
        while let Some(token) = tokens.0.get(at) {
            at = match token {
                TokenTree::Ident(ident) if ident == "feature" && tokens.is(at + 1, '=') => {
                    if let Some(TokenTree::Literal(text)) = tokens.0.get(at + 2) {
                        let feature = text.to_string().trim_matches('"').to_owned();
                        self.features.push((ident.span().start().line, feature));
                    }
                    at + 3
                }
                TokenTree::Ident(ident) => self.add_path(&tokens, at, ident, prefix),
                TokenTree::Group(group) => {
                    self.add(&group.stream(), &[]);
                    at + 1
                }
                TokenTree::Literal(_) | TokenTree::Punct(_) => at + 1,
            };
        }
    }

    /// Adds the path that begins with `ident` at `at`; returns where it ends.
    fn add_path(&mut self, tokens: &Tokens, at: usize, ident: &Ident, prefix: &[String]) -> usize {
        let Some(begin) = tokens.begin(at, ident) else { return at + 1 };
        let mut path = prefix.to_vec();
        path.extend(begin.map(str::to_owned));
        // `{self}` is the module itself.
        if prefix.is_empty() || ident != "self" {
            path.push(ident.to_string());
        }
        let mut end = at + 1;
        while tokens.colons(end)
            && let Some(TokenTree::Ident(next)) = tokens.0.get(end + 2)
        {
            path.push(next.to_string());
            end += 3;
        }
        if tokens.colons(end)
            && let Some(TokenTree::Group(group)) = tokens.0.get(end + 2)
            && group.delimiter() == Delimiter::Brace
        {
            self.add(&group.stream(), &path);
            return end + 3;
        }
        // Without a prefix, what comes after `as` is a type.
        if prefix.is_empty() || !tokens.is_word(at.wrapping_sub(1), "as") {
            self.paths.push(Written { path, line: ident.span().start().line, is_use: !prefix.is_empty() });
        }
        end
    }
}

struct Tokens(Vec<TokenTree>);

impl Tokens {
    fn is(&self, at: usize, wanted: char) -> bool {
        matches!(self.0.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
    }

    fn is_word(&self, at: usize, wanted: &str) -> bool {
        matches!(self.0.get(at), Some(TokenTree::Ident(ident)) if ident == wanted)
    }

    fn colons(&self, at: usize) -> bool {
        self.is(at, ':') && self.is(at + 1, ':')
    }

    /// The start of a path before `ident` at `at`, empty or `::`; `None` where no path begins.
    fn begin(&self, at: usize, ident: &Ident) -> Option<Option<&'static str>> {
        let before = |back: usize, wanted| at >= back && self.is(at - back, wanted);
        let is_keyword = syn::parse_str::<syn::Ident>(&ident.to_string()).is_err();
        let is_start = ["crate", "self", "super"].iter().any(|start| ident == start);
        let is_variable = before(1, '$') && ident != "crate";
        let is_field = before(1, '.') && !before(2, '.');
        if is_keyword && !is_start || is_variable || is_field || before(1, '\'') {
            return None;
        }
        // A path that begins with a crate; what comes after `<T>::` or `$x::` names none of ours.
        Some((before(1, ':') && before(2, ':')).then_some("::"))
    }
}
