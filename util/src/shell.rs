//! Text as a word of a shell command that a user may paste.

/// `text` as one word: unchanged where it is plain, else in single quotes.
pub fn word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_pasted() {
        assert_eq!(word("runs/a-2/adapter"), "runs/a-2/adapter");
        assert_eq!(word("my run's"), r"'my run'\''s'");
        assert_eq!(word("a;b"), "'a;b'");
        assert_eq!(word(""), "''");
    }
}
