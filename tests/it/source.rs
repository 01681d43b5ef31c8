//! Rust source as the rules of `tidy` see it: code apart from comments, strings and test parts.

/// A Rust file of the tree.
pub struct Source {
    /// Path from the root of the tree, with forward slashes.
    pub path: String,
    pub text: String,
    /// `text` line by line, without comments, strings and test parts.
    pub code: Vec<String>,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        let bare = without_comments_and_strings(text);
        let code = if is_test_file(path) { String::new() } else { without_tests(&bare) };
        Self { path: path.to_owned(), text: text.to_owned(), code: code.lines().map(str::to_owned).collect() }
    }

    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.code.iter().map(String::as_str))
    }

    pub fn is_in(&self, folders: &[&str]) -> bool {
        folders.iter().any(|folder| self.path.starts_with(folder))
    }

    /// `path:line: what` for each line of code that `breaks`.
    pub fn broken(&self, breaks: impl Fn(&str) -> bool) -> Vec<String> {
        let lines = self.lines().filter(|(_, line)| breaks(line));
        lines.map(|(number, line)| format!("{}:{number}: {}", self.path, line.trim())).collect()
    }
}

/// Files that only tests compile; `test_files_are_declared_after_cfg_test` holds them to it.
pub fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.starts_with("tests/") || matches!(name, "tests.rs" | "testing.rs") || name.ends_with("_tests.rs")
}

/// The same text with comments and the contents of strings turned to blanks; lines keep their numbers.
pub fn without_comments_and_strings(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped(&chars, at);
        match end {
            None => {
                out.push(chars[at]);
                at += 1;
            }
            Some(end) => {
                let blank = |&c: &char| if c == '\n' { '\n' } else { ' ' };
                out.extend(chars[at..end].iter().map(blank));
                at = end;
            }
        }
    }
    out
}

/// The end of the comment, string or character that begins at `at`.
fn skipped(chars: &[char], at: usize) -> Option<usize> {
    let next = |offset: usize| chars.get(at + offset).copied();
    let until = |from: usize, stop: &str| {
        let stop: Vec<char> = stop.chars().collect();
        let found = (from..chars.len()).find(|&i| chars[i..].starts_with(&stop));
        found.map_or(chars.len(), |found| found + stop.len())
    };
    let inside_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match chars[at] {
        '/' if next(1) == Some('/') => Some(at + chars[at..].iter().take_while(|&&c| c != '\n').count()),
        '/' if next(1) == Some('*') => Some(block_comment(chars, at)),
        'r' if !inside_word || chars[at - 1] == 'b' => {
            let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
            (next(1 + hashes) == Some('"'))
                .then(|| until(at + 2 + hashes, &format!("\"{}", "#".repeat(hashes))))
        }
        '"' => Some(quoted(chars, at)),
        '\'' if next(1) == Some('\\') => Some(until(at + 3, "'")),
        '\'' if next(2) == Some('\'') => Some(at + 3),
        _ => None,
    }
}

fn quoted(chars: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

fn block_comment(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

/// Blanks out each item after `#[cfg(test)]`: up to its `;` or its closing brace.
pub fn without_tests(bare: &str) -> String {
    let mut rest = bare;
    let mut out = String::with_capacity(bare.len());
    while let Some(at) = rest.find("#[cfg(test)]") {
        out += &rest[..at];
        let (item, behind) = rest[at..].split_at(end_of_item(&rest[at..]));
        out.extend(item.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = behind;
    }
    out + rest
}

fn end_of_item(text: &str) -> usize {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && c == '}' {
                    return at + 1;
                }
            }
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The words of a line: runs of letters, digits and underscores.
pub fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The parts of a word in snake_case or CamelCase, in lower case: `TrainSet` gives train, set.
pub fn parts_of(word: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut before = '_';
    for c in word.chars() {
        let begins = before == '_' || (c.is_uppercase() && before.is_lowercase());
        if c != '_' {
            if begins {
                parts.push(String::new());
            }
            parts.last_mut().into_iter().for_each(|part| part.extend(c.to_lowercase()));
        }
        before = c;
    }
    parts
}

#[test]
fn only_comments_strings_and_tests_are_blanked() {
    let text = "let a = 'x'; // y\nlet b: &'a str = \"q\\\"r\"; /* s\n/* t */ u */ v();\nlet c = r#\"w\"#;\n";
    let bare = without_comments_and_strings(text);
    let seen: Vec<&str> = words(&bare).collect();
    assert_eq!(seen, ["let", "a", "let", "b", "a", "str", "v", "let", "c"]);
    assert_eq!(bare.lines().count(), text.lines().count());
    let tests = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { [1; 2]; }\n}\nfn c() {}\n";
    assert_eq!(words(&without_tests(tests)).collect::<Vec<_>>(), ["fn", "a", "fn", "c"]);
    assert_eq!(parts_of("TrainStep_of2GPT"), ["train", "step", "of2gpt"]);
}
