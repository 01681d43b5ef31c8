//! Numbers and hashes in sentences for people.

/// A number with the word that is counted: `1 step`, `2 steps`.
pub fn count(number: impl Into<u64>, word: &str) -> String {
    counted(number.into(), word)
}

/// As [`count`], of a number of things in memory.
pub fn count_of(number: usize, word: &str) -> String {
    counted(number as u64, word)
}

fn counted(number: u64, word: &str) -> String {
    // `entries`, but `days`.
    let stem = word.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u']));
    match (number, stem) {
        (1, _) => format!("1 {word}"),
        (_, Some(stem)) => format!("{number} {stem}ies"),
        (_, None) => format!("{number} {word}s"),
    }
}

/// Digits of a hash that tell two apart.
const DIGITS: usize = 12;

/// A hash for people: its digits, those after the last colon, cut to twelve.
pub fn short_hash(hash: &str) -> &str {
    let start = hash.rfind(':').map_or(0, |colon| colon + 1);
    hash.get(..start + DIGITS).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!(
            [count(0u64, "row"), count(1u64, "row"), count_of(2, "row")],
            ["0 rows", "1 row", "2 rows"]
        );
        assert_eq!([count(1u64, "entry"), count(2u64, "entry")], ["1 entry", "2 entries"]);
        assert_eq!(count(3u64, "day"), "3 days");
    }

    #[test]
    fn hashes_are_cut_to_twelve_digits() {
        assert_eq!(short_hash("engraft1:blake3:0123456789abcdef"), "engraft1:blake3:0123456789ab");
        assert_eq!(short_hash("0123456789abcdef"), "0123456789ab");
        assert_eq!(short_hash("a:b"), "a:b");
    }
}
