//! Lengths and supervised tokens of rows: time depends on both.

use super::Dataset;

/// How long the rows of a data set are, and how many of their tokens have a loss.
#[derive(Debug, Clone, PartialEq)]
pub struct RowStatistics {
    /// Number of rows of each length; the index is the length in positions.
    rows_of_length: Vec<usize>,
    /// Mean number of supervised tokens of a row.
    pub supervised: f64,
}

impl RowStatistics {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows_of_length.iter().sum()
    }

    /// Counts the rows of `data`; reads their index alone.
    pub fn of(data: &Dataset) -> Self {
        let mut rows_of_length = vec![0; data.longest() + 1];
        data.rows.iter().for_each(|row| rows_of_length[row.ids.len()] += 1);
        let supervised = data.report.supervised as f64 / data.rows.len().max(1) as f64;
        Self { rows_of_length, supervised }
    }

    /// Expected length of the longest of `count` rows that are drawn at random: the length that a
    /// micro-batch is padded to. The longest is at most t with the probability `F(t)^count`, F being the
    /// share of rows that are at most t long.
    pub fn padded_length(&self, count: usize) -> f64 {
        let all = self.rows_of_length.iter().sum::<usize>().max(1) as f64;
        let (mut rows, mut below, mut expected) = (0, 0.0, 0.0);
        for (length, &count_of_length) in self.rows_of_length.iter().enumerate() {
            rows += count_of_length;
            let at_most = (rows as f64 / all).powf(count as f64);
            expected += length as f64 * (at_most - below);
            below = at_most;
        }
        expected
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Kind, load_text, testing};

    fn statistics(rows: &[(usize, usize)]) -> RowStatistics {
        let row = |&(tokens, supervised): &(usize, usize)| {
            let ids = vec![5; tokens];
            // The first label is never a target.
            let labels: Vec<i32> =
                (0..tokens).map(|at| if at > 0 && at <= supervised { 5 } else { -100 }).collect();
            format!("{{\"input_ids\":{ids:?},\"labels\":{labels:?}}}\n")
        };
        let text: String = rows.iter().map(row).collect();
        let data =
            load_text("rows.jsonl", text.as_bytes(), Kind::Jsonl, None, &testing::options(64)).unwrap();
        assert_eq!(data.rows.len(), rows.len());
        RowStatistics::of(&data)
    }

    #[test]
    fn one_row_has_the_mean_length_and_many_rows_the_longest() {
        let found = statistics(&[(11, 4), (21, 10), (21, 4), (31, 2)]);
        assert_eq!(found.supervised, 5.0);
        let lengths = [11.0, 21.0, 21.0, 31.0];
        assert!((found.padded_length(1) - 21.0).abs() < 1e-9, "{}", found.padded_length(1));
        // All pairs, by hand.
        let pairs =
            lengths.iter().flat_map(|a: &f64| lengths.iter().map(move |b| a.max(*b))).sum::<f64>() / 16.0;
        assert!((found.padded_length(2) - pairs).abs() < 1e-9, "{}", found.padded_length(2));
        assert!((found.padded_length(1000) - 31.0).abs() < 1e-9);
    }
}
