//! A micro-batch as the model takes it: rows of tokens of one length, with targets and documents.

use std::ops::Range;

/// Marks a position without loss, in labels as in targets (the value PyTorch ignores).
pub const NO_LOSS: i32 = -100;

/// One row before batching, owned; all vectors have the row's length `t`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Row {
    /// Token ids, `(t)`.
    pub ids: Vec<u32>,
    /// Shifted targets, `(t)`: the id that position `i` should predict (`ids[i + 1]`), or [`NO_LOSS`].
    pub targets: Vec<i32>,
    /// For every position the index of the first position of its document, `(t)`; all zero
    /// without packing. Attention sees `starts[i]..=i`; the position embedding is `i - starts[i]`.
    pub starts: Vec<u32>,
}

impl Row {
    /// Appends a document, after virtual tokens of the ids `prompt`, which its positions count. The last one of them
    /// has the target `first`: the document's first token, or [`NO_LOSS`]. The others have none.
    pub fn push(&mut self, prompt: Range<u32>, first: i32, ids: &[u32], targets: &[i32]) {
        let start = self.ids.len() as u32;
        if !prompt.is_empty() {
            self.targets.extend(std::iter::repeat_n(NO_LOSS, prompt.len() - 1).chain([first]));
        }
        self.ids.extend(prompt);
        self.ids.extend_from_slice(ids);
        self.targets.extend_from_slice(targets);
        self.starts.resize(self.ids.len(), start);
    }

    /// The same row, borrowed.
    pub fn view(&self) -> RowRef<'_> {
        RowRef { ids: &self.ids, targets: &self.targets, starts: &self.starts }
    }
}

/// A [`Row`] that borrows its numbers; all slices have the row's own length `t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRef<'a> {
    /// Token ids, `(t)`.
    pub ids: &'a [u32],
    /// Shifted targets, `(t)`, as in [`Row`].
    pub targets: &'a [i32],
    /// For every position the first position of its document, `(t)`, as in [`Row`].
    pub starts: &'a [u32],
}

impl<'a> RowRef<'a> {
    /// Its ids but those of virtual tokens, which begin at `vocab`.
    pub fn text(self, vocab: usize) -> impl Iterator<Item = u32> + 'a {
        self.ids.iter().copied().filter(move |&id| (id as usize) < vocab)
    }
}

impl<'a> From<&'a Row> for RowRef<'a> {
    fn from(row: &'a Row) -> Self {
        row.view()
    }
}

/// `b` rows padded to one length `t`; every vector is `(b, t)` in row-major order.
///
/// Padding is at the end of a row, with id 0 and target [`NO_LOSS`]: causal attention keeps it
/// from every real token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number `b` of rows.
    pub rows: usize,
    /// Length `t` of every row after padding.
    pub seq_len: usize,
    /// Token ids; 0 in padding.
    pub ids: Vec<u32>,
    /// Shifted targets; [`NO_LOSS`] where nothing is supervised.
    pub targets: Vec<i32>,
    /// Position inside the document, the row of the position embedding.
    pub positions: Vec<u32>,
    /// Index within the row of the first token that attention sees.
    pub starts: Vec<u32>,
}

impl Batch {
    /// Pads `rows`, each a [`RowRef`] or a `&Row`, to the longest of them.
    pub fn new<'a, R: Into<RowRef<'a>> + Copy>(rows: &[R]) -> Self {
        let rows = rows.iter().map(|&row| row.into());
        let seq_len = rows.clone().map(|row| row.ids.len()).max().unwrap_or(0);
        let cells = rows.len() * seq_len;
        let mut batch = Self {
            rows: rows.len(),
            seq_len,
            ids: Vec::with_capacity(cells),
            targets: Vec::with_capacity(cells),
            positions: Vec::with_capacity(cells),
            starts: Vec::with_capacity(cells),
        };
        for row in rows {
            batch.push(row);
        }
        batch
    }

    /// Number of positions with a loss.
    pub fn supervised(&self) -> usize {
        self.targets.iter().filter(|&&target| target != NO_LOSS).count()
    }

    fn push(&mut self, row: RowRef) {
        let padding = self.seq_len - row.ids.len();
        self.ids.extend(row.ids.iter().copied().chain(std::iter::repeat_n(0, padding)));
        self.targets.extend(row.targets.iter().copied().chain(std::iter::repeat_n(NO_LOSS, padding)));
        self.positions.extend((0u32..).zip(row.starts).map(|(index, start)| index - start));
        self.positions.extend(std::iter::repeat_n(0, padding));
        self.starts.extend(row.starts.iter().copied());
        // A padded query must see at least one key: its own.
        self.starts.extend((row.ids.len()..self.seq_len).map(|index| index as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pads_to_the_longest_row_and_restarts_positions() {
        let packed = Row { ids: vec![5, 6, 7, 8], targets: vec![6, NO_LOSS, 8, 1], starts: vec![0, 0, 2, 2] };
        let short = Row { ids: vec![9], targets: vec![2], starts: vec![0] };
        let batch = Batch::new(&[&packed, &short]);
        assert_eq!(batch, Batch::new(&[packed.view(), short.view()]));
        assert_eq!((batch.rows, batch.seq_len, batch.supervised()), (2, 4, 4));
        assert_eq!(batch.ids, [5, 6, 7, 8, 9, 0, 0, 0]);
        assert_eq!(batch.positions, [0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(batch.starts, [0, 0, 2, 2, 0, 1, 2, 3]);
        assert_eq!(batch.targets[4..], [2, NO_LOSS, NO_LOSS, NO_LOSS]);
    }
}
