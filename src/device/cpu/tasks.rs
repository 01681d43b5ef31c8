//! Work of the CPU sides cut into tasks.
//!
//! No two tasks add to the same element, and the order of an element's sum does not depend on the cuts: either the
//! cuts follow from shapes alone, or the position of a row or column in a task changes no bit of it. So results do
//! not depend on the number of threads.

use rayon::prelude::*;

/// Runs `task` for every index below `count`, on the global pool when there is more than one.
pub fn each(count: usize, task: impl Fn(usize) + Send + Sync) {
    if count <= 1 {
        (0..count).for_each(task);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// `count` cut into equal parts of at most `most`, as (parts, length of a part); the length is a
/// multiple of 16 unless one part holds all.
pub fn parts(count: usize, most: usize) -> (usize, usize) {
    if count <= most {
        return (1, count.max(1));
    }
    let pieces = count.div_ceil(most).next_multiple_of(2);
    let length = count.div_ceil(pieces).next_multiple_of(16);
    (count.div_ceil(length), length)
}

/// `count` cut for every thread into equal parts, multiples of `unit`: (parts, length of a part). Only for work whose
/// results do not depend on where the cuts are.
pub fn cut(count: usize, unit: usize) -> (usize, usize) {
    let length = count.div_ceil(rayon::current_num_threads()).next_multiple_of(unit).max(unit);
    (count.div_ceil(length), length)
}

/// As [`parts`], and one for every thread where these are more, in multiples of `unit`. Only for work whose results
/// do not depend on where the cuts are.
pub fn shares(count: usize, most: usize, unit: usize) -> (usize, usize) {
    let (tasks, length) = parts(count, most);
    if tasks >= rayon::current_num_threads() { (tasks, length) } else { cut(count, unit) }
}

/// Rows of a product that take the time of widening its panel: 2% of 2048 rows, by `perf record`.
const WIDENING: usize = 40;

/// `n` rows of each of `tasks` panels cut for all threads: (bands, rows of a band), the latter a multiple of `unit`.
/// Each band widens its panel again; the number of bands with the shortest predicted time is taken. Only for work
/// whose results do not depend on where the cuts are.
pub fn bands(tasks: usize, n: usize, unit: usize) -> (usize, usize) {
    let threads = rayon::current_num_threads();
    let time = |bands: usize| (tasks * bands).div_ceil(threads) * (n.div_ceil(bands) + WIDENING);
    let bands = (1..=threads).min_by_key(|&bands| time(bands)).unwrap_or(1);
    let height = n.div_ceil(bands).next_multiple_of(unit).max(unit);
    (n.div_ceil(height).max(1), height)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::with_threads;

    #[test]
    fn bands_end_soonest() {
        for (threads, tasks, n, expected) in [
            (1, 4, 2048, 1),
            (2, 4, 2048, 1),
            (2, 1, 2048, 2),
            (16, 4, 2048, 4),
            (16, 262, 512, 1),
            (16, 4, 200, 4),
            // 8 rows each, which are whole tiles of 6.
            (16, 4, 30, 3),
            (16, 3, 0, 1),
            // 12 tasks leave a quarter of 16 threads idle, 48 none.
            (16, 12, 2048, 4),
            // 5 tasks and 3 threads: 10 of 12, 15 of 15.
            (3, 5, 2048, 3),
        ] {
            let (bands, height) = with_threads(threads, || bands(tasks, n, 6));
            assert_eq!(bands, expected, "{threads} threads, {tasks} tasks, {n} rows");
            assert!(
                bands * height >= n && height % 6 == 0 && (bands - 1) * height <= n,
                "{n}: {bands} x {height}"
            );
        }
    }

    #[test]
    fn shares_are_as_many_as_threads() {
        assert_eq!(with_threads(2, || shares(768, 256, 64)), parts(768, 256));
        assert_eq!(with_threads(16, || shares(768, 256, 64)), (12, 64));
        assert_eq!(with_threads(6, || shares(768, 256, 64)), (6, 128));
    }

    #[test]
    fn parts_cover_everything() {
        for count in [1, 15, 192, 193, 768, 1600, 2304, 50257] {
            let (pieces, length) = parts(count, 256);
            assert!(
                pieces * length >= count && (pieces - 1) * length < count,
                "{count}: {pieces} x {length}"
            );
        }
    }
}
