//! Rows in memory and in files: the same numbers, in the same order, with few pages held.

use std::fs;

use super::*;
use crate::data::batch::Row;

#[test]
fn a_file_of_rows_makes_no_folder() {
    let root = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(Some(&root.path().join("runs/first")));
    (0..5000).for_each(|index| writer.push(row(index).view()).unwrap());
    assert!(writer.file.is_some());
    assert_eq!(writer.finish().unwrap().len(), 5000);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    assert_eq!((nearest(Path::new("not there")), nearest(root.path())), (Path::new("."), root.path()));
}

/// Rows of 1 to 50 positions whose numbers tell them apart.
fn row(index: u32) -> Row {
    let length = index * 7 % 50 + 1;
    let ids: Vec<u32> = (0..length).map(|position| 1000 * index + position).collect();
    let targets = ids.iter().map(|&id| if id % 3 == 0 { -100 } else { id as i32 }).collect();
    Row { ids, targets, starts: (0..length).map(|position| position / 2).collect() }
}

fn stored(folder: Option<&Path>, count: u32) -> Result<Rows> {
    let mut writer = Writer::new(folder);
    (0..count).try_for_each(|index| writer.push(row(index).view()))?;
    writer.finish()
}

#[test]
fn few_rows_stay_on_the_heap_and_many_are_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let few = stored(Some(folder.path()), 100).unwrap();
    let many = stored(Some(folder.path()), 5000).unwrap();
    let heap = stored(None, 5000).unwrap();
    let words = |count| (0..count).map(|index| 3 * row(index).ids.len() + 2).sum::<usize>() + 2;
    assert_eq!(few.memory(), (4 * words(100), 0));
    assert_eq!(many.memory(), (0, 4 * words(5000)));
    assert_eq!(heap.memory(), (4 * words(5000), 0));
    assert!(words(5000) > WAITING && many == heap);
    assert_eq!((few.longest(), many.len(), few.is_empty()), (50, 5000, false));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
    for (index, found) in many.iter().enumerate() {
        assert_eq!(found, row(index as u32).view(), "row {index}");
    }
}

#[test]
fn an_index_longer_than_the_buffer_is_written_too() {
    let folder = tempfile::tempdir().unwrap();
    let count = WAITING as u32;
    let mut writer = Writer::new(Some(folder.path()));
    for index in 0..count {
        writer.push(RowRef { ids: &[index], targets: &[-100], starts: &[0] }).unwrap();
    }
    let rows = writer.finish().unwrap();
    assert_eq!(rows.memory(), (0, 4 * (5 * count as usize + 2)));
    assert!(rows.iter().zip(0..count).all(|(row, index)| row.ids == [index] && row.targets == [-100]));
}

#[test]
fn parts_share_the_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let all = stored(Some(folder.path()), 5000).unwrap();
    let odd = all.part((0..5000).filter(|index| index % 2 == 1));
    let fifth = odd.part((0..2500).filter(|index| index % 5 == 0));
    assert_eq!(odd.memory(), (4 * 2500, all.memory().1));
    assert_eq!((fifth.len(), fifth.get(3)), (500, row(31).view()));
    drop(all);
    assert_eq!(odd.get(2499), row(4999).view());
    assert_ne!(odd, fifth);
}

#[test]
fn pages_given_back_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    // More than one release: 3 x 300,000 x 25 words.
    let rows = stored(Some(folder.path()), 100_000).unwrap();
    for _ in 0..2 {
        let mut index = 0;
        rows.for_each(|found| {
            assert_eq!(found, row(index).view());
            index += 1;
        });
        assert_eq!(index, 100_000);
    }
}

/// KiB of the mapping of `rows` that are in memory.
#[cfg(target_os = "linux")]
fn resident(rows: &Rows) -> usize {
    let start = format!("{:x}-", rows.store.words().as_ptr() as usize);
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let line = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn a_row_that_was_copied_leaves_nothing_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let rows = stored(Some(folder.path()), 100_000).unwrap();
    rows.for_each(|_| ());
    let before = resident(&rows);
    for index in (0..100_000).step_by(7001) {
        assert_eq!(rows.get(index), row(index as u32).view());
        assert!(resident(&rows) > before);
        rows.release(index);
    }
    // Pages of the index may stay, and what came along with them; of 30 MB in 15 places all would else.
    assert!(resident(&rows) < before + 4096, "{before} {}", resident(&rows));
}

#[test]
fn a_folder_that_takes_nothing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = stored(Some(&file), 5000).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    let start = format!("{}: cannot take the file of tokenised rows: ", file.display());
    assert!(error.to_string().starts_with(&start), "{error}");
    assert!(stored(Some(&file), 100).is_ok(), "few rows need no file");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error() {
    for rows in [5000, 4000] {
        let mut writer = Writer::new(Some(Path::new("/full")));
        writer.file = Some((File::options().write(true).open("/dev/full").unwrap(), None));
        let pushed = (0..rows).try_for_each(|index| writer.push(row(index).view()));
        let error = pushed.and_then(|()| writer.finish().map(drop)).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().starts_with("/full: cannot take the file"), "{error}");
        assert!(error.to_string().contains("No space left on device"), "{error}");
    }
}
