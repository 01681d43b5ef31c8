//! Documents to rows: windows that do not overlap, and packing.

use std::{ops::Range, path::Path};

use super::batch::{NO_LOSS, Row};
use super::documents::Document;
use super::store::{Rows, Writer};
use crate::error::Result;

/// Builds rows of at most `seq_len` input positions, in the order of the documents; with a prompt, virtual tokens stand
/// in front of every window, and a row has the positions of one prompt more.
///
/// A document longer than a row is cut into windows; the target of a window's last position is the
/// first token of the next window, so that no target is lost at the border. The last virtual token before the
/// first window predicts the document's first token, if that is supervised; those before other windows
/// predict nothing, so that no token is a target twice. Without packing every window is a row of its own.
/// With packing the next window joins the open row if all of it fits, else it opens a new one
/// (next-fit: the order stays, and a window is never split further, so that the packed loss is the loss of
/// the same windows alone). A window without any target is left out.
///
/// No more than a window and a row are in memory; finished rows go to the store.
#[derive(Debug)]
pub struct RowBuilder {
    seq_len: usize,
    pack: bool,
    /// Ids of the virtual tokens that a window begins with.
    prompt: Range<u32>,
    /// What the virtual tokens of the open window predict, or [`NO_LOSS`].
    first: i32,
    /// The open window of the open document.
    window: Pairs,
    /// Number of windows of the open document so far, and of those that were kept.
    windows: usize,
    kept: usize,
    row: Row,
    store: Writer,
    documents: usize,
    dropped: usize,
}

/// Ids of inputs and their targets, `(t)` each.
#[derive(Debug, Default)]
struct Pairs {
    ids: Vec<u32>,
    targets: Vec<i32>,
}

impl RowBuilder {
    /// A builder of rows of `seq_len` positions, at least 1. Rows of more than 1 MiB go to a file in
    /// `spool`.
    pub fn new(seq_len: usize, pack: bool, spool: Option<&Path>) -> Self {
        Self {
            seq_len: seq_len.max(1),
            pack,
            prompt: 0..0,
            first: NO_LOSS,
            window: Pairs::default(),
            windows: 0,
            kept: 0,
            row: Row::default(),
            store: Writer::new(spool),
            documents: 0,
            dropped: 0,
        }
    }

    /// Puts `prompt` virtual tokens, of ids `vocab` and following, in front of each window.
    pub fn with_prompt(self, vocab: usize, prompt: usize) -> Self {
        Self { prompt: vocab as u32..(vocab + prompt) as u32, ..self }
    }

    /// Puts rows of more than 1 MiB into a file in `folder` that can be kept ([`Rows::persist`]).
    pub(super) fn kept_in(self, folder: &Path) -> Self {
        Self { store: Writer::kept_in(folder), ..self }
    }

    /// Adds the windows of `document`; one without inputs counts as dropped.
    ///
    /// # Errors
    /// When the folder of the rows cannot be written.
    pub fn push(&mut self, document: &Document) -> Result<()> {
        self.begin(document.first);
        self.extend(&document.ids, &document.targets)?;
        self.end()
    }

    /// Begins a document with what virtual tokens in front of it predict, its first token or [`NO_LOSS`]. A document
    /// that is extended without this has no such target.
    pub fn begin(&mut self, first: i32) {
        self.first = first;
    }

    /// Adds the next inputs of the open document with their targets, `(t)` each, for any `t`.
    ///
    /// # Errors
    /// As [`RowBuilder::push`].
    pub fn extend(&mut self, mut ids: &[u32], mut targets: &[i32]) -> Result<()> {
        while !ids.is_empty() {
            let room = (self.seq_len - self.window.ids.len()).min(ids.len());
            self.window.ids.extend_from_slice(&ids[..room]);
            self.window.targets.extend_from_slice(&targets[..room]);
            (ids, targets) = (&ids[room..], &targets[room..]);
            if self.window.ids.len() == self.seq_len {
                self.close_window()?;
            }
        }
        Ok(())
    }

    /// Ends the open document and adds its last window.
    ///
    /// # Errors
    /// As [`RowBuilder::push`].
    pub fn end(&mut self) -> Result<()> {
        if !self.window.ids.is_empty() || self.windows == 0 {
            self.close_window()?;
        }
        self.dropped += self.windows - self.kept;
        self.documents += usize::from(self.kept > 0);
        (self.windows, self.kept) = (0, 0);
        Ok(())
    }

    /// Ends the open row, so that none holds documents of two files, and returns the number of rows so far.
    ///
    /// # Errors
    /// As [`RowBuilder::push`].
    pub(super) fn end_file(&mut self) -> Result<usize> {
        self.close_row()?;
        Ok(self.store.len())
    }

