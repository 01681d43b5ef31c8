//! Documents to rows: windows that do not overlap, and packing.

use super::batch::{NO_LOSS, Row};
use super::documents::Document;

/// Builds rows of at most `seq_len` input positions, in the order of the documents.
///
/// A document longer than a row is cut into windows; the target of a window's last position is the
/// first token of the next window, so that no target is lost at the border. Without packing every
/// window is a row of its own. With packing the next window joins the open row if all of it fits,
/// else it opens a new one (next-fit: the order stays, and a window is never split further, so that
/// the packed loss is the loss of the same windows alone). A window without any target is left out.
#[derive(Debug)]
pub struct RowBuilder {
    seq_len: usize,
    pack: bool,
    rows: Vec<Row>,
    documents: usize,
    dropped: usize,
}

impl RowBuilder {
    /// A builder of rows of `seq_len` positions, at least 1.
    pub fn new(seq_len: usize, pack: bool) -> Self {
        Self { seq_len: seq_len.max(1), pack, rows: Vec::new(), documents: 0, dropped: 0 }
    }

    /// Adds the windows of `document`; one without inputs counts as dropped.
    pub fn push(&mut self, document: &Document) {
        let before = self.dropped;
        let inputs = document.ids.chunks(self.seq_len);
        let windows = inputs.len().max(1);
        for (ids, targets) in inputs.zip(document.targets.chunks(self.seq_len)) {
            self.window(ids, targets);
        }
        if document.ids.is_empty() {
            self.dropped += 1;
        }
        self.documents += usize::from(self.dropped - before < windows);
    }

    /// The rows, the number of documents in them, and the number of windows left out.
    pub fn finish(self) -> (Vec<Row>, usize, usize) {
        (self.rows, self.documents, self.dropped)
    }

    fn window(&mut self, ids: &[u32], targets: &[i32]) {
        if targets.iter().all(|&target| target == NO_LOSS) {
            self.dropped += 1;
            return;
        }
        let room = |row: &&mut Row| self.pack && row.ids.len() + ids.len() <= self.seq_len;
        if let Some(row) = self.rows.last_mut().filter(room) {
            append(row, ids, targets);
        } else {
            let mut row = Row { ids: Vec::new(), targets: Vec::new(), starts: Vec::new() };
            append(&mut row, ids, targets);
            self.rows.push(row);
        }
    }
}

fn append(row: &mut Row, ids: &[u32], targets: &[i32]) {
    let start = row.ids.len() as u32;
    row.ids.extend_from_slice(ids);
    row.targets.extend_from_slice(targets);
    row.starts.resize(row.ids.len(), start);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document of the ids `first..first + length` that predicts the next id everywhere.
    fn document(first: u32, length: u32) -> Document {
        let ids: Vec<u32> = (first..first + length).collect();
        let targets = ids.iter().map(|&id| id as i32 + 1).collect();
        Document { ids, targets, cut: false }
    }

    fn build(documents: &[Document], seq_len: usize, pack: bool) -> (Vec<Row>, usize, usize) {
        let mut builder = RowBuilder::new(seq_len, pack);
        documents.iter().for_each(|document| builder.push(document));
        builder.finish()
    }

    fn row(ids: &[u32], targets: &[i32], starts: &[u32]) -> Row {
        Row { ids: ids.to_vec(), targets: targets.to_vec(), starts: starts.to_vec() }
    }

    #[test]
    fn windows_do_not_overlap_and_lose_no_target() {
        let (rows, documents, dropped) = build(&[document(10, 7)], 3, false);
        let expected = [
            row(&[10, 11, 12], &[11, 12, 13], &[0; 3]),
            row(&[13, 14, 15], &[14, 15, 16], &[0; 3]),
            row(&[16], &[17], &[0]),
        ];
        assert_eq!(rows, expected);
        assert_eq!((documents, dropped), (1, 0));
    }

    #[test]
    fn a_document_of_exactly_whole_windows_leaves_no_empty_row() {
        for pack in [false, true] {
            let (rows, ..) = build(&[document(0, 6)], 3, pack);
            assert_eq!(rows.iter().map(|row| row.ids.len()).collect::<Vec<_>>(), [3, 3]);
        }
    }

    #[test]
    fn without_packing_a_document_is_a_row() {
        let (rows, ..) = build(&[document(0, 1), document(5, 2)], 4, false);
        assert_eq!(rows, [row(&[0], &[1], &[0]), row(&[5, 6], &[6, 7], &[0, 0])]);
    }

    #[test]
    fn packing_keeps_order_starts_and_targets_apart() {
        let (rows, documents, _) =
            build(&[document(0, 2), document(5, 2), document(8, 1), document(9, 1)], 4, true);
        // 1 -> 2, never 1 -> 5: a target belongs to its own document.
        let expected = [row(&[0, 1, 5, 6], &[1, 2, 6, 7], &[0, 0, 2, 2]), row(&[8, 9], &[9, 10], &[0, 1])];
        assert_eq!(rows, expected);
        assert_eq!(documents, 4);
    }

    #[test]
    fn a_window_that_does_not_fit_opens_a_row() {
        let (rows, ..) = build(&[document(0, 3), document(10, 2), document(20, 1)], 4, true);
        assert_eq!(rows[0].ids, [0, 1, 2], "next-fit never goes back to fill");
        assert_eq!((&rows[1].ids[..], &rows[1].starts[..]), (&[10, 11, 20][..], &[0, 0, 2][..]));
    }

    #[test]
    fn the_rest_of_a_long_document_shares_its_row() {
        let (rows, ..) = build(&[document(0, 5), document(10, 2)], 4, true);
        assert_eq!(rows[1], row(&[4, 10, 11], &[5, 11, 12], &[0, 1, 1]));
    }

    #[test]
    fn windows_without_target_are_dropped_and_counted() {
        let mut long = document(0, 6);
        long.targets[..3].fill(NO_LOSS);
        let silent = Document { targets: vec![NO_LOSS; 2], ..document(7, 2) };
        let none = document(0, 0);
        for pack in [false, true] {
            let (rows, documents, dropped) = build(&[silent.clone(), long.clone(), none.clone()], 3, pack);
            assert_eq!(rows, [row(&[3, 4, 5], &[4, 5, 6], &[0; 3])]);
            assert_eq!((documents, dropped), (1, 3));
        }
    }

    #[test]
    fn packed_and_unpacked_rows_hold_the_same_windows() {
        let documents: Vec<_> = (0..40u32).map(|index| document(100 * index, index * 7 % 12)).collect();
        let windows = |pack| {
            let mut windows = Vec::new();
            for row in build(&documents, 8, pack).0 {
                assert!(row.ids.len() <= 8);
                let pairs = row.starts.iter().zip(row.ids.iter().zip(&row.targets));
                for (index, (&start, (&id, &target))) in pairs.enumerate() {
                    windows.push((index as u32 - start, id, target));
                }
            }
            windows
        };
        assert_eq!(windows(true), windows(false));
        assert!(build(&documents, 8, true).0.len() < build(&documents, 8, false).0.len());
    }
}
