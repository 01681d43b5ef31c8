//! Weights of files: how often the rows of each come in an epoch.

use serde::{Deserialize, Serialize};

/// Where the rows of each file end, and the weight of the file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Weights(Vec<(usize, f64)>);

impl Weights {
    /// Whether no file was added.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a file whose rows end before row `end`.
    pub(super) fn push(&mut self, end: usize, weight: f64) {
        self.0.push((end, weight));
    }

    /// How often row `row` comes: row i of a file of weight w comes floor((i + 1) w) - floor(i w) times, so that a file
    /// of n rows gives floor(n w), evenly over the file.
    pub(super) fn times(&self, row: usize) -> usize {
        let file = self.0.partition_point(|&(end, _)| end <= row);
        let first = file.checked_sub(1).map_or(0, |before| self.0[before].0);
        let Some(&(_, weight)) = self.0.get(file) else { return 0 };
        let until = |rows: usize| (rows as f64 * weight).floor() as usize;
        until(row - first + 1) - until(row - first)
    }

    /// `rows`, ascending, each as often as it comes.
    pub(super) fn repeated(&self, rows: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
        rows.flat_map(|row| std::iter::repeat_n(row, self.times(row)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_as_often_as_their_file_weighs() {
        let mut weights = Weights::default();
        for (end, weight) in [(3, 2.0), (3, 5.0), (7, 0.5), (9, 1.0), (13, 1.5)] {
            weights.push(end, weight);
        }
        let rows: Vec<usize> = weights.repeated(0..13).collect();
        assert_eq!(rows, [0, 0, 1, 1, 2, 2, 4, 6, 7, 8, 9, 10, 10, 11, 12, 12]);
        assert_eq!(weights.times(13), 0);
    }
}