    /// The rows, the number of documents in them, and the number of windows left out.
    ///
    /// # Errors
    /// As [`RowBuilder::push`].
    pub fn finish(mut self) -> Result<(Rows, usize, usize)> {
        self.close_row()?;
        Ok((self.store.finish()?, self.documents, self.dropped))
    }

    /// Puts the window into a row, unless it is empty or nothing in it has a target.
    fn close_window(&mut self) -> Result<()> {
        self.windows += 1;
        let (first, prompt) = (std::mem::replace(&mut self.first, NO_LOSS), self.prompt.len());
        let is_target = |target: i32| target != NO_LOSS;
        let supervised = prompt > 0 && is_target(first) || self.window.targets.iter().copied().any(is_target);
        if supervised && !self.window.ids.is_empty() {
            self.kept += 1;
            // A row has room for one prompt beside `seq_len` tokens.
            let cells = prompt + self.window.ids.len();
            let fits = self.row.ids.len() + cells <= self.seq_len + prompt;
            if !self.pack || !fits {
                self.close_row()?;
            }
            self.row.push(self.prompt.clone(), first, &self.window.ids, &self.window.targets);
        }
        self.window.ids.clear();
        self.window.targets.clear();
        Ok(())
    }

    fn close_row(&mut self) -> Result<()> {
        if !self.row.ids.is_empty() {
            self.store.push(self.row.view())?;
        }
        self.row.ids.clear();
        self.row.targets.clear();
        self.row.starts.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document of the ids `first..first + length` that predicts the next id everywhere.
    fn document(first: u32, length: u32) -> Document {
        let ids: Vec<u32> = (first..first + length).collect();
        let targets = ids.iter().map(|&id| id as i32 + 1).collect();
        Document { ids, targets, first: first as i32, lost: 0 }
    }

    fn build(documents: &[Document], seq_len: usize, pack: bool) -> (Vec<Row>, usize, usize) {
        let mut builder = RowBuilder::new(seq_len, pack, None);
        documents.iter().for_each(|document| builder.push(document).unwrap());
        let (rows, documents, dropped) = builder.finish().unwrap();
        (rows.iter().map(|found| row(found.ids, found.targets, found.starts)).collect(), documents, dropped)
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

    /// Both windows of a long document have a prompt; packed, a prompt counts like the tokens of its document.
    #[test]
    fn every_window_begins_with_the_prompt() {
        let documents = [document(10, 4), document(20, 1), document(30, 2)];
        let build = |pack| {
            let mut builder = RowBuilder::new(3, pack, None).with_prompt(90, 2);
            documents.iter().for_each(|document| builder.push(document).unwrap());
            let rows = builder.finish().unwrap().0;
            rows.iter().map(|found| row(found.ids, found.targets, found.starts)).collect::<Vec<_>>()
        };
        let no = NO_LOSS;
        // The first token of a document is predicted, and no token twice: 13 is the target of 12.
        let whole = row(&[90, 91, 10, 11, 12], &[no, 10, 11, 12, 13], &[0; 5]);
        let alone = [
            whole.clone(),
            row(&[90, 91, 13], &[no, no, 14], &[0; 3]),
            row(&[90, 91, 20], &[no, 20, 21], &[0; 3]),
            row(&[90, 91, 30, 31], &[no, 30, 31, 32], &[0; 4]),
        ];
        assert_eq!(build(false), alone);
        // 3 + 2 cells a row: two windows of one token each take 6.
        assert_eq!(build(true), alone);
        let mut builder = RowBuilder::new(5, true, None).with_prompt(90, 2);
        documents.iter().for_each(|document| builder.push(document).unwrap());
        let rows = builder.finish().unwrap().0;
        let both = row(&[90, 91, 20, 90, 91, 30, 31], &[no, 20, 21, no, 30, 31, 32], &[0, 0, 0, 3, 3, 3, 3]);
        assert_eq!((rows.len(), rows.get(1)), (2, both.view()));
    }

    /// A window is kept for its first token alone, if virtual tokens can predict it; an empty document never is.
    #[test]
    fn virtual_tokens_predict_what_is_supervised() {
        let no = NO_LOSS;
        let of = |first| Document { ids: vec![5], targets: vec![no], first, lost: 0 };
        let none = Document { first: 7, ..document(0, 0) };
        let documents = [of(5), of(no), none, Document { first: no, ..document(3, 1) }];
        for pack in [false, true] {
            let mut builder = RowBuilder::new(9, pack, None).with_prompt(90, 2);
            documents.iter().for_each(|document| builder.push(document).unwrap());
            let (rows, kept, dropped) = builder.finish().unwrap();
            assert_eq!((kept, dropped), (2, 2));
            let targets: Vec<i32> = rows.iter().flat_map(|row| row.targets.to_vec()).collect();
            assert_eq!(targets, [no, 5, no, no, no, 4]);
            let (rows, kept, dropped) = build(&documents, 9, pack);
            assert_eq!((rows.len(), kept, dropped), (1, 1, 3));
        }
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
